"""One comparison block: all cells of one workload point, on the same numbers, gated, then timed interleaved."""

import gc
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from granikv.binding import names
from granikv.cell import Cell, CellName, FilledLayout, OpCell
from granikv.gate import GateError, self_test
from granikv.kernels import AttentionKernel
from granikv.layouts.base import KVLayout
from granikv.logical import LogicalKV, logical_bytes, materialize
from granikv.memory import fits
from granikv.provenance import code_hash, device_name, digest, environment, git_state, gpu_state
from granikv.record import Record
from granikv.reference import oracle
from granikv.roofline import Ceilings, Floor
from granikv.spec import AttentionSpec
from granikv.step.decoder import DecoderSpec
from granikv.timing import Clock, CpuClock, Timing
from granikv.tree import ContextTree
from granikv.workloads.base import Workload

Progress = Callable[[str, int, int, Sequence[Cell]], None]
"""Called with what is being done, how much of it is done, how much there is, and the cells as they stand."""


@dataclass(frozen=True)
class Block:
    """Everything that one block measures. `layouts` makes a fresh layout by name; a kernel that could not be made is
    the reason (a string), and its cells are unsupported. `ceilings` are the device's, where they were measured.
    With a `decoder` the block measures whole decode steps, else one layer's attention.
    """

    run: str
    workload: Workload
    spec: AttentionSpec
    model: Mapping[str, Any]
    timing: Timing
    fallback: str
    layouts: Mapping[str, Callable[[], KVLayout]]
    kernels: Mapping[tuple[str, str], AttentionKernel | str]
    baseline: CellName
    config: Mapping[str, Any]
    ceilings: Ceilings | None = None
    decoder: DecoderSpec | None = None

    @property
    def cell_names(self) -> list[CellName]:
        """The grid, and an A/A copy of the baseline if the grid has it."""
        grid = [CellName(layout, kernel, backend) for layout in self.layouts for kernel, backend in self.kernels]
        return [*grid, self.baseline._replace(placebo=True)] if self.baseline in grid else grid

    def hashes(self) -> dict[str, str]:
        """What resume compares: configuration, the batch it describes, code and environment."""
        return {
            "config": digest(self.config),
            "batch": digest(self.workload.tree()),
            "code": code_hash(),
            "environment": digest(environment(self.spec.device)),
        }

    def key(self) -> str:
        """Identifies the block across runs: 16 hex digits over hashes()."""
        return digest(self.hashes())

    @property
    def level(self) -> str:
        """What is measured, as records say it."""
        return "step" if self.decoder else "op"

    def memory_bytes(self, tree: ContextTree) -> int:
        """K and V of the logical batch and of every layout's layers, the placebo's too, and a decoder's weights."""
        made = {name: layout() for name, layout in self.layouts.items()}
        pools = sum(layout.pool_bytes(self.spec, layout.capacity_of(tree)) for layout in made.values())
        if self.baseline.layout in made:
            placebo = made[self.baseline.layout]
            pools += placebo.pool_bytes(self.spec, placebo.capacity_of(tree))
        layer_bytes = logical_bytes(tree, self.spec)
        if self.decoder:
            weights = self.decoder.num_weights * self.spec.dtype.itemsize
            return (pools + layer_bytes) * self.decoder.num_layers + weights
        return pools * self.timing.rotated_layers(layer_bytes) + layer_bytes


def run_block(block: Block, progress: Progress = lambda *_: None) -> list[Record]:
    """Runs `block` to its end and returns one record a cell. A cell that fails has its status; the others go on."""
    tree = block.workload.tree()
    cells: Sequence[Any]
    facts: dict[str, Any] = {"kv_hash": None, "gate_margins": {}, "gpu_before": gpu_state(block.spec.device)}
    measure: Callable[..., None]
    if block.decoder:
        from granikv.step.cell import StepCell, measure_steps

        cells, measure = [StepCell(name) for name in block.cell_names], measure_steps
    else:
        cells, measure = [OpCell(name) for name in block.cell_names], _measure
    shortage = fits(block.memory_bytes(tree), block.spec.device, f"the block {block.workload.name}")
    try:
        if shortage:
            _end_all(cells, "oom", shortage)
        else:
            measure(block, tree, cells, facts, progress)
    except GateError as error:
        _end_all(cells, "incorrect", f"{error}: nothing here can be vouched for")
    except Exception as error:
        _end_all(cells, "crash", f"{type(error).__name__}: {error}")
    facts["gpu_after"] = gpu_state(block.spec.device)
    floor = block.ceilings.floor(tree, block.spec) if block.ceilings and not block.decoder else None
    if floor and block.timing.cache == "cold":
        _reject_below(cells, floor.bound_us)
    return _records(block, tree, cells, floor, facts)


def _reject_below(cells: Sequence[Cell], bound_us: float) -> None:
    """A time that nothing can reach is a fault of the measurement."""
    for cell in cells:
        if cell.status is None and (median := statistics.median(cell.samples["run_us"])) < bound_us:
            cell.end(
                "incorrect", f"run_us {median:.1f} is below the roofline bound of {bound_us:.1f}: measured wrongly"
            )


def _end_all(cells: Sequence[Cell], status: str, reason: str) -> None:
    for cell in cells:
        if cell.status is None:
            cell.end(status, reason)


def _measure(
    block: Block, tree: ContextTree, cells: Sequence[OpCell], facts: dict[str, Any], progress: Progress
) -> None:
    """Numbers, oracle, layouts, gate, trials."""
    timing = block.timing
    progress("materialize", 0, 1, cells)
    logical = materialize(tree, block.spec, timing.seed)
    facts["kv_hash"] = logical.digest()
    progress("oracle and gate self-test", 0, 1, cells)
    truth = oracle(logical)
    facts["gate_margins"] = self_test(truth, logical)
    clock = _clock(block, tree)
    _prepare(block, cells, logical, clock.num_layers, progress)
    for done, cell in enumerate(cells):
        if cell.status is None:
            progress(f"gate {cell.name}", done, len(cells), cells)

            def gated(cell: OpCell = cell) -> None:
                cell.check(truth, clock, timing.num_layers)

            cell.attempt(gated, timing.cell_timeout_s)
    time_cells(block, cells, clock, progress)


def _clock(block: Block, tree: ContextTree) -> Clock:
    if block.timing.clock == "cpu":
        return CpuClock(block.timing)
    from granikv.cuda_timing import CudaClock

    return CudaClock(block.timing, block.timing.rotated_layers(logical_bytes(tree, block.spec)))


def _prepare(block: Block, cells: Sequence[OpCell], logical: LogicalKV, num_layers: int, progress: Progress) -> None:
    """Fills one layout a name, and one more for the placebo; settles what is unsupported or illegal."""
    filled: dict[tuple[str, bool], FilledLayout] = {}
    for done, cell in enumerate(cells):
        progress(f"fill {cell.name.layout}", done, len(cells), cells)
        if not has_kernel(block, cell):
            continue

        def fill(cell: OpCell = cell) -> None:
            key = (cell.name.layout, cell.name.placebo)
            if key not in filled:
                layout, seed = block.layouts[cell.name.layout](), block.timing.seed + cell.name.placebo
                made = FilledLayout(layout, logical, seed, num_layers)
                made.verify()
                filled[key] = made
            cell.fill(filled[key], block.fallback)

        cell.attempt(fill, block.timing.cell_timeout_s)


def has_kernel(block: Block, cell: Cell) -> bool:
    """Gives the cell its kernel, or ends it as unsupported if there is none."""
    kernel = block.kernels[cell.name.kernel, cell.name.backend]
    if isinstance(kernel, str):
        cell.end("unsupported", kernel)
        return False
    cell.kernel = kernel
    return True


def time_cells(block: Block, cells: Sequence[Cell], clock: Clock, progress: Progress) -> None:
    """Warm-up and trials of all living cells, in the order that the timing asks for."""
    timing = block.timing
    alive = [cell for cell in cells if cell.status is None]
    total = (timing.warmup + timing.trials) * len(alive)
    gc.collect()
    gc.disable()
    try:
        for done, (repetition, position, index) in enumerate(timing.schedule(len(alive))):
            if done % len(alive) == 0:
                progress("warm-up and trials", done, total, cells)
            cell = alive[index]
            if cell.status is not None:
                continue

            def once(cell: Cell = cell, position: int = position, counts: bool = repetition >= timing.warmup) -> None:
                times = cell.measure(clock, timing.num_layers)
                if counts:
                    for name, value in {"position": position, **times}.items():
                        cell.samples[name].append(value)

            start = time.perf_counter()
            cell.attempt(once, timing.cell_timeout_s - cell.seconds)
            cell.seconds += time.perf_counter() - start
    finally:
        gc.enable()


def _records(
    block: Block, tree: ContextTree, cells: Sequence[Cell], floor: Floor | None, facts: Mapping[str, Any]
) -> list[Record]:
    attempt, spec = uuid.uuid4().hex[:16], block.spec
    provenance = {
        **git_state(),
        "environment": environment(spec.device),
        **facts,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    measure = {
        "clock": block.timing.clock,
        "l2": block.timing.cache,
        "order": block.timing.order,
        "device": spec.device.type,
        "device_name": device_name(spec.device),
        "num_threads": torch.get_num_threads(),
        "trials": block.timing.trials,
        "warmup": block.timing.warmup,
        "seed": block.timing.seed,
    }
    model = {**block.model, "num_layers": block.timing.num_layers, "dtype": str(spec.dtype).removeprefix("torch.")}
    workload, hashes, key = block.workload.describe(tree), block.hashes(), block.key()
    return [
        Record(
            level=block.level,
            run=block.run,
            block=key,
            attempt=attempt,
            expected_cells=len(cells),
            cell=cell.name._asdict(),
            status=cell.status or "ok",
            reason=cell.reason,
            workload=workload,
            model=model,
            measure=measure,
            baseline=block.baseline._asdict(),
            legality={
                "missing": names(cell.binding.missing).split("+") if cell.binding and cell.binding.missing else [],
                "adapter": cell.binding.adapter.name if cell.binding and cell.binding.adapter else None,
                "adapt_bytes": cell.adapt_bytes,
            },
            plan={"ran": cell.ran, "notes": cell.notes},
            gate=asdict(cell.gate) if cell.gate else None,
            footprint=asdict(cell.layout.footprint()) if cell.layout else None,
            floor_us=floor.level_sum_us if floor else None,
            bound_us=floor.bound_us if floor else None,
            samples=cell.samples,
            provenance=provenance,
            hashes=hashes,
            config=dict(block.config),
        )
        for cell in cells
    ]
