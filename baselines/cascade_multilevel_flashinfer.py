"""cascade as FlashInfer ships it: MultiLevelCascadeAttentionWrapper, with the backend of its levels pinned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baselines.flashinfer_levels import WORKSPACE_BYTES, Workspace, unsupported
from granikv.kernels import AttentionState, Plan
from granikv.spec import AttentionSpec
from granikv.view import KVPool, KVView, Trait


@dataclass(frozen=True, kw_only=True)
class MultiLevelPlan(Plan):
    """The planned wrapper."""

    wrapper: Any


class CascadeMultiLevelFlashInfer:
    """Every level, the rows' own tokens too, by batch prefill. The wrapper returns no lse, so its states have none,
    and the gate judges their output alone.
    """

    requires = Trait.LEVELED | Trait.ONE_POOL
    lse_base = 2.0

    def __init__(self, name: str, backend: str, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        if backend not in ("fa2", "fa3"):
            raise ValueError(f"backend={backend!r}: fa2 or fa3; auto would let the device choose. Fix: backend=fa2")
        self.name, self.backend = name, backend
        self._workspace = Workspace(workspace_bytes)

    def supports(self, spec: AttentionSpec) -> str | None:
        if self.backend == "fa3" and spec.device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
            return "backend fa3: needs a Hopper GPU. Fix: kernel=[cascade_multilevel_fa2]"
        return unsupported(spec)

    def plan(self, view: KVView, spec: AttentionSpec) -> MultiLevelPlan:
        import flashinfer

        empty = [number for number, level in enumerate(view.levels) if bool((level.kv_lens == 0).any())]
        if empty:
            raise ValueError(
                f"{self.name}: level {empty[0]} has rows without tokens, which its merge does not cover. "
                f"Fix: kernel=[cascade]"
            )
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
            len(view.levels), self._workspace.take(spec.device), "NHD"
        )
        for inner in wrapper._batch_prefill_wrappers:  # its constructor takes no backend
            if not hasattr(inner, "_backend"):
                raise ValueError(f"{self.name}: this FlashInfer has no backend to pin. Fix: flashinfer-python==0.6.17")
            inner._backend = self.backend
        levels = view.levels
        wrapper.plan(
            [level.qo_indptr for level in levels],
            [level.kv_indptr for level in levels],
            [level.kv_indices.to(spec.device) for level in levels],
            [level.last_page_len for level in levels],
            spec.num_qo_heads,
            spec.num_kv_heads,
            spec.head_dim,
            levels[-1].page_size,
            sm_scale=spec.sm_scale,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
        )
        return MultiLevelPlan(ran=f"cascade_multilevel_flashinfer_{self.backend}", wrapper=wrapper)

    def run(self, plan: MultiLevelPlan, q: Tensor, kv: Sequence[KVPool]) -> AttentionState:
        return AttentionState(plan.wrapper.run(q, (kv[-1].k, kv[-1].v)), torch.empty(0, device=q.device))
