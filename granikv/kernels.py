"""What every attention kernel looks like from outside, and how partial results over disjoint tokens are merged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from granikv.spec import AttentionSpec
from granikv.view import KVPool, KVView, Trait


class AttentionState(NamedTuple):
    """out [B, num_qo_heads, head_dim] and lse float32 [B, num_qo_heads], the log of the softmax denominator.

    The base of lse is the kernel's `lse_base`. A row without tokens has out 0 and lse -inf. lse is empty [0] where a
    library does not give it; such a state cannot be merged, and the gate judges its out alone.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What run() needs for one view, made once a step and shared by all layers. Kernels extend it."""

    ran: str  # the kernel that run() really calls, as records show it
    notes: dict[str, Any] = field(
        default_factory=dict
    )  # decisions worth recording: splits, tiles, the selector's reasons


@runtime_checkable
class AttentionKernel(Protocol):
    """One method in one implementation. Structural: a kernel need not inherit anything."""

    name: str
    requires: Trait
    lse_base: float  # math.e or 2.0

    def supports(self, spec: AttentionSpec) -> str | None:
        """None if the kernel computes `spec` correctly, else the reason, with the fix."""
        ...

    def plan(self, view: KVView, spec: AttentionSpec) -> Any:
        """A Plan for `view`. Mutates nothing."""
        ...

    def run(self, plan: Any, q: Tensor, kv: Sequence[KVPool]) -> AttentionState:
        """Attention of q [B, num_qo_heads, head_dim] in view order; kv[i] is the pool of the view's level i."""
        ...


def merge_states(states: Sequence[AttentionState], base: float = math.e) -> AttentionState:
    """The state over the union of disjoint token sets: out = sum_i w_i out_i with w = softmax(lse) (FlashInfer,
    Ye et al. 2025, section 2.2). All lse are in `base`. Rows that no state has tokens for get out 0, lse -inf."""
    if len(states) == 1:
        return states[0]
    lse = torch.stack([state.lse for state in states])
    unit = math.log(base)
    total = torch.logsumexp(lse * unit, 0)
    weights = torch.exp(lse * unit - total.masked_fill(total == -math.inf, 0.0)).unsqueeze(-1)
    out = weights[0] * states[0].out
    for weight, state in zip(weights[1:], states[1:], strict=True):
        out = torch.addcmul(out, weight, state.out.to(out.dtype))
    return AttentionState(out.to(states[0].out.dtype), total / unit)
