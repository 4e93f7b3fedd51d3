"""The correctness gate: no cell gets a latency before its output matches the oracle. The gate proves it can fail."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from granikv.kernels import AttentionState
from granikv.logical import LogicalKV
from granikv.reference import Oracle, planted_faults

LARGEST_MARGIN = 1e9
"""Margins are cut here: a row that lost all its tokens is infinitely wrong, which strict JSON cannot say."""


class GateError(RuntimeError):
    """The gate cannot tell a planted fault from rounding on this workload, so it cannot vouch for any cell."""


@dataclass(frozen=True)
class GateResult:
    """Largest deviation of out and lse over the oracle's largest magnitude, beside what is allowed."""

    out_error: float
    out_budget: float
    lse_error: float
    lse_budget: float

    @property
    def passed(self) -> bool:
        """False for NaN, too."""
        return self.out_error <= self.out_budget and self.lse_error <= self.lse_budget

    def reason(self) -> str:
        """What deviated by how much."""
        parts = [
            f"{name} error {error:.2e} over the budget of {budget:.2e}"
            for name, error, budget in (
                ("out", self.out_error, self.out_budget),
                ("lse", self.lse_error, self.lse_budget),
            )
            if not error <= budget
        ]
        return "; ".join(parts)


def check(state: AttentionState, lse_base: float, truth: Oracle) -> GateResult:
    """Compares a kernel's state, whose lse is in `lse_base`, with the oracle. An empty lse is not judged.

    The budget is twice the error of the oracle's low-precision reference, plus the rounding that any order of float32
    sums may add (64 eps) or a quarter of the KV type's eps, whichever is larger.
    """
    natural = state.lse.double() * math.log(lse_base)
    slack = max(64 * torch.finfo(torch.float32).eps, torch.finfo(state.out.dtype).eps / 4)
    budgets = [2 * scaled_error(low, high) + slack for low, high in zip(truth.low_precision, truth.whole, strict=True)]
    lse_error = scaled_error(natural, truth.whole.lse) if natural.numel() else 0.0
    return GateResult(scaled_error(state.out, truth.whole.out), budgets[0], lse_error, budgets[1])


def scaled_error(value: Tensor, truth: Tensor) -> float:
    """max |value - truth| / max |truth|; NaN if any element is NaN; inf for a wrong shape."""
    if value.shape != truth.shape:
        return math.inf
    return float((value.double() - truth).abs().max() / truth.abs().max())


def self_test(truth: Oracle, logical: LogicalKV) -> dict[str, float]:
    """For each planted fault, how many times over budget the gate finds it. Raises GateError if one would pass."""
    margins = {}
    for name, state in planted_faults(truth, logical).items():
        result = check(AttentionState(state.out.to(logical.spec.dtype), state.lse), math.e, truth)
        if result.passed:
            raise GateError(
                f"the gate would pass the planted fault {name}: out error {result.out_error:.2e}, "
                f"budget {result.out_budget:.2e}"
            )
        margin = max(result.out_error / result.out_budget, result.lse_error / result.lse_budget)
        margins[name] = min(margin, LARGEST_MARGIN)
    return margins
