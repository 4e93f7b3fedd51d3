"""All layouts driven in lockstep through random operations, against lists of token numbers."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from granikv.layouts.base import Capacity, CapacityError, KVLayout
from granikv.layouts.paged import PagedLayout
from granikv.layouts.slab_token import SlabTokenLayout
from granikv.layouts.unshared import UnsharedLayout
from granikv.spec import AttentionSpec
from granikv.view import Trait

SPEC = AttentionSpec(1, 1, 4)
TOKENS, HOT_TOKENS = 288, 80  # slots of a pool: few enough that it fills up
SLOT_BYTES = 2 * 1 * 4 * 4


def made_layouts():
    return [
        PagedLayout("paged_16", 16),
        PagedLayout("paged_3", 3),
        PagedLayout("paged_1", 1),
        SlabTokenLayout("slab_token"),
        UnsharedLayout("unshared_16", 16),
    ]


def keys_and_values(tokens):
    """K holds each token's number in every element, V its negative."""
    k = torch.tensor(tokens, dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, 4).contiguous()
    return k, -k


@dataclass
class Known:
    """What a sequence must be. `born` tokens came from its parent, `shared` of them in pages of its ancestors."""

    number: int
    parent: int | None
    content: list[int]
    born: int
    shared: int
    announced: int
    forks: int = 0
    live: bool = True


class Twin:
    """One layout and the model it must agree with. What does not fit in this layout happens in neither."""

    def __init__(self, layout: KVLayout, seed: int) -> None:
        self.layout, self.slab = layout, isinstance(layout, SlabTokenLayout)
        self.shares = not isinstance(layout, UnsharedLayout)
        hot_pages = HOT_TOKENS if self.slab else 0
        layout.reserve(SPEC, Capacity(TOKENS // layout.page_size, hot_pages), seed=seed)
        self.known: dict[int, Known] = {}
        self.freed: list[int] = []
        self.num_refused = 0

    # ---- the model ----

    def pages_for(self, tokens):
        return -(-tokens // self.layout.page_size)

    def own_len(self, known):
        return len(known.content) - known.shared

    def shareable(self, known):
        """Own tokens that forks see in place: those in whole pages."""
        return self.own_len(known) // self.layout.page_size * self.layout.page_size if self.shares else 0

    def num_pages(self, known):
        slab = known.announced if self.slab else 0
        return max(self.pages_for(self.own_len(known)), slab)

    def live(self):
        return [name for name, known in self.known.items() if known.live]

    def ancestors(self, name):
        """Sequences with tokens that `name` shares."""
        while (name := self.known[name].parent) is not None:
            if self.shareable(self.known[name]):
                yield name

    def num_owned(self):
        return sum(self.num_pages(known) for known in self.known.values())

    def num_free(self):
        return self.layout.capacity.pages - self.num_owned()

    # ---- operations ----

    def refused(self, error, message, work):
        before = self.snapshot()
        with pytest.raises(error, match=message):
            work()
        assert self.snapshot() == before
        self.num_refused += error is CapacityError

    def snapshot(self):
        names = self.live()
        view, order = self.view(names)
        return (
            self.layout.footprint(),
            order,
            self.rows_of(view),
            [self.layout.seq_len(self.known[n].number) for n in names],
        )

    def add(self, name, parent, announced):
        if parent is None:
            child = Known(0, None, [], 0, 0, announced)
        elif parent in self.known:
            source = self.known[parent]
            shared = source.shared + self.shareable(source)
            child = Known(0, parent, list(source.content), len(source.content), shared, announced)
        else:
            return
        pages = self.pages_for(self.own_len(child))
        fits = pages <= self.num_free() and not (self.slab and announced > self.longest_hot_run())

        def work():
            return self.layout.allocate(announced) if parent is None else self.layout.fork(source.number, announced)

        if not fits:
            self.refused(CapacityError, "Fix: free ", work)
            return
        child.number = work()
        assert child.number not in self.freed
        self.known[name] = child
        if parent is not None:
            source.forks += 1

    def grow(self, more):
        """`more` holds new tokens by name; one name goes through append()."""
        more = {name: tokens for name, tokens in more.items() if name in self.known}
        chosen = [self.known[name] for name in more]
        numbers, counts = [known.number for known in chosen], [len(tokens) for tokens in more.values()]
        if any(known.forks for known in chosen):
            self.refused(ValueError, "frozen", lambda: self.layout.grow(numbers, counts))
            return
        needed = [
            max(0, self.pages_for(self.own_len(known) + n) - self.num_pages(known)) for known, n in zip(chosen, counts)
        ]
        if sum(needed) > self.num_free():
            self.refused(CapacityError, "Fix: free ", lambda: self.layout.grow(numbers, counts))
            return
        kv = keys_and_values([token for tokens in more.values() for token in tokens])
        if len(chosen) == 1:
            self.layout.append(numbers[0], *kv)
        else:
            slots = self.layout.grow(numbers, counts)
            assert slots.dtype == torch.int64
            self.layout.write(0, slots, *kv)
        for known, tokens in zip(chosen, more.values(), strict=True):
            known.content += tokens

    def shrink(self, name, count):
        known = self.known.get(name)
        if known is None:
            return
        if known.forks:
            self.refused(ValueError, "frozen", lambda: self.layout.shrink(known.number, count))
        elif count > len(known.content) - known.born:
            self.refused(ValueError, f"shrink by {count}", lambda: self.layout.shrink(known.number, count))
        else:
            self.layout.shrink(known.number, count)
            known.content = known.content[: len(known.content) - count]

    def free(self, name):
        if name not in self.known:
            return
        self.layout.free(self.known[name].number)
        self.freed.append(self.known[name].number)
        self.known[name].live = False
        gone = name
        while gone is not None and not self.known[gone].live and not self.known[gone].forks:
            gone = self.known.pop(gone).parent
            if gone is not None:
                self.known[gone].forks -= 1

    def refuse_freed(self):
        for number in self.freed[-2:]:
            for work in (self.layout.free, self.layout.fork, lambda number: self.layout.grow([number], [1])):
                self.refused(ValueError, f"sequence {number} is not live", lambda work=work, n=number: work(n))

    # ---- what the layout shows ----

    def view(self, names):
        view = self.layout.view([self.known[name].number for name in names])
        view.check()
        order = list(range(len(names))) if view.order is None else view.order.tolist()
        assert sorted(order) == list(range(len(names)))
        return view, order

    def tokens_of(self, level):
        """Token numbers of each entry, as a kernel would find them."""
        pages = level.kv_indices.long()
        k, v = (pool[pages].reshape(-1, 4).numpy() for pool in self.layout.pools[0])
        entries = []
        for first_page, kv_len in zip(level.kv_indptr.tolist(), level.kv_lens.tolist()):
            begin = first_page * level.page_size
            held = k[begin : begin + kv_len]
            assert (held == -v[begin : begin + kv_len]).all()
            assert (held == held[:, :1]).all()
            entries.append(held[:, 0].astype(int).tolist())
        return entries

    def rows_of(self, view):
        """Token numbers of each row of the view, root level first."""
        rows = [[] for _ in range(view.batch_size)]
        for level in view.levels:
            row_at = level.qo_indptr.tolist()
            for entry, tokens in enumerate(self.tokens_of(level)):
                for row in range(row_at[entry], row_at[entry + 1]):
                    rows[row] += tokens
        return rows

    def longest_hot_run(self):
        """By the bitmap of what sequences own, not by what the allocator says."""
        owned, longest, run = self.owned(), 0, 0
        for slot in range(HOT_TOKENS):
            run = 0 if slot in owned else run + 1
            longest = max(longest, run)
        return longest

    def owned(self):
        return Counter(int(page) for s in self.layout._sequences.values() for page in s.pages[: s.num_pages])

    # ---- what must hold ----

    def check_ownership(self):
        owned, layout = self.owned(), self.layout
        free = layout._free[: layout._num_free].tolist()
        if self.slab:
            free += [slot for start, length in layout._hot._runs for slot in range(start, start + length)]
        assert sorted([*owned.elements(), *free]) == list(range(layout.capacity.pages))
        assert owned.total() == self.num_owned()

    def check_footprint(self):
        footprint, known = self.layout.footprint(), self.known.values()
        tokens = sum(self.own_len(one) for one in known)
        assert footprint.reserved_bytes == self.layout.capacity.pages * self.layout.page_size * SLOT_BYTES
        assert footprint.used_bytes == tokens * SLOT_BYTES
        assert footprint.internal_waste_bytes == (self.num_owned() * self.layout.page_size - tokens) * SLOT_BYTES
        assert footprint.page_table_bytes == 4 * sum(self.pages_for(len(one.content)) for one in known if one.live)
        assert footprint.copied_tokens == sum(one.born - one.shared for one in known)
        assert footprint.free_pages == self.num_free()
        in_hot = sum(page < HOT_TOKENS for page in self.owned()) if self.slab else 0
        slabs = sum(one.announced for one in known) if self.slab else 0
        assert footprint.spilled_pages == in_hot - slabs
        assert footprint.hot_free_pages == (HOT_TOKENS - in_hot if self.slab else 0)

    def check_view(self, names):
        """A batch in any order: its tokens, its groups, its traits and its flat table. Returns tokens by name."""
        names = [name for name in names if name in self.known]
        content = [self.known[name].content for name in names]
        view, order = self.view(names)
        rows = self.rows_of(view)
        assert rows == [content[at] for at in order]
        assert view.seq_lens.tolist() == [len(content[at]) for at in order]
        assert self.tokens_of(view.flat()) == [content[at] for at in order]
        sharing = {}
        for row, name in enumerate(names):
            for ancestor in self.ancestors(name):
                sharing.setdefault(ancestor, []).append(row)
        expected = [(self.shareable(self.known[ancestor]), rows) for ancestor, rows in sharing.items()]
        groups = [(g.kv_len, sorted(order[g.row_start : g.row_end])) for g in view.prefix_groups()]
        assert sorted(groups) == sorted(expected)
        dense = all(self.own_len(self.known[ancestor]) <= self.known[ancestor].announced for ancestor in sharing)
        assert (Trait.DENSE_PREFIX in view.traits) == (self.slab and dense)
        assert (Trait.LEVELED in view.traits) == self.shares
        return {names[at]: row for at, row in zip(order, rows, strict=True)}

    def check_all_free(self):
        for name in self.live():
            self.free(name)
        assert not self.known
        assert not self.layout._sequences
        footprint = self.layout.footprint()
        assert footprint.free_pages == self.layout.capacity.pages
        assert footprint.used_bytes == footprint.internal_waste_bytes == footprint.page_table_bytes == 0
        if self.slab:
            assert self.layout._hot._runs == [(0, HOT_TOKENS)]


class Lockstep(RuleBasedStateMachine):
    """Sequences are known by a name of ours; each layout has its own number for them."""

    def __init__(self):
        super().__init__()
        self.twins = [Twin(layout, seed) for seed, layout in enumerate(made_layouts())]
        self.names, self.forked = [], set()
        self.next_name = self.next_token = 0

    def name(self):
        self.next_name += 1
        self.names.append(self.next_name)
        return self.next_name

    def tokens(self, count):
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def draw_growable(self, data):
        """Mostly a sequence without forks, because the others refuse to change."""
        leaves = [name for name in self.names if name not in self.forked]
        return data.draw(st.sampled_from([*leaves, *leaves, *leaves, *self.names]))

    def start(self, parent, announced, count):
        name, tokens = self.name(), self.tokens(count)
        self.forked.add(parent)
        for twin in self.twins:
            twin.add(name, parent, announced)
            twin.grow({name: tokens})
        return name

    @initialize(
        prefix_lens=st.lists(st.sampled_from([1, 5, 16, 17, 40]), min_size=1, max_size=2),
        announced=st.booleans(),
        own_lens=st.lists(st.integers(0, 9), min_size=2, max_size=4),
    )
    def a_batch_over_its_prefixes(self, prefix_lens, announced, own_lens):
        """Row i continues prefix i modulo their number, so rows that share are not neighbours."""
        prefixes = [self.start(None, n if announced else 0, n) for n in prefix_lens]
        for i, own_len in enumerate(own_lens):
            self.start(prefixes[i % len(prefixes)], 0, own_len)

    @rule(announced=st.sampled_from([0, 5, 17, 40]), data=st.data())
    def allocate(self, announced, data):
        """With its tokens, mostly as many as announced."""
        self.start(None, announced, data.draw(st.sampled_from([announced, announced, 0, 16, 30])))

    @precondition(lambda self: self.names)
    @rule(data=st.data(), announced=st.sampled_from([0, 0, 4, 20]))
    def fork(self, data, announced):
        """With tokens of its own, mostly as many as announced."""
        source = data.draw(st.sampled_from(self.names))
        self.start(source, announced, data.draw(st.sampled_from([announced, announced, 0, 3, 16])))

    @precondition(lambda self: self.names)
    @rule(data=st.data(), count=st.integers(0, 40))
    def append(self, data, count):
        more = {self.draw_growable(data): self.tokens(count)}
        for twin in self.twins:
            twin.grow(more)

    @precondition(lambda self: len(self.names) > 1)
    @rule(data=st.data())
    def grow_several(self, data):
        chosen = dict.fromkeys(self.draw_growable(data) for _ in range(4))
        more = {name: self.tokens(data.draw(st.integers(0, 17))) for name in chosen}
        for twin in self.twins:
            twin.grow(more)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), count=st.integers(0, 20))
    def shrink(self, data, count):
        name = self.draw_growable(data)
        for twin in self.twins:
            twin.shrink(name, count)

    @precondition(lambda self: len(self.names) > 2)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(self.names))
        self.names.remove(name)
        for twin in self.twins:
            twin.free(name)
        self.forked &= {known.parent for twin in self.twins for known in twin.known.values()}

    @precondition(lambda self: any(twin.freed for twin in self.twins))
    @rule()
    def use_what_was_freed(self):
        for twin in self.twins:
            twin.refuse_freed()

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def view(self, data):
        names = data.draw(st.lists(st.sampled_from(self.names), unique=True))
        for twin in self.twins:
            twin.check_view(names)

    @invariant()
    def every_layout_shows_the_tokens_of_its_model(self):
        """Every other row, then the rest: an order in which rows that share are not neighbours."""
        shown = [(twin, twin.check_view(self.names[::2] + self.names[1::2])) for twin in self.twins]
        never_full = [tokens for twin, tokens in shown if not twin.num_refused]
        assert all(tokens == never_full[0] for tokens in never_full)

    @invariant()
    def no_page_has_two_owners_and_none_is_lost(self):
        for twin in self.twins:
            twin.check_ownership()

    @invariant()
    def the_footprint_is_that_of_the_model(self):
        for twin in self.twins:
            twin.check_footprint()

    def teardown(self):
        for twin in self.twins:
            twin.check_all_free()


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
