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


def filled_by(layout, tree, first=0):
    """Sequences of `tree` with tokens first, first + 1, ..., grown as FilledLayout grows them."""
    seqs = []
    for node in tree.nodes:
        prefix_len = node.num_tokens if node.shared else 0
        seqs.append(layout.allocate(prefix_len) if node.parent is None else layout.fork(seqs[node.parent], prefix_len))
        layout.append(seqs[-1], *tokens(first, node.num_tokens))
        first += node.num_tokens
    return seqs


def shown(layout, seqs):
    """Everything that a view says about `seqs`, as plain lists."""
    view = layout.view(seqs)
    levels = [
        (x.qo_indptr.tolist(), x.kv_indptr.tolist(), x.last_page_len.tolist(), x.kv_indices.tolist())
        for x in view.levels
    ]
    return levels, view.traits, None if view.order is None else view.order.tolist(), read(layout, view)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fork_copies_k_and_v_of_every_layer(name):
    """20 tokens: page 16 copies the last 4 of them, unshared_16 all."""
    layout = make_layout(name)
    layout.reserve(SPEC, Capacity(100), num_layers=2, seed=3)
    root = layout.allocate()
    slots, k = layout.grow([root], [20]), tokens(0, 20)[0]
    layout.write(0, slots, k, k + 100)
    layout.write(1, slots, k + 200, k + 300)
    flat = layout.view([layout.fork(root)]).flat()
    for pool, first in ((layout.pools[0], 0), (layout.pools[1], 200)):
        for part, offset in ((pool.k, 0), (pool.v, 100)):
            held = part[flat.kv_indices.long()].flatten(0, 1)[:20]
            assert torch.equal(held, k + first + offset)


def test_a_fork_of_a_fork_copies_the_partial_page_of_the_fork():
    """page 16: 20 tokens share 16 and copy 4; with 15 more the fork owns 19, of which its own fork copies 3."""
    layout = reserved(PagedLayout("paged_16", 16), 20)
    _, (fork,) = with_prefix(layout, 20, [15])
    second = layout.fork(fork)
    layout.append(second, *tokens(500, 1))
    assert layout.footprint().copied_tokens == 4 + 3
    assert [group.kv_len for group in layout.view([second]).prefix_groups()] == [16, 16]
    assert read(layout, layout.view([second])) == [[*range(20), *range(1000, 1015), 500]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fork_outlives_the_sequence_it_continues(name):
    layout = reserved(make_layout(name), 200, 64 if name == "slab_token" else 0)
    root, forks = with_prefix(layout, 20, [1, 2])
    layout.free(root)
    other = layout.allocate()
    layout.append(other, *tokens(500, 40))
    assert read(layout, layout.view(forks)) == [[*range(20), 1000], [*range(20), 1100, 1101]]
    with pytest.raises(ValueError, match=f"sequence {root} is not live"):
        layout.fork(root)


@pytest.mark.parametrize("own_lens", [[0, 0], [0, 3], [3, 0]], ids=str)
@pytest.mark.parametrize("prefix_len", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("name", LAYOUTS)
def test_prefixes_and_suffixes_may_be_empty(name, prefix_len, own_lens):
    layout = reserved(make_layout(name), 200, 64 if name == "slab_token" else 0)
    _, forks = with_prefix(layout, prefix_len, own_lens)
    view = layout.view(forks)
    view.check()
    expected = [[*range(prefix_len), *range(1000 + 100 * i, 1000 + 100 * i + n)] for i, n in enumerate(own_lens)]
    assert read(layout, view) == expected
    assert view.seq_lens.tolist() == [prefix_len + n for n in own_lens]
    shared = {"paged_16": prefix_len // 16 * 16, "unshared_16": 0}.get(name, prefix_len)
    assert [tuple(group) for group in view.prefix_groups()] == ([(0, 0, 0, 2, shared)] if shared else [])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_batch_without_rows_is_shown(name):
    view = reserved(make_layout(name), 8).view([])
    view.check()
    assert view.batch_size == 0


@pytest.mark.parametrize("name", SHARING)
def test_a_prefix_without_its_first_owner_still_makes_one_group(name):
    layout = reserved(make_layout(name), 200, 64 if name == "slab_token" else 0)
    root, forks = with_prefix(layout, 32, [1, 1, 1])
    layout.free(root)
    layout.free(forks[1])
    groups = [tuple(group) for group in layout.view([forks[2], forks[0]]).prefix_groups()]
    assert groups == [(0, 0, 0, 2, 32)]


@pytest.mark.parametrize("name", SHARING)
def test_equal_tokens_in_different_pages_are_not_shared(name):
    layout = reserved(make_layout(name), 200, 64 if name == "slab_token" else 0)
    first, second = with_prefix(layout, 32, [1])[1], with_prefix(layout, 32, [1])[1]
    view = layout.view(first + second)
    assert read(layout, view) == [[*range(32), 1000]] * 2
    assert [(g.row_start, g.row_end) for g in view.prefix_groups()] == [(0, 1), (1, 2)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_next_to_its_own_fork_sees_its_tokens_as_its_own(name):
    layout = reserved(make_layout(name), 200, 64 if name == "slab_token" else 0)
    root, (fork,) = with_prefix(layout, 32, [2])
    view = layout.view([root, fork])
    view.check()
    assert read(layout, view) == [list(range(32)), [*range(32), 1000, 1001]]
    assert [(g.row_start, g.row_end) for g in view.prefix_groups()] == ([] if name == "unshared_16" else [(1, 2)])


@pytest.mark.parametrize("headroom", [0, 1, 16, 17])
@pytest.mark.parametrize("tree", ["nested_prefixes", "two_groups_of_unequal_length", "all_suffixes_empty"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_capacity_of_a_tree_has_room_for_its_headroom_and_no_page_more(name, tree, headroom):
    layout, tree = make_layout(name), TREES[tree]
    layout.reserve(SPEC, layout.capacity_of(tree, headroom), seed=3)
    seqs = filled_by(layout, tree)
    rows = [seqs[number] for number in tree.requests]
    layout.grow(rows, [headroom] * len(rows))
    assert layout.footprint().free_pages == 0
    assert layout.view(rows).seq_lens.tolist() == [n + headroom for n in tree.seq_lens()]
    full = [layout.seq_len(seq) for seq in rows]
    with pytest.raises(CapacityError):
        layout.grow(rows, [layout.page_size] * len(rows))
    assert [layout.seq_len(seq) for seq in rows] == full


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_page_less_than_the_capacity_of_a_tree_is_too_few(name):
    layout, tree = make_layout(name), TREES["two_groups_of_unequal_length"]
    exact = layout.capacity_of(tree)
    layout.reserve(SPEC, Capacity(exact.pages - 1, exact.hot_pages), seed=3)
    with pytest.raises(CapacityError):
        filled_by(layout, tree)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_does_not_fit_changes_no_view_and_no_page(name):
    layout = reserved(make_layout(name), 8 if "16" in name else 60, 20 if name == "slab_token" else 0)
    _, forks = with_prefix(layout, 20, [3, 5])
    other = layout.allocate()
    layout.append(other, *tokens(500, 2))
    rows = [forks[1], other, forks[0]]
    before = layout.footprint(), shown(layout, rows)
    for seqs, counts in (([other], [500]), ([forks[0], other, forks[1]], [1, 500, 1]), (rows, [40, 40, 40])):
        with pytest.raises(CapacityError):
            layout.grow(seqs, counts)
        assert (layout.footprint(), shown(layout, rows)) == before
    free = layout.footprint().free_pages
    last = layout.allocate()
    layout.append(last, *tokens(700, free * layout.page_size))
    assert layout.footprint().free_pages == 0
    assert shown(layout, rows) == before[1]
    assert read(layout, layout.view([last])) == [list(range(700, 700 + free * layout.page_size))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_shrink_keeps_what_a_fork_copied_and_refuses_less_than_nothing(name):
    layout = reserved(make_layout(name), 200, 64 if name == "slab_token" else 0)
    root, (fork,) = with_prefix(layout, 20, [3])
    layout.shrink(fork, 3)
    with pytest.raises(ValueError, match=f"shrink by 1: sequence {fork} has 0 tokens of its own"):
        layout.shrink(fork, 1)
    with pytest.raises(ValueError, match="shrink by -1"):
        layout.shrink(fork, -1)
    assert read(layout, layout.view([fork])) == [list(range(20))]
    layout.free(fork)
    layout.shrink(root, 20)
    with pytest.raises(ValueError, match="shrink by 1"):
        layout.shrink(root, 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_shrink_returns_whole_pages_and_grow_takes_them_again(name):
    layout = reserved(make_layout(name), 4 if "16" in name else 64, 0)
    seq = layout.allocate()
    layout.append(seq, *tokens(0, 64))
    assert layout.footprint().free_pages == 0
    layout.shrink(seq, 17)
    assert layout.footprint().free_pages == (1 if "16" in name else 17)
    layout.append(seq, *tokens(800, 17))
    assert read(layout, layout.view([seq])) == [[*range(47), *range(800, 817)]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sequence_that_never_was_is_refused(name):
    layout = reserved(make_layout(name), 8)
    for use in (
        layout.fork,
        layout.free,
        layout.seq_len,
        lambda seq: layout.grow([seq], [1]),
        lambda s: layout.view([s]),
    ):
        with pytest.raises(ValueError, match="sequence 7 is not live: it was freed or never allocated"):
            use(7)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_prefix_of_less_than_nothing_is_refused(name):
    layout = reserved(make_layout(name), 8)
    with pytest.raises(ValueError, match="prefix_len=-1: must be at least 0"):
        layout.allocate(-1)


def test_a_slab_that_does_not_fit_leaves_its_parent_as_it_was():
    layout = reserved(SlabTokenLayout("slab_token"), 30, 20)
    root, _ = with_prefix(layout, 12, [])
    before = layout.footprint()
    for start in (lambda: layout.allocate(9), lambda: layout.fork(root, 9)):
        with pytest.raises(
            CapacityError, match="a slab of 9 tokens does not fit: HOT has 8 of 20 tokens free, 8 in one"
        ):
            start()
        assert layout.footprint() == before
    layout.shrink(root, 1)  # not frozen: it has no fork
    layout.fork(root, 8)


def test_a_full_pool_of_tokens_says_what_is_free_in_cold_and_in_hot():
    layout = reserved(SlabTokenLayout("slab_token"), 30, 20)
    layout.allocate(12)
    seq = layout.allocate()
    layout.grow([seq], [7])
    with pytest.raises(CapacityError, match="12 tokens asked for, 3 free in COLD, 8 in HOT"):
        layout.grow([seq], [12])
    layout.grow([seq], [11])
    assert layout.footprint().free_pages == 0


def test_shrinking_a_spilled_sequence_gives_hot_back():
    layout = reserved(SlabTokenLayout("slab_token"), 30, 20)
    seq = layout.allocate()
    layout.grow([seq], [14])
    layout.shrink(seq, 3)
    footprint = layout.footprint()
    assert (footprint.spilled_pages, footprint.hot_free_pages, footprint.free_pages) == (1, 19, 19)
    layout.shrink(seq, 2)
    footprint = layout.footprint()
    assert (footprint.spilled_pages, footprint.hot_free_pages, footprint.free_pages) == (0, 20, 21)


def test_a_slab_stays_whole_until_it_is_freed():
    """10 announced, 4 held: 6 slots of 32 bytes wait; 12 held: the last 2 are scattered, so the prefix is not dense."""
    layout = reserved(SlabTokenLayout("slab_token"), 60, 40)
    root = layout.allocate(10)
    assert layout.footprint().internal_waste_bytes == 10 * 32
    layout.append(root, *tokens(0, 4))
    assert (layout.footprint().used_bytes, layout.footprint().internal_waste_bytes) == (4 * 32, 6 * 32)
    layout.append(root, *tokens(4, 8))
    assert (layout.footprint().hot_free_pages, layout.footprint().free_pages) == (30, 48)
    for count, dense in ((0, False), (2, True), (10, True)):
        layout.shrink(root, count)
        fork = layout.fork(root)
        assert (Trait.DENSE_PREFIX in layout.view([fork]).traits) == dense
        assert read(layout, layout.view([fork])) == [list(range(layout.seq_len(root)))]
        layout.free(fork)
    assert (layout.seq_len(root), layout.footprint().hot_free_pages) == (0, 30)
    layout.free(root)
    assert layout.footprint().hot_free_pages == 40


def test_slabs_at_both_levels_are_dense_and_one_unannounced_level_ends_it():
    layout = reserved(SlabTokenLayout("slab_token"), 100, 60)
    root, _ = with_prefix(layout, 20, [])
    announced, not_announced = layout.fork(root, 7), layout.fork(root)
    rows = []
    for middle in (announced, not_announced):
        layout.append(middle, *tokens(100, 7))
        rows.append(layout.fork(middle))
        layout.append(rows[-1], *tokens(200, 1))
    view = layout.view(rows[:1])
    view.check()
    assert Trait.DENSE_PREFIX in view.traits
    for level, first, length in ((0, 0, 20), (1, 100, 7)):
        start = int(view.levels[level].slab_starts[0])
        assert layout.pools[0].k.view(-1, 4)[start : start + length, 0].tolist() == list(range(first, first + length))
    both = layout.view(rows)
    both.check()
    assert Trait.DENSE_PREFIX not in both.traits
    assert both.levels[1].slab_starts is None
    assert read(layout, both) == [[*range(20), *range(100, 107), 200]] * 2


def test_the_slice_of_a_slab_begins_inside_the_pool_itself():
    layout = reserved(SlabTokenLayout("slab_token"), 60, 40)
    with_prefix(layout, 5, [])
    _, forks = with_prefix(layout, 30, [2])
    start = int(layout.view(forks).levels[0].slab_starts[0])
    assert start == 5
    for pool in layout.pools[0]:
        kept = pool.view(-1, 1, 4)[start : start + 30]
        assert kept.is_contiguous()
        assert kept.data_ptr() == pool.data_ptr() + 5 * 16
        kept[0] = -1.0
        assert pool[5, 0, 0, 0] == -1.0


def test_a_new_slab_in_the_place_of_an_old_one_holds_the_new_tokens():
    layout = reserved(SlabTokenLayout("slab_token"), 30, 10)
    root, (fork,) = with_prefix(layout, 10, [3])
    with pytest.raises(CapacityError):
        layout.allocate(10)
    layout.free(root)
    with pytest.raises(CapacityError):  # the fork still reads the slab
        layout.allocate(10)
    layout.free(fork)
    again = layout.allocate(10)
    layout.append(again, *tokens(500, 10))
    assert read(layout, layout.view([layout.fork(again)])) == [list(range(500, 510))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_slot_without_a_token_keeps_the_unowned_value(name):
    layout = reserved(make_layout(name), 200, 64 if name == "slab_token" else 0)
    with_prefix(layout, 20, [3, 5])
    written = 20 + 8 + layout.footprint().copied_tokens
    for pool in layout.pools[0]:
        assert int((pool != UNOWNED_VALUE).sum()) == written * 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_are_shuffled_the_same_way_for_the_same_seed(name):
    def pages(seed):
        layout = make_layout(name)
        layout.reserve(SPEC, Capacity(30), seed=seed)
        seq = layout.allocate()
        layout.grow([seq], [8 * layout.page_size])
        return layout.view([seq]).levels[0].kv_indices.tolist()

    assert pages(1) == pages(1) != pages(2)
    assert pages(1) != sorted(pages(1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_grown_slots_are_where_the_view_finds_the_tokens(name):
    layout = reserved(make_layout(name), 12, 0)
    seqs = [layout.allocate() for _ in range(3)]
    layout.grow(seqs, [2, 0, 1])
    slots = layout.grow([seqs[2], seqs[0]], [3, 2])
    assert slots.dtype == torch.int64
    values = torch.arange(5, dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, 4).contiguous()
    layout.write(0, slots, values, values)
    held = read(layout, layout.view(seqs))
    assert held[2][1:] == [0, 1, 2]
    assert held[0][2:] == [3, 4]
    assert [len(row) for row in held] == [4, 0, 4]
