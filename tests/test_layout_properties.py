"""All layouts driven in lockstep through random operations, against lists of token numbers."""

from collections import Counter
from typing import ClassVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from granikv.layouts.base import Capacity, CapacityError
from granikv.layouts.paged import PagedLayout
from granikv.layouts.slab_token import SlabTokenLayout
from granikv.layouts.unshared import UnsharedLayout
from granikv.spec import AttentionSpec

SPEC = AttentionSpec(1, 1, 2)
TOKENS = 260  # slots a pool: small enough that it fills up


def made_layouts():
    return [
        PagedLayout("paged_16", 16),
        PagedLayout("paged_3", 3),
        PagedLayout("paged_1", 1),
        SlabTokenLayout("slab_token"),
        UnsharedLayout("unshared_16", 16),
    ]


class Lockstep(RuleBasedStateMachine):
    """Sequences are known by a name of ours; each layout has its own number for them.

    A layout in which an operation does not fit is checked to be unchanged, and leaves the race.
    """

    largest_pool: ClassVar[int] = TOKENS

    def __init__(self):
        super().__init__()
        self.layouts = made_layouts()
        for seed, layout in enumerate(self.layouts):
            hot = 60 if layout.name == "slab_token" else 0
            layout.reserve(SPEC, Capacity(TOKENS // layout.page_size, hot), seed=seed)
        self.numbers = [{} for _ in self.layouts]
        self.content, self.parent, self.own, self.forks = {}, {}, {}, Counter()
        self.live = []
        self.next_name = self.next_token = 0

    def attempt(self, work):
        """`work(layout, numbers)` in every layout still racing."""
        for index, layout in enumerate(list(self.layouts)):
            if layout is None:
                continue
            before = layout.footprint(), self.read(layout, self.numbers[index])
            try:
                work(layout, self.numbers[index])
            except CapacityError:
                assert (layout.footprint(), self.read(layout, self.numbers[index])) == before
                self.layouts[index] = None

    def read(self, layout, numbers):
        """Tokens of all live sequences, through the levels of one view."""
        names = [name for name in self.live if name in numbers]
        view = layout.view([numbers[name] for name in names])
        view.check()
        keys = layout.pools[0].k.view(-1, 2)
        rows = [[] for _ in names]
        for level in view.levels:
            for entry in range(level.num_entries):
                pages = level.kv_indices[int(level.kv_indptr[entry]) : int(level.kv_indptr[entry + 1])].long()
                slots = (pages.unsqueeze(1) * level.page_size + torch.arange(level.page_size)).flatten()
                tokens = keys[slots[: int(level.kv_lens[entry])], 0].tolist()
                for row in range(int(level.qo_indptr[entry]), int(level.qo_indptr[entry + 1])):
                    rows[row] += tokens
        order = range(len(rows)) if view.order is None else view.order.tolist()
        return {names[at]: row for at, row in zip(order, rows, strict=True)}

    def add(self, parent, content):
        name, self.next_name = self.next_name, self.next_name + 1
        self.live.append(name)
        self.content[name], self.parent[name], self.own[name] = content, parent, 0
        if parent is not None:
            self.forks[parent] += 1
        return name

    @rule(announced=st.sampled_from([0, 0, 5, 17, 40]))
    def allocate(self, announced):
        name = self.next_name
        self.attempt(lambda layout, numbers: numbers.__setitem__(name, layout.allocate(announced)))
        self.add(None, [])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        source, name = data.draw(st.sampled_from(self.live)), self.next_name
        self.attempt(lambda layout, numbers: numbers.__setitem__(name, layout.fork(numbers[source])))
        self.add(source, list(self.content[source]))

    @precondition(lambda self: any(not self.forks[name] for name in self.live))
    @rule(data=st.data(), count=st.integers(0, 40))
    def append(self, data, count):
        name = data.draw(st.sampled_from([name for name in self.live if not self.forks[name]]))
        values = torch.arange(self.next_token, self.next_token + count, dtype=torch.float32)
        kv = values.view(-1, 1, 1).expand(-1, 1, 2).contiguous()
        self.attempt(lambda layout, numbers: layout.append(numbers[name], kv, kv))
        self.content[name] += values.tolist()
        self.own[name] += count
        self.next_token += count

    @precondition(lambda self: any(not self.forks[name] for name in self.live))
    @rule(data=st.data())
    def shrink(self, data):
        name = data.draw(st.sampled_from([name for name in self.live if not self.forks[name]]))
        count = data.draw(st.integers(0, self.own[name]))
        self.attempt(lambda layout, numbers: layout.shrink(numbers[name], count))
        self.own[name] -= count
        if count:
            del self.content[name][-count:]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(self.live))
        self.live.remove(name)
        self.attempt(lambda layout, numbers: layout.free(numbers.pop(name)))
        gone = name
        while gone is not None and gone not in self.live and not self.forks[gone]:
            gone = self.parent[gone]
            if gone is not None:
                self.forks[gone] -= 1

    @invariant()
    def every_layout_holds_the_same_tokens(self):
        expected = {name: self.content[name] for name in self.live}
        for layout, numbers in zip(self.layouts, self.numbers, strict=True):
            if layout is not None:
                assert self.read(layout, numbers) == expected

    @invariant()
    def no_page_has_two_owners_and_none_is_lost(self):
        for layout in self.layouts:
            if layout is None:
                continue
            owned = [int(page) for s in layout._sequences.values() for page in s.pages[: s.num_pages]]
            assert len(owned) == len(set(owned))
            footprint = layout.footprint()
            assert len(owned) + footprint.free_pages == layout.capacity.pages
            free = set(layout._free[: layout._num_free].tolist())
            assert not free & set(owned)
            slot_bytes = 2 * 2 * 4
            assert footprint.used_bytes + footprint.internal_waste_bytes == len(owned) * layout.page_size * slot_bytes

    def teardown(self):
        for index, layout in enumerate(self.layouts):
            if layout is not None:
                for name in self.live:
                    layout.free(self.numbers[index][name])
                assert layout.footprint().free_pages == layout.capacity.pages
                assert not layout._sequences


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
