"""Operator time against prefix length, one line a cell, beside the roofline floor."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from analysis.load import Run
from analysis.stats import median_interval
from analysis.style import (
    BACKEND_LINES,
    KERNEL_COLOURS,
    LAYOUT_MARKERS,
    in_order,
    kernel_colour,
    layout_marker,
    plain_log_axis,
    save,
    title,
    token_label,
    what,
)


def draw(run: Run, directory: Path) -> list[Path]:
    """scaling: a column a batch size, a row a layout; not-ok points are named at the bottom."""
    cells = run.cells[~run.cells.placebo & (run.cells.workload == "uniform") & (run.cells.num_prefixes == 1)]
    if cells[cells.status == "ok"].empty:
        return []
    data = _with_intervals(run, cells)
    layouts, batches = in_order(cells.layout, LAYOUT_MARKERS), sorted(cells.batch_size.unique())
    size = (2.2 + 2.5 * len(batches), 1.2 + 2.1 * len(layouts))
    figure, axes = plt.subplots(
        len(layouts), len(batches), figsize=size, squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    for row, layout in enumerate(layouts):
        for column, batch in enumerate(batches):
            _panel(axes[row, column], data[(data.batch_size == batch) & (data.layout == layout)], cells)
        axes[row, 0].set_ylabel(f"{layout}\ntime (us)", fontsize=8)
    for column, batch in enumerate(batches):
        axes[0, column].set_title(f"{batch} requests", fontsize=9)
        axes[-1, column].set_xlabel("shared prefix (tokens)", fontsize=8)
    found = {}
    for axis in axes.flat:
        found.update(dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)))
    figure.legend(found.values(), found.keys(), loc="outside right center", fontsize=7)
    title(figure, f"Time of {what(cells)}; open markers: a gather is charged", cells)
    return save(figure, data, directory, "scaling")


def _panel(axis: Axes, data: pd.DataFrame, cells: pd.DataFrame) -> None:
    kernels, backends = in_order(cells.kernel, KERNEL_COLOURS), list(dict.fromkeys(cells.backend))
    layouts = in_order(cells.layout, LAYOUT_MARKERS)
    for (layout, kernel, backend), line in data.groupby(["layout", "kernel", "backend"], sort=False):
        ok = line[line.status == "ok"].sort_values("prefix_len")
        charged = bool((line.adapter != "").any())
        axis.errorbar(
            ok.prefix_len,
            ok.op_us,
            yerr=[ok.op_us - ok.op_lo, ok.op_hi - ok.op_us],
            color=kernel_colour(str(kernel), kernels),
            marker=layout_marker(str(layout), layouts),
            markerfacecolor="white" if charged else None,
            linestyle=BACKEND_LINES[backends.index(backend) % len(BACKEND_LINES)],
            markersize=3.5,
            linewidth=1.1,
            capsize=1.5,
            elinewidth=0.7,
            label=str(kernel) + (f", {backend}" if len(backends) > 1 else ""),
        )
        for _, cell in line[line.status != "ok"].iterrows():
            axis.text(cell.prefix_len, 0.02, cell.status, rotation=90, fontsize=5, transform=axis.get_xaxis_transform())
    floor = data[data.floor_us.notna()].groupby("prefix_len").floor_us.min()
    if len(floor):
        axis.plot(floor.index, floor, color="black", linewidth=2, alpha=0.4, label="roofline floor")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted(cells.prefix_len.unique()))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: token_label(value)))
    axis.tick_params(labelsize=6.5)
    plain_log_axis(axis.yaxis)


def _with_intervals(run: Run, cells: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for _, cell in cells.iterrows():
        lo = hi = float("nan")
        if cell.status == "ok":
            _, lo, hi = median_interval(run.samples_of(cell), int(cell.seed))
        rows.append({**cell, "op_lo": lo, "op_hi": hi})
    return pd.DataFrame(rows)
