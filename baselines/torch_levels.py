"""Attention over one level in plain torch, on the CPU or a GPU: the building blocks of the torch kernels.

Keys and values are read in chunks small enough to stay in the cache between the gather and the two products, with an
online softmax across chunks (Milakov and Gimelshein, 2018), so that a step streams KV once, as fused kernels do.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from granikv.kernels import AttentionState
from granikv.spec import AttentionSpec
from granikv.view import KVLevel, KVPool

CHUNK_BYTES = 4 << 20
"""K bytes of one chunk, in the computing dtype. Two such chunks (K and V) are live at a time."""

MIN_CHUNK_LEN = 64
DENSE_CHUNK_LEN = 512


class Workspace:
    """Memory for gathered chunks that a kernel keeps between steps, so that no step pays for fresh pages."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor of `shape` with the type and device of `like`, valid until `name` is taken again."""
        key, count = (name, like.dtype, like.device), math.prod(shape)
        held = self._buffers.get(key)
        if held is None or held.numel() < count:
            held = self._buffers[key] = torch.empty(count, dtype=like.dtype, device=like.device)
        return held[:count].view(shape)


class Bucket(NamedTuple):
    """Entries with about the same number of query rows, longest first, computed as one batch."""

    rows: Tensor  # int64 [n, R] query row of each place; places past an entry's last row repeat its first
    used: Tensor  # int64 [m] places of rows.flatten() that are real
    pages: Tensor  # int64 [n, max_pages], padded with page 0
    kv_lens: Tensor  # int64 [n]
    host_lens: list[int]
    chunk_len: int


@dataclass(frozen=True)
class PagedLevelPlan:
    """Batches of entries of one paged level, on the device."""

    page_size: int
    buckets: list[Bucket]


@dataclass(frozen=True)
class DenseLevelPlan:
    """(first row, past the last row, first slot, length) of each contiguous entry, host integers."""

    entries: list[tuple[int, int, int, int]]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores and sums are float32 at least, whatever the KV's element type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def plan_paged_level(level: KVLevel, spec: AttentionSpec) -> PagedLevelPlan:
    """Groups the entries of `level` into buckets whose chunks fit CHUNK_BYTES."""
    kv_lens, num_rows = level.kv_lens.tolist(), level.num_rows.tolist()
    row_starts, page_starts = level.qo_indptr.tolist(), level.kv_indptr.tolist()
    by_rows: dict[int, list[int]] = {}
    for entry, (kv_len, rows) in enumerate(zip(kv_lens, num_rows, strict=True)):
        if kv_len and rows:
            by_rows.setdefault(1 << (rows - 1).bit_length(), []).append(entry)
    token_bytes = spec.num_kv_heads * spec.head_dim * compute_dtype(spec.dtype).itemsize
    largest_batch = max(1, CHUNK_BYTES // (MIN_CHUNK_LEN * token_bytes))
    indices, buckets = level.kv_indices, []
    for width, entries in by_rows.items():
        entries.sort(key=lambda entry: -kv_lens[entry])
        for at in range(0, len(entries), largest_batch):
            batch = entries[at : at + largest_batch]
            chunk_len = max(MIN_CHUNK_LEN, CHUNK_BYTES // (len(batch) * token_bytes))
            chunk_len = -(-chunk_len // level.page_size) * level.page_size
            max_pages = -(-kv_lens[batch[0]] // level.page_size)
            pages = torch.zeros(len(batch), max_pages, dtype=torch.int64)
            for i, entry in enumerate(batch):
                own = indices[page_starts[entry] : page_starts[entry + 1]]
                pages[i, : own.numel()] = own
            counts = torch.tensor([num_rows[entry] for entry in batch]).unsqueeze(1)
            place = torch.arange(width).unsqueeze(0)
            rows = torch.tensor([row_starts[entry] for entry in batch]).unsqueeze(1) + torch.where(
                place < counts, place, 0
            )
            used = (place < counts).flatten().nonzero().flatten()
            host_lens = [kv_lens[entry] for entry in batch]
            tensors = [x.to(spec.device) for x in (rows, used, pages, torch.tensor(host_lens))]
            buckets.append(Bucket(*tensors, host_lens, chunk_len))
    return PagedLevelPlan(level.page_size, buckets)


def plan_dense_level(level: KVLevel) -> DenseLevelPlan:
    """Slices of `level`, which must have slab_starts."""
    assert level.slab_starts is not None
    rows = level.qo_indptr.tolist()
    fields = zip(rows[:-1], rows[1:], level.slab_starts.tolist(), level.kv_lens.tolist(), strict=True)
    return DenseLevelPlan([entry for entry in fields if entry[3] and entry[1] > entry[0]])


def attend_paged_level(
    plan: PagedLevelPlan, q: Tensor, pool: KVPool, spec: AttentionSpec, workspace: Workspace
) -> AttentionState:
    """Attention of each row over its entry's pages. lse is natural; rows without an entry get out 0, lse -inf."""
    result = _empty_state(q)
    for bucket in plan.buckets:
        n, width = bucket.rows.shape
        folded = _fold(q[bucket.rows], spec)
        state = _OnlineSoftmax(folded, spec.head_dim)
        for begin in range(0, bucket.host_lens[0], bucket.chunk_len):
            end = begin + bucket.chunk_len
            active = sum(kv_len > begin for kv_len in bucket.host_lens)
            k, v = _gather(bucket, plan.page_size, begin, end, active, pool, spec, workspace)
            scores = workspace.take("scores", folded, (k.shape[0], folded.shape[1], k.shape[1]))
            torch.bmm(folded[: k.shape[0]], k.transpose(1, 2), out=scores)
            full = sum(kv_len >= end for kv_len in bucket.host_lens[:active])
            if full < active:
                positions = torch.arange(begin, begin + scores.shape[-1], device=q.device)
                past = positions >= bucket.kv_lens[full:active].unsqueeze(1)
                per_entry = scores.view(active, spec.num_kv_heads, *scores.shape[1:])
                per_entry[full:].masked_fill_(past[:, None, None], -math.inf)
            state.add(scores, v)
        out, lse = state.finish()
        rows = bucket.rows.flatten()[bucket.used]
        shape = (n, spec.num_kv_heads, width, spec.group_size)
        out = out.view(*shape, spec.head_dim).transpose(1, 2).reshape(n * width, spec.num_qo_heads, spec.head_dim)
        lse = lse.view(shape).transpose(1, 2).reshape(n * width, spec.num_qo_heads)
        result.out.index_copy_(0, rows, out[bucket.used].to(q.dtype))
        result.lse.index_copy_(0, rows, lse[bucket.used].float())
    return result


def attend_dense_level(
    plan: DenseLevelPlan, q: Tensor, pool: KVPool, spec: AttentionSpec, fused: bool
) -> AttentionState:
    """Attention of each entry's rows, folded into one matrix, over a zero-copy slice of the pool.

    fused: chunks with an online softmax. Otherwise all scores of an entry are written out between two batched products,
    as in Hydragen (Juravsky et al., 2024).
    """
    result = _empty_state(q)
    keys, values = (x.view(-1, spec.num_kv_heads, spec.head_dim) for x in pool)
    for first, past, slot, length in plan.entries:
        folded = _fold(q[first:past].unsqueeze(0), spec)
        state = _OnlineSoftmax(folded, spec.head_dim)
        for begin in range(slot, slot + length, DENSE_CHUNK_LEN if fused else length):
            end = min(slot + length, begin + (DENSE_CHUNK_LEN if fused else length))
            k, v = keys[begin:end].to(folded.dtype), values[begin:end].to(folded.dtype)
            state.add(torch.bmm(folded, k.permute(1, 2, 0)), v.transpose(0, 1))
        out, lse = state.finish()
        shape = (spec.num_kv_heads, past - first, spec.group_size)
        by_row = (past - first, spec.num_kv_heads, spec.group_size)
        result.out[first:past].view(*by_row, spec.head_dim).copy_(out.view(*shape, spec.head_dim).transpose(0, 1))
        result.lse[first:past].view(by_row).copy_(lse.view(shape).transpose(0, 1))
    return result


class _OnlineSoftmax:
    """Running maximum, denominator and weighted sum over chunks; later chunks may cover fewer leading rows."""

    def __init__(self, folded: Tensor, head_dim: int) -> None:
        shape = folded.shape[:2]
        self.peak = folded.new_full((*shape, 1), -math.inf)
        self.total = folded.new_zeros((*shape, 1))
        self.out = folded.new_zeros((*shape, head_dim))

    def add(self, scores: Tensor, v: Tensor) -> None:
        """scores [b, M, C] are overwritten; v [b, C, D]."""
        b = scores.shape[0]
        peak = torch.maximum(self.peak[:b], scores.amax(-1, keepdim=True))
        weights = scores.sub_(peak).exp_()
        shrink = torch.exp(self.peak[:b] - peak)
        self.peak[:b] = peak
        self.total[:b].mul_(shrink).add_(weights.sum(-1, keepdim=True))
        self.out[:b].mul_(shrink).baddbmm_(weights, v)

    def finish(self) -> tuple[Tensor, Tensor]:
        return self.out / self.total, (self.peak + self.total.log()).squeeze(-1)


def _empty_state(q: Tensor) -> AttentionState:
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    return AttentionState(torch.zeros_like(q), lse)


def _fold(q: Tensor, spec: AttentionSpec) -> Tensor:
    """q [n, R, Hq, D] to scaled [n * Hkv, R * G, D]: all rows of an entry that read one KV head form one matrix."""
    n, width = q.shape[:2]
    grouped = q.view(n, width, spec.num_kv_heads, spec.group_size, spec.head_dim).transpose(1, 2)
    folded = grouped.reshape(n * spec.num_kv_heads, width * spec.group_size, spec.head_dim)
    return folded.to(compute_dtype(spec.dtype)) * spec.sm_scale


def _gather(
    bucket: Bucket,
    page_size: int,
    begin: int,
    end: int,
    active: int,
    pool: KVPool,
    spec: AttentionSpec,
    workspace: Workspace,
) -> Iterator[Tensor]:
    """Tokens [begin, end) of the first `active` entries, head-major: two tensors [active * Hkv, C, D]."""
    pages = bucket.pages[:active, begin // page_size : end // page_size]
    tokens = (pages.unsqueeze(-1) * page_size + torch.arange(page_size, device=pages.device)).flatten(1)
    heads = torch.arange(spec.num_kv_heads, device=pages.device).unsqueeze(-1)
    index = (tokens.unsqueeze(1) * spec.num_kv_heads + heads).flatten()
    for name, x in zip("kv", pool, strict=True):
        gathered = workspace.take(name, x, (index.numel(), spec.head_dim))
        torch.index_select(x.view(-1, spec.head_dim), 0, index, out=gathered)
        yield gathered.view(active * spec.num_kv_heads, -1, spec.head_dim).to(compute_dtype(spec.dtype))
