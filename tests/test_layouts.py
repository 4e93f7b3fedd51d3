import pytest
import torch
from conftest import LAYOUTS, TREES, filled, make_layout

from granikv.layouts.base import UNOWNED_VALUE, Capacity, CapacityError
from granikv.layouts.paged import PagedLayout
from granikv.layouts.slab_token import SlabTokenLayout
from granikv.layouts.unshared import UnsharedLayout
from granikv.spec import AttentionSpec
from granikv.tree import two_level
from granikv.view import Trait

SPEC = AttentionSpec(2, 1, 4)
SHARING = [name for name in LAYOUTS if name != "unshared_16"]


def reserved(layout, pages, hot_pages=0):
    layout.reserve(SPEC, Capacity(pages, hot_pages), seed=3)
    return layout


def tokens(first, count):
    """K and V whose every element is the token's number."""
    values = torch.arange(first, first + count, dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, 4).contiguous()
    return values, values


def read(layout, view):
    """Token numbers of each row, in batch order, as a kernel would find them."""
    flat, keys = view.flat(), layout.pools[0].k
    rows = []
    for i, kv_len in enumerate(flat.kv_lens.tolist()):
        pages = flat.kv_indices[int(flat.kv_indptr[i]) : int(flat.kv_indptr[i + 1])].long()
        rows.append([int(x) for x in keys[pages].flatten(0, 1)[:kv_len, 0, 0]])
    order = range(len(rows)) if view.order is None else view.order.tolist()
    return [row for _, row in sorted(zip(order, rows))]


def with_prefix(layout, prefix_len, own_lens):
    """A prefix of tokens 0, 1, ... and forks of it with tokens 1000 + 100 i + j."""
    root = layout.allocate(prefix_len)
    layout.append(root, *tokens(0, prefix_len))
    forks = []
    for i, own_len in enumerate(own_lens):
        forks.append(layout.fork(root))
        layout.append(forks[-1], *tokens(1000 + 100 * i, own_len))
    return root, forks


@pytest.mark.parametrize(
    ("layout", "copied"),
    [
        (PagedLayout("paged_16", 16), 4),
        (PagedLayout("paged_1", 1), 0),
        (SlabTokenLayout("slab_token"), 0),
        (UnsharedLayout("unshared_16", 16), 100),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_fork_copies_only_the_partial_page(layout, copied):
    reserved(layout, 400, 200 if layout.name == "slab_token" else 0)
    _, forks = with_prefix(layout, 100, [3, 5])
    assert layout.footprint().copied_tokens == 2 * copied
    view = layout.view(forks)
    view.check()
    expected = [list(range(100)) + list(range(1000 + 100 * i, 1000 + 100 * i + n)) for i, n in enumerate((3, 5))]
    assert read(layout, view) == expected


@pytest.mark.parametrize(("prefix_len", "shared", "copied"), [(15, 0, 15), (16, 16, 0), (17, 16, 1), (0, 0, 0)])
def test_page_16_shares_whole_pages_only(prefix_len, shared, copied):
    layout = reserved(PagedLayout("paged_16", 16), 20)
    _, forks = with_prefix(layout, prefix_len, [2, 2])
    assert layout.footprint().copied_tokens == 2 * copied
    groups = list(layout.view(forks).prefix_groups())
    assert [group.kv_len for group in groups] == ([shared] if shared else [])


@pytest.mark.parametrize("name", SHARING)
def test_interleaved_rows_of_two_prefixes_become_neighbours(name):
    tree = two_level([(32, [1, 2, 3]), (48, [4, 5])])
    held = filled(name, tree)
    rows = [held.rows[i] for i in (0, 3, 1, 4, 2)]
    view = held.layout.view(rows)
    view.check()
    assert view.order.tolist() == [0, 2, 4, 1, 3]
    assert [(g.row_start, g.row_end, g.kv_len) for g in view.prefix_groups()] == [(0, 3, 32), (3, 5, 48)]


@pytest.mark.parametrize("name", SHARING)
def test_32_requests_of_one_prompt_and_18_of_another_are_two_groups(name):
    held = filled(name, two_level([(64, [3] * 32), (64, [3] * 18)]))
    groups = [(g.row_end - g.row_start, g.kv_len) for g in held.layout.view(held.rows).prefix_groups()]
    assert groups == [(32, 64), (18, 64)]


@pytest.mark.parametrize("name", SHARING)
def test_sharing_is_by_page_identity_not_by_reference_count(name):
    """8 of 15 requests share a prefix, 7 of those finish: nobody else is drawn into its group."""
    held = filled(name, two_level([(256, [4] * 8), (0, [300] * 7)]))
    for row in held.rows[:7]:
        held.layout.free(row)
    view = held.layout.view(held.rows[7:])
    assert [(g.row_start, g.row_end, g.kv_len) for g in view.prefix_groups()] == [(0, 1, 256)]
    assert view.seq_lens.tolist() == [260] + [300] * 7


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_the_capacity_of_a_tree_holds_exactly_that_tree(name, tree):
    held = filled(name, TREES[tree])
    footprint = held.layout.footprint()
    assert footprint.free_pages == 0
    assert footprint.reserved_bytes == held.layout.pool_bytes(held.logical.spec, held.layout.capacity)


@pytest.mark.parametrize("name", LAYOUTS)
def test_freeing_everything_returns_every_page_in_any_order(name):
    held = filled(name, TREES["nested_prefixes"])
    everything = [*held.rows, *(seq for seq in held.layout._sequences if seq not in held.rows)]
    for seq in sorted(everything, key=lambda seq: seq * 7 % 11):
        held.layout.free(seq)
    footprint = held.layout.footprint()
    assert footprint.free_pages == held.layout.capacity.pages
    assert footprint.used_bytes == footprint.internal_waste_bytes == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sequence_is_freed_once(name):
    layout = reserved(make_layout(name), 8)
    seq = layout.allocate()
    layout.free(seq)
    with pytest.raises(ValueError, match=f"sequence {seq} is not live"):
        layout.free(seq)
    with pytest.raises(ValueError, match="not live"):
        layout.view([seq])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_forked_sequence_is_frozen_until_its_forks_are_gone(name):
    layout = reserved(make_layout(name), 200, 64 if name == "slab_token" else 0)
    root, forks = with_prefix(layout, 20, [1, 1])
    for change in (lambda: layout.grow([root], [1]), lambda: layout.shrink(root, 1)):
        with pytest.raises(ValueError, match=r"has 2 forks, so its tokens are frozen"):
            change()
    for fork in forks:
        layout.free(fork)
    layout.append(root, *tokens(20, 2))
    assert read(layout, layout.view([root])) == [list(range(22))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_shrink_takes_back_only_own_tokens(name):
    layout = reserved(make_layout(name), 200, 64 if name == "slab_token" else 0)
    _, (fork,) = with_prefix(layout, 20, [3])
    with pytest.raises(ValueError, match="shrink by 4"):
        layout.shrink(fork, 4)
    layout.shrink(fork, 2)
    assert read(layout, layout.view([fork])) == [[*range(20), 1000]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_grow_names_each_sequence_once(name):
    layout = reserved(make_layout(name), 8)
    seq = layout.allocate()
    with pytest.raises(ValueError, match="name each sequence once"):
        layout.grow([seq, seq], [1, 1])
    with pytest.raises(ValueError, match="count of at least 0"):
        layout.grow([seq], [-1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_full_pool_refuses_and_changes_nothing(name):
    layout = reserved(make_layout(name), 3 if "16" in name else 48, 0)
    seqs = [layout.allocate() for _ in range(2)]
    layout.grow(seqs, [20, 10])
    before = layout.footprint(), [layout.seq_len(seq) for seq in seqs]
    with pytest.raises(CapacityError, match=r"Fix: free sequences or reserve a larger pool"):
        layout.grow(seqs, [1, 40])
    assert (layout.footprint(), [layout.seq_len(seq) for seq in seqs]) == before


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fork_that_does_not_fit_changes_nothing(name):
    layout = reserved(make_layout(name), 2 if "16" in name else 20, 0)
    root = layout.allocate()
    layout.append(root, *tokens(0, 20))
    if name in ("paged_1", "slab_token"):
        layout.fork(root)  # copies nothing, so it always fits
        return
    before = layout.footprint()
    with pytest.raises(CapacityError):
        layout.fork(root)
    assert layout.footprint() == before
    layout.shrink(root, 1)


def test_a_full_hot_region_says_what_is_free_and_what_spilled():
    layout = reserved(SlabTokenLayout("slab_token"), 30, 20)
    layout.allocate(12)
    spill = layout.allocate()
    layout.grow([spill], [13])
    with pytest.raises(CapacityError, match=r"a slab of 6 tokens.*5 of 20 tokens free, 5 in one run \(3 hold spilled"):
        layout.allocate(6)


def test_cold_spills_into_free_hot_space_and_gives_it_back():
    layout = reserved(SlabTokenLayout("slab_token"), 30, 20)
    seq = layout.allocate()
    layout.append(seq, *tokens(0, 14))
    footprint = layout.footprint()
    assert (footprint.spilled_pages, footprint.hot_free_pages, footprint.free_pages) == (4, 16, 16)
    assert read(layout, layout.view([seq])) == [list(range(14))]
    layout.free(seq)
    footprint = layout.footprint()
    assert (footprint.spilled_pages, footprint.hot_free_pages) == (0, 20)
    layout.allocate(20)


def test_a_slab_is_a_zero_copy_slice_of_the_pool():
    layout = reserved(SlabTokenLayout("slab_token"), 60, 40)
    _, forks = with_prefix(layout, 30, [2, 2])
    view = layout.view(forks)
    assert Trait.DENSE_PREFIX in view.traits
    start = int(view.levels[0].slab_starts[0])
    keys = layout.pools[0].k.view(-1, 1, 4)[start : start + 30]
    assert keys[:, 0, 0].tolist() == list(range(30))
    assert keys.untyped_storage().data_ptr() == layout.pools[0].k.untyped_storage().data_ptr()
    assert len(layout.pools) == 1


def test_a_prefix_that_was_not_announced_is_not_dense():
    layout = reserved(SlabTokenLayout("slab_token"), 60, 40)
    root = layout.allocate()
    layout.append(root, *tokens(0, 20))
    assert Trait.DENSE_PREFIX not in layout.view([layout.fork(root)]).traits


@pytest.mark.parametrize("name", LAYOUTS)
def test_slots_that_nobody_owns_hold_a_value_that_fails_the_gate(name):
    layout = reserved(make_layout(name), 8)
    assert all((pool == UNOWNED_VALUE).all() for pool in layout.pools[0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_reused_pages_hold_the_new_tokens(name):
    layout = reserved(make_layout(name), 4 if "16" in name else 40, 0)
    first = layout.allocate()
    layout.append(first, *tokens(0, 30))
    layout.free(first)
    second, third = layout.allocate(), layout.allocate()
    layout.append(second, *tokens(500, 18))
    layout.append(third, *tokens(700, 16))
    assert read(layout, layout.view([third, second])) == [list(range(700, 716)), list(range(500, 518))]


@pytest.mark.parametrize("page_size", [0, -1, 2.5, "16"])
def test_a_page_size_that_is_no_count_is_refused(page_size):
    with pytest.raises(ValueError, match=f"page_size={page_size!r}.*Fix: page_size=16"):
        PagedLayout("paged", page_size)


def test_any_whole_page_size_works():
    layout = reserved(PagedLayout("paged_3", 3), 20)
    _, forks = with_prefix(layout, 10, [4, 1])
    assert read(layout, layout.view(forks)) == [[*range(10), 1000, 1001, 1002, 1003], [*range(10), 1100]]
    assert layout.footprint().copied_tokens == 2


def test_a_layout_is_reserved_once_and_hot_is_part_of_the_pool():
    layout = reserved(SlabTokenLayout("slab_token"), 8, 8)
    with pytest.raises(ValueError, match="reserved already"):
        reserved(layout, 8)
    with pytest.raises(ValueError, match="hot_pages=9 of 8 pages"):
        reserved(SlabTokenLayout("slab_token"), 8, 9)


def test_what_a_shared_prefix_costs_in_memory():
    """100 shared tokens and 4 own ones for each of 10 requests, in slots of 32 bytes."""
    tree = two_level([(100, [4] * 10)])
    waste, copied = {}, {}
    for name in ("paged_16", "paged_1", "slab_token", "unshared_16"):
        footprint = filled(name, tree, SPEC).layout.footprint()
        waste[name], copied[name] = footprint.internal_waste_bytes // 32, footprint.copied_tokens
    assert copied == {"paged_16": 40, "paged_1": 0, "slab_token": 0, "unshared_16": 1000}
    assert waste == {"paged_16": 12 + 10 * 8, "paged_1": 0, "slab_token": 0, "unshared_16": 12 + 10 * 8}
