"""One level of attention through FlashInfer's batch wrappers (Ye et al., 2025): what the FlashInfer kernels share.

FlashInfer's lse is in base 2. Its element types default to float16 and its backend to a choice by device, so both are
always given. `fa2` splits the KV of a level over the whole GPU; `fa3` does not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from granikv.kernels import AttentionState, merge_states
from granikv.spec import AttentionSpec
from granikv.view import KVLevel, KVPool

VERSIONS = ((0, 6, 17), (0, 7, 0))
"""The first version whose calls these files make, and the first that is not known to have them."""

HEAD_DIMS = (64, 128, 256)
CUDA_CORE_GROUP_SIZES = (1, 2, 3, 4, 8)
WORKSPACE_BYTES = 256 << 20


@cache
def missing() -> str | None:
    """None if a usable FlashInfer is installed, else why there is none, with the fix."""
    fix = "Fix: pip install 'flashinfer-python>=0.6.17,<0.7'"
    try:
        found = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return f"flashinfer is not installed. {fix}"
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:3])
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        return f"flashinfer {found}: its calls differ from those made here. {fix}"
    return None


def unsupported(spec: AttentionSpec, tensor_cores: bool = True) -> str | None:
    """None if FlashInfer computes `spec`, else the reason with the fix."""
    if spec.device.type != "cuda":
        return f"device {spec.device.type}: FlashInfer needs a CUDA GPU. Fix: backend=torch"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {spec.dtype}: FlashInfer has float16, bfloat16. Fix: device.dtype=bfloat16"
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim {spec.head_dim}: FlashInfer has 64, 128, 256. Fix: backend=torch"
    if not tensor_cores and spec.group_size not in CUDA_CORE_GROUP_SIZES:
        return f"group_size {spec.group_size}: CUDA-core decode has 1, 2, 3, 4, 8. Fix: kernel=[naive]"
    return missing()


@dataclass(frozen=True)
class LevelPlan:
    """A planned wrapper. `absent` marks rows that have no token on this level, None if all have some."""

    wrapper: Any
    absent: Tensor | None


class Workspace:
    """Device memory for partial results of split levels, allocated once a kernel."""

    def __init__(self, num_bytes: int = WORKSPACE_BYTES) -> None:
        self.num_bytes = num_bytes
        self._buffer: Tensor | None = None

    def take(self, device: torch.device) -> Tensor:
        """The buffer, on `device`."""
        if self._buffer is None or self._buffer.device.type != device.type:
            self._buffer = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
        return self._buffer


def plan_decode(level: KVLevel, spec: AttentionSpec, workspace: Workspace, tensor_cores: bool) -> LevelPlan:
    """Plans a level with one row an entry. A fresh wrapper each time: plans must not share what they point to."""
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace.take(spec.device), "NHD", use_tensor_cores=tensor_cores, backend="fa2"
    )
    indices = level.kv_indices.to(spec.device, non_blocking=True)
    heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, level.page_size)
    with _workspace_errors(workspace):
        wrapper.plan(level.kv_indptr, indices, level.last_page_len, *heads, **_types(spec))
    return LevelPlan(wrapper, _absent(level, spec))


def plan_prefill(level: KVLevel, spec: AttentionSpec, workspace: Workspace) -> LevelPlan:
    """Plans a level with any number of rows an entry, its KV split over the GPU."""
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace.take(spec.device), "NHD", backend="fa2")
    indices = level.kv_indices.to(spec.device, non_blocking=True)
    heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, level.page_size)
    with _workspace_errors(workspace):
        wrapper.plan(
            level.qo_indptr, level.kv_indptr, indices, level.last_page_len, *heads, causal=False, **_types(spec)
        )
    return LevelPlan(wrapper, _absent(level, spec))


def run_level(plan: LevelPlan, q: Tensor, pool: KVPool) -> AttentionState:
    """The state of every row over its entry's tokens."""
    state = AttentionState(*plan.wrapper.run(q, (pool.k, pool.v), return_lse=True))
    return state if plan.absent is None else without(state, plan.absent)


def without(state: AttentionState, absent: Tensor) -> AttentionState:
    """`state` with nothing for the rows marked in `absent`."""
    return AttentionState(
        state.out.masked_fill(absent[:, None, None], 0.0), state.lse.masked_fill(absent[:, None], float("-inf"))
    )


def merge(states: Sequence[AttentionState], every_row_has_all: bool) -> AttentionState:
    """States over disjoint tokens, merged by FlashInfer's kernel; rows that lack some of them need ours."""
    if not every_row_has_all:
        return merge_states(states, base=2.0)
    import flashinfer

    merged = states[0]
    for state in states[1:]:
        merged = AttentionState(*flashinfer.merge_state(*merged, *state))
    return merged


def _types(spec: AttentionSpec) -> dict[str, Any]:
    return {"q_data_type": spec.dtype, "kv_data_type": spec.dtype, "sm_scale": spec.sm_scale}


def _absent(level: KVLevel, spec: AttentionSpec) -> Tensor | None:
    rows = torch.repeat_interleave(level.kv_lens == 0, level.num_rows)
    return rows.to(spec.device) if bool(rows.any()) else None


class _workspace_errors:
    """Says what to change where FlashInfer's own message names only the allocation that failed."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and "alloc" in str(error).lower():
            raise ValueError(
                f"workspace_bytes={self.workspace.num_bytes} is too small: {str(error).strip().splitlines()[0]}. "
                f"Fix: a larger workspace_bytes for this kernel"
            ) from error
