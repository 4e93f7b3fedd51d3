"""How much of a speed-up the layout earns and how much the kernel: exact, on ln(time), with intervals.

For corners (L0, K0) to (L1, K1) of one block, the total factor t(L0,K0) / t(L1,K1) splits in two orders, layout first
or kernel first. The Shapley value of the two-player game is the mean of both orders on the log scale, and the
interaction is what the orders disagree by: layout effect under K1 over layout effect under K0 (Shapley, 1953).
"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.load import Run
from analysis.stats import interval, joint_medians

EFFECTS = ("total", "layout_first", "kernel_second", "kernel_first", "layout_second", "layout", "kernel", "interaction")
"""layout_first: the layout under the old kernel; layout_second: under the new one; likewise for the kernel.
layout and kernel: Shapley means."""

MUST_AGREE = ("block", "backend", "clock", "l2", "order", "device", "device_name", "dtype", "environment_hash")


class Corners(NamedTuple):
    """From which cell to which."""

    layout_from: str = "paged_16"
    kernel_from: str = "naive"
    layout_to: str = "slab_token"
    kernel_to: str = "granikv"

    def __str__(self) -> str:
        return f"{self.layout_from} x {self.kernel_from} to {self.layout_to} x {self.kernel_to}"


FROM_BASELINE_TO_GRANIKV = Corners()


def attribute(
    run: Run, block: str, corners: Corners = FROM_BASELINE_TO_GRANIKV, backend: str | None = None
) -> pd.DataFrame:
    """One row an effect: factor (above 1 is faster), lo, hi, and whether the interval lies within the A/A noise.

    Raises ValueError for a corner that is missing or not ok, and for corners that differ in anything but layout and
    kernel.
    """
    rows = [
        _corner(run, block, layout, kernel, backend)
        for layout in (corners.layout_from, corners.layout_to)
        for kernel in (corners.kernel_from, corners.kernel_to)
    ]
    for column in MUST_AGREE:
        values = sorted({str(row[column]) for row in rows})
        if len(values) > 1:
            raise ValueError(
                f"corners with {column} {', '.join(values)}: only layout and kernel may differ. Fix: name one"
            )
    medians, resampled = joint_medians([run.samples_of(row) for row in rows], seed=int(rows[0].seed))
    point, spread = _factors(np.log(medians)[None]), _factors(np.log(resampled))
    trials = int(rows[0].num_trials)
    noise = noise_floor(run).get(block)
    table = []
    for effect in EFFECTS:
        estimate = interval(float(point[effect][0]), spread[effect], trials)
        within = noise is not None and estimate.lo >= 1 / noise and estimate.hi <= noise
        table.append(
            {
                "block": block,
                "effect": effect,
                "factor": estimate.value,
                "lo": estimate.lo,
                "hi": estimate.hi,
                "within_noise": within,
            }
        )
    return pd.DataFrame(table)


def attribute_all(run: Run, corners: Corners = FROM_BASELINE_TO_GRANIKV) -> pd.DataFrame:
    """attribute() of every block and backend that has all four corners, with the workload point beside it."""
    where = ["block", "backend", "workload", "model", "batch_size", "prefix_len", "suffix_len", "num_prefixes"]
    tables = []
    for (block, backend), cells in run.cells[~run.cells.placebo].groupby(["block", "backend"], sort=False):
        try:
            table = attribute(run, str(block), corners, str(backend))
        except ValueError:
            continue
        tables.append(table.merge(cells[where].head(1), on="block"))
    if not tables:
        return pd.DataFrame(columns=[*where, "effect", "factor", "lo", "hi", "within_noise"])
    return pd.concat(tables, ignore_index=True)


def noise_floor(run: Run) -> dict[str, float]:
    """For each block with an A/A pair, the factor by which two copies of one cell may seem to differ."""
    placebo = run.cells[run.cells.placebo & (run.cells.status == "ok") & run.cells.ratio.notna()]
    return {str(cell.block): float(max(cell.ratio_hi, 1 / cell.ratio_lo)) for _, cell in placebo.iterrows()}


def _corner(run: Run, block: str, layout: str, kernel: str, backend: str | None) -> pd.Series:
    cells = run.cells
    found = cells[(cells.block == block) & (cells.layout == layout) & (cells.kernel == kernel) & ~cells.placebo]
    found = found if backend is None else found[found.backend == backend]
    if len(found) != 1:
        have = ", ".join(
            sorted(f"{c.layout} x {c.kernel} ({c.backend})" for _, c in cells[cells.block == block].iterrows())
        )
        raise ValueError(
            f"corner {layout} x {kernel}: {len(found)} cells in block {block}. It has {have}. Fix: run that cell"
        )
    corner = found.iloc[0]
    if corner.status != "ok":
        raise ValueError(
            f"corner {layout} x {kernel} is {corner.status}: {corner.reason}. Attribution needs all four corners ok"
        )
    return corner


def _factors(log_times: np.ndarray) -> dict[str, np.ndarray]:
    """Effects as factors from ln times [n, 4] in the order (L0,K0), (L0,K1), (L1,K0), (L1,K1)."""
    base, kernel_only, layout_only, both = log_times.T
    log = {
        "total": base - both,
        "layout_first": base - layout_only,
        "kernel_second": layout_only - both,
        "kernel_first": base - kernel_only,
        "layout_second": kernel_only - both,
    }
    log["layout"] = (log["layout_first"] + log["layout_second"]) / 2
    log["kernel"] = (log["kernel_first"] + log["kernel_second"]) / 2
    log["interaction"] = log["layout_second"] - log["layout_first"]
    return {effect: np.exp(value) for effect, value in log.items()}
