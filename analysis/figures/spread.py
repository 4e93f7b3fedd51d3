"""How far implementations of one method are apart, and how little that has to do with the layout."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from analysis.load import Run
from analysis.style import (
    BACKEND_LINES,
    LAYOUT_MARKERS,
    in_order,
    layout_marker,
    point_label,
    save,
    title,
)

METHODS = {
    "naive": ("naive", "naive_cudacore"),
    "cascade": ("cascade", "cascade_multilevel_fa2", "cascade_multilevel_fa3", "fused_paged"),
    "hydragen": ("hydragen", "hydragen_fa3", "hydragen_gemm", "fused"),
}
MARKS = ("#D55E00", "#0072B2", "#009E73")


def draw(run: Run, directory: Path) -> list[Path]:
    """spread: a panel a block; a row an implementation, a mark a layout it runs on natively."""
    cells = run.cells[(run.cells.status == "ok") & ~run.cells.placebo & (run.cells.adapter == "")]
    if cells.backend.nunique() < 2:
        return []
    rows = [
        (kernel, backend)
        for kernels in METHODS.values()
        for kernel in kernels
        for backend in sorted(cells[cells.kernel == kernel].backend.unique())
    ]
    layouts, blocks = in_order(cells.layout, LAYOUT_MARKERS), list(dict.fromkeys(cells.block))
    across = min(4, len(blocks))
    down = -(-len(blocks) // across)
    size = (2.6 + 2.2 * across, 1.2 + (0.5 + 0.19 * len(rows)) * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, block in zip(axes.flat, blocks, strict=False):
        mine = cells[cells.block == block]
        for y, (kernel, backend) in enumerate(rows):
            for _, cell in mine[(mine.kernel == kernel) & (mine.backend == backend)].iterrows():
                colour = MARKS[layouts.index(cell.layout) % len(MARKS)]
                axis.plot(cell.op_us, y, layout_marker(cell.layout, layouts), color=colour, markersize=4, alpha=0.8)
        axis.set_xscale("log")
        axis.set_title(point_label(mine.iloc[0]), fontsize=7.5)
        axis.tick_params(labelsize=6, which="both")
        for edge in (len(METHODS["naive"]), len(METHODS["naive"]) + len(METHODS["cascade"])):
            names = list(METHODS.values())
            wanted = {k for group in names[: 1 if edge == len(names[0]) else 2] for k in group}
            count = sum(kernel in wanted for kernel, _ in rows)
            axis.axhline(count - 0.5, color="#AAAAAA", linewidth=0.6, linestyle=BACKEND_LINES[2])
    for axis in axes.flat[len(blocks) :]:
        axis.axis("off")
    axes[0, 0].set_yticks(range(len(rows)), [f"{kernel}, {backend}" for kernel, backend in rows])
    axes[0, 0].set_ylim(len(rows) - 0.5, -0.5)
    for axis in axes[-1]:
        axis.set_xlabel("operator time (us)", fontsize=7.5)
    handles = [
        Line2D([], [], color=MARKS[i % len(MARKS)], marker=layout_marker(layout, layouts), linestyle="", label=layout)
        for i, layout in enumerate(layouts)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7)
    title(figure, "Implementations of one method, on every layout they run on natively", cells)
    return save(figure, cells[["block", "layout", "kernel", "backend", "op_us"]], directory, "spread")
