"""What common mistakes would have reported: the same two cells, measured wrongly in one way at a time.

`python -m analysis.audit outputs/audit` prints the table and draws the figure.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from rich.console import Console

from analysis.load import Run, load_records
from analysis.report import plain_table, point
from analysis.stats import RESAMPLES, Estimate, Floats, interval
from analysis.style import save, title

BASELINE, OURS = ("paged_16", "naive"), ("slab_token", "granikv")


class NotMeasured(ValueError):
    """The run lacks what a mistake needs."""


@dataclass(frozen=True)
class Evidence:
    """The run, the block that is measured rightly, and the backend that both cells are of."""

    run: Run
    block: pd.Series
    backend: str

    def samples(self, name: tuple[str, str], column: str = "total_us", **changes: object) -> list[float]:
        """A cell's samples in the right block, or in its twin that differs in `changes`; NotMeasured without one."""
        cells = self.run.cells[(self.run.cells.status == "ok") & ~self.run.cells.placebo]
        wanted: dict[str, object] = {key: self.block[key] for key in TWIN}
        wanted |= {**changes, "layout": name[0], "kernel": name[1], "backend": self.backend}
        for key, value in wanted.items():
            cells = cells[cells[key] == value]
        if cells.empty:
            raise NotMeasured(f"{name[0]} x {name[1]} with {changes or 'no change'}")
        return self.run.samples_of(cells.iloc[0], column)


TWIN = ("workload", "model", "batch_size", "prefix_len", "suffix_len", "clock", "l2", "order", "level")
"""What identifies a block's twins: equal but for what a mistake changes."""

Statistic = Callable[[Floats], Floats]
"""Reduces the last axis."""


@dataclass(frozen=True)
class Arms:
    """Samples of both arms, how each is summarised, the work each does in its time, and whether trials are pairs."""

    base: Sequence[float]
    ours: Sequence[float]
    paired: bool = True
    base_statistic: Statistic = lambda x: np.median(x, axis=-1)
    ours_statistic: Statistic = lambda x: np.median(x, axis=-1)
    work_ratio: float = 1.0

    def estimate(self, seed: int) -> Estimate:
        """How many times as fast ours seems, with its bootstrap interval."""
        base, ours = (np.asarray(x, dtype=np.float64) for x in (self.base, self.ours))
        rng = np.random.default_rng(seed)
        picks = rng.integers(0, len(base), (RESAMPLES, len(base)))
        other = picks if self.paired else rng.integers(0, len(ours), (RESAMPLES, len(ours)))
        spread = self.base_statistic(base[picks]) / self.ours_statistic(ours[other])
        value = float(self.base_statistic(base) / self.ours_statistic(ours))
        found = interval(value, spread, len(base))
        return Estimate(*(x * self.work_ratio for x in found))


def right(e: Evidence) -> Arms:
    """Same tokens, same conditions, interleaved pairs, host work charged, medians."""
    return Arms(e.samples(BASELINE), e.samples(OURS))


def copied_prefix(e: Evidence) -> Arms:
    """The baseline keeps a copy of the prefix for every request."""
    return Arms(e.samples(("unshared_16", "naive")), e.samples(OURS))


def cuda_core_baseline(e: Evidence) -> Arms:
    """The baseline decodes on CUDA cores."""
    return Arms(e.samples(("paged_16", "naive_cudacore")), e.samples(OURS))


def graphs_in_one_arm(e: Evidence) -> Arms:
    """The baseline launches eagerly, ours replays a CUDA graph."""
    return Arms(e.samples(BASELINE, clock="eager"), e.samples(OURS), paired=False)


def warm_cache_in_one_arm(e: Evidence) -> Arms:
    """Ours runs on a warm cache."""
    return Arms(e.samples(BASELINE), e.samples(OURS, l2="warm"), paired=False)


def host_work_left_out(e: Evidence) -> Arms:
    """Ours is timed without slot allocation, view and plan."""
    return Arms(e.samples(BASELINE), e.samples(OURS, "run_us"))


def unlike_batches(e: Evidence) -> Arms:
    """Tokens a second, the baseline's at the smaller batch."""
    sizes = e.run.cells[e.run.cells.workload == e.block.workload].batch_size
    if sizes.min() == e.block.batch_size:
        raise NotMeasured("a smaller batch")
    base = e.samples(BASELINE, batch_size=sizes.min())
    return Arms(base, e.samples(OURS), paired=False, work_ratio=float(e.block.batch_size / sizes.min()))


def best_of_all_trials(e: Evidence) -> Arms:
    """Ours reports its fastest trial, the baseline its median."""
    return Arms(e.samples(BASELINE), e.samples(OURS), ours_statistic=lambda x: np.min(x, axis=-1))


def one_after_the_other(e: Evidence) -> Arms:
    """All trials of one arm, then all of the other, so that drift falls on one of them."""
    base, ours = (e.samples(name, order="sequential") for name in (BASELINE, OURS))
    return Arms(base, ours, paired=False)


MISTAKES: tuple[Callable[[Evidence], Arms], ...] = (
    right,
    copied_prefix,
    cuda_core_baseline,
    graphs_in_one_arm,
    warm_cache_in_one_arm,
    host_work_left_out,
    unlike_batches,
    best_of_all_trials,
    one_after_the_other,
)


def audit(run: Run) -> pd.DataFrame:
    """One row a mistake that the run can show: what it is, the ratio it reports, its interval, and by how much it errs.

    The right block is the cold, interleaved one with the largest batch, not launched eagerly.
    """
    cells = run.cells[(run.cells.l2 == "cold") & (run.cells.order == "interleaved") & run.cells.is_baseline]
    cells = cells[cells.clock != "eager"]
    if cells.empty:
        raise ValueError("no cold, interleaved block with its baseline. Fix: run experiment=audit")
    block = cells.sort_values("batch_size").iloc[-1]
    evidence = Evidence(run, block, str(block.backend))
    rows = []
    for mistake in MISTAKES:
        try:
            found = mistake(evidence).estimate(int(block.seed))
        except NotMeasured:
            continue
        told = (mistake.__doc__ or "").strip()
        rows.append({"mistake": mistake.__name__, "what": told, "ratio": found.value, "lo": found.lo, "hi": found.hi})
    table = pd.DataFrame(rows, columns=["mistake", "what", "ratio", "lo", "hi"])
    if "right" not in set(table.mistake):
        raise ValueError("paged_16 x naive or slab_token x granikv is missing. Fix: run experiment=audit")
    return table.assign(error=table.ratio / table.ratio[table.mistake == "right"].iloc[0], block=block.block)


def draw(run: Run, directory: Path) -> list[Path]:
    """audit: the ratio that each mistake reports, beside the right one."""
    data = audit(run)
    cells = run.cells[run.cells.block == data.block.iloc[0]]
    figure, axis = plt.subplots(figsize=(7.0, 1.3 + 0.36 * len(data)), layout="constrained")
    y = np.arange(len(data))
    truth = data[data.mistake == "right"].iloc[0]
    axis.axvspan(truth.lo, truth.hi, color="#009E73", alpha=0.2)
    axis.axvline(truth.ratio, color="#009E73", linewidth=1)
    axis.axvline(1.0, color="black", linewidth=0.8)
    colours = ["#009E73" if name == "right" else "#D55E00" for name in data.mistake]
    for at, (_, row) in enumerate(data.iterrows()):
        error = [[row.ratio - row.lo], [row.hi - row.ratio]]
        axis.errorbar(row.ratio, at, xerr=error, fmt="o", markersize=4, color=colours[at], capsize=2, linewidth=1)
        axis.annotate(f"{row.ratio:.2f}x", (row.hi, at), (5, -3), textcoords="offset points", fontsize=7)
    axis.set_yticks(y, [name.replace("_", " ") for name in data.mistake])
    axis.set_ylim(len(data) - 0.5, -0.5)
    axis.set_xlabel(f"reported speed-up of {' x '.join(OURS)} over {' x '.join(BASELINE)}, 95% interval", fontsize=8)
    axis.margins(x=0.12)
    title(figure, f"What each mistake would have reported ({point(cells.iloc[0])})", cells)
    return save(figure, data, directory, "audit")


def main() -> int:
    """Parses the command line, prints the table, draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="outputs/NAME or results/NAME")
    parser.add_argument("--figures", type=Path, help="folder for the figure (default: RUN/figures)")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    try:
        run = load_records(options.run)
        data = audit(run)
        written = draw(run, options.figures or options.run / "figures")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = plain_table("The same two cells, each time with one mistake")
    for name in ("mistake", "reported", "of the right ratio", "what was done"):
        table.add_column(name, no_wrap=name != "what was done")
    for _, row in data.iterrows():
        found = str(Estimate(row.ratio, row.lo, row.hi))
        table.add_row(row.mistake.replace("_", " "), found, f"{row.error:.2f}", row.what)
    console.print(table)
    for path in written:
        console.print(str(path.resolve()), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
