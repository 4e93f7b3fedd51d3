"""cascade: each shared prefix once for all its queries, each suffix per request, merged by lse."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from baselines.torch_levels import PagedLevelPlan, Workspace, attend_paged_level, plan_paged_level
from granikv.kernels import AttentionState, Plan, merge_states
from granikv.spec import AttentionSpec
from granikv.view import KVPool, KVView, Trait


@dataclass(frozen=True, kw_only=True)
class CascadePlan(Plan):
    """One batched page table a level."""

    spec: AttentionSpec
    levels: list[PagedLevelPlan]


class CascadeTorch:
    """Cascade attention (Ye et al., 2024) over page tables.

    grouping="group" computes every prefix group as a level entry. grouping="batch" is the batch-global form of stock
    engines: only a prefix common to the whole batch is a level, and all other tokens are read per request.
    """

    name = "cascade"
    requires = Trait.LEVELED | Trait.ONE_POOL
    lse_base = math.e

    def __init__(self, grouping: str = "group") -> None:
        if grouping not in ("group", "batch"):
            raise ValueError(f"grouping={grouping!r}: group or batch")
        self.grouping = grouping
        self._workspace = Workspace()

    def supports(self, spec: AttentionSpec) -> str | None:
        return None

    def plan(self, view: KVView, spec: AttentionSpec) -> CascadePlan:
        shown = batch_global(view) if self.grouping == "batch" else view
        levels = [plan_paged_level(level, spec) for level in shown.levels]
        return CascadePlan(ran="cascade_torch", notes={"num_levels": len(levels)}, spec=spec, levels=levels)

    def run(self, plan: CascadePlan, q: Tensor, kv: Sequence[KVPool]) -> AttentionState:
        return merge_states([attend_paged_level(level, q, kv[-1], plan.spec, self._workspace) for level in plan.levels])


def batch_global(view: KVView) -> KVView:
    """`view` with only the levels that one entry covers; everything below them becomes each row's own pages."""
    common = 0
    while common < len(view.levels) - 1 and view.levels[common].num_entries == 1:
        common += 1
    own = replace(view, levels=view.levels[common:]).flat()
    return replace(view, levels=(*view.levels[:common], own))
