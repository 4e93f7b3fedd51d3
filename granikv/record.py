"""Records: one JSON line a cell, raw samples included, in one append-only file a block.

A block's rows are written together and synced, so a killed process loses at most the running block. A file may hold
several attempts at its block; readers take the last complete one.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
STATUSES = ("ok", "illegal", "unsupported", "incorrect", "oom", "timeout", "crash")
RETRIED = ("crash", "timeout")
"""Statuses that a later run tries again; the others are facts about the cell."""

SAMPLE_FIELDS = ("append_us", "alloc_us", "view_us", "plan_us", "adapt_us", "run_us")


class BlockBusy(RuntimeError):
    """Another process is measuring the same block into the same file."""


@dataclass
class Record:
    """One cell of one attempt at a block. Only an `ok` cell that passed the gate may hold samples."""

    level: str
    run: str
    block: str
    attempt: str
    expected_cells: int
    cell: dict[str, Any]
    status: str
    reason: str | None
    workload: dict[str, Any]
    model: dict[str, Any]
    measure: dict[str, Any]
    baseline: dict[str, Any]
    legality: dict[str, Any]
    plan: dict[str, Any]
    gate: dict[str, Any] | None
    footprint: dict[str, Any] | None
    floor_us: float | None
    bound_us: float | None
    samples: dict[str, list[float]]
    provenance: dict[str, Any]
    hashes: dict[str, str]
    config: dict[str, Any]
    schema: int = field(default=SCHEMA)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r}: one of {', '.join(STATUSES)}")
        has_samples = any(self.samples.values())
        if (self.status == "ok") != has_samples or (self.status == "ok") == bool(self.reason):
            raise ValueError(
                f"a cell is ok and has samples, or has a reason and none: {self.status}, {self.reason!r}, "
                f"samples={has_samples}"
            )
        if self.status == "ok" and self.gate is None:
            raise ValueError("an ok cell has passed the gate: gate=None")
        for name, values in self.samples.items():
            if any(not math.isfinite(value) or value < 0 for value in values):
                raise ValueError(f"samples.{name} holds a value that is not a finite number of at least 0: {values}")

    def line(self) -> str:
        """The record as one line of strict JSON."""
        return json.dumps(asdict(self), allow_nan=False, default=str) + "\n"


class BlockFile:
    """The records file of one block."""

    def __init__(self, directory: Path, block: str) -> None:
        self.path = directory / f"{block}.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        """Every whole row; a truncated or damaged line is passed over."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and "attempt" in row:
                rows.append(row)
        return rows

    def finished_attempt(self) -> list[dict[str, Any]] | None:
        """Rows of the last attempt if it is complete and nothing in it is worth another try."""
        attempts: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows():
            attempts.setdefault(row["attempt"], []).append(row)
        complete = [rows for rows in attempts.values() if len(rows) == rows[0]["expected_cells"]]
        if not complete or any(row["status"] in RETRIED for row in complete[-1]):
            return None
        return complete[-1]

    def append(self, records: list[Record]) -> None:
        """Adds all rows in one write, then syncs file and folder."""
        text = "".join(record.line() for record in records)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell() and not self._ends_with_newline():
                text = "\n" + text
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds this block for one process; BlockBusy if another one has it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockBusy(f"block {self.path.stem} is being measured by another process") from None
            yield

    def _ends_with_newline(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
