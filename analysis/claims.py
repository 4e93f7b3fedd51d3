"""The paper's claims beside what the records say: `python -m analysis.claims RUN ...` prints the table.

A claim is tested on the largest batch and all others of its prefix length; what the records lack is said, not guessed.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console

from analysis.attribution import attribute_all
from analysis.load import Run, load_records
from analysis.report import plain_table
from analysis.stats import Estimate, paired_ratio

CLOSE = 0.10
"""A ratio within a tenth of the paper's counts as reproduced."""

LONG_PREFIX = 16384


@dataclass(frozen=True)
class Finding:
    """One row of the table. `records` names the run."""

    claim: str
    paper: str
    ours: str
    conditions: str
    verdict: str
    records: str


Named = tuple[str, Run]


def throughput(runs: Sequence[Named], model: str, paper: float) -> Finding:
    """C1: output tokens a second of slab_token x granikv over paged_16 x naive, a 16K prefix, whole decode steps."""
    claim = f"C1 throughput at a 16K prefix, {model}"
    for name, run in runs:
        cells = _uniform(run.cells, "step")
        cells = cells[(cells.model == model) & (cells.prefix_len == LONG_PREFIX)]
        found = {int(b): _ratio(run, cells[cells.batch_size == b]) for b in sorted(cells.batch_size.unique())}
        known = {batch: ratio for batch, ratio in found.items() if ratio is not None}
        if known:
            ours = "; ".join(f"B {batch}: {ratio}" for batch, ratio in known.items())
            return Finding(claim, f"{paper:.2f}x", ours, _where(cells), _verdict(list(known.values()), paper), name)
    return _untested(claim, f"{paper:.2f}x", f"no decode steps of {model} at a {LONG_PREFIX}-token prefix")


def decomposition(runs: Sequence[Named]) -> Finding:
    """C2: the kernel earns most of the speed-up, the layout 1.05 to 1.15, at the largest batch."""
    claim, paper = "C2 where it comes from", "kernel: most; layout: 1.05-1.15x"
    for name, run in sorted(runs, key=lambda item: _weight(item[1])):
        effects = attribute_all(run)
        if effects.empty:
            continue
        last = effects.sort_values(["batch_size", "prefix_len"]).block.iloc[-1]
        mine = effects[effects.block == last].drop_duplicates("effect").set_index("effect")
        layout, kernel = (Estimate(*mine.loc[effect, ["factor", "lo", "hi"]]) for effect in ("layout", "kernel"))
        most = np.log(kernel.value) > np.log(layout.value)
        inside = layout.hi >= 1.05 and layout.lo <= 1.15
        verdict = "reproduced" if most and inside else "kernel: reproduced; layout: not" if most else "not reproduced"
        ours = f"kernel {kernel}; layout {layout}"
        return Finding(claim, paper, ours, _where(run.cells[run.cells.block == last]), verdict, name)
    return _untested(claim, paper, "no block with all four corners")


def contiguity(runs: Sequence[Named]) -> Finding:
    """C3: only a contiguous prefix lets the dense (Hydragen) kernel run; what bridging a paged one costs instead."""
    claim, paper = "C3 dense kernels need a contiguous prefix", "qualitative"
    for name, run in sorted(runs, key=lambda item: _weight(item[1])):
        cells = _uniform(run.cells, None)
        dense = cells[(cells.kernel == "hydragen") & (cells.status == "ok")]
        native, charged = dense[dense.adapter == ""], dense[dense.adapter != ""]
        if native.empty or charged.empty:
            continue
        block = native.sort_values(["batch_size", "prefix_len"]).iloc[-1].block
        one, other = (group[group.block == block] for group in (charged, native))
        if one.empty or other.empty:
            continue
        paid = paired_ratio(run.samples_of(one.iloc[0]), run.samples_of(other.iloc[0]), int(one.iloc[0].seed))
        ours = f"a gather in every step bridges it: {paid} times the time on a slab"
        where = _where(run.cells[run.cells.block == block])
        return Finding(claim, paper, ours, where, "depends on whether a gather is charged", name)
    return _untested(claim, paper, "no hydragen cell on both a slab and pages")


def many_agents(runs: Sequence[Named]) -> Finding:
    """C4: with unlike agents GraniKV keeps 1.95x where a batch-global cascade falls to parity."""
    claim, paper = "C4 heterogeneous agents", "GraniKV 1.95x, batch-global cascade 1x"
    for name, run in sorted(runs, key=lambda item: _weight(item[1])):
        cells = run.cells[(run.cells.status == "ok") & ~run.cells.placebo & (run.cells.num_prefixes > 1)]
        cells = cells[cells.block.isin(cells[cells.kernel == "cascade_batch"].block)]
        # agents that share nothing with each other, yet several requests each
        cells = cells[cells.num_prefixes < cells.batch_size]
        if cells.empty:
            continue
        block = cells.sort_values("num_prefixes").block.iloc[-1]
        mine = cells[(cells.block == block) & (cells.backend == cells[cells.block == block].backend.iloc[0])]
        by_name = {(c.layout, c.kernel): Estimate(c.ratio, c.ratio_lo, c.ratio_hi) for _, c in mine.iterrows()}
        wanted = [("slab_token", "granikv"), ("paged_16", "cascade_batch"), ("paged_16", "cascade")]
        if any(cell not in by_name for cell in wanted):
            continue
        ours, batch_global, grouped = (by_name[cell] for cell in wanted)
        parity = batch_global.hi < 1.1
        fair = "so does a grouped cascade on pages" if grouped.lo > 1.1 else "a grouped cascade on pages does not"
        verdict = f"reproduced against batch-global; {fair}" if parity and ours.lo > 1.1 else "not reproduced"
        told = f"granikv {ours}; batch-global {batch_global}; grouped {grouped}"
        return Finding(claim, paper, told, _where(mine), verdict, name)
    return _untested(claim, paper, "no batch of several agents with cascade_batch")


CLAIMS: tuple[Callable[[Sequence[Named]], Finding], ...] = (
    lambda runs: throughput(runs, "llama31_8b", 2.16),
    lambda runs: throughput(runs, "qwen25_14b_tp2", 1.98),
    lambda runs: throughput(runs, "qwen25_32b_tp4", 1.57),
    decomposition,
    contiguity,
    many_agents,
)


def claims(runs: Sequence[Named]) -> list[Finding]:
    """Every claim of the paper (arXiv 2608.15584), tested on the first run that has what it needs; GPU runs first."""
    ordered = sorted(runs, key=lambda item: _weight(item[1]))
    return [claim(ordered) for claim in CLAIMS]


def _weight(run: Run) -> tuple[bool, bool]:
    """GPUs before processors, whole steps before single operators."""
    return bool((run.cells.device == "cpu").all()), bool((run.cells.level == "op").all())


def _uniform(cells: pd.DataFrame, level: str | None) -> pd.DataFrame:
    kept = cells[(cells.workload == "uniform") & (cells.num_prefixes == 1) & ~cells.placebo]
    return kept if level is None else kept[kept.level == level]


def _ratio(run: Run, cells: pd.DataFrame) -> Estimate | None:
    """slab_token x granikv over paged_16 x naive in the first backend that has both."""
    ok = cells[cells.status == "ok"]
    for _, group in ok.groupby("backend", sort=False):
        corners = [
            group[(group.layout == layout) & (group.kernel == kernel)]
            for layout, kernel in (("paged_16", "naive"), ("slab_token", "granikv"))
        ]
        if all(len(corner) for corner in corners):
            base, ours = (run.samples_of(corner.iloc[0], "total_us") for corner in corners)
            return paired_ratio(base, ours, int(group.seed.iloc[0]))
    return None


def _verdict(found: Sequence[Estimate], paper: float) -> str:
    near = [e for e in found if e.hi >= paper * (1 - CLOSE) and e.lo <= paper * (1 + CLOSE)]
    if len(near) == len(found):
        return "reproduced"
    spread = f"depends on the batch: {min(e.value for e in found):.2f}x to {max(e.value for e in found):.2f}x"
    return spread if near or len(found) > 1 else "not reproduced"


def _where(cells: pd.DataFrame) -> str:
    first = cells.iloc[0]
    level = "decode steps" if first.level == "step" else "one layer's attention"
    sizes = sorted({int(b) for b in cells.batch_size})
    return (
        f"{first.device}: {first.device_name}, {level}, {first.model}, B {'/'.join(map(str, sizes))}, "
        f"Lp {first.prefix_len:.0f}, {int(first.num_prefixes)} prefixes"
    )


def _untested(claim: str, paper: str, lacking: str) -> Finding:
    return Finding(claim, paper, "", "", f"not testable here: {lacking}", "")


def main() -> int:
    """Parses the command line, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="outputs/NAME or results/NAME")
    options = parser.parse_args()
    try:
        found = claims([(str(path), load_records(path)) for path in options.runs])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 150)
    table = plain_table("Claims of arXiv 2608.15584")
    for name in ("claim", "paper", "here", "conditions", "verdict", "records"):
        table.add_column(name)
    for row in found:
        table.add_row(row.claim, row.paper, row.ours, row.conditions, row.verdict, row.records, end_section=True)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
