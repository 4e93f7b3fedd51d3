"""The work of a step's attention as a table of tiles, balanced over the programs of one persistent launch.

A shared tile is a run of keys of one KV head for up to `block_m` folded query rows (rows times query heads of that KV
head); an own tile is a run of one row's own keys for a block of KV heads. Long runs are split; each piece writes a
partial state to a slot of its rows, and a merge adds the slots up.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from granikv.view import KVLevel

Ints = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]

FIELDS = ("head", "fold_start", "fold_end", "kv_start", "page_start", "kv_end", "slot")
"""Columns of a tile table.

head         KV head; for own tiles the block of KV heads.
fold_start   first folded row, counted over the batch: row * group_size + query head of the KV head.
fold_end     past the last folded row.
kv_start     first token: a slot of the pool for a slab, else counted from the start of the entry.
page_start   first of the entry's pages in the index array.
kv_end       past the last token, counted as kv_start is.
slot         where the partial state goes.
"""

SHARED_WEIGHT = {0: 1.0, 16: 1.5, 64: 1.5, 128: 1.5}
"""Time of a token in a shared tile of so many folded rows over its time in an own tile (compute against memory)."""

TILE_COST = 150.0
"""Time to start and end a tile, in tokens of one KV head."""

OWN_PIECES = 2
"""Own tiles that would fill a program's fair share: more even out better, and write more partial states."""

MOST_PIECES, TRIED_PIECES = 64, 12
"""Pieces of the longest shared entry at most, and about how many numbers of pieces are weighed."""

SLOT_COST = 8.0
"""Time that a further slot takes in the merge, in tokens of one KV head."""


@dataclass(frozen=True)
class TileTable:
    """shared, own       int32 [n, len(FIELDS)].
    shared_starts, own_starts  int32 [num_programs + 1], the run of tiles that each program takes.
    num_slots         int32 [batch_size], partial states of each row.
    """

    shared: NDArray[np.int32]
    own: NDArray[np.int32]
    shared_starts: NDArray[np.int32]
    own_starts: NDArray[np.int32]
    num_slots: NDArray[np.int32]

    @property
    def most_slots(self) -> int:
        return int(self.num_slots.max(initial=0))


@dataclass(frozen=True)
class TileShape:
    """Folded rows and least tokens of a shared tile, KV heads and least tokens of an own tile."""

    shared_m: int
    shared_n: int
    own_h: int
    own_n: int


def tile_table(
    shared_levels: Sequence[KVLevel],
    own_level: KVLevel | None,
    num_slots: Ints,
    num_kv_heads: int,
    group_size: int,
    shape: TileShape,
    num_programs: int,
    dense: bool,
) -> TileTable:
    """Tiles of all levels such that each program has about the same time to spend.

    Every run is cut into equal pieces: shared ones of at most a program's fair share, own ones of a quarter of it, so
    that they even out what shared ones leave. `num_slots`, int64 [batch_size], holds the slots that each row has
    already, and is counted up. Page indices are those of all levels in a row, `own_level` last; dense levels have none.
    """
    weight = SHARED_WEIGHT[shape.shared_m]
    per_level, page_base = [], 0
    for level in shared_levels:
        per_level.append(_entries(level, dense, page_base))
        page_base += 0 if dense else int(level.kv_indptr[-1])
    own = _entries(own_level, False, page_base) if own_level is not None else np.empty((0, 5), np.int64)
    blocks = [-(-(e[:, 1] - e[:, 0]) * group_size // max(1, shape.shared_m)) for e in per_level]
    cost = sum(float((weight * n * e[:, 4]).sum()) for e, n in zip(per_level, blocks)) + float(own[:, 4].sum())
    share = cost * num_kv_heads / num_programs
    folds = (num_kv_heads // shape.own_h, group_size, group_size, shape.own_n)
    own_slots = np.zeros_like(num_slots)
    own_tiles = _tiles(own, np.ones(len(own), np.int64), share / shape.own_h / OWN_PIECES, own_slots, *folds)
    own_cost = shape.own_h * (own_tiles[:, 5] - own_tiles[:, 3]) + TILE_COST
    longest = _longest_piece(per_level, blocks, num_kv_heads, weight, shape.shared_n, own_cost, num_programs)
    folds = (num_kv_heads, group_size, shape.shared_m, shape.shared_n)
    shared_tiles = [_tiles(e, n, longest, num_slots, *folds) for e, n in zip(per_level, blocks)]
    shared = np.concatenate([np.empty((0, len(FIELDS)), np.int64), *shared_tiles])
    own_tiles[:, 6] += num_slots[
        own_tiles[:, 1] // group_size
    ]  # after the shared ones, which all rows of an entry have
    num_slots += own_slots
    shared_starts = np.arange(num_programs + 1) * len(shared) // num_programs
    shared_cost = np.concatenate([[0.0], np.cumsum(weight * (shared[:, 5] - shared[:, 3]) + TILE_COST)])
    own_starts = _fill(own_cost, np.diff(shared_cost[shared_starts]))
    return TileTable(*(x.astype(np.int32) for x in (shared, own_tiles, shared_starts, own_starts, num_slots)))


def _longest_piece(
    per_level: Sequence[Ints],
    blocks: Sequence[Ints],
    num_kv_heads: int,
    weight: float,
    block_n: int,
    own_cost: Floats,
    num_programs: int,
) -> int:
    """Length of shared pieces with which the last program, its own tiles included, ends first.

    All pieces are taken to be as long as the longest, and all own tiles to cost their mean.
    """
    lens = [int(n) for entries in per_level for n in entries[:, 4]]
    if not lens:
        return block_n
    tiles = [int(n) * num_kv_heads for level in blocks for n in level]
    longest, own_total = max(lens), float(own_cost.sum())
    mean = (weight * sum(n * t for n, t in zip(lens, tiles)) + own_total) / num_programs
    fewest, most = (max(1, min(MOST_PIECES, math.ceil(weight * longest / (part * mean)))) for part in (1.2, 0.3))
    each_own = own_total / len(own_cost) if len(own_cost) else 0.0
    best, best_end = block_n, math.inf
    for cuts in range(fewest, most + 1, max(1, (most - fewest) // TRIED_PIECES)):
        piece = max(block_n, -(-longest // cuts // block_n) * block_n)
        count = sum(-(-n // piece) * t for n, t in zip(lens, tiles))
        few, more = divmod(count, num_programs)
        each = weight * piece + TILE_COST
        end = _end_time([(few * each, num_programs - more), ((few + 1) * each, more)], len(own_cost), each_own)
        if end + SLOT_COST * cuts < best_end:
            best, best_end = piece, end + SLOT_COST * cuts
    return best


def _end_time(kinds: Sequence[tuple[float, int]], num_own: int, each_own: float) -> float:
    """Earliest end for which `num_own` own tiles fit; kinds are (busy until, programs) of all programs."""
    latest = max(taken for taken, programs in kinds if programs)
    if not num_own:
        return latest
    programs = sum(n for _, n in kinds)
    low = max(latest, (sum(taken * n for taken, n in kinds) + num_own * each_own) / programs) - 1e-6
    high = low + each_own * (num_own // programs + 2)
    for _ in range(8):
        middle = (low + high) / 2
        room = sum(int((middle - taken) // each_own) * n for taken, n in kinds if taken < middle)
        low, high = (low, middle) if room >= num_own else (middle, high)
    return high


def _fill(costs: Floats, taken: Floats) -> Ints:
    """int64 [programs + 1]: consecutive runs of own tiles for programs that are busy until `taken`."""
    if not len(costs):
        return np.zeros(len(taken) + 1, np.int64)
    total = float(costs.sum())
    end = _end_time(list(Counter(taken.tolist()).items()), len(costs), total / len(costs))
    bounds = np.concatenate([[0.0], np.cumsum(np.maximum(0, (end - taken) // (total / len(costs))))])
    middles = (np.cumsum(costs) - costs / 2) * (bounds[-1] / total)
    return np.searchsorted(middles, bounds)


def _entries(level: KVLevel, dense: bool, page_base: int) -> Ints:
    """[n, 5]: first row, past the last row, first token, first page, tokens, of every entry with rows and tokens."""
    rows, lens = level.qo_indptr.numpy().astype(np.int64), level.kv_lens.numpy()
    if dense:
        assert level.slab_starts is not None
        starts, pages = level.slab_starts.numpy(), np.zeros(len(lens), np.int64)
    else:
        starts, pages = np.zeros(len(lens), np.int64), level.kv_indptr.numpy()[:-1].astype(np.int64) + page_base
    table = np.stack([rows[:-1], rows[1:], starts, pages, lens], 1)
    return table[(table[:, 4] > 0) & (table[:, 1] > table[:, 0])]


def _tiles(
    entries: Ints,
    blocks: Ints,
    longest: float,
    num_slots: Ints,
    num_kv_heads: int,
    group_size: int,
    block_m: int,
    block_n: int,
) -> Ints:
    """Tiles of `entries`, each in `blocks` row blocks and pieces of at most `longest` tokens, rounded up to `block_n`.

    Takes the next free slots of the rows, and counts them in `num_slots`.
    """
    if not len(entries):
        return np.empty((0, len(FIELDS)), np.int64)
    first, past, start, page, length = entries.T
    pieces = np.maximum(1, np.ceil(length / max(longest, block_n))).astype(np.int64)
    piece = -(-length // pieces)
    piece = -(-piece // block_n) * block_n
    pieces = -(-length // piece)
    base = num_slots[first]
    rows = past - first
    row_ids = np.repeat(first - np.cumsum(rows) + rows, rows) + np.arange(int(rows.sum()))
    num_slots[row_ids] += np.repeat(pieces, rows)
    per_entry = pieces * blocks * num_kv_heads
    entry = np.repeat(np.arange(len(entries)), per_entry)
    rank = np.arange(int(per_entry.sum())) - np.repeat(np.cumsum(per_entry) - per_entry, per_entry)
    head, rank = rank % num_kv_heads, rank // num_kv_heads
    block, cut = rank % blocks[entry], rank // blocks[entry]
    fold = first[entry] * group_size + block * block_m
    begin = start[entry] + cut * piece[entry]
    end = np.minimum(begin + piece[entry], (start + length)[entry])
    fold_end = np.minimum(fold + block_m, past[entry] * group_size)
    return np.stack([head, fold, fold_end, begin, page[entry], end, base[entry] + cut], 1)
