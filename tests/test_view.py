from dataclasses import replace

import pytest
import torch

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
        ({"last_page_len": ints(4)}, "1 in last_page_len"),
        ({"kv_indptr": ints(0, 2, 1)}, r"kv_indptr=\[0, 2, 1\]: starts at 0 and never falls"),
        ({"kv_indptr": ints(1, 1, 3)}, "starts at 0"),
        ({"kv_indptr": torch.tensor([0, 1, 3])}, "kv_indptr is torch.int64"),
        ({"kv_indptr": ints(0, 1, 2)}, "3 kv_indices, but kv_indptr ends at 2"),
        ({"pages": ints(5, 1, 8)}, r"kv_indices span 1\.\.8, but the pool has pages 0\.\.7"),
        ({"pages": ints(5, -1, 0)}, r"kv_indices span -1"),
        ({"qo_indptr": ints(0, 2, 3)}, "exactly one row an entry"),
        ({"page_size": 0}, "page_size=0: a page holds at least 1 token"),
        ({"page_size": 32}, r"page sizes \[16, 32\] in one table"),
    ],
)
def test_a_malformed_own_level_is_refused_by_value(changes, message):
    with pytest.raises(ValueError, match=message):
        own_changed(**changes).check()


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


def test_ranges_and_running_sums():
    assert ragged_arange(torch.tensor([5, 100, 7]), torch.tensor([2, 0, 3])).tolist() == [5, 6, 7, 8, 9]
    assert indptr_of([3, 0, 2]).tolist() == [0, 3, 3, 5]


def test_slots_past_2_to_the_31_do_not_wrap():
    """2^31 elements of a pool with 8 heads of 128 are 2^21 tokens; 64 of them would be 2^31 slots."""
    huge = ragged_arange(torch.tensor([2**31 - 1, 2**33]), torch.tensor([3, 2]))
    assert huge.tolist() == [2**31 - 1, 2**31, 2**31 + 1, 2**33, 2**33 + 1]
    assert KVLevel(16, ints(0, 1), ints(0, 2**28), ints(16), pages=ints()).kv_lens.tolist() == [2**32]
