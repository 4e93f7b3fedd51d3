from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import LAYOUTS, TREES, filled
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.layouts.base import Capacity
from granikv.layouts.paged import PagedLayout
from granikv.spec import AttentionSpec
from granikv.view import KVLevel, KVView, PrefixGroup, Trait, indptr_of, ragged_arange

PAGED = Trait.LEVELED | Trait.ONE_POOL


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def level(rows, pages, last, page_size=16, **more):
    """A level whose entries serve `rows` rows each and hold the given page ids."""
    counts = indptr_of([len(p) for p in pages])
    flat = ints(*[page for entry in pages for page in entry])
    return KVLevel(page_size, indptr_of(rows), counts, ints(*last), flat, **more)


def small_view():
    """Two rows share pages 7 and 3 (32 tokens); they own page 5 with 4 tokens, and pages 1, 0 with 16 + 9."""
    return KVView((level([2], [[7, 3]], [16]), level([1, 1], [[5], [1, 0]], [4, 9])), PAGED, num_pages=8)


def own_changed(**changes):
    view = small_view()
    return replace(view, levels=(view.levels[0], replace(view.levels[1], **changes)))


def shared_changed(**changes):
    view = small_view()
    return replace(view, levels=(replace(view.levels[0], **changes), view.levels[1]))


def slab_view(starts, traits=PAGED | Trait.DENSE_PREFIX, num_pages=50):
    """Two rows share slots 10, 11, 12 if starts is 10; row 0 owns slot 3, row 1 slots 5 and 4."""
    shared = KVLevel(1, ints(0, 2), ints(0, 3), ints(1), slab_starts=torch.tensor(starts))
    return KVView((shared, level([1, 1], [[3], [5, 4]], [1, 1], page_size=1)), traits, num_pages)


def test_lengths_and_groups_of_a_small_view():
    view = small_view()
    view.check()
    assert view.seq_lens.tolist() == [36, 57]
    assert list(view.prefix_groups()) == [PrefixGroup(0, 0, 0, 2, 32)]


def test_the_flat_table_repeats_the_prefix_for_every_row():
    flat = small_view().flat()
    assert flat.kv_indices.tolist() == [7, 3, 5, 7, 3, 1, 0]
    assert flat.kv_indptr.tolist() == [0, 3, 7]
    assert flat.last_page_len.tolist() == [4, 9]
    assert flat.kv_lens.tolist() == [36, 57]


def test_a_row_without_own_tokens_ends_in_its_prefix():
    view = KVView((level([2], [[7, 3]], [16]), level([1, 1], [[], [1]], [0, 9])), PAGED, num_pages=8)
    view.check()
    flat = view.flat()
    assert flat.kv_indices.tolist() == [7, 3, 7, 3, 1]
    assert flat.last_page_len.tolist() == [16, 9]
    assert view.seq_lens.tolist() == [32, 41]


def test_three_levels_flatten_from_the_root_down():
    view = KVView(
        (
            level([3, 1], [[9], []], [2, 0], page_size=2),
            level([2, 1, 1], [[4, 5], [], []], [2, 0, 0], page_size=2),
            level([1, 1, 1, 1], [[0], [], [1], [2]], [1, 0, 2, 1], page_size=2),
        ),
        PAGED,
        num_pages=10,
    )
    view.check()
    flat = view.flat()
    assert flat.kv_indices.tolist() == [9, 4, 5, 0, 9, 4, 5, 9, 1, 2]
    assert flat.kv_lens.tolist() == view.seq_lens.tolist() == [7, 6, 4, 1]
    assert [group[1:] for group in view.prefix_groups()] == [(0, 0, 3, 2), (0, 0, 2, 4)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"last_page_len": ints(17, 9)}, r"last_page_len=17 of entry 0: must be 1\.\.16"),
        ({"last_page_len": ints(4, 0)}, r"last_page_len=0 of entry 1: must be 1\.\.16"),
        ({"last_page_len": ints(-1, 9)}, r"last_page_len=-1 of entry 0: must be 1\.\.16"),
        ({"last_page_len": ints(4)}, "1 in last_page_len"),
        ({"last_page_len": ints(4, 9, 1)}, "2 entries in qo_indptr, 2 in kv_indptr, 3 in last_page_len"),
        ({"kv_indptr": ints(0, 3)}, "2 entries in qo_indptr, 1 in kv_indptr, 2 in last_page_len"),
        ({"kv_indptr": ints(0, 2, 1)}, r"kv_indptr=\[0, 2, 1\]: starts at 0 and never falls"),
        ({"kv_indptr": ints(1, 1, 3)}, "starts at 0"),
        ({"kv_indptr": torch.tensor([0, 1, 3])}, "level 1: kv_indptr is torch.int64 on cpu: host int32"),
        ({"kv_indptr": torch.empty(3, dtype=torch.int32, device="meta")}, "kv_indptr is torch.int32 on meta: host"),
        ({"qo_indptr": torch.tensor([0, 1, 2])}, "level 1: qo_indptr is torch.int64 on cpu: host int32"),
        ({"kv_indptr": ints(0, 1, 4)}, "3 kv_indices, but kv_indptr ends at 4"),
        ({"kv_indptr": ints(0, 1, 2)}, "3 kv_indices, but kv_indptr ends at 2"),
        ({"pages": ints(5, 1, 8)}, r"kv_indices span 1\.\.8, but the pool has pages 0\.\.7"),
        ({"pages": ints(5, -1, 0)}, r"kv_indices span -1"),
        ({"qo_indptr": ints(0, 2, 3)}, "exactly one row an entry"),
        ({"page_size": 0}, r"page_size=0: a page holds at least 1 token\. Fix: page_size=16"),
        ({"page_size": -3}, "page_size=-3: a page holds at least 1 token"),
        ({"page_size": 32}, r"page sizes \[16, 32\] in one table"),
    ],
)
def test_a_malformed_own_level_is_refused_by_value(changes, message):
    with pytest.raises(ValueError, match=message):
        own_changed(**changes).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"last_page_len": ints(17)}, r"level 0: last_page_len=17 of entry 0: must be 1\.\.16"),
        ({"last_page_len": ints(0)}, r"level 0: last_page_len=0 of entry 0: must be 1\.\.16"),
        ({"kv_indptr": ints(0, -2)}, r"level 0: kv_indptr=\[0, -2\]: starts at 0 and never falls"),
        ({"qo_indptr": ints(0, 1)}, "level 0: qo_indptr ends at 1, but the batch has 2 rows"),
        ({"qo_indptr": ints(1, 2)}, r"level 0: qo_indptr=\[1, 2\]: starts at 0"),
        ({"qo_indptr": torch.tensor([0, 2])}, "level 0: qo_indptr is torch.int64"),
        ({"pages": ints(7, 8)}, r"level 0: kv_indices span 7\.\.8, but the pool has pages 0\.\.7"),
        ({"page_size": 0}, "level 0: page_size=0"),
    ],
)
def test_a_malformed_shared_level_is_refused_by_value(changes, message):
    with pytest.raises(ValueError, match=message):
        shared_changed(**changes).check()


def test_a_level_is_checked_on_its_own_too():
    own = small_view().levels[1]
    own.check(num_pages=6, batch_size=2)
    with pytest.raises(ValueError, match=r"^level: kv_indices span 0\.\.5, but the pool has pages 0\.\.4"):
        own.check(num_pages=5, batch_size=2)
    with pytest.raises(ValueError, match=r"^mine: qo_indptr ends at 2, but the batch has 3 rows"):
        own.check(num_pages=6, batch_size=3, where="mine")


def test_page_sizes_may_differ_where_no_flat_table_is_promised():
    replace(own_changed(page_size=32), traits=Trait.LEVELED).check()


def test_a_shared_level_must_end_on_a_page_in_one_pool():
    view = small_view()
    inside = replace(view, levels=(level([2], [[7, 3]], [5]), view.levels[1]))
    with pytest.raises(ValueError, match="a shared entry ends inside a page"):
        inside.check()
    replace(inside, traits=Trait.LEVELED).check()


def test_a_shared_level_must_cover_the_batch():
    view = small_view()
    with pytest.raises(ValueError, match="level 0: qo_indptr ends at 3, but the batch has 2 rows"):
        replace(view, levels=(level([3], [[7, 3]], [16]), view.levels[1])).check()


def test_an_entry_without_pages_has_no_last_page():
    view = small_view()
    with pytest.raises(ValueError, match="last_page_len=3 of entry 0: must be 0 for an entry without pages"):
        replace(view, levels=(level([2], [[]], [3]), view.levels[1])).check()


def test_dense_prefix_needs_slab_starts_and_a_view_needs_levels():
    with pytest.raises(ValueError, match="has slab_starts on every shared level"):
        replace(small_view(), traits=PAGED | Trait.DENSE_PREFIX).check()
    with pytest.raises(ValueError, match="no levels"):
        KVView((), PAGED, 8).check()


def test_a_slab_writes_its_indices_out_when_asked():
    slab = KVLevel(1, ints(0, 1, 3), ints(0, 3, 5), ints(1, 1), slab_starts=torch.tensor([10, 40]))
    assert slab.kv_indices.tolist() == [10, 11, 12, 40, 41]
    assert slab.kv_indices.dtype == torch.int32
    assert slab.kv_lens.tolist() == [3, 2]


def test_a_slab_keeps_the_rules_of_pages():
    view = slab_view([10])
    view.check()
    assert view.seq_lens.tolist() == [4, 5]
    assert view.flat().kv_indices.tolist() == [10, 11, 12, 3, 10, 11, 12, 5, 4]
    for start, span in ((48, r"48\.\.50"), (-1, r"-1\.\.1")):
        with pytest.raises(ValueError, match=rf"level 0: kv_indices span {span}, but the pool has pages 0\.\.49"):
            slab_view([start]).check()


def test_every_shared_level_of_a_dense_view_needs_its_slab():
    shared, own = slab_view([10]).levels
    paged = level([1, 1], [[20], [21]], [1, 1], page_size=1)
    with pytest.raises(ValueError, match="has slab_starts on every shared level"):
        replace(slab_view([10]), levels=(shared, paged, own)).check()
    replace(slab_view([10]), levels=(shared, paged, own), traits=PAGED).check()


def test_a_view_of_one_level_is_its_own_flat_table():
    own = level([1, 1], [[5], [1, 0]], [4, 9])
    view = KVView((own,), PAGED, num_pages=8)
    view.check()
    assert view.flat() is own
    assert not list(view.prefix_groups())
    assert view.seq_lens.tolist() == [4, 25]


def test_a_batch_without_rows_is_a_view():
    view = KVView((level([], [], []),), PAGED, num_pages=0)
    view.check()
    assert (view.batch_size, view.seq_lens.tolist(), list(view.prefix_groups())) == (0, [], [])


def test_groups_without_tokens_are_not_groups():
    shared = level([1, 2, 1], [[], [4, 6], []], [0, 16, 0])
    view = KVView((shared, level([1] * 4, [[0], [1], [2], [3]], [1, 2, 3, 4])), PAGED, num_pages=8)
    view.check()
    assert list(view.prefix_groups()) == [PrefixGroup(level=0, entry=1, row_start=1, row_end=3, kv_len=32)]
    assert view.seq_lens.tolist() == [1, 34, 35, 4]
    assert view.flat().kv_indices.tolist() == [0, 4, 6, 1, 4, 6, 2, 3]


@pytest.mark.parametrize("tree", ["nested_prefixes", "two_groups_of_unequal_length", "some_suffixes_empty"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_levels_and_flat_table_of_a_real_view_hold_the_same_tokens(name, tree):
    """By the logical K itself: every row's pages from the flat table, in order, are its sequence."""
    held = filled(name, TREES[tree], AttentionSpec(1, 1, 4))
    view = held.layout.view(held.rows)
    view.check()
    flat, keys = view.flat(), held.layout.pools[0].k
    assert view.seq_lens.tolist() == flat.kv_lens.tolist() == TREES[tree].seq_lens()
    for row, kv_len in enumerate(flat.kv_lens.tolist()):
        pages = flat.kv_indices[int(flat.kv_indptr[row]) : int(flat.kv_indptr[row + 1])].long()
        assert torch.equal(keys[pages].flatten(0, 1)[:kv_len], held.logical.row(row).k)
    flat.check(view.num_pages, view.batch_size)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_flat_is_each_rows_entries_one_after_the_other(data):
    """Levels drawn at random, from the rows up to the root, against lists."""
    batch_size, page_size = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 3, 16]))
    levels, pages_of, lens = [], [[] for _ in range(batch_size)], [0] * batch_size
    for depth in range(data.draw(st.integers(1, 4))):
        rows = [1] * batch_size if depth == 0 else partition(data, batch_size)
        counts = [data.draw(st.integers(0, 3)) for _ in rows]
        pages = [[data.draw(st.integers(0, 99)) for _ in range(n)] for n in counts]
        last = [(page_size if depth else data.draw(st.integers(1, page_size))) if n else 0 for n in counts]
        levels.insert(0, level(rows, pages, last, page_size))
        ends = indptr_of(rows).tolist()
        for entry, (begin, end) in enumerate(pairwise(ends)):
            for row in range(begin, end):
                pages_of[row] = pages[entry] + pages_of[row]
                lens[row] += (counts[entry] - 1) * page_size + last[entry] if counts[entry] else 0
    view = KVView(tuple(levels), PAGED, num_pages=100)
    view.check()
    flat = view.flat()
    flat.check(100, batch_size)
    ends = flat.kv_indptr.tolist()
    assert [flat.kv_indices[a:b].tolist() for a, b in pairwise(ends)] == pages_of
    assert flat.kv_lens.tolist() == view.seq_lens.tolist() == lens


def partition(data, total):
    """Positive whole numbers that add up to `total`."""
    parts = []
    while total:
        parts.append(data.draw(st.integers(1, total)))
        total -= parts[-1]
    return parts


def test_ranges_and_running_sums():
    assert ragged_arange(torch.tensor([5, 100, 7]), torch.tensor([2, 0, 3])).tolist() == [5, 6, 7, 8, 9]
    assert indptr_of([3, 0, 2]).tolist() == [0, 3, 3, 5]


def test_ranges_and_sums_of_nothing():
    nothing = torch.empty(0, dtype=torch.int64)
    assert ragged_arange(nothing, nothing).tolist() == []
    assert ragged_arange(torch.tensor([4, 9]), torch.tensor([0, 0])).tolist() == []
    assert indptr_of([]).tolist() == [0]
    assert indptr_of(nothing).dtype == torch.int32


def test_ranges_are_int64_whatever_the_starts_are():
    starts, lens = ints(5, 7), ints(2, 3)
    for total in (None, 5):
        ranges = ragged_arange(starts, lens.long(), total)
        assert ranges.dtype == torch.int64
        assert ranges.tolist() == [5, 6, 7, 8, 9]
    assert indptr_of(ints(3, 4)).tolist() == [0, 3, 7]
    assert indptr_of(ints(3, 4)).dtype == torch.int32


def test_slots_past_2_to_the_31_do_not_wrap():
    """2^31 elements of a pool with 8 heads of 128 are 2^21 tokens; 64 of them would be 2^31 slots."""
    huge = ragged_arange(torch.tensor([2**31 - 1, 2**33]), torch.tensor([3, 2]))
    assert huge.tolist() == [2**31 - 1, 2**31, 2**31 + 1, 2**33, 2**33 + 1]
    assert KVLevel(16, ints(0, 1), ints(0, 2**28), ints(16), pages=ints()).kv_lens.tolist() == [2**32]


def test_slots_of_pages_past_2_to_the_31_elements_do_not_wrap():
    """A pool on the meta device owns no memory: 4096 pages of 2^20 tokens are slots up to 2^32 and elements up to 2^34.

    In int32, page 2048 would start at slot -2^31.
    """
    layout = PagedLayout("paged_huge", 2**20)
    layout.reserve(AttentionSpec(1, 1, 4, torch.float16, torch.device("meta")), Capacity(4096))
    seqs = [layout.allocate() for _ in range(4096)]
    slots = layout.grow(seqs, [3] * 4096)
    assert slots.dtype == torch.int64
    view = layout.view(seqs)
    view.check()
    pages = view.levels[0].kv_indices.tolist()
    assert max(pages) == 4095
    assert slots.tolist() == [page * 2**20 + offset for page in pages for offset in range(3)]
    assert layout.footprint().reserved_bytes == 2**35 + 2**35
