"""The Triton kernels that work through a TileTable, and the merge of partial states. Import this only with Triton.

Softmax is online (Milakov and Gimelshein, 2018) in base 2, splits are merged by log-sum-exp (Dao et al., 2023,
flash-decoding), and query heads of a KV head are folded with the rows into one matrix (Juravsky et al., 2024).
"""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _attend_block(q, k, v, peak, total, acc, scale_log2, num_left, MASKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """One block of keys into the running peak [M], denominator [M] and weighted sum [M, D]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(tl.arange(0, BLOCK_N)[None, :] < num_left, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    weights = tl.math.exp2(scores * scale_log2 - new_peak[:, None])
    shrink = tl.math.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _load_block(
    k_ptr, v_ptr, k_desc, v_desc, page_ptr, begin, num_left, head, stride_token,
    DENSE: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """K and V [BLOCK_N, D] of tokens begin, begin + 1, ...: slots of a slab, or positions in a page table."""
    if DENSE and TMA:
        k = k_desc.load([begin, head * D])
        v = v_desc.load([begin, head * D])
    else:
        token = begin + tl.arange(0, BLOCK_N)
        inside = tl.arange(0, BLOCK_N) < num_left
        if DENSE:
            slot = token
        elif PAGE == 1:
            slot = tl.load(page_ptr + token, mask=inside, other=0) if MASKED else tl.load(page_ptr + token)
        else:
            page = (
                tl.load(page_ptr + token // PAGE, mask=inside, other=0) if MASKED else tl.load(page_ptr + token // PAGE)
            )
            slot = page * PAGE + token % PAGE
        offsets = slot.to(tl.int64)[:, None] * stride_token + head * D + tl.arange(0, D)[None, :]
        if MASKED:
            k = tl.load(k_ptr + offsets, mask=inside[:, None], other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside[:, None], other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
    return k, v


@triton.jit
def _attend_shared_tile(
    tile_ptr, q_ptr, k_ptr, v_ptr, k_desc, v_desc, pages_ptr, part_out_ptr, part_lse_ptr, batch_size, scale_log2,
    stride_token,
    DENSE: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial state of one tile into its slot."""
    head = tl.load(tile_ptr)
    fold = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
    fold_end = tl.load(tile_ptr + 2)
    begin = tl.load(tile_ptr + 3)
    page_ptr = pages_ptr + tl.load(tile_ptr + 4)
    end = tl.load(tile_ptr + 5)
    slot = tl.load(tile_ptr + 6)
    row, qo_head = fold // GROUP, head * GROUP + fold % GROUP
    real = fold < fold_end
    dims = tl.arange(0, D)
    q = tl.load(q_ptr + (row * HEADS + qo_head)[:, None] * D + dims[None, :], mask=real[:, None], other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    whole = begin + (end - begin) // BLOCK_N * BLOCK_N
    for at in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
        k, v = _load_block(
            k_ptr, v_ptr, k_desc, v_desc, page_ptr, at, BLOCK_N, head, stride_token,
            DENSE, TMA, False, PAGE, BLOCK_N, D,
        )  # fmt: skip
        peak, total, acc = _attend_block(q, k, v, peak, total, acc, scale_log2, BLOCK_N, False, BLOCK_N)
    if whole < end:
        k, v = _load_block(
            k_ptr, v_ptr, k_desc, v_desc, page_ptr, whole, end - whole, head, stride_token,
            DENSE, TMA, True, PAGE, BLOCK_N, D,
        )  # fmt: skip
        peak, total, acc = _attend_block(q, k, v, peak, total, acc, scale_log2, end - whole, True, BLOCK_N)
    place = (slot * batch_size + row).to(tl.int64) * HEADS + qo_head
    tl.store(part_lse_ptr + place, peak + tl.math.log2(total), mask=real)
    tl.store(part_out_ptr + place[:, None] * D + dims[None, :], acc / total[:, None], mask=real[:, None])


@triton.jit
def _attend_own_tile(
    tile_ptr, q_ptr, k_ptr, v_ptr, pages_ptr, part_out_ptr, part_lse_ptr, batch_size, scale_log2, stride_token,
    PAGE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial state of one row's tokens for BLOCK_H KV heads. Heads are a batch dimension, so that a token's heads are
    read as one run and each warp works on heads of its own, without waiting for others."""
    head = tl.load(tile_ptr) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.load(tile_ptr + 1) // GROUP
    begin = tl.load(tile_ptr + 3)
    page_ptr = pages_ptr + tl.load(tile_ptr + 4)
    end = tl.load(tile_ptr + 5)
    slot = tl.load(tile_ptr + 6)
    member, dims = tl.arange(0, BLOCK_M), tl.arange(0, D)
    qo_head = head[:, None] * GROUP + member[None, :]
    real = tl.broadcast_to((member < GROUP)[None, :], (BLOCK_H, BLOCK_M))
    q = tl.load(q_ptr + (row * HEADS + qo_head)[:, :, None] * D + dims[None, None, :], mask=real[:, :, None], other=0.0)
    peak = tl.full([BLOCK_H, BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_M, D], tl.float32)
    for at in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        token = at + tl.arange(0, BLOCK_N)
        inside = token < end
        if PAGE == 1:
            slots = tl.load(page_ptr + token, mask=inside, other=0).to(tl.int64)
        else:
            slots = tl.load(page_ptr + token // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + token % PAGE
        offsets = slots[None, :, None] * stride_token + head[:, None, None] * D + dims[None, None, :]
        k = tl.load(k_ptr + offsets, mask=inside[None, :, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=inside[None, :, None], other=0.0)
        scores = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision="ieee")
        scores = tl.where(inside[None, None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 2) * scale_log2)
        weights = tl.math.exp2(scores * scale_log2 - new_peak[:, :, None])
        shrink = tl.math.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 2)
        acc = acc * shrink[:, :, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    place = (slot * batch_size + row).to(tl.int64) * HEADS + qo_head
    tl.store(part_lse_ptr + place, peak + tl.math.log2(total), mask=real)
    tl.store(part_out_ptr + place[:, :, None] * D + dims[None, None, :], acc / total[:, :, None], mask=real[:, :, None])


@triton.jit
def attend_tiles(
    q_ptr, shared_k_ptr, shared_v_ptr, shared_k_desc, shared_v_desc, own_k_ptr, own_v_ptr,
    shared_tiles_ptr, own_tiles_ptr, shared_starts_ptr, own_starts_ptr, pages_ptr,
    part_out_ptr, part_lse_ptr, batch_size, scale_log2, stride_token, num_sms,
    DENSE: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr, SHARED_PAGE: tl.constexpr, OWN_PAGE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, FIELDS: tl.constexpr,
    SHARED_M: tl.constexpr, SHARED_N: tl.constexpr, SHARED_STAGES: tl.constexpr,
    OWN_H: tl.constexpr, OWN_M: tl.constexpr, OWN_N: tl.constexpr, OWN_STAGES: tl.constexpr,
):  # fmt: skip
    """A program's shared and own tiles; every other program takes its own tiles first, so that work bound by arithmetic
    and work bound by memory run side by side. SHARED_M 0: there are only own tiles."""
    if PDL:
        gdc_wait()
    program = tl.program_id(0)
    own_first = (program // num_sms + program) % 2
    for phase in range(2):
        if phase == own_first:
            if SHARED_M > 0:
                for tile in range(tl.load(shared_starts_ptr + program), tl.load(shared_starts_ptr + program + 1)):
                    _attend_shared_tile(
                        shared_tiles_ptr + tile * FIELDS, q_ptr, shared_k_ptr, shared_v_ptr, shared_k_desc,
                        shared_v_desc, pages_ptr, part_out_ptr, part_lse_ptr, batch_size, scale_log2, stride_token,
                        DENSE, TMA, SHARED_PAGE, HEADS, GROUP, SHARED_M, SHARED_N, D, SHARED_STAGES,
                    )  # fmt: skip
        else:
            for tile in range(tl.load(own_starts_ptr + program), tl.load(own_starts_ptr + program + 1)):
                _attend_own_tile(
                    own_tiles_ptr + tile * FIELDS, q_ptr, own_k_ptr, own_v_ptr, pages_ptr, part_out_ptr, part_lse_ptr,
                    batch_size, scale_log2, stride_token,
                    OWN_PAGE, HEADS, GROUP, OWN_H, OWN_M, OWN_N, D, OWN_STAGES,
                )  # fmt: skip
    if PDL:
        gdc_launch_dependents()


@triton.jit
def merge_slots(
    part_out_ptr, part_lse_ptr, num_slots_ptr, out_ptr, lse_ptr, batch_size,
    PDL: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """out and lse (base 2) of one row and query head from its slots; 0 and -inf where it has none.

    Slots are read before it is known how many there are, so that the reads need not wait; others are masked after.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dims = part * BLOCK_D + tl.arange(0, BLOCK_D)
    num_slots = tl.load(num_slots_ptr + row)
    if PDL:
        gdc_wait()
    slots = tl.arange(0, SLOTS)
    place = (slots * batch_size + row).to(tl.int64) * HEADS + head
    lse = tl.load(part_lse_ptr + place)
    out = tl.load(part_out_ptr + place[:, None] * D + dims[None, :])
    there = slots < num_slots
    lse = tl.where(there, lse, float("-inf"))
    peak = tl.max(lse, 0)
    weights = tl.where(there, tl.math.exp2(lse - peak), 0.0)
    total = tl.sum(weights, 0)
    acc = tl.sum(tl.where(there[:, None], out, 0.0) * weights[:, None], 0)
    for first in range(SLOTS, num_slots, SLOTS):
        slots = first + tl.arange(0, SLOTS)
        there = slots < num_slots
        place = (slots * batch_size + row).to(tl.int64) * HEADS + head
        lse = tl.load(part_lse_ptr + place, mask=there, other=float("-inf"))
        out = tl.load(part_out_ptr + place[:, None] * D + dims[None, :], mask=there[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.math.exp2(lse - new_peak)
        shrink = tl.math.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(out * weights[:, None], 0)
        peak = new_peak
    place = row * HEADS + head
    empty = num_slots == 0
    if part == 0:
        tl.store(lse_ptr + place, tl.where(empty, float("-inf"), peak + tl.math.log2(tl.where(empty, 1.0, total))))
    tl.store(out_ptr + place * D + dims, tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total)))
