"""The live view of a running block: progress, and a table of its cells as they stand."""

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from granikv.block import Block
from granikv.block import Progress as ProgressCallback
from granikv.cell import Cell

console = Console(width=None if sys.stdout.isatty() else 110)
"""In a terminal as wide as that; in a file wide enough for every column."""


@contextmanager
def live_block(block: Block, number: int, count: int) -> Iterator[ProgressCallback]:
    """Shows block `number` of `count` while the body runs; yields the callback for run_block."""
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    run = progress.add_task("block", total=count, completed=number)
    stage_task = progress.add_task("starting", total=1)
    with Live(progress, console=console, transient=True, refresh_per_second=4) as live:

        def show(stage: str, done: int, total: int, cells: Sequence[Cell]) -> None:
            progress.update(run, description=f"block {number + 1} of {count}: {point(block)}")
            progress.update(stage_task, description=stage, completed=done, total=total)
            live.update(Group(progress, _cells(cells, block)))

        yield show


def point(block: Block) -> str:
    """The workload point in a few words."""
    facts = block.workload.describe()
    lens = f"prefix {facts['prefix_len']:.0f}, own {facts['suffix_len']:.0f}"
    return f"{facts['name']}, {facts['batch_size']} requests, {lens}"


def _cells(cells: Sequence[Cell], block: Block) -> Table:
    table = Table(box=None, padding=(0, 2))
    for title in ("cell", "status", "trials", "median ms", "ratio so far"):
        table.add_column(title, justify="left" if title in ("cell", "status") else "right")
    base = next((cell.samples["total_us"] for cell in cells if cell.name == block.baseline), [])
    for cell in cells:
        taken = cell.samples["total_us"]
        median = statistics.median(taken) if taken else None
        ratio = f"{statistics.median(base) / median:.2f}x" if base and median else ""
        state = cell.status or ("running" if taken else "waiting")
        table.add_row(str(cell.name), state, str(len(taken)), f"{median / 1e3:.2f}" if median else "", ratio)
    return table
