"""How close each kernel comes to the floor: the fraction of it that its time achieves, on the layout it is best on."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from analysis.load import Run
from analysis.style import BACKEND_LINES, KERNEL_COLOURS, in_order, kernel_colour, save, title, token_label


def draw(run: Run, directory: Path) -> list[Path]:
    """roofline: a panel a batch size. 1 is the summed-level floor; only kernels that overlap levels can pass it."""
    cells = run.cells[(run.cells.status == "ok") & ~run.cells.placebo & run.cells.floor_us.notna()]
    cells = cells[(cells.workload == "uniform") & (cells.num_prefixes == 1)]
    if cells.empty:
        return []
    best = cells.sort_values("op_us").drop_duplicates(["block", "kernel", "backend"])
    best = best.assign(achieved=best.floor_us / best.op_us)
    kernels, backends = in_order(cells.kernel, KERNEL_COLOURS), list(dict.fromkeys(cells.backend))
    batches = sorted(cells.batch_size.unique())
    size = (2.2 + 2.4 * len(batches), 3.2)
    figure, axes = plt.subplots(1, len(batches), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, batch in zip(axes.flat, batches, strict=True):
        for (kernel, backend), line in best[best.batch_size == batch].groupby(["kernel", "backend"], sort=False):
            line = line.sort_values("prefix_len")
            axis.plot(
                line.prefix_len,
                line.achieved,
                color=kernel_colour(str(kernel), kernels),
                linestyle=BACKEND_LINES[backends.index(backend) % len(BACKEND_LINES)],
                marker=".",
                linewidth=1.1,
                label=str(kernel) + (f", {backend}" if len(backends) > 1 else ""),
            )
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(cells.prefix_len.unique()))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: token_label(value)))
        axis.set_title(f"{batch} requests", fontsize=9)
        axis.set_xlabel("shared prefix (tokens)", fontsize=8)
        axis.tick_params(labelsize=6.5)
    axes[0, 0].set_ylabel("floor / operator time", fontsize=8)
    found = {}
    for axis in axes.flat:
        found.update(dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)))
    figure.legend(found.values(), found.keys(), loc="outside right center", fontsize=7)
    title(figure, "Achieved fraction of the roofline floor, each kernel on its best layout", cells)
    return save(figure, best, directory, "roofline")
