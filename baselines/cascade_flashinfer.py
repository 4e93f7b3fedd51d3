"""cascade from FlashInfer's parts: shared levels by split-KV prefill, own tokens by decode, merged by lse."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baselines.cascade_torch import batch_global
from baselines.flashinfer_levels import (
    WORKSPACE_BYTES,
    LevelPlan,
    Workspace,
    merge,
    plan_decode,
    plan_prefill,
    run_level,
    unsupported,
)
from granikv.kernels import AttentionState, Plan
from granikv.spec import AttentionSpec
from granikv.view import KVPool, KVView, Trait


@dataclass(frozen=True, kw_only=True)
class CascadePlan(Plan):
    """One planned wrapper a level."""

    levels: list[LevelPlan]


class CascadeFlashInfer:
    """Cascade attention (Ye et al., 2024) for any page size and any number of groups; see CascadeTorch for grouping."""

    requires = Trait.LEVELED | Trait.ONE_POOL
    lse_base = 2.0

    def __init__(self, name: str, grouping: str = "group", workspace_bytes: int = WORKSPACE_BYTES) -> None:
        if grouping not in ("group", "batch"):
            raise ValueError(f"grouping={grouping!r}: group or batch. Fix: grouping=group")
        self.name, self.grouping = name, grouping
        self._workspace = Workspace(workspace_bytes)

    def supports(self, spec: AttentionSpec) -> str | None:
        return unsupported(spec)

    def plan(self, view: KVView, spec: AttentionSpec) -> CascadePlan:
        shown = batch_global(view) if self.grouping == "batch" else view
        shared = [level for level in shown.levels[:-1] if int(level.kv_lens.sum())]
        levels = [plan_prefill(level, spec, self._workspace) for level in shared]
        levels.append(plan_decode(shown.levels[-1], spec, self._workspace, tensor_cores=True))
        return CascadePlan(ran=f"{self.name}_flashinfer_fa2", notes={"num_levels": len(levels)}, levels=levels)

    def run(self, plan: CascadePlan, q: Tensor, kv: Sequence[KVPool]) -> AttentionState:
        states = [run_level(level, q, kv[-1]) for level in plan.levels]
        return merge(states, all(level.absent is None for level in plan.levels))
