"""naive: FlashInfer's paged decode over each request's whole sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baselines.flashinfer_levels import WORKSPACE_BYTES, LevelPlan, Workspace, plan_decode, run_level, unsupported
from granikv.kernels import AttentionState, Plan
from granikv.spec import AttentionSpec
from granikv.view import KVPool, KVView, Trait


@dataclass(frozen=True, kw_only=True)
class NaivePlan(Plan):
    """The flat page table, planned."""

    level: LevelPlan


class NaiveFlashInfer:
    """BatchDecodeWithPagedKVCacheWrapper, on tensor cores or on CUDA cores."""

    requires = Trait.ONE_POOL
    lse_base = 2.0

    def __init__(self, name: str, tensor_cores: bool, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        self.name, self.tensor_cores = name, tensor_cores
        self._workspace = Workspace(workspace_bytes)

    def supports(self, spec: AttentionSpec) -> str | None:
        return unsupported(spec, self.tensor_cores)

    def plan(self, view: KVView, spec: AttentionSpec) -> NaivePlan:
        level = plan_decode(view.flat(), spec, self._workspace, self.tensor_cores)
        return NaivePlan(ran=f"{self.name}_flashinfer_fa2", level=level)

    def run(self, plan: NaivePlan, q: Tensor, kv: Sequence[KVPool]) -> AttentionState:
        return run_level(plan.level, q, kv[-1])
