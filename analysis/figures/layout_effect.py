"""What the layout alone changes: operator time on paged_16 over that on another layout, under one kernel."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from analysis.load import Run
from analysis.stats import paired_ratio
from analysis.style import KERNEL_COLOURS, LAYOUT_MARKERS, in_order, layout_marker, point_label, save, title

BASE = "paged_16"
SLAB_TWINS = {"fused_paged": "fused", "cascade": "hydragen"}
"""Kernels that read a prefix through a page table, and their twins that read it as a slab."""


def draw(run: Run, directory: Path) -> list[Path]:
    """layout_effect: a panel a block, a row a kernel; right of 1 the layout is faster than paged_16."""
    data = _effects(run)
    if data.empty:
        return []
    blocks = list(dict.fromkeys(data.block))
    across = min(4, len(blocks))
    down = -(-len(blocks) // across)
    names = list(dict.fromkeys(data.name))
    layouts = in_order(run.cells.layout, LAYOUT_MARKERS)
    size = (2.2 + 2.3 * across, 1.4 + (0.5 + 0.2 * len(names)) * down)
    figure, axes = plt.subplots(
        down, across, figsize=size, squeeze=False, sharey=True, sharex=True, layout="constrained"
    )
    colours = {"paged_1": "#0072B2", "slab_token": "#E69F00", "unshared_16": "#7F7F7F"}
    for axis, block in zip(axes.flat, blocks, strict=False):
        mine = data[data.block == block]
        for layout, points in mine.groupby("layout", sort=False):
            y = [names.index(name) for name in points.name]
            errors = [points.ratio - points.lo, points.hi - points.ratio]
            look = {"color": colours.get(str(layout), "black"), "marker": layout_marker(str(layout), layouts)}
            axis.errorbar(points.ratio, y, xerr=errors, linestyle="", markersize=3.5, capsize=1.5, label=layout, **look)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(point_label(run.cells[run.cells.block == block].iloc[0]), fontsize=7.5)
        axis.tick_params(labelsize=6.5)
    for axis in axes.flat[len(blocks) :]:
        axis.axis("off")
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    for axis in axes[-1]:
        axis.set_xlabel(f"time on {BASE} / time", fontsize=7.5)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    title(figure, "The layout under one kernel, 95% interval", run.cells[run.cells.block.isin(blocks)])
    return save(figure, data, directory, "layout_effect")


def _effects(run: Run) -> pd.DataFrame:
    cells = run.cells[
        (run.cells.status == "ok") & ~run.cells.placebo & (run.cells.adapter == "") & (run.cells.chosen == "")
    ]
    rows = []
    for (block, backend), group in cells.groupby(["block", "backend"], sort=False):
        by_name = {(cell.layout, cell.kernel): cell for _, cell in group.iterrows()}
        for kernel in in_order(group.kernel, KERNEL_COLOURS):
            base = by_name.get((BASE, kernel))
            if base is None:
                continue
            pairs = [(kernel, cell) for (layout, k), cell in by_name.items() if k == kernel and layout != BASE]
            twin = SLAB_TWINS.get(kernel)
            if ("slab_token", twin) in by_name:
                pairs.append((f"{kernel} to {twin}", by_name["slab_token", twin]))
            for name, cell in pairs:
                estimate = paired_ratio(run.samples_of(base), run.samples_of(cell), int(cell.seed))
                rows.append(
                    {
                        "block": block,
                        "name": f"{name}, {backend}",
                        "layout": cell.layout,
                        "ratio": estimate.value,
                        "lo": estimate.lo,
                        "hi": estimate.hi,
                    }
                )
    return pd.DataFrame(rows)
