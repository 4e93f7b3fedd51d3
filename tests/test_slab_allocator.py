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


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_agrees_with_a_bitmap(data):
    allocator, free, held = SlabAllocator(SIZE), np.ones(SIZE, bool), []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["take", "scattered", "give"]))
        count = data.draw(st.integers(1, 12))
        if action == "give" and held:
            slots, contiguous = held.pop(data.draw(st.integers(0, len(held) - 1)))
            if contiguous:
                allocator.give(int(slots[0]), len(slots))
            else:
                allocator.give_scattered(slots)
            free[slots] = True
        elif action == "take":
            start = allocator.take(count)
            assert (start is None) == (longest_run(free) < count)
            if start is not None:
                slots = np.arange(start, start + count)
                assert free[slots].all()
                free[slots] = False
                held.append((slots, True))
        elif action == "scattered":
            slots = allocator.take_scattered(count)
            assert (slots is None) == (free.sum() < count)
            if slots is not None:
                assert len(set(slots)) == count
                assert free[slots].all()
                free[slots] = False
                held.append((slots, False))
        assert allocator.num_free == free.sum()
        assert allocator.largest == longest_run(free)


def longest_run(free):
    longest = run = 0
    for one in free:
        run = run + 1 if one else 0
        longest = max(longest, run)
    return longest
