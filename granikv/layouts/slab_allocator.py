"""Contiguous ranges of different lengths from one address range: best fit, coalescing frees."""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray


class SlabAllocator:
    """Free runs of [0, size), sorted by start, never adjacent to each other."""

    def __init__(self, size: int) -> None:
        self._runs: list[tuple[int, int]] = [(0, size)] if size else []

    @property
    def num_free(self) -> int:
        return sum(length for _, length in self._runs)

    @property
    def largest(self) -> int:
        return max((length for _, length in self._runs), default=0)

    def take(self, length: int) -> int | None:
        """Start of a run of `length` from the smallest free run that holds it; None if no run does."""
        fitting = [run for run in self._runs if run[1] >= length]
        if not fitting:
            return None
        start, free = min(fitting, key=lambda run: (run[1], run[0]))
        at = bisect_left(self._runs, (start, free))
        self._runs[at : at + 1] = [(start + length, free - length)] if free > length else []
        return start

    def give(self, start: int, length: int) -> None:
        """Returns [start, start + length) and joins it with its free neighbours. ValueError if part of it is free."""
        at = bisect_left(self._runs, (start, 0))
        before = self._runs[at - 1] if at else None
        after = self._runs[at] if at < len(self._runs) else None
        if (before and sum(before) > start) or (after and start + length > after[0]):
            raise ValueError(f"slots {start}..{start + length - 1} are free already, at least in part")
        if after and after[0] == start + length:
            length += after[1]
            del self._runs[at]
        if before and sum(before) == start:
            start, length = before[0], before[1] + length
            del self._runs[at - 1]
        insort(self._runs, (start, length))

    def take_scattered(self, count: int) -> NDArray[np.int32] | None:
        """`count` single slots from the smallest runs first, so that large runs stay whole; None if too few."""
        if count > self.num_free:
            return None
        taken = []
        for start, length in sorted(self._runs, key=lambda run: (run[1], -run[0])):
            used = min(length, count)
            taken.append(np.arange(start + length - used, start + length, dtype=np.int32))
            at = bisect_left(self._runs, (start, length))
            self._runs[at : at + 1] = [(start, length - used)] if length > used else []
            count -= used
            if not count:
                break
        return np.concatenate(taken) if taken else np.empty(0, np.int32)

    def give_scattered(self, slots: NDArray[np.int32]) -> None:
        """Returns single slots, neighbours joined first."""
        ordered = np.sort(slots)
        for run in np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1):
            if len(run):
                self.give(int(run[0]), len(run))
