"""What a layout shows a kernel: levels of FlashInfer-standard index arrays over one pool.

A view is a host value. Index arrays live in host memory, because planning reads them as integers and must never
wait for the device; a kernel's plan() moves what its run() needs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Trait(Flag):
    """What a view offers and a kernel requires. Legality is set algebra over these."""

    NONE = 0
    LEVELED = auto()  # a shared prefix is stored once and shown as a level of its own
    ONE_POOL = auto()  # all levels index one pool with one page size, so a flat per-request table exists
    DENSE_PREFIX = auto()  # every shared entry is one contiguous run of its pool


class KVPool(NamedTuple):
    """K and V storage of one layer: two tensors [num_pages, page_size, num_kv_heads, head_dim]."""

    k: Tensor
    v: Tensor


class PrefixGroup(NamedTuple):
    """Rows [row_start, row_end) of a view that share `kv_len` tokens: entry `entry` of level `level`."""

    level: int
    entry: int
    row_start: int
    row_end: int
    kv_len: int


def ragged_arange(starts: Tensor, lens: Tensor, total: int | None = None) -> Tensor:
    """Concatenated ranges [starts[i], starts[i] + lens[i]), int64, on the device of `starts`.

    `total` is sum(lens) if the caller knows it; without it a CUDA tensor costs a synchronisation.
    """
    total = int(lens.sum()) if total is None else total
    ends = lens.cumsum(0)
    shift = torch.repeat_interleave(starts.long() - (ends - lens), lens, output_size=total)
    return shift + torch.arange(total, device=starts.device)


def indptr_of(lens: Sequence[int] | Tensor) -> Tensor:
    """int32 [n + 1] running sum of n lengths, starting at 0."""
    lens = torch.as_tensor(lens, dtype=torch.int64)
    out = torch.zeros(lens.numel() + 1, dtype=torch.int32)
    torch.cumsum(lens, 0, out=out[1:])
    return out


@dataclass(frozen=True)
class KVLevel:
    """One level: n entries, entry i serving the query rows qo_indptr[i]:qo_indptr[i + 1].

    qo_indptr, kv_indptr  int32 [n + 1]. An entry without pages (its rows have nothing on this level) is allowed.
    last_page_len         int32 [n], 1..page_size, and 0 exactly for entries without pages.
    pages                 int32 [kv_indptr[-1]], or None where `slab_starts` says it all.
    slab_starts           int64 [n], first token slot of each entry's contiguous run; None on a paged level.
    """

    page_size: int
    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    pages: Tensor | None = None
    slab_starts: Tensor | None = None

    @property
    def num_entries(self) -> int:
        return int(self.qo_indptr.numel()) - 1

    @cached_property
    def num_rows(self) -> Tensor:
        """int64 [n], query rows of each entry."""
        return self.qo_indptr.diff().long()

    @cached_property
    def kv_lens(self) -> Tensor:
        """int64 [n], tokens of each entry."""
        num_pages = self.kv_indptr.diff().long()
        return (num_pages - 1).clamp_min(0) * self.page_size + self.last_page_len.long()

    @cached_property
    def kv_indices(self) -> Tensor:
        """int32 page ids of all entries. A slab has none stored; they are written out here, when a kernel asks."""
        if self.pages is not None:
            return self.pages
        assert self.slab_starts is not None
        assert self.page_size == 1
        return ragged_arange(self.slab_starts, self.kv_lens).int()

    def check(self, num_pages: int, batch_size: int, where: str = "level") -> None:
        """Raises ValueError, naming value, rule and fix, unless the arrays describe pages of a pool of `num_pages`."""
        if self.page_size < 1:
            raise ValueError(f"{where}: page_size={self.page_size}: a page holds at least 1 token. Fix: page_size=16")
        for name, array in (("qo_indptr", self.qo_indptr), ("kv_indptr", self.kv_indptr)):
            if array.dtype != torch.int32 or array.device.type != "cpu":
                raise ValueError(f"{where}: {name} is {array.dtype} on {array.device}: host int32 is the contract")
            if int(array[0]) != 0 or bool((array.diff() < 0).any()):
                raise ValueError(f"{where}: {name}={array.tolist()[:8]}: starts at 0 and never falls")
        if int(self.qo_indptr[-1]) != batch_size:
            raise ValueError(
                f"{where}: qo_indptr ends at {int(self.qo_indptr[-1])}, but the batch has {batch_size} rows"
            )
        if not self.num_entries == self.kv_indptr.numel() - 1 == self.last_page_len.numel():
            raise ValueError(
                f"{where}: {self.num_entries} entries in qo_indptr, {self.kv_indptr.numel() - 1} in kv_indptr, "
                f"{self.last_page_len.numel()} in last_page_len: all describe the same entries"
            )
        has_pages = self.kv_indptr.diff() > 0
        last = self.last_page_len
        wrong = torch.where(has_pages, (last < 1) | (last > self.page_size), last != 0).nonzero()
        if wrong.numel():
            i = int(wrong[0])
            rule = f"1..{self.page_size}" if bool(has_pages[i]) else "0 for an entry without pages"
            raise ValueError(
                f"{where}: last_page_len={int(last[i])} of entry {i}: must be {rule} (page_size={self.page_size})"
            )
        indices = self.kv_indices
        if indices.numel() != int(self.kv_indptr[-1]):
            raise ValueError(f"{where}: {indices.numel()} kv_indices, but kv_indptr ends at {int(self.kv_indptr[-1])}")
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= num_pages):
            raise ValueError(
                f"{where}: kv_indices span {int(indices.min())}..{int(indices.max())}, "
                f"but the pool has pages 0..{num_pages - 1}"
            )


@dataclass(frozen=True)
class KVView:
    """A batch as a kernel sees it: levels from the root to the rows' own tokens.

    levels     at least one; the last has exactly one entry a row.
    traits     what this view offers.
    num_pages  pages of the pool that the index arrays address.
    order      int64 [B] or None: row i of the view is row order[i] of the caller's batch. Rows that share are
               neighbours in the view; None says that they already were in the batch.
    """

    levels: tuple[KVLevel, ...]
    traits: Trait
    num_pages: int
    order: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return self.levels[-1].num_entries

    @cached_property
    def seq_lens(self) -> Tensor:
        """int64 [B], tokens that each row attends to, over all levels."""
        return torch.stack([torch.repeat_interleave(x.kv_lens, x.num_rows) for x in self.levels]).sum(0)

    def prefix_groups(self) -> Iterator[PrefixGroup]:
        """Every shared entry with tokens, root level first."""
        for number, level in enumerate(self.levels[:-1]):
            rows, lens = level.qo_indptr.tolist(), level.kv_lens.tolist()
            for entry, kv_len in enumerate(lens):
                if kv_len:
                    yield PrefixGroup(number, entry, rows[entry], rows[entry + 1], kv_len)

    def flat(self) -> KVLevel:
        """One level with every row's whole sequence: the page table that an engine without levels would hold.

        Requires Trait.ONE_POOL. Built anew for each view, because an engine's batch changes each step.
        """
        if len(self.levels) == 1:
            return self.levels[0]
        pages = [level.kv_indices.numpy() for level in self.levels]
        ends = [level.kv_indptr.tolist() for level in self.levels]
        entry_of = [
            torch.repeat_interleave(torch.arange(level.num_entries), level.num_rows).tolist() for level in self.levels
        ]
        runs, counts = [], []
        for row in range(self.batch_size):
            count = 0
            for level_pages, level_ends, entries in zip(pages, ends, entry_of, strict=True):
                begin, end = level_ends[entries[row]], level_ends[entries[row] + 1]
                runs.append(level_pages[begin:end])
                count += end - begin
            counts.append(count)
        kv_indices = torch.from_numpy(np.concatenate([np.empty(0, np.int32), *runs]))
        last_page_len = torch.zeros(self.batch_size, dtype=torch.int32)
        for level in self.levels:
            rows = torch.repeat_interleave(level.last_page_len, level.num_rows)
            last_page_len = torch.where(rows > 0, rows, last_page_len)
        one_row_each = torch.arange(self.batch_size + 1, dtype=torch.int32)
        return KVLevel(self.levels[0].page_size, one_row_each, indptr_of(counts), last_page_len, kv_indices)

    def check(self) -> None:
        """Raises ValueError unless every level is well formed and the levels fit together."""
        if not self.levels:
            raise ValueError("a view has no levels: it needs at least the rows' own tokens")
        own = self.levels[-1]
        if not torch.equal(own.qo_indptr, torch.arange(own.num_entries + 1, dtype=torch.int32)):
            raise ValueError("the last level holds each row's own tokens: exactly one row an entry")
        for number, level in enumerate(self.levels):
            level.check(self.num_pages, self.batch_size, f"level {number}")
        if Trait.ONE_POOL in self.traits:
            sizes = {level.page_size for level in self.levels}
            if len(sizes) > 1:
                raise ValueError(f"page sizes {sorted(sizes)} in one table: one pool has one page size")
            for number, level in enumerate(self.levels[:-1]):
                partial = (level.last_page_len != level.page_size) & (level.last_page_len != 0)
                if bool(partial.any()):
                    raise ValueError(
                        f"level {number}: a shared entry ends inside a page: share whole pages, copy the tail"
                    )
        if Trait.DENSE_PREFIX in self.traits and any(level.slab_starts is None for level in self.levels[:-1]):
            raise ValueError("a view with DENSE_PREFIX has slab_starts on every shared level")
