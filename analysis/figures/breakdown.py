"""What a step's attention consists of: host work shared by the layers, append, gather, kernel."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.load import Run
from analysis.style import CHARGED_HATCH, KERNEL_COLOURS, LAYOUT_MARKERS, in_order, point_label, save, title, what

PARTS = {
    "run_us": ("kernel", "#0072B2"),
    "adapt_us": ("charged gather", "#D55E00"),
    "append_us": ("append", "#009E73"),
    "plan_us": ("plan / layers", "#E69F00"),
    "view_us": ("view / layers", "#F0E442"),
    "alloc_us": ("alloc / layers", "#CC79A7"),
}
SHARED = ("plan_us", "view_us", "alloc_us")


def draw(run: Run, directory: Path) -> list[Path]:
    """breakdown: medians of the parts of every ok cell, a panel a block."""
    cells = run.cells[(run.cells.status == "ok") & ~run.cells.placebo]
    if cells.empty:
        return []
    shares = cells.assign(**{part: cells[part] / cells.host_share for part in SHARED})
    blocks = shares.sort_values(["model", "batch_size", "prefix_len"]).block.drop_duplicates()
    across = min(4, len(blocks))
    down = -(-len(blocks) // across)
    per_block = int(shares.groupby("block").size().max())
    size = (2.0 + 2.6 * across, 1.4 + (0.5 + 0.2 * per_block) * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, sharey="row", layout="constrained")
    for axis, block in zip(axes.flat, blocks, strict=False):
        _panel(axis, shares[shares.block == block])
    for axis in axes.flat[len(blocks) :]:
        axis.axis("off")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for _, colour in PARTS.values()]
    names = [name for name, _ in PARTS.values()]
    if cells.level.iloc[0] == "step":
        names = ["device", *(name.removesuffix(" / layers") for name in names[1:])]
    figure.legend(handles, names, loc="outside lower center", ncols=6, fontsize=7)
    title(figure, f"Where the time of {what(cells)} goes (medians)", cells)
    return save(figure, shares[["block", "layout", "kernel", "backend", *PARTS]], directory, "breakdown")


def _panel(axis: Axes, cells: pd.DataFrame) -> None:
    kernels, layouts = in_order(cells.kernel, KERNEL_COLOURS), in_order(cells.layout, LAYOUT_MARKERS)
    several = cells.backend.nunique() > 1
    ordered = sorted(cells.iterrows(), key=lambda item: (kernels.index(item[1].kernel), layouts.index(item[1].layout)))
    for y, (_, cell) in enumerate(ordered):
        left = 0.0
        for part, (_, colour) in PARTS.items():
            hatch = CHARGED_HATCH if part == "adapt_us" else None
            axis.barh(y, cell[part] / 1e3, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3)
            left += cell[part] / 1e3
    names = [f"{cell.kernel}, {cell.layout}" + (f", {cell.backend}" if several else "") for _, cell in ordered]
    axis.set_yticks(range(len(names)), names, fontsize=6.5)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlabel("ms", fontsize=8)
    axis.set_title(point_label(cells.iloc[0]), fontsize=8)
    axis.grid(visible=False, axis="y")
