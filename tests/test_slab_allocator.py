import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.layouts.slab_allocator import SlabAllocator

SIZE = 40


def test_the_smallest_run_that_fits_is_taken():
    allocator = SlabAllocator(20)
    starts = [allocator.take(n) for n in (6, 1, 3, 1, 9)]
    allocator.give(starts[0], 6)
    allocator.give(starts[2], 3)
    assert allocator.take(3) == starts[2]
    assert allocator.take(2) == starts[0]


def test_frees_join_their_neighbours_whatever_the_order():
    allocator = SlabAllocator(9)
    starts = [allocator.take(3) for _ in range(3)]
    for index in (0, 2, 1):
        allocator.give(starts[index], 3)
    assert allocator.largest == 9
    assert allocator.take(9) == 0


def test_what_is_free_cannot_be_freed_again():
    allocator = SlabAllocator(10)
    start = allocator.take(4)
    allocator.give(start, 4)
    with pytest.raises(ValueError, match="free already"):
        allocator.give(start, 4)
    with pytest.raises(ValueError, match="free already"):
        allocator.give(start + 2, 1)


def test_scattered_slots_come_from_small_runs_so_that_large_ones_stay_whole():
    allocator = SlabAllocator(20)
    starts = [allocator.take(n) for n in (2, 3, 15)]
    allocator.give(starts[0], 2)
    allocator.give(starts[2], 15)
    assert sorted(allocator.take_scattered(2)) == [0, 1]
    assert allocator.largest == 15
    assert allocator.take_scattered(16) is None
    assert allocator.num_free == 15


def test_of_equal_runs_the_first_is_taken():
    allocator = SlabAllocator(12)
    starts = [allocator.take(n) for n in (3, 1, 3, 1, 4)]
    allocator.give(starts[2], 3)
    allocator.give(starts[0], 3)
    assert [allocator.take(2), allocator.take(1)] == [0, 2]


def test_a_range_is_refused_whole_if_any_end_of_it_is_free():
    allocator = SlabAllocator(10)
    allocator.take(10)
    allocator.give(4, 2)
    for start, length in [(3, 2), (5, 2), (4, 1), (5, 1), (2, 8), (4, 2)]:
        with pytest.raises(ValueError, match=rf"slots {start}\.\.{start + length - 1} are free already"):
            allocator.give(start, length)
        assert (allocator.num_free, allocator.largest) == (2, 2)
    allocator.give(6, 4)
    allocator.give(0, 4)
    assert allocator.largest == 10


def test_scattered_slots_go_back_in_any_order_and_join_their_neighbours():
    allocator = SlabAllocator(8)
    slots = allocator.take_scattered(8)
    assert slots.dtype == np.int32
    allocator.give_scattered(slots[[5, 0, 7, 2]])
    assert allocator.num_free == 4
    allocator.give_scattered(slots[[6, 1, 4, 3]])
    assert (allocator.num_free, allocator.largest) == (8, 8)
    with pytest.raises(ValueError, match="free already"):
        allocator.give_scattered(slots[:1])


def test_nothing_can_be_taken_from_nothing():
    allocator = SlabAllocator(0)
    assert (allocator.num_free, allocator.largest) == (0, 0)
    assert allocator.take(1) is None
    assert allocator.take_scattered(1) is None
    assert len(allocator.take_scattered(0)) == 0
    allocator.give_scattered(np.empty(0, np.int32))
    assert allocator.num_free == 0


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_it_agrees_with_a_bitmap(data):
    allocator, free, held = SlabAllocator(SIZE), np.ones(SIZE, bool), []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["take", "take", "scattered", "give", "give", "give twice"]))
        count, runs = data.draw(st.integers(1, 12)), free_runs(free)
        if action == "give" and held:
            slots, contiguous = held.pop(data.draw(st.integers(0, len(held) - 1)))
            if contiguous:
                allocator.give(int(slots[0]), len(slots))
            else:
                allocator.give_scattered(data.draw(st.permutations(slots)))
            free[slots] = True
        elif action == "give twice":
            start = data.draw(st.integers(0, SIZE - count))
            if free[start : start + count].any():
                with pytest.raises(ValueError, match="free already"):
                    allocator.give(start, count)
        elif action == "take":
            start = allocator.take(count)
            fitting = [(length, begin) for begin, length in runs if length >= count]
            assert start == (min(fitting)[1] if fitting else None)
            if fitting:
                slots = np.arange(start, start + count)
                free[slots] = False
                held.append((slots, True))
        elif action == "scattered":
            slots = allocator.take_scattered(count)
            assert (slots is None) == (free.sum() < count)
            if slots is not None:
                assert len(set(slots.tolist())) == len(slots) == count
                assert free[slots].all()
                free[slots] = False
                assert whole(free_runs(free)) == whole_after(runs, count)
                held.append((slots, False))
        assert allocator._runs == free_runs(free)
        assert allocator.num_free == free.sum()
        assert allocator.largest == max((length for _, length in free_runs(free)), default=0)


def free_runs(free):
    """(start, length) of every maximal free run: what coalescing must leave."""
    edges = np.flatnonzero(np.diff(np.r_[0, free.astype(int), 0]))
    return [(int(begin), int(end - begin)) for begin, end in edges.reshape(-1, 2)]


def whole(runs):
    return sorted(length for _, length in runs)


def whole_after(runs, count):
    """Lengths of the runs that remain if `count` slots come out of the smallest ones."""
    lengths = whole(runs)
    while count:
        used = min(count, lengths[0])
        count, lengths[0] = count - used, lengths[0] - used
        lengths = [length for length in lengths if length]
    return sorted(lengths)
