"""hydragen: the queries that share a slab, folded into one matrix, attend to it as dense slices; fused softmax."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baselines.torch_levels import (
    DenseLevelPlan,
    PagedLevelPlan,
    Workspace,
    attend_dense_level,
    attend_paged_level,
    plan_dense_level,
    plan_paged_level,
)
from granikv.kernels import AttentionState, Plan, merge_states
from granikv.spec import AttentionSpec
from granikv.view import KVPool, KVView, Trait


@dataclass(frozen=True, kw_only=True)
class HydragenPlan(Plan):
    """Slices of the shared levels and the page table of the rows' own tokens."""

    spec: AttentionSpec
    shared: list[DenseLevelPlan]
    own: PagedLevelPlan


class HydragenTorch:
    """Hydragen (Juravsky et al., 2024) over slabs. fused=False writes out all scores between two batched products."""

    requires = Trait.LEVELED | Trait.DENSE_PREFIX
    lse_base = math.e

    def __init__(self, name: str = "hydragen", fused: bool = True) -> None:
        self.name, self.fused = name, fused
        self._workspace = Workspace()

    def supports(self, spec: AttentionSpec) -> str | None:
        return None

    def plan(self, view: KVView, spec: AttentionSpec) -> HydragenPlan:
        shared = [plan_dense_level(level) for level in view.levels[:-1]]
        own = plan_paged_level(view.levels[-1], spec)
        return HydragenPlan(ran=f"{self.name}_torch", spec=spec, shared=shared, own=own)

    def run(self, plan: HydragenPlan, q: Tensor, kv: Sequence[KVPool]) -> AttentionState:
        pools = zip(plan.shared, kv[:-1], strict=True)
        states = [attend_dense_level(level, q, pool, plan.spec, self.fused) for level, pool in pools]
        return merge_states([*states, attend_paged_level(plan.own, q, kv[-1], plan.spec, self._workspace)])
