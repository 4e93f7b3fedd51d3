"""Where a prefix kernel pays: the fastest one over naive on the same layout, by prefix length and batch size."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import TwoSlopeNorm

from analysis.load import Run
from analysis.stats import paired_ratio
from analysis.style import LAYOUT_MARKERS, in_order, save, title


def draw(run: Run, directory: Path) -> list[Path]:
    """crossover: a panel a layout and backend; below 1 naive wins and the number says by how much. A line marks 1."""
    data = _winners(run)
    if data.empty:
        return []
    panels = [
        (layout, backend)
        for layout in in_order(data.layout, LAYOUT_MARKERS)
        for backend in data[data.layout == layout].backend.unique()
    ]
    prefixes, batches = sorted(data.prefix_len.unique()), sorted(data.batch_size.unique())
    size = (1.4 + (0.7 + 0.85 * len(prefixes)) * len(panels), 1.7 + 0.62 * len(batches))
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True, layout="constrained")
    logs = np.log2(data.ratio)
    norm = TwoSlopeNorm(0.0, min(-0.1, logs.min()), max(0.1, logs.max()))
    colours = plt.get_cmap("PuOr_r")
    for axis, (layout, backend) in zip(axes.flat, panels, strict=True):
        mine = data[(data.layout == layout) & (data.backend == backend)]
        grid = np.full((len(batches), len(prefixes)), np.nan)
        for cell in mine.itertuples():
            x, y = prefixes.index(cell.prefix_len), batches.index(cell.batch_size)
            grid[y, x] = np.log2(cell.ratio)
            dark = abs(float(norm(grid[y, x])) - 0.5) > 0.3
            text = (
                f"{cell.kernel}{' (charged)' if cell.charged else ''}\n{cell.ratio:.2f}x\n{cell.lo:.2f}–{cell.hi:.2f}"
            )
            axis.text(x, y, text, ha="center", va="center", fontsize=6, color="white" if dark else "black")
        axis.imshow(grid, cmap=colours, norm=norm, aspect="auto", origin="lower")
        if min(grid.shape) > 1 and np.nanmin(grid) < 0 < np.nanmax(grid):
            axis.contour(grid, levels=[0.0], colors="black", linewidths=1.5)
        axis.set_xticks(range(len(prefixes)), [f"{p:.0f}" for p in prefixes])
        axis.set_yticks(range(len(batches)), [str(b) for b in batches])
        axis.set_title(layout if len({b for _, b in panels}) == 1 else f"{layout}, {backend}", fontsize=8)
        axis.set_xlabel("shared prefix (tokens)", fontsize=8)
        axis.grid(visible=False)
    axes[0, 0].set_ylabel("requests", fontsize=8)
    title(
        figure,
        "Fastest prefix kernel over naive on the same layout, 95% interval",
        run.cells[run.cells.block.isin(data.block)],
    )
    return save(figure, data, directory, "crossover")


def _winners(run: Run) -> pd.DataFrame:
    """For every block, layout and backend with naive: the fastest other fixed kernel and its ratio."""
    cells = run.cells[(run.cells.status == "ok") & ~run.cells.placebo & (run.cells.workload == "uniform")]
    rows = []
    for (block, layout, backend), group in cells.groupby(["block", "layout", "backend"], sort=False):
        naive, others = group[group.kernel == "naive"], group[(group.kernel != "naive") & (group.chosen == "")]
        if naive.empty or others.empty:
            continue
        best = others.sort_values("op_us").iloc[0]
        estimate = paired_ratio(run.samples_of(naive.iloc[0]), run.samples_of(best), int(best.seed))
        rows.append(
            {
                "block": block,
                "layout": layout,
                "backend": backend,
                "prefix_len": best.prefix_len,
                "batch_size": best.batch_size,
                "kernel": best.kernel,
                "charged": bool(best.adapter),
                "ratio": estimate.value,
                "lo": estimate.lo,
                "hi": estimate.hi,
            }
        )
    return pd.DataFrame(rows)
