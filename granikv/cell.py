"""One layout x kernel x backend of a block, from legality through the gate to its samples."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from granikv.binding import Binding, GatherPlan, bind
from granikv.gate import GateResult, check
from granikv.kernels import AttentionKernel, AttentionState
from granikv.layouts.base import KVLayout
from granikv.logical import LogicalKV
from granikv.record import SAMPLE_FIELDS
from granikv.reference import Oracle
from granikv.selector import NoLegalChoice
from granikv.spec import AttentionSpec
from granikv.timing import CellTimeout, Clock, time_limit
from granikv.view import KVPool, KVView, Trait


class CellName(NamedTuple):
    """A cell's place in the grid. The placebo is a second copy of the baseline (A/A)."""

    layout: str
    kernel: str
    backend: str
    placebo: bool = False

    def __str__(self) -> str:
        return f"{self.layout} x {self.kernel} ({self.backend}{', A/A' if self.placebo else ''})"


class FilledLayout:
    """A layout that holds a block's tokens in each of `num_layers` layers, and the sequence of each row."""

    def __init__(self, layout: KVLayout, logical: LogicalKV, seed: int, num_layers: int = 1) -> None:
        self.layout, self.logical = layout, logical
        tree, spec = logical.tree, logical.spec
        layout.reserve(spec, layout.capacity_of(tree), num_layers, seed)
        self.sequences: list[int] = []
        for number, node in enumerate(tree.nodes):
            prefix_len = node.num_tokens if node.shared else 0
            seq = (
                layout.allocate(prefix_len)
                if node.parent is None
                else layout.fork(self.sequences[node.parent], prefix_len)
            )
            slots = layout.grow([seq], [node.num_tokens]).to(spec.device)
            for layer in range(num_layers):
                layout.write(layer, slots, *logical.kv[number])
            self.sequences.append(seq)
        self.rows = [self.sequences[number] for number in tree.requests]
        self.full_lens = [layout.seq_len(seq) for seq in self.rows]
        self.growing = [row for row, number in enumerate(tree.requests) if tree.nodes[number].num_tokens]
        newest = [logical.kv[tree.requests[row]] for row in self.growing]
        self.last_tokens = (
            KVPool(*(torch.stack([kv[part][-1] for kv in newest]) for part in (0, 1))) if newest else None
        )

    def take_back_last_tokens(self) -> None:
        """Every growing row is one token short of full, also after a step that was cut off half-way."""
        for row in self.growing:
            seq = self.rows[row]
            self.layout.shrink(seq, self.layout.seq_len(seq) - (self.full_lens[row] - 1))

    def verify(self) -> None:
        """Raises AssertionError unless the tokens read back through the view are the logical ones, in every row."""
        view = self.layout.view(self.rows)
        view.check()
        taken = torch.zeros(view.batch_size, dtype=torch.int64)
        for number, level in enumerate(view.levels):
            pages = level.kv_indices.long().to(self.logical.spec.device)
            own = number == len(view.levels) - 1
            for entry in range(level.num_entries):
                first, past = int(level.qo_indptr[entry]), int(level.qo_indptr[entry + 1])
                length = int(level.kv_lens[entry])
                ids = pages[int(level.kv_indptr[entry]) : int(level.kv_indptr[entry + 1])]
                for row in range(first, past) if own else [first]:
                    begin = int(taken[row])
                    expected = self.logical.row(int(view.order[row]) if view.order is not None else row)
                    for pool, truth in zip(self.layout.pools[0], expected, strict=True):
                        stored = pool.index_select(0, ids).flatten(0, 1)[:length]
                        assert torch.equal(stored, truth[begin : begin + length]), (
                            f"{self.layout.name}: row {row}, level {number}"
                        )
                taken[first:past] += length
        assert taken.tolist() == view.seq_lens.tolist()


@dataclass
class Cell:
    """A cell while its block runs. `status` is None as long as it is alive."""

    name: CellName
    layout: KVLayout | None = None
    kernel: AttentionKernel | None = None
    binding: Binding | None = None
    status: str | None = None
    reason: str | None = None
    gate: GateResult | None = None
    ran: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    adapt_bytes: int = 0
    seconds: float = 0.0
    planned: KVView | None = None
    captured: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in ("position", *SAMPLE_FIELDS, "total_us")}
    )

    def measure(self, clock: Clock, num_layers: int) -> dict[str, float]:
        """Durations of one repetition, by the names of `samples`."""
        raise NotImplementedError

    def end(self, status: str, reason: str) -> None:
        """Gives the cell its final status; samples taken so far are dropped, because a failed cell has no latency."""
        self.status, self.reason = status, reason
        self.captured.clear()
        for values in self.samples.values():
            values.clear()

    def attempt(self, work: Callable[[], None], limit_s: float) -> None:
        """Runs `work`, turning whatever ends it into this cell's status. Other cells go on."""
        try:
            with time_limit(limit_s):
                work()
        except CellTimeout as error:
            self.end("timeout", f"{error}. Fix: a larger timing.cell_timeout_s or a smaller workload")
        except (torch.OutOfMemoryError, MemoryError) as error:
            self.end("oom", str(error).splitlines()[0] if str(error) else "out of memory")
        except NoLegalChoice as error:
            self.end("illegal", str(error))
        except Exception as error:
            if "allocate memory" in str(error):
                self.end("oom", str(error).splitlines()[0])
            else:
                where = traceback.extract_tb(error.__traceback__)[-1]
                self.end(
                    "crash", f"{type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
                )

    def settle(self, spec: AttentionSpec, traits: Trait, fallback: str) -> None:
        """Ends the cell as unsupported or illegal where it cannot run on views with `traits`."""
        assert self.kernel is not None
        reason = self.kernel.supports(spec)
        if reason is not None:
            return self.end("unsupported", reason)
        self.binding = bind(self.kernel, traits, fallback)
        if self.binding.reason is not None:
            self.end("illegal", self.binding.reason)


@dataclass
class OpCell(Cell):
    """One layer's attention on a filled layout."""

    filled: FilledLayout | None = None

    def fill(self, filled: FilledLayout, fallback: str) -> None:
        """Gives the cell its tokens, and settles whether it can run on them."""
        self.filled, self.layout = filled, filled.layout
        self.settle(filled.logical.spec, filled.layout.view(filled.rows).traits, fallback)

    def measure(self, clock: Clock, num_layers: int) -> dict[str, float]:
        return self.step(clock, num_layers)[1]

    def check(self, truth: Oracle, clock: Clock, num_layers: int) -> None:
        """One unrecorded step through the gate; ends the cell as incorrect if its output is wrong."""
        assert self.kernel is not None
        state, _ = self.step(clock, num_layers)
        self.gate = check(state, self.kernel.lse_base, truth)
        if not self.gate.passed:
            self.end("incorrect", self.gate.reason())

    def step(self, clock: Clock, num_layers: int) -> tuple[AttentionState, dict[str, float]]:
        """One decode step: the newest token of every row is appended again, planned and attended to.

        Host work of the step (alloc, view, plan) is shared by `num_layers` layers; each pays for append, adapt and run.
        """
        assert self.filled is not None
        assert self.kernel is not None
        assert self.binding is not None
        layout, rows, logical = self.filled.layout, self.filled.rows, self.filled.logical
        kernel, adapter, spec, q = self.kernel, self.binding.adapter, logical.spec, logical.q
        growing, newest = [rows[row] for row in self.filled.growing], self.filled.last_tokens
        self.filled.take_back_last_tokens()
        times = {}
        slots, times["alloc_us"] = clock.host_us(lambda: layout.grow(growing, [1] * len(growing)).to(spec.device))
        view, times["view_us"] = clock.host_us(lambda: layout.view(rows))

        def plan() -> tuple[GatherPlan | None, KVView, Any]:
            gather = None if adapter is None else adapter.plan(view, spec)
            shown = view if gather is None else gather.view
            return gather, shown, kernel.plan(shown, spec)

        (gather, shown, made), times["plan_us"] = clock.host_us(plan)
        if not same_pages(self.planned, view):
            self.captured.clear()
        self.planned = view
        order = device_order(shown, spec.device)
        pools = [[layout.pools[layer]] * len(view.levels) for layer in range(clock.num_layers)]
        clock.chill()
        times["append_us"] = 0.0
        if newest is not None:
            _, times["append_us"] = clock.device_us(
                lambda layer: layout.write(layer, slots, *newest), self.captured, "append"
            )
        times["adapt_us"] = 0.0
        if adapter is not None and gather is not None:
            gathered: dict[int, list[KVPool]] = {}

            def adapt(layer: int) -> None:
                gathered[layer] = adapter.run(gather, pools[layer])

            _, times["adapt_us"] = clock.device_us(adapt, self.captured, "adapt")
            if "adapt" in self.captured:  # a graph fills the buffers of its capture
                self.captured.setdefault("gathered", gathered)
                gathered = self.captured["gathered"]
            pools = [gathered[layer] for layer in range(clock.num_layers)]
        state, times["run_us"] = clock.device_us(
            lambda layer: run_in_batch_order(kernel, made, order, q, pools[layer]), self.captured, "run"
        )
        host = times["alloc_us"] + times["view_us"] + times["plan_us"]
        times["total_us"] = times["append_us"] + times["adapt_us"] + times["run_us"] + host / num_layers
        self.ran, self.notes = made.ran, made.notes
        self.adapt_bytes = gather.num_bytes if gather else 0
        return state, times


def same_pages(planned: KVView | None, view: KVView) -> bool:
    """Whether what was captured for `planned` reads the right pages for `view`."""
    return planned is not None and all(
        torch.equal(a.kv_lens, b.kv_lens)
        and (
            torch.equal(a.slab_starts, b.slab_starts)
            if a.slab_starts is not None and b.slab_starts is not None
            else torch.equal(a.kv_indices, b.kv_indices)
        )
        for a, b in zip(planned.levels, view.levels, strict=True)
    )


def run_in_batch_order(
    kernel: AttentionKernel, plan: Any, order: torch.Tensor | None, q: torch.Tensor, kv: list[KVPool]
) -> AttentionState:
    """kernel.run for a caller whose rows are in batch order: q is permuted into the view's order and the state back.

    `order` is the view's, on q's device already, because a captured graph must not copy from the host.
    """
    if order is None:
        return kernel.run(plan, q, kv)
    state = kernel.run(plan, q.index_select(0, order), kv)
    back = torch.argsort(order)
    return AttentionState(*(x.index_select(0, back) if x.numel() else x for x in state))


def device_order(view: KVView, device: torch.device) -> torch.Tensor | None:
    """The view's order where run_in_batch_order wants it."""
    return None if view.order is None else view.order.to(device)
