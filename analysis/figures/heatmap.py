"""The grid of cells: speed-up over the baseline, its interval, and how every other cell ended."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from analysis.load import Run
from analysis.style import (
    CHARGED_HATCH,
    KERNEL_COLOURS,
    LAYOUT_MARKERS,
    column_label,
    in_order,
    plain_log_axis,
    point_label,
    save,
    title,
)


def draw(run: Run, directory: Path) -> list[Path]:
    """heatmap: one panel a block; hatched cells pay for a gather in every step."""
    cells = run.cells[~run.cells.placebo]
    layouts, backends = in_order(cells.layout, LAYOUT_MARKERS), list(dict.fromkeys(cells.backend))
    run_of = set(zip(cells.kernel, cells.backend, strict=True))
    columns = [
        (kernel, backend)
        for kernel in in_order(cells.kernel, KERNEL_COLOURS)
        for backend in backends
        if (kernel, backend) in run_of
    ]
    blocks = cells.sort_values(["model", "batch_size", "prefix_len"]).block.drop_duplicates()
    across = min(1 if len(columns) > 8 else 2 if len(blocks) <= 4 else 4, len(blocks))
    down = -(-len(blocks) // across)
    size = (0.5 + across * (0.9 + 0.78 * len(columns)), 1.0 + down * (1.0 + 0.52 * len(layouts)))
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    values = cells.ratio.dropna()
    norm = LogNorm(min(0.8, values.min()) if len(values) else 0.8, max(1.25, values.max()) if len(values) else 1.25)
    colours = plt.get_cmap("cividis")
    for axis, block in zip(axes.flat, blocks, strict=False):
        mine = cells[cells.block == block].set_index(["layout", "kernel", "backend"])
        for y, layout in enumerate(layouts):
            for x, (kernel, backend) in enumerate(columns):
                if (layout, kernel, backend) not in mine.index:
                    axis.text(x, y, "not run", ha="center", va="center", fontsize=6, color="#777777")
                    continue
                cell = mine.loc[(layout, kernel, backend)]
                ok = cell.status == "ok" and not np.isnan(cell.ratio)
                shade = colours(norm(cell.ratio)) if ok else "#EEEEEE"
                dark = ok and float(norm(cell.ratio)) < 0.55
                hatch = CHARGED_HATCH if cell.adapter else None
                axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=shade, edgecolor="white", linewidth=1.2))
                if hatch:
                    axis.add_patch(
                        Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch=hatch, edgecolor="#FFFFFF99", linewidth=0)
                    )
                text = f"{cell.ratio:.2f}x\n{cell.ratio_lo:.2f}–{cell.ratio_hi:.2f}" if ok else str(cell.status)
                label = axis.text(
                    x, y, text, ha="center", va="center", fontsize=6.5, color="white" if dark else "black"
                )
                if hatch and ok:
                    label.set_path_effects([withStroke(linewidth=2.5, foreground=shade)])
        axis.set_xlim(-0.5, len(columns) - 0.5)
        axis.set_ylim(len(layouts) - 0.5, -0.5)
        axis.set_xticks(range(len(columns)), [column_label(k, b, backends) for k, b in columns], fontsize=7)
        axis.set_yticks(range(len(layouts)), layouts, fontsize=7)
        axis.set_title(point_label(mine.iloc[0]), fontsize=8)
        axis.grid(visible=False)
        axis.tick_params(length=0)
    for axis in axes.flat[len(blocks) :]:
        axis.axis("off")
    bar = figure.colorbar(plt.cm.ScalarMappable(norm, colours), ax=axes, shrink=0.7, pad=0.01)
    bar.set_label("speed-up over the baseline (log)", fontsize=7)
    plain_log_axis(bar.ax.yaxis)
    bar.ax.tick_params(labelsize=6)
    title(
        figure,
        "Speed-up of every cell, 95% interval below; hatched: a gather is charged",
        cells,
    )
    return save(figure, cells, directory, "heatmap")
