"""KVLayout: sequences of tokens over a page pool, with sharing through fork.

Host bookkeeping (grow, shrink, fork, free, view) never touches the device, except that fork copies the tokens that
the layout cannot share. Device writes go through write(), which a CUDA graph can capture.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from granikv.spec import AttentionSpec
from granikv.tree import ContextTree
from granikv.view import KVLevel, KVPool, KVView, Trait, indptr_of

UNOWNED_VALUE = 1e4
"""What slots hold that no token owns: large enough that reading one fails the gate, finite so that masking it works."""


class CapacityError(ValueError):
    """The pool has too few free pages for what was asked; nothing was changed."""


@dataclass(frozen=True)
class Capacity:
    """Pages of a pool; the first `hot_pages` of them are reserved for slabs."""

    pages: int
    hot_pages: int = 0


@dataclass(frozen=True)
class Footprint:
    """What a layout holds right now. Bytes cover K and V of all layers; tokens and pages are counted once."""

    reserved_bytes: int
    used_bytes: int
    internal_waste_bytes: int  # owned slots without a token: page tails, unfilled slabs
    page_table_bytes: int  # int32 page ids that all live sequences together need, ancestors' pages included
    copied_tokens: int  # tokens that forks duplicated because they could not be shared
    free_pages: int
    hot_free_pages: int = 0
    spilled_pages: int = 0  # COLD pages living in free HOT space


@dataclass
class _Sequence:
    """Own pages of one sequence; shared tokens stay with its ancestors."""

    parent: int | None
    inherited: int  # tokens in ancestors' shared pages
    pages: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    num_pages: int = 0
    own_len: int = 0  # tokens in own pages, copied ones included
    copied: int = 0
    reserved: int = 0  # leading pages that shrink() keeps: a slab stays whole until it is freed
    slab_start: int | None = None
    num_forks: int = 0
    released: bool = False  # freed by its owner, alive for its forks

    @property
    def dense_start(self) -> int | None:
        """First slot of the contiguous run that holds all own tokens, None if they are scattered."""
        return self.slab_start if self.num_pages == self.reserved else None


class KVLayout:
    """A page pool and the sequences in it. Subclasses say where pages come from and what a fork shares."""

    name: str
    page_size: int
    provides: Trait = Trait.LEVELED | Trait.ONE_POOL

    def __init__(self, name: str, page_size: int) -> None:
        if not isinstance(page_size, int) or page_size < 1:
            raise ValueError(
                f"page_size={page_size!r}: a page holds a whole number of at least 1 token. Fix: page_size=16"
            )
        self.name, self.page_size = name, page_size
        self.pools: list[KVPool] = []
        self.capacity = Capacity(0)
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0
        self._free: NDArray[np.int32] = np.empty(0, np.int32)
        self._num_free = 0

    # ---- capacity ----

    def capacity_of(self, tree: ContextTree, headroom: int = 0) -> Capacity:
        """Pages that hold `tree` with `headroom` more tokens for every request."""
        pages, tail = 0, [0] * len(tree.nodes)
        for number, node in enumerate(tree.nodes):
            inherited = 0 if node.parent is None else self._unshared_tokens(tail[node.parent])
            tail[number] = inherited + node.num_tokens
            pages += self._pages_for(tail[number] + (0 if node.shared else headroom))
        return Capacity(pages)

    def pool_bytes(self, spec: AttentionSpec, capacity: Capacity, num_layers: int = 1) -> int:
        """Bytes that reserve() will allocate."""
        return capacity.pages * self.page_size * spec.kv_token_bytes * num_layers

    def reserve(self, spec: AttentionSpec, capacity: Capacity, num_layers: int = 1, seed: int = 0) -> None:
        """Allocates K and V pools for all layers, filled with UNOWNED_VALUE, and a shuffled free list."""
        if self.pools:
            raise ValueError(f"{self.name} is reserved already: make a second layout instead")
        shape = (capacity.pages, self.page_size, spec.num_kv_heads, spec.head_dim)
        for _ in range(num_layers):
            k, v = (torch.full(shape, UNOWNED_VALUE, dtype=spec.dtype, device=spec.device) for _ in range(2))
            self.pools.append(KVPool(k, v))
        self.capacity = capacity
        ids = np.arange(capacity.hot_pages, capacity.pages, dtype=np.int32)
        self._free = np.random.default_rng(seed).permutation(ids)
        self._num_free = len(ids)

    # ---- sequences ----

    def allocate(self, prefix_len: int = 0) -> int:
        """Starts an empty sequence. `prefix_len` > 0 announces a prefix of that many tokens, to be shared by forks."""
        return self._add(_Sequence(None, 0), prefix_len)

    def fork(self, parent: int, prefix_len: int = 0) -> int:
        """Starts a sequence that continues `parent`, whose tokens are frozen from here on.

        Whole pages are shared; the parent's partial last page is copied, and counted in footprint().copied_tokens.
        """
        source = self._live(parent)
        tail = self._unshared_tokens(source.own_len)
        child = _Sequence(parent, source.inherited + source.own_len - tail, own_len=tail, copied=tail)
        number = self._add(child, prefix_len, self._pages_for(tail))
        source.num_forks += 1
        if tail:
            self._copy_tokens(source, source.own_len - tail, child, tail)
        return number

    def grow(self, seqs: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Adds counts[i] token slots to seqs[i]. Returns the slots, int64 [sum(counts)], for write().

        Raises CapacityError, changing nothing, if the pool cannot hold them all.
        """
        if len(set(seqs)) != len(seqs) or min(counts, default=0) < 0:
            raise ValueError(
                f"grow {list(seqs)[:8]} by {list(counts)[:8]}: name each sequence once, with a count of at least 0"
            )
        sequences = [self._growable(seq) for seq in seqs]
        needed = [self._pages_for(s.own_len + n) - s.num_pages for s, n in zip(sequences, counts, strict=True)]
        total = sum(n for n in needed if n > 0)
        if total:
            pages = self._take(total)
            at = 0
            for sequence, n in zip(sequences, needed, strict=True):
                if n > 0:
                    self._attach(sequence, pages[at : at + n])
                    at += n
        slots = np.empty(sum(counts), np.int64)
        at = 0
        for s, n in zip(sequences, counts, strict=True):
            positions = np.arange(s.own_len, s.own_len + n)
            slots[at : at + n] = (
                s.pages[positions // self.page_size].astype(np.int64) * self.page_size + positions % self.page_size
            )
            s.own_len += n
            at += n
        return torch.from_numpy(slots)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k, v [n, num_kv_heads, head_dim] at `slots` (int64 [n], on the pool's device) of one layer."""
        for pool, values in zip(self.pools[layer], (k, v), strict=True):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, values)

    def append(self, seq: int, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """grow() by k.shape[0] tokens and write() them to one layer."""
        self.write(layer, self.grow([seq], [k.shape[0]]).to(k.device), k, v)

    def shrink(self, seq: int, count: int) -> None:
        """Takes back the last `count` tokens of a sequence without forks."""
        sequence = self._growable(seq)
        if not 0 <= count <= sequence.own_len - sequence.copied:
            raise ValueError(
                f"shrink by {count}: sequence {seq} has {sequence.own_len - sequence.copied} tokens of its own"
            )
        sequence.own_len -= count
        keep = max(self._pages_for(sequence.own_len), sequence.reserved)
        self._give(sequence.pages[keep : sequence.num_pages])
        sequence.num_pages = keep

    def free(self, seq: int) -> None:
        """Ends a sequence. Pages that forks still share return with the last of them."""
        self._live(seq).released = True
        current: int | None = seq
        while current is not None:
            sequence = self._sequences[current]
            if not sequence.released or sequence.num_forks:
                return
            self._release(sequence)
            del self._sequences[current]
            current = sequence.parent
            if current is not None:
                self._sequences[current].num_forks -= 1

    def seq_len(self, seq: int) -> int:
        """Tokens of a live sequence, inherited ones included."""
        sequence = self._live(seq)
        return sequence.inherited + sequence.own_len

    # ---- what kernels see ----

    def view(self, seqs: Sequence[int]) -> KVView:
        """The batch `seqs` as levels: shared ancestors by page identity, then each row's own pages."""
        for seq in seqs:
            self._live(seq)
        chains = [self._shared_chain(seq) for seq in seqs]
        first_seen: dict[int, int] = {}
        for row, chain in enumerate(chains):
            for node in chain:
                first_seen.setdefault(node, row)
        order = sorted(range(len(seqs)), key=lambda row: [first_seen[n] for n in chains[row]] + [row])
        chains = [chains[row] for row in order]
        depth = max(map(len, chains), default=0)
        levels = [self._shared_level([c[d] if d < len(c) else None for c in chains]) for d in range(depth)]
        own = [self._sequences[seqs[row]] for row in order]
        levels.append(self._level([1] * len(own), own, [s.own_len for s in own]))
        permuted = torch.tensor(order) if order != list(range(len(seqs))) else None
        return KVView(tuple(levels), self._traits_of(chains), self.capacity.pages, permuted)

    def footprint(self) -> Footprint:
        """Memory held now, read off the real pools and sequences."""
        slot_bytes = sum(pool.k[0, 0].nbytes * 2 for pool in self.pools)
        owned = sum(s.num_pages for s in self._sequences.values())
        used = sum(s.own_len for s in self._sequences.values())
        live = [number for number, s in self._sequences.items() if not s.released]
        table = sum(-(-self.seq_len(number) // self.page_size) for number in live)
        return Footprint(
            reserved_bytes=sum(pool.k.nbytes + pool.v.nbytes for pool in self.pools),
            used_bytes=used * slot_bytes,
            internal_waste_bytes=(owned * self.page_size - used) * slot_bytes,
            page_table_bytes=4 * table,
            copied_tokens=sum(s.copied for s in self._sequences.values()),
            free_pages=self._num_free,
        )

    # ---- what a subclass may change ----

    def _unshared_tokens(self, own_len: int) -> int:
        """Tokens at the end of a sequence that a fork has to copy."""
        return own_len % self.page_size

    def _take(self, count: int) -> NDArray[np.int32]:
        """`count` free pages; CapacityError, changing nothing, if there are fewer."""
        if count > self._num_free:
            raise CapacityError(
                f"{self.name}: {count} pages of {self.page_size} tokens asked for, "
                f"{self._num_free} of {self.capacity.pages} free. Fix: free sequences or reserve a larger pool"
            )
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def _give(self, pages: NDArray[np.int32]) -> None:
        """Returns pages to the free list."""
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def _reserve_prefix(self, sequence: _Sequence, prefix_len: int) -> None:
        """Prepares `sequence` for a prefix of `prefix_len` tokens. Pages need nothing."""

    def _release(self, sequence: _Sequence) -> None:
        self._give(sequence.pages[: sequence.num_pages])

    def _traits_of(self, chains: list[list[int]]) -> Trait:
        """Traits of a view whose rows have these shared ancestors."""
        return self.provides

    # ---- shared machinery ----

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _add(self, sequence: _Sequence, prefix_len: int, num_pages: int = 0) -> int:
        if prefix_len < 0:
            raise ValueError(f"prefix_len={prefix_len}: must be at least 0")
        if num_pages:
            self._attach(sequence, self._take(num_pages))
        if prefix_len:
            self._reserve_prefix(sequence, prefix_len)
        self._sequences[self._next_id] = sequence
        self._next_id += 1
        return self._next_id - 1

    def _attach(self, sequence: _Sequence, pages: NDArray[np.int32]) -> None:
        end = sequence.num_pages + len(pages)
        if end > len(sequence.pages):
            grown = np.empty(max(end, 2 * len(sequence.pages)), np.int32)
            grown[: sequence.num_pages] = sequence.pages[: sequence.num_pages]
            sequence.pages = grown
        sequence.pages[sequence.num_pages : end] = pages
        sequence.num_pages = end

    def _copy_tokens(self, source: _Sequence, start: int, target: _Sequence, count: int) -> None:
        def slots(sequence: _Sequence, begin: int) -> Tensor:
            at = np.arange(begin, begin + count)
            ids = sequence.pages[at // self.page_size].astype(np.int64) * self.page_size + at % self.page_size
            return torch.from_numpy(ids).to(self.pools[0].k.device)

        read, written = slots(source, start), slots(target, 0)
        for layer, pool in enumerate(self.pools):
            k, v = (x.view(-1, *x.shape[2:]).index_select(0, read) for x in pool)
            self.write(layer, written, k, v)

    def _live(self, seq: int) -> _Sequence:
        sequence = self._sequences.get(seq)
        if sequence is None or sequence.released:
            raise ValueError(f"sequence {seq} is not live: it was freed or never allocated")
        return sequence

    def _growable(self, seq: int) -> _Sequence:
        sequence = self._live(seq)
        if sequence.num_forks:
            raise ValueError(
                f"sequence {seq} has {sequence.num_forks} forks, so its tokens are frozen. Fix: change a fork of it"
            )
        return sequence

    def _shared_chain(self, seq: int) -> list[int]:
        """Ancestors that share at least a page with `seq`, root first."""
        chain: list[int] = []
        current = self._sequences[seq].parent
        while current is not None:
            ancestor = self._sequences[current]
            if ancestor.own_len > self._unshared_tokens(ancestor.own_len):
                chain.insert(0, current)
            current = ancestor.parent
        return chain

    def _shared_level(self, column: list[int | None]) -> KVLevel:
        rows: list[int] = []
        entries: list[_Sequence | None] = []
        previous: int | str | None = "none yet"
        for node in column:
            if node == previous:
                rows[-1] += 1
            else:
                rows.append(1)
                entries.append(None if node is None else self._sequences[node])
            previous = node
        lens = [0 if s is None else s.own_len - self._unshared_tokens(s.own_len) for s in entries]
        return self._level(rows, entries, lens)

    def _level(self, rows: list[int], entries: Sequence[_Sequence | None], lens: list[int]) -> KVLevel:
        pages = [self._pages_for(n) for n in lens]
        last = [n - (p - 1) * self.page_size if p else 0 for n, p in zip(lens, pages, strict=True)]
        shape = (indptr_of(rows), indptr_of(pages), torch.tensor(last, dtype=torch.int32))
        starts = [0 if s is None else s.dense_start for s in entries]
        if self.page_size == 1 and entries and None not in starts:
            return KVLevel(1, *shape, slab_starts=torch.tensor(starts, dtype=torch.int64))
        used = [s.pages[:p] for s, p in zip(entries, pages, strict=True) if s is not None]
        ids = np.concatenate(used) if used else np.empty(0, np.int32)
        return KVLevel(self.page_size, *shape, pages=torch.from_numpy(ids))
