"""Time of a step's attention against prefix length, one line a cell, and the speed-up over the baseline."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import FuncFormatter

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
)


def draw(run: Run, directory: Path) -> list[Path]:
    """scaling: a column a batch size; times above, ratios below; not-ok points are crosses on the axis."""
    cells = run.cells[~run.cells.placebo & (run.cells.workload == "uniform")]
    if cells[cells.status == "ok"].empty:
        return []
    data = _with_intervals(run, cells)
    kernels, layouts = in_order(cells.kernel, KERNEL_COLOURS), in_order(cells.layout, LAYOUT_MARKERS)
    backends, batches = list(dict.fromkeys(cells.backend)), sorted(cells.batch_size.unique())
    size = (1.8 + 3.6 * len(batches), 6.4)
    figure, axes = plt.subplots(
        2, len(batches), figsize=size, squeeze=False, sharex="col", sharey="row", layout="constrained"
    )
    for column, batch in enumerate(batches):
        times, ratios = axes[:, column]
        for (layout, kernel, backend), line in data[data.batch_size == batch].groupby(
            ["layout", "kernel", "backend"], sort=False
        ):
            line = line.sort_values("prefix_len")
            ok = line[line.status == "ok"]
            look = {
                "color": kernel_colour(kernel, kernels),
                "marker": layout_marker(layout, layouts),
                "linestyle": BACKEND_LINES[backends.index(backend) % len(BACKEND_LINES)],
                "markersize": 4.5,
                "linewidth": 1.2,
                "markerfacecolor": "white" if (line.adapter != "").any() else None,
                "label": f"{kernel}, {layout}" + (f", {backend}" if len(backends) > 1 else ""),
            }
            for axis, value, scale in ((times, "total", 1e-3), (ratios, "ratio", 1.0)):
                middle = ok[f"{value}_us" if value == "total" else value] * scale
                errors = [middle - ok[f"{value}_lo"] * scale, ok[f"{value}_hi"] * scale - middle]
                axis.errorbar(ok.prefix_len, middle, yerr=errors, capsize=2, elinewidth=0.8, **look)
            for _, cell in line[line.status != "ok"].iterrows():
                times.text(
                    cell.prefix_len, 0.02, cell.status, rotation=90, fontsize=6, transform=times.get_xaxis_transform()
                )
        floor = data[(data.batch_size == batch) & data.floor_us.notna()].groupby("prefix_len").floor_us.min()
        if len(floor):
            times.plot(
                floor.index, floor * 1e-3, color="black", linestyle="-", linewidth=2, alpha=0.5, label="roofline floor"
            )
        ratios.axhline(1.0, color="black", linewidth=0.8)
        times.set_title(f"{batch} requests", fontsize=9)
        ratios.set_xlabel("shared prefix (tokens)")
        for axis in (times, ratios):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
            plain_log_axis(axis.yaxis)
    axes[0, 0].set_ylabel("time of one layer's attention\nin a decode step (ms)")
    axes[1, 0].set_ylabel("speed-up over the baseline")
    handles, labels = axes[0, -1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=7)
    title(figure, "Medians with 95% intervals; open markers: a gather is charged", cells)
    return save(figure, data, directory, "scaling")


def _with_intervals(run: Run, cells: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for _, cell in cells.iterrows():
        lo = hi = float("nan")
        if cell.status == "ok":
            _, lo, hi = median_interval(run.samples_of(cell), int(cell.seed))
        rows.append({**cell, "total_lo": lo, "total_hi": hi})
    return pd.DataFrame(rows)
