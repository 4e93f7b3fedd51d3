"""Records in, two tables out: one row a cell, one row a cell and trial."""

import json
import math
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.stats import paired_ratio

PARTS = ("append_us", "alloc_us", "view_us", "plan_us", "adapt_us", "run_us", "op_us", "total_us")
"""op_us is what is compared. At level op it is adapt_us + run_us, the operator with the gather it needs, and total_us
adds append and a layer's part of the host work of a step. At level step both are the whole step."""
PER_BLOCK = ("time", "kv_hash", "gate_margins", "gpu_before", "gpu_after")
"""What provenance says of one block alone."""

CELL = ["layout", "kernel", "backend", "placebo"]


@dataclass(frozen=True)
class Run:
    """cells: one row a cell, medians and ratios included. samples: one row a trial. provenance: code,
    environment and configurations."""

    cells: pd.DataFrame
    samples: pd.DataFrame
    provenance: list[dict[str, Any]]

    def samples_of(self, cell: pd.Series, column: str = "op_us") -> list[float]:
        """One column of a cell's samples, in trial order."""
        return [float(value) for value in self._by_cell[cell.block, *(cell[key] for key in CELL)][column]]

    @cached_property
    def _by_cell(self) -> dict[Any, pd.DataFrame]:
        ordered = self.samples.sort_values("trial")
        return dict(list(ordered.groupby(["block", *CELL], sort=False)))


def load_records(path: Path | str, blocks: Collection[str] | None = None) -> Run:
    """The run in folder `path`: outputs/NAME with records/*.jsonl, or a published results/NAME with its parquet pair.

    `blocks` keeps only these. Without it, blocks made by other code or in another environment than the newest one are
    set aside with a warning. Raises ValueError if nothing is left.
    """
    path = Path(path)
    if not (path / "records").is_dir():
        if not (path / "cells.parquet").is_file():
            raise ValueError(
                f"{path}: neither records/ nor cells.parquet is there. Fix: name a folder that a run wrote"
            )
        provenance = path / "provenance.json"
        origin = json.loads(provenance.read_text()) if provenance.is_file() else []
        return Run(pd.read_parquet(path / "cells.parquet"), pd.read_parquet(path / "samples.parquet"), origin)
    rows = [row for file in sorted((path / "records").glob("*.jsonl")) for row in _last_attempt(file)]
    rows = [row for row in rows if row["block"] in blocks] if blocks is not None else _newest_environment(rows)
    if not rows:
        raise ValueError(f"{path / 'records'}: no complete record. Fix: run the experiment first")
    rows.sort(key=_point)
    cells = pd.DataFrame([_cell(row) for row in rows])
    samples = pd.DataFrame([sample for row in rows for sample in _samples(row)])
    if samples.empty:
        samples = pd.DataFrame(columns=["block", *CELL, "trial", "position", *PARTS])
    run = Run(cells, samples, _origins(rows))
    return Run(_with_ratios(run), samples, run.provenance)


def export(run: Run, directory: Path) -> list[Path]:
    """Writes cells.parquet, samples.parquet and provenance.json into `directory`, each in one step."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in (("cells", run.cells), ("samples", run.samples)):
        target = directory / f"{name}.parquet"
        table.to_parquet(target.with_suffix(".part"), index=False, compression="zstd")
        target.with_suffix(".part").replace(target)
        written.append(target)
    target = directory / "provenance.json"
    target.with_suffix(".part").write_text(json.dumps(run.provenance, indent=1, sort_keys=True) + "\n")
    target.with_suffix(".part").replace(target)
    return [*written, target]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Sound rows of a file; what is torn or holds an impossible sample is passed over with a warning that says so."""
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            bad = [v for values in row["samples"].values() for v in values if not math.isfinite(v) or v < 0]
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(f"{file}:{number}: no record ({type(error).__name__}); passed over", stacklevel=2)
            continue
        if bad:
            warnings.warn(f"{file}:{number}: sample {bad[0]} is no duration; row rejected", stacklevel=2)
            continue
        yield row


def _last_attempt(file: Path) -> list[dict[str, Any]]:
    """Rows of the last complete attempt, or of the last one where none is complete."""
    attempts: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(file):
        attempts.setdefault(row["attempt"], []).append(row)
    complete = [rows for rows in attempts.values() if len(rows) == rows[0]["expected_cells"]]
    return (complete or list(attempts.values()) or [[]])[-1]


def _newest_environment(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not rows:
        return rows

    def origin(row: dict[str, Any]) -> tuple[str, str]:
        return row["hashes"]["code"], row["hashes"]["environment"]

    newest = origin(max(rows, key=lambda row: str(row["provenance"].get("time"))))
    kept = [row for row in rows if origin(row) == newest]
    if len(kept) < len(rows):
        aside = len({row["block"] for row in rows}) - len({row["block"] for row in kept})
        warnings.warn(f"{aside} blocks made by other code or in another environment are set aside", stacklevel=2)
    return kept


def _point(row: dict[str, Any]) -> tuple[Any, ...]:
    """Order of blocks in tables: model, workload, then sizes. Cells of a block stay as they ran."""
    workload = row["workload"]
    sizes = (workload["batch_size"], workload["num_prefixes"], workload["prefix_len"], workload["suffix_len"])
    return (row["model"]["name"], workload["name"], *sizes, row["block"])


def _cell(row: dict[str, Any]) -> dict[str, Any]:
    """One flat row of cells.parquet."""
    plan, legality, measure, gate = row["plan"], row["legality"], row["measure"], row["gate"] or {}
    notes, footprint, whole_step = plan.get("notes") or {}, row["footprint"] or {}, row["level"] == "step"
    samples = pd.DataFrame(_samples(row), columns=list(PARTS), dtype=float)
    medians = {part: float(samples[part].median()) for part in PARTS}
    return {
        **{key: row[key] for key in ("level", "run", "block", "status", "reason", "floor_us", "bound_us")},
        **row["cell"],
        **{key: measure[key] for key in ("device", "device_name", "clock", "l2", "num_threads", "seed")},
        "order": row["measure"].get("order", "interleaved"),
        **{key: row["model"][key] for key in ("dtype", "num_qo_heads", "num_kv_heads", "head_dim", "num_layers")},
        "model": row["model"]["name"],
        "workload": row["workload"]["name"],
        **{key: row["workload"][key] for key in ("batch_size", "prefix_len", "suffix_len", "num_prefixes")},
        "missing": "+".join(legality["missing"]),
        "adapter": legality["adapter"] or "",
        "adapt_bytes": legality["adapt_bytes"],
        "ran": plan.get("ran"),
        "chosen": notes.get("chosen") or "",
        "choice_reason": notes.get("reason"),
        **{f"gate_{key}": gate.get(key) for key in ("out_error", "out_budget", "lse_error", "lse_budget")},
        **medians,
        "tokens_per_s": row["workload"]["batch_size"] / medians["total_us"] * 1e6 if whole_step else math.nan,
        "host_share": 1 if whole_step else row["model"]["num_layers"],
        **{key: footprint.get(key) for key in ("reserved_bytes", "used_bytes", "copied_tokens", "spilled_pages")},
        **{f"sm_mhz_{when}": _megahertz(row["provenance"].get(f"gpu_{when}")) for when in ("before", "after")},
        "is_baseline": row["cell"] == row["baseline"],
        "num_trials": len(row["samples"]["total_us"]),
        **{key: row["provenance"].get(key) for key in ("git_sha", "dirty")},
        **{f"{key}_hash": row["hashes"][key] for key in ("code", "environment", "config")},
    }


def _megahertz(state: dict[str, str] | None) -> float:
    """The GPU's clock as nvidia-smi printed it, NaN where there was none."""
    return float(state["clocks.sm"].split()[0]) if state else math.nan


def _samples(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    columns = row["samples"]
    for trial in range(len(columns["total_us"])):
        taken = {key: columns[key][trial] for key in columns}
        op_us = taken["total_us"] if row["level"] == "step" else taken["adapt_us"] + taken["run_us"]
        yield {"block": row["block"], **row["cell"], "trial": trial, **taken, "op_us": op_us}


def _with_ratios(run: Run) -> pd.DataFrame:
    """cells with ratio (operator time) and total_ratio (with append and host work) against each block's baseline."""
    cells = run.cells.copy()
    for name in ("ratio", "total_ratio"):
        cells[[name, f"{name}_lo", f"{name}_hi"]] = math.nan
    for _, block in cells.groupby("block", sort=False):
        base = block[block.is_baseline & (block.status == "ok")]
        if base.empty:
            continue
        for index, cell in block[block.status == "ok"].iterrows():
            for name, column in (("ratio", "op_us"), ("total_ratio", "total_us")):
                one, other = (run.samples_of(c, column) for c in (base.iloc[0], cell))
                cells.loc[index, [name, f"{name}_lo", f"{name}_hi"]] = list(paired_ratio(one, other, int(cell.seed)))
    return cells


def _origins(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Distinct code and environments, each with the full configuration of the blocks that it measured."""
    seen: dict[str, dict[str, Any]] = {}
    for row in rows:
        origin = {key: v for key, v in row["provenance"].items() if key not in PER_BLOCK}
        origin["hashes"] = {key: row["hashes"][key] for key in ("code", "environment")}
        key = json.dumps(origin, sort_keys=True)
        known = seen.setdefault(key, {**origin, "time": row["provenance"].get("time"), "configs": {}})
        known["configs"][row["block"]] = row["config"]
    return list(seen.values())
