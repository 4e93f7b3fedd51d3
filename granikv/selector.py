"""GraniKV's per-step choice of an attention kernel. Policies are pure functions of host integers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from granikv.kernels import AttentionKernel, AttentionState, Plan
from granikv.spec import AttentionSpec
from granikv.view import KVPool, KVView, Trait


class NoLegalChoice(ValueError):
    """The policy's choice is not among the candidates that are legal on this view."""


@dataclass(frozen=True)
class BatchShape:
    """All that a policy may look at: host integers of one step.

    groups  (rows, tokens) of every shared prefix; own_lens  tokens that each row does not share.
    """

    groups: tuple[tuple[int, int], ...]
    own_lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def batch_size(self) -> int:
        return len(self.own_lens)

    @property
    def effective_batch(self) -> float:
        """Rows that read an average shared token: sum(rows * tokens) / sum(tokens) over groups; 0 without any."""
        tokens = sum(length for _, length in self.groups)
        return sum(rows * length for rows, length in self.groups) / tokens if tokens else 0.0

    @classmethod
    def of(cls, view: KVView, spec: AttentionSpec) -> "BatchShape":
        """Read off a view's host arrays."""
        groups = tuple((g.row_end - g.row_start, g.kv_len) for g in view.prefix_groups())
        own = tuple(view.levels[-1].kv_lens.tolist())
        return cls(groups, own, spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.dtype.itemsize)


class Choice(NamedTuple):
    """A candidate's name and why it was taken, with the numbers that decided."""

    name: str
    reason: str


class Policy(Protocol):
    """Pure: equal arguments give equal choices."""

    def choose(self, shape: BatchShape, legal: Sequence[str]) -> Choice:
        """One of `legal`. Raises NoLegalChoice if the policy has none."""
        ...

    def needs(self) -> tuple[str, ...]:
        """Candidates that must exist for the policy to make sense."""
        ...


@dataclass(frozen=True, kw_only=True)
class SelectorPlan(Plan):
    """The chosen kernel with its own plan."""

    kernel: AttentionKernel
    inner: Any


class Selector:
    """A kernel that plans one of its candidates each step. Choosing is part of plan(), so its time is charged.

    Candidates must agree on lse_base; their names are the keys that policies and records use.
    """

    requires = Trait.NONE

    def __init__(self, name: str, policy: Policy, candidates: Mapping[str, AttentionKernel]) -> None:
        bases = {key: kernel.lse_base for key, kernel in candidates.items()}
        if not candidates or len(set(bases.values())) > 1:
            raise ValueError(f"{name}: candidates {bases}: at least one, all with the same lse_base")
        unknown = [key for key in policy.needs() if key not in candidates]
        if unknown:
            known = ", ".join(candidates)
            raise ValueError(
                f"policy names {unknown[0]!r}, but {name} has the candidates {known}. Fix: name one of them"
            )
        self.name, self.policy, self.candidates = name, policy, dict(candidates)
        self.lse_base = next(iter(bases.values()))

    def supports(self, spec: AttentionSpec) -> str | None:
        """A reason only if no candidate supports `spec`."""
        reasons = [kernel.supports(spec) for kernel in self.candidates.values()]
        return None if None in reasons else "; ".join(reason for reason in reasons if reason)

    def plan(self, view: KVView, spec: AttentionSpec) -> SelectorPlan:
        legal = [key for key, k in self.candidates.items() if k.requires in view.traits and k.supports(spec) is None]
        choice = self.policy.choose(BatchShape.of(view, spec), legal)
        if choice.name not in legal:
            raise NoLegalChoice(f"{self.name}: policy chose {choice.name!r}, legal here: {', '.join(legal) or 'none'}")
        kernel = self.candidates[choice.name]
        inner = kernel.plan(view, spec)
        notes = {
            "chosen": choice.name,
            "policy": type(self.policy).__name__,
            "reason": choice.reason,
            "legal": legal,
            **inner.notes,
        }
        return SelectorPlan(ran=inner.ran, notes=notes, kernel=kernel, inner=inner)

    def run(self, plan: SelectorPlan, q: Tensor, kv: Sequence[KVPool]) -> AttentionState:
        return plan.kernel.run(plan.inner, q, kv)
