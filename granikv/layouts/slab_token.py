"""GraniKV's layout: prefixes as contiguous HOT slabs, everything else token by token in COLD, in one page-1 pool.

HOT is the slot range [0, hot_pages) of the same tensors, so a slab is a zero-copy slice `k[s:s+L]` and kernels that
read page tables run on it natively.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from granikv.layouts.base import Capacity, CapacityError, Footprint, KVLayout, _Sequence
from granikv.layouts.slab_allocator import SlabAllocator
from granikv.spec import AttentionSpec
from granikv.tree import ContextTree
from granikv.view import Trait


class SlabTokenLayout(KVLayout):
    """HOT slabs and COLD tokens. COLD spills into free HOT space when it is full; footprint() says how much.

    A view offers DENSE_PREFIX as long as every shared prefix in it was announced with `prefix_len`.
    """

    provides = Trait.LEVELED | Trait.ONE_POOL | Trait.DENSE_PREFIX

    def __init__(self, name: str) -> None:
        super().__init__(name, page_size=1)
        self._hot = SlabAllocator(0)
        self._spilled = 0

    def capacity_of(self, tree: ContextTree, headroom: int = 0) -> Capacity:
        hot = sum(node.num_tokens for node in tree.nodes if node.shared)
        return Capacity(super().capacity_of(tree, headroom).pages, hot)

    def reserve(self, spec: AttentionSpec, capacity: Capacity, num_layers: int = 1, seed: int = 0) -> None:
        if not 0 <= capacity.hot_pages <= capacity.pages:
            raise ValueError(f"hot_pages={capacity.hot_pages} of {capacity.pages} pages: HOT is a part of the pool")
        super().reserve(spec, capacity, num_layers, seed)
        self._hot = SlabAllocator(capacity.hot_pages)

    def footprint(self) -> Footprint:
        base, hot_free = super().footprint(), self._hot.num_free
        return replace(
            base, free_pages=base.free_pages + hot_free, hot_free_pages=hot_free, spilled_pages=self._spilled
        )

    def _reserve_prefix(self, sequence: _Sequence, prefix_len: int) -> None:
        start = self._hot.take(prefix_len)
        if start is None:
            raise CapacityError(
                f"{self.name}: a slab of {prefix_len} tokens does not fit: HOT has {self._hot.num_free} of "
                f"{self.capacity.hot_pages} tokens free, {self._hot.largest} in one run "
                f"({self._spilled} hold spilled COLD tokens). "
                f"Fix: free a prefix, or reserve more hot_pages"
            )
        self._attach(sequence, np.arange(start, start + prefix_len, dtype=np.int32))
        sequence.slab_start, sequence.reserved = start, prefix_len

    def _take(self, count: int) -> NDArray[np.int32]:
        missing = count - self._num_free
        if missing <= 0:
            return super()._take(count)
        spilled = self._hot.take_scattered(missing)
        if spilled is None:
            raise CapacityError(
                f"{self.name}: {count} tokens asked for, {self._num_free} free in COLD, {self._hot.num_free} in HOT. "
                f"Fix: free sequences or reserve a larger pool"
            )
        self._spilled += missing
        return np.concatenate([super()._take(count - missing), spilled])

    def _give(self, pages: NDArray[np.int32]) -> None:
        in_hot = pages < self.capacity.hot_pages
        super()._give(pages[~in_hot])
        self._hot.give_scattered(pages[in_hot])
        self._spilled -= int(in_hot.sum())

    def _release(self, sequence: _Sequence) -> None:
        if sequence.slab_start is not None:
            self._hot.give(sequence.slab_start, sequence.reserved)
        self._give(sequence.pages[sequence.reserved : sequence.num_pages])

    def _traits_of(self, chains: list[list[int]]) -> Trait:
        shared = {node for chain in chains for node in chain}
        dense = all(self._sequences[node].dense_start is not None for node in shared)
        return self.provides if dense else self.provides & ~Trait.DENSE_PREFIX
