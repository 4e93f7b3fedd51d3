"""hydragen from FlashInfer's parts: dense prefill over each slab, decode over the rows' own tokens, merged by lse."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.flashinfer_levels import (
    WORKSPACE_BYTES,
    LevelPlan,
    Workspace,
    merge,
    plan_decode,
    run_level,
    unsupported,
)
from baselines.torch_levels import DenseLevelPlan, plan_dense_level
from granikv.kernels import AttentionState, Plan
from granikv.spec import AttentionSpec
from granikv.view import KVPool, KVView, Trait


@dataclass(frozen=True, kw_only=True)
class HydragenPlan(Plan):
    """Slices of the shared levels, and the decode wrapper of the rows' own tokens.

    whole  whether every row has tokens on every level.
    """

    spec: AttentionSpec
    shared: list[DenseLevelPlan]
    own: LevelPlan
    whole: bool


class HydragenFlashInfer:
    """Hydragen (Juravsky et al., 2024). Slabs are read in place: `k[start:start + length]`, no page table.

    prefix  "fa2" or "fa3": single_prefill_with_kv_cache with that backend. "gemm": the unfused form, two batched matrix
            products with the scores written out between them.
    """

    requires = Trait.LEVELED | Trait.DENSE_PREFIX
    lse_base = 2.0

    def __init__(self, name: str, prefix: str = "fa2", workspace_bytes: int = WORKSPACE_BYTES) -> None:
        if prefix not in ("fa2", "fa3", "gemm"):
            raise ValueError(f"prefix={prefix!r}: fa2, fa3 or gemm. Fix: prefix=fa2")
        self.name, self.prefix = name, prefix
        self._workspace = Workspace(workspace_bytes)

    def supports(self, spec: AttentionSpec) -> str | None:
        if self.prefix == "fa3" and spec.device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
            return "prefix fa3: needs a Hopper GPU. Fix: kernel=[hydragen]"
        return unsupported(spec)

    def plan(self, view: KVView, spec: AttentionSpec) -> HydragenPlan:
        shared = [plan_dense_level(level) for level in view.levels[:-1]]
        own = plan_decode(view.levels[-1], spec, self._workspace, tensor_cores=True)
        covered = all(sum(e[1] - e[0] for e in level.entries) == view.batch_size for level in shared)
        return HydragenPlan(
            ran=f"{self.name}_flashinfer_{self.prefix}",
            spec=spec,
            shared=shared,
            own=own,
            whole=covered and own.absent is None,
        )

    def run(self, plan: HydragenPlan, q: Tensor, kv: Sequence[KVPool]) -> AttentionState:
        states = [self._dense(level, q, pool, plan.spec) for level, pool in zip(plan.shared, kv[:-1], strict=True)]
        return merge([*states, run_level(plan.own, q, kv[-1])], plan.whole)

    def _dense(self, level: DenseLevelPlan, q: Tensor, pool: KVPool, spec: AttentionSpec) -> AttentionState:
        """The state of every row over its slab; rows without one get out 0, lse -inf."""
        keys, values = (x.view(-1, spec.num_kv_heads, spec.head_dim) for x in pool)
        parts = []
        for first, past, slot, length in level.entries:
            k, v = keys[slot : slot + length], values[slot : slot + length]
            parts.append((first, past, self._attend(q[first:past], k, v, spec)))
        if len(parts) == 1 and parts[0][:2] == (0, q.shape[0]):
            return parts[0][2]
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
        for first, past, state in parts:
            out[first:past], lse[first:past] = state
        return AttentionState(out, lse)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionState:
        if self.prefix == "gemm":
            return attend_unfused(q, k, v, spec)
        import flashinfer

        return AttentionState(
            *flashinfer.single_prefill_with_kv_cache(
                q, k, v, causal=False, sm_scale=spec.sm_scale, backend=self.prefix, return_lse=True
            )
        )


def attend_unfused(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionState:
    """Rows q [n, Hq, D] over k, v [L, Hkv, D] by two batched products; float32 scores, lse base 2."""
    n = q.shape[0]
    folded = q.view(n, spec.num_kv_heads, spec.group_size, -1).transpose(0, 1).flatten(1, 2)
    keys = k.permute(1, 2, 0)
    if q.is_cuda:
        scores = torch.bmm(folded, keys, out_dtype=torch.float32) * spec.sm_scale
    else:
        scores = torch.bmm(folded.float(), keys.float()) * spec.sm_scale
    lse = torch.logsumexp(scores, -1)
    out = torch.bmm(torch.softmax(scores, -1).to(q.dtype), v.transpose(0, 1))
    shape = (spec.num_kv_heads, n, spec.group_size)
    return AttentionState(
        out.view(*shape, -1).transpose(0, 1).reshape(q.shape),
        (lse / math.log(2)).view(shape).transpose(0, 1).reshape(n, spec.num_qo_heads),
    )
