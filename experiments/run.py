"""Run comparison blocks: `python -m experiments.run [-m] [key=value ...]`. One Hydra job is one block."""

import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from analysis.load import export, load_records
from analysis.report import attribution_tables, ratio_tables, write_figures
from experiments.build import build_block
from experiments.display import console, live_block, point
from experiments.preflight import Preflight, preflight
from granikv.block import run_block
from granikv.cell import CellName
from granikv.record import BlockBusy, BlockFile

FAILURES = ("incorrect", "oom", "timeout", "crash")
"""Statuses that make the exit code 1. Illegal and unsupported cells are answers, not failures."""


_num_blocks = 1
"""Blocks of this run, for the progress bar; main() sets it."""


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def run_job(cfg: DictConfig) -> None:
    """Measures one block, unless its records are there already, and adds its rows at once."""
    block, job = build_block(cfg), HydraConfig.get().job
    number = int(job.get("num", 0) or 0)
    file = BlockFile(Path(cfg.output_dir).resolve() / "records", block.key())
    try:
        with file.locked():
            if file.finished_attempt():
                console.print(f"[dim]block {file.path.stem} ({point(block)}): measured before, resumed[/dim]")
                return
            with live_block(block, number, max(_num_blocks, number + 1)) as progress:
                records = run_block(block, progress)
            file.append(records)
    except BlockBusy as busy:
        console.print(f"[yellow]{busy}; it is left to that one[/yellow]")
        return
    counts = {status: sum(r.status == status for r in records) for status in dict.fromkeys(r.status for r in records)}
    summary = ", ".join(f"{number} {status}" for status, number in counts.items())
    console.print(f"block {file.path.stem} ({point(block)}): {summary}")
    if block.workload.name != "uniform":
        groups = ", ".join(
            f"{rows} requests x {tokens} tokens" for rows, tokens in block.workload.tree().prefix_groups()
        )
        console.print(f"  prefix groups: {groups or 'none'}", soft_wrap=True)
    for record in records:
        if record.status != "ok":
            cell = CellName(**record.cell)
            console.print(f"  {cell}: {record.status}: {record.reason}", soft_wrap=True)


def finish(plan: Preflight) -> int:
    """Prints what this run's blocks say and where they are. Returns the exit code."""
    keys = [block.key() for block in plan.blocks]
    attempts = {key: BlockFile(plan.output_dir / "records", key).rows() for key in keys}
    missing = [key for key, rows in attempts.items() if not rows]
    if len(missing) < len(keys):
        run = load_records(plan.output_dir, blocks=keys)
        console.print(ratio_tables(run))
        console.print(attribution_tables(run))
        written = export(run, plan.output_dir)
        if plan.figures:
            written += write_figures(run, plan.output_dir / "figures")
        for path in written:
            console.print(str(path), soft_wrap=True)
        bad = run.cells[run.cells.status.isin(FAILURES)]
    console.print(f"records {plan.output_dir / 'records'}", soft_wrap=True)
    if missing:
        console.print(
            f"[yellow]{len(missing)} of {len(keys)} blocks have no records; the same command resumes them[/yellow]"
        )
        return 1
    if len(bad):
        console.print(f"[red]{len(bad)} cells failed: {', '.join(sorted(set(bad.status)))}[/red]")
    return int(bool(len(bad)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the whole command line, runs it through Hydra, reports. Exit code 2 for refused input."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parsed = get_args_parser().parse_args(words)
    if parsed.help or parsed.hydra_help or parsed.cfg or parsed.info is not None:
        run_job()
        return 0
    try:
        plan = preflight(parsed.overrides, parsed.multirun, parsed.config_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(f"{len(plan.blocks)} blocks of {len(plan.blocks[0].cell_names)} cells")
    global _num_blocks
    _num_blocks = len(plan.blocks)
    sys.argv = [sys.argv[0], *words]
    try:
        run_job()
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: finished blocks are kept, the same command resumes[/yellow]")
        finish(plan)
        return 130
    return finish(plan)


if __name__ == "__main__":
    sys.exit(main())
