"""Cells of a block that measures whole decode steps at a fixed batch: the steady state, without ramp and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from granikv.block import Block, Progress, has_kernel, time_cells
from granikv.cell import Cell, same_pages
from granikv.gate import GateResult, scaled_error
from granikv.kernels import AttentionKernel
from granikv.step.context import Prompts, extend
from granikv.step.decoder import Decoder
from granikv.step.session import PlannedStep, Session
from granikv.timing import Clock, CpuClock
from granikv.tree import ContextTree
from granikv.view import KVPool


@dataclass(frozen=True)
class StepTruth:
    """Logits [B, vocab_size] of a dense decoder: attention in wide precision, and with probabilities and outputs
    rounded to the model's element type.
    """

    logits: Tensor
    low_precision: Tensor

    @property
    def budget(self) -> float:
        """Twice what rounding moves the logits by, and the rounding of sums in another order."""
        slack = max(1024 * torch.finfo(torch.float32).eps, torch.finfo(self.logits.dtype).eps)
        return 2 * scaled_error(self.low_precision, self.logits.double()) + slack


@dataclass
class StepCell(Cell):
    """A decode step of all layers; the batch is put back after each, so that every trial measures the same lengths."""

    session: Session | None = None

    def start(self, session: Session, fallback: str) -> None:
        """Gives the cell its batch, and settles whether it can run on it."""
        self.session, self.layout = session, session.layout
        self.settle(session.decoder.spec.attention, session.view().traits, fallback)

    def check(self, truth: StepTruth, clock: Clock) -> None:
        """One unrecorded step through the gate: its logits against those of the dense decoder."""
        logits, _ = self.step(clock)
        error = scaled_error(logits, truth.logits.double())
        self.gate = GateResult(error, truth.budget, 0.0, truth.budget)
        if not self.gate.passed:
            self.end("incorrect", f"logits: {self.gate.reason()}")

    def measure(self, clock: Clock, num_layers: int) -> dict[str, float]:
        return self.step(clock)[1]

    def step(self, clock: Clock) -> tuple[Tensor, dict[str, float]]:
        """Logits of one step and its durations. run_us is all device work: embedding to greedy tokens."""
        assert self.session is not None
        assert self.kernel is not None
        session, kernel = self.session, self.kernel
        times = {"append_us": 0.0, "adapt_us": 0.0}
        slots, times["alloc_us"] = clock.host_us(session.grow)
        try:
            view, times["view_us"] = clock.host_us(session.view)
            planned, times["plan_us"] = clock.host_us(lambda: session.plan(kernel, view, slots))
            if not same_pages(self.planned, view):
                self.captured.clear()
            self.planned = view
            clock.chill()
            (logits, _), times["run_us"] = clock.device_us(
                lambda _: _with_greedy_tokens(session, kernel, planned), self.captured, "run"
            )
        finally:
            session.shrink()
        times["total_us"] = sum(times[part] for part in ("alloc_us", "view_us", "plan_us", "run_us"))
        self.ran, self.notes = planned.plan.ran, planned.plan.notes
        self.adapt_bytes = planned.gather.num_bytes * session.decoder.spec.num_layers if planned.gather else 0
        return logits, times


def _with_greedy_tokens(session: Session, kernel: AttentionKernel, planned: PlannedStep) -> tuple[Tensor, Tensor]:
    logits = session.forward(kernel, planned)
    return logits, logits.argmax(-1)


def measure_steps(
    block: Block, tree: ContextTree, cells: Sequence[StepCell], facts: dict[str, Any], progress: Progress
) -> None:
    """Weights, prompts, layouts, gate, trials."""
    assert block.decoder is not None
    timing = block.timing
    progress("weights and prompts", 0, 1, cells)
    decoder = Decoder(block.decoder, timing.seed)
    prompts = Prompts(decoder, tree, timing.seed)
    truth = dense_step(decoder, prompts)
    clock: Clock = CpuClock(timing)
    if timing.clock != "cpu":
        from granikv.cuda_timing import CudaClock

        clock = CudaClock(timing, num_layers=1)
    sessions: dict[tuple[str, bool], Session] = {}
    for done, cell in enumerate(cells):
        progress(f"fill {cell.name.layout}", done, len(cells), cells)
        if has_kernel(block, cell):

            def start(cell: StepCell = cell) -> None:
                key = (cell.name.layout, cell.name.placebo)
                if key not in sessions:
                    layout, seed = block.layouts[cell.name.layout](), timing.seed + cell.name.placebo
                    sessions[key] = Session(decoder, layout, prompts, headroom=1, fallback=block.fallback, seed=seed)
                cell.start(sessions[key], block.fallback)

            cell.attempt(start, timing.cell_timeout_s)
    for done, cell in enumerate(cells):
        if cell.status is None:
            progress(f"gate {cell.name}", done, len(cells), cells)

            def gated(cell: StepCell = cell) -> None:
                cell.check(truth, clock)

            cell.attempt(gated, timing.cell_timeout_s)
    time_cells(block, cells, clock, progress)


def dense_step(decoder: Decoder, prompts: Prompts) -> StepTruth:
    """The first decode step of every row by the plain way: all its K and V in one piece, no layout, no kernel."""
    logits, low = [], []
    for number, token in zip(prompts.tree.requests, prompts.first, strict=True):
        past = prompts.context(decoder, number)
        logits.append(extend(decoder, past, token.view(1))[1])
        low.append(extend(decoder, past, token.view(1), attention=rounded_attention)[1])
    return StepTruth(torch.stack(logits), torch.stack(low))


def rounded_attention(q: Tensor, kv: KVPool, sm_scale: float) -> Tensor:
    """One query token [1, Hq, D] over all tokens; probabilities and output have q's type, sums are float32."""
    keys, values = (x.float() for x in kv)
    grouped = q.float().view(keys.shape[1], -1, q.shape[-1])
    weights = torch.softmax(torch.matmul(grouped, keys.permute(1, 2, 0)) * sm_scale, -1).to(q.dtype).float()
    return torch.matmul(weights, values.transpose(0, 1)).reshape(q.shape).to(q.dtype)
