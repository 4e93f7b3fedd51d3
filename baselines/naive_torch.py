"""naive: one paged decode over each request's whole sequence, shared tokens read once per request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baselines.torch_levels import PagedLevelPlan, Workspace, attend_paged_level, plan_paged_level
from granikv.kernels import AttentionState, Plan
from granikv.spec import AttentionSpec
from granikv.view import KVPool, KVView, Trait


@dataclass(frozen=True, kw_only=True)
class NaivePlan(Plan):
    """The flat page table, batched."""

    spec: AttentionSpec
    level: PagedLevelPlan


class NaiveTorch:
    """Paged decode attention (PagedAttention, Kwon et al., 2023) over the flat page table of a view."""

    name = "naive"
    requires = Trait.ONE_POOL
    lse_base = math.e

    def __init__(self) -> None:
        self._workspace = Workspace()

    def supports(self, spec: AttentionSpec) -> str | None:
        return None

    def plan(self, view: KVView, spec: AttentionSpec) -> NaivePlan:
        return NaivePlan(ran="naive_torch", spec=spec, level=plan_paged_level(view.flat(), spec))

    def run(self, plan: NaivePlan, q: Tensor, kv: Sequence[KVPool]) -> AttentionState:
        return attend_paged_level(plan.level, q, kv[-1], plan.spec, self._workspace)
