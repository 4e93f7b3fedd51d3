"""The oracle: attention in float64, one row at a time, from logical K and V only. Slow, obvious and layout-blind."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from granikv.kernels import AttentionState, merge_states
from granikv.logical import LogicalKV
from granikv.view import KVPool


@dataclass(frozen=True)
class Oracle:
    """What every cell must compute, split at each row's first own token; lse natural, all float64.

    shared, own    states over the shared and the row's own tokens; their merge is `whole`.
    low_precision  out and lse of an independent float32 reference; probabilities, the outputs of both parts and their
                   merge have the KV's type.
    """

    shared: AttentionState
    own: AttentionState
    whole: AttentionState
    low_precision: AttentionState


def attend(q: Tensor, kv: KVPool, sm_scale: float, dtype: torch.dtype = torch.float64) -> AttentionState:
    """softmax(q K^T sm_scale) V for one row: q [Hq, D], K and V [n, Hkv, D], out [Hq, D], lse [Hq]."""
    keys, values = (x.to(dtype) for x in kv)
    grouped = q.to(dtype).view(keys.shape[1], -1, q.shape[-1])
    scores = torch.einsum("hgd,nhd->hgn", grouped, keys) * sm_scale
    out = torch.einsum("hgn,nhd->hgd", torch.softmax(scores, -1), values)
    return AttentionState(out.reshape(q.shape), torch.logsumexp(scores, -1).flatten())


def attend_low_precision(q: Tensor, kv: KVPool, sm_scale: float) -> AttentionState:
    """The same in float32, with probabilities and output rounded to q's type, as the best kernels do."""
    keys, values = (x.float() for x in kv)
    grouped = q.float().view(keys.shape[1], -1, q.shape[-1])
    scores = torch.matmul(grouped, keys.permute(1, 2, 0)) * sm_scale
    peak = scores.amax(-1, keepdim=True) if keys.shape[0] else scores.new_full((*scores.shape[:2], 1), -math.inf)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights.to(q.dtype).float(), values.transpose(0, 1)) / total
    rounded = torch.nan_to_num(out.reshape(q.shape)).to(q.dtype)
    return AttentionState(rounded.double(), (peak + total.log()).flatten().double())


def merge_low_precision(q: Tensor, prefix: KVPool, rest: KVPool, sm_scale: float) -> AttentionState:
    """attend_low_precision of both parts, merged and rounded again, as level by level computation does."""
    merged = merge_states([attend_low_precision(q, kv, sm_scale) for kv in (prefix, rest)])
    return AttentionState(merged.out.to(q.dtype).double(), merged.lse)


def oracle(logical: LogicalKV) -> Oracle:
    """The oracle for every row of the batch."""
    spec, tree = logical.spec, logical.tree
    parts: list[list[AttentionState]] = [[], [], [], []]
    widened: tuple[int | None, KVPool] | None = None
    for row, request in enumerate(tree.requests):
        kv, q, parent = logical.row(row), logical.q[row], tree.nodes[request].parent
        split = kv.k.shape[0] - tree.nodes[request].num_tokens
        if widened is None or widened[0] != parent:  # rows that share a prefix are neighbours: widen it once
            widened = parent, KVPool(*(x[:split].double() for x in kv))
        prefix, rest = widened[1], KVPool(*(x[split:].double() for x in kv))
        shared, own = (attend(q, tokens, spec.sm_scale) for tokens in (prefix, rest))
        whole = attend(q, KVPool(*(torch.cat(pair) for pair in zip(prefix, rest, strict=True))), spec.sm_scale)
        parts_of_row = KVPool(*(x[:split] for x in kv)), KVPool(*(x[split:] for x in kv))
        low = merge_low_precision(q, *parts_of_row, spec.sm_scale)
        for states, state in zip(parts, (shared, own, whole, low), strict=True):
            states.append(AttentionState(torch.nan_to_num(state.out), state.lse))
    return Oracle(*(AttentionState(*(torch.stack(column) for column in zip(*states, strict=True))) for states in parts))


def planted_faults(truth: Oracle, logical: LogicalKV) -> dict[str, AttentionState]:
    """States that a faulty kernel would return, one per fault that this workload can show."""
    shared, own = truth.shared, truth.own
    has_shared, has_own = bool(shared.lse.isfinite().any()), bool(own.lse.isfinite().any())
    faults = {}
    if has_own:
        faults["dropped_suffix"] = shared
        faults["off_by_one_last_page"] = merge_states([shared, _without_last_token(truth, logical)])
    if has_shared and has_own:
        faults["swapped_lse_base"] = merge_states([shared, AttentionState(own.out, own.lse / math.log(2))])
        if own.lse.shape[1] > 1:
            faults["permuted_lse"] = merge_states([shared, AttentionState(own.out, own.lse.roll(1, dims=1))])
    if has_own and own.out.shape[0] > 1:
        swapped = AttentionState(*(x.roll(1, dims=0) for x in own))
        faults["swapped_table_rows"] = merge_states([shared, swapped])
    return faults


def _without_last_token(truth: Oracle, logical: LogicalKV) -> AttentionState:
    out, lse = truth.own.out.clone(), truth.own.lse.clone()
    for row, request in enumerate(logical.tree.requests):
        if own_len := logical.tree.nodes[request].num_tokens:
            kv = KVPool(*(x[-own_len:-1] for x in logical.row(row)))
            out[row], lse[row] = attend(logical.q[row], kv, logical.spec.sm_scale)
    return AttentionState(torch.nan_to_num(out), lse)
