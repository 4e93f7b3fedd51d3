import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.tiles import FIELDS, TileShape, tile_table
from granikv.view import KVLevel, indptr_of

NAMES = {name: column for column, name in enumerate(FIELDS)}


def paged(rows, lens):
    """A page-1 level with entries of so many rows and tokens."""
    last = torch.tensor([int(n > 0) for n in lens], dtype=torch.int32)
    total = sum(lens)
    return KVLevel(1, indptr_of(rows), indptr_of(lens), last, pages=torch.arange(total, dtype=torch.int32))


def covered(table, num_rows, group_size, num_kv_heads, own_h):
    """How often each (row, query head, page index) is attended to, and each row's slots, from the tiles alone."""
    seen, slots = {}, {row: set() for row in range(num_rows)}
    for tiles, own in ((table.shared, False), (table.own, True)):
        for tile in tiles:
            head, fold, fold_end, begin, page, end, slot = (int(x) for x in tile)
            heads = range(head * own_h, (head + 1) * own_h) if own else [head]
            for kv_head in heads:
                for folded in range(fold, fold_end):
                    row, qo_head = folded // group_size, kv_head * group_size + folded % group_size
                    slots[row].add(slot)
                    for token in range(begin, end):
                        key = row, qo_head, page + token
                        seen[key] = seen.get(key, 0) + 1
    return seen, slots


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_row_and_head_attends_to_every_token_once(data):
    num_kv_heads, group_size = data.draw(st.sampled_from([(1, 1), (2, 4), (4, 5), (2, 7)]))
    groups = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 90)), min_size=1, max_size=4))
    rows, lens = [g[0] for g in groups], [g[1] for g in groups]
    own_lens = data.draw(st.lists(st.integers(0, 50), min_size=sum(rows), max_size=sum(rows)))
    own_h = data.draw(st.sampled_from([h for h in (1, 2, 4) if num_kv_heads % h == 0]))
    shape = TileShape(data.draw(st.sampled_from([16, 64, 128])), 16, own_h, 16)
    programs = data.draw(st.integers(1, 12))
    batch = sum(rows)
    slots = np.zeros(batch, np.int64)
    table = tile_table(
        [paged(rows, lens)], paged([1] * batch, own_lens), slots, num_kv_heads, group_size, shape, programs, False
    )
    seen, taken = covered(table, batch, group_size, num_kv_heads, own_h)
    group_of = np.repeat(np.arange(len(rows)), rows)
    shared_starts, own_starts = np.cumsum([0, *lens]), sum(lens) + np.cumsum([0, *own_lens])
    expected = {
        (row, head, int(page))
        for row in range(batch)
        for head in range(num_kv_heads * group_size)
        for page in (
            *range(shared_starts[group_of[row]], shared_starts[group_of[row] + 1]),
            *range(own_starts[row], own_starts[row + 1]),
        )
    }
    assert set(seen) == expected
    assert set(seen.values()) <= {1}
    assert all(taken[row] == set(range(int(table.num_slots[row]))) for row in range(batch))
    for tiles, starts in ((table.shared, table.shared_starts), (table.own, table.own_starts)):
        assert len(starts) == programs + 1
        assert starts[0] == 0
        assert starts[-1] == len(tiles)
        assert (np.diff(starts) >= 0).all()


@pytest.mark.parametrize(("batch", "prefix_len"), [(16, 16384), (64, 16384), (256, 16384), (64, 2048)])
def test_no_program_has_much_more_to_do_than_the_mean(batch, prefix_len):
    shape, programs = TileShape(128, 64, 8, 16), 132
    levels = paged([batch], [prefix_len]), paged([1] * batch, [256] * batch)
    table = tile_table([levels[0]], levels[1], np.zeros(batch, np.int64), 8, 4, shape, programs, False)
    tokens = np.zeros(programs)
    for tiles, starts, heads in ((table.shared, table.shared_starts, 1.5), (table.own, table.own_starts, 8)):
        lens = heads * (tiles[:, NAMES["kv_end"]] - tiles[:, NAMES["kv_start"]])
        tokens += [lens[a:b].sum() for a, b in itertools.pairwise(starts)]
    assert tokens.max() < 1.35 * tokens.mean()


def test_a_slab_has_slots_for_tokens_and_no_pages():
    slab = KVLevel(
        1, indptr_of([3]), indptr_of([40]), torch.ones(1, dtype=torch.int32), slab_starts=torch.tensor([700])
    )
    own = paged([1, 1, 1], [5, 6, 7])
    table = tile_table([slab], own, np.zeros(3, np.int64), 1, 4, TileShape(16, 16, 1, 16), 1, True)
    assert set(table.shared[:, NAMES["page_start"]]) == {0}
    assert table.shared[:, NAMES["kv_start"]].min() == 700
    assert table.shared[:, NAMES["kv_end"]].max() == 740
    assert table.own[:, NAMES["page_start"]].tolist() == [0, 5, 11]
