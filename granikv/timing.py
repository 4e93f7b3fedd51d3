"""Clocks, cache regime and the order of measurements."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

T = TypeVar("T")

LEAST_ROTATED = 4
"""Layers that a cold measurement on a GPU visits at least."""


class CellTimeout(Exception):
    """A cell used up its time limit."""


@dataclass(frozen=True)
class Timing:
    """How a block is timed.

    trials, warmup   measured and unmeasured passes over all cells.
    clock            "cpu"; on a GPU "graph" (CUDA graph replay) or "eager" (launches as they come).
    order            "interleaved": every trial visits all cells, in a fresh random order. "sequential": all trials of a
                     cell, then the next cell's; for the audit alone, since drift then falls on some cells only.
    cache            "cold": `flush_bytes` are overwritten before each timed operator, so that no KV is left in the last
                     level of cache; "warm": nothing is done.
                     On a GPU the timed work also rotates over the KV of several layers.
    num_layers       layers that share one plan: host work of a step is charged to each layer as 1 / num_layers.
    cell_timeout_s   limit for one cell's warm-up and gate, and for all its trials together.
    """

    trials: int
    warmup: int
    clock: str
    order: str
    cache: str
    flush_bytes: int
    num_layers: int
    cell_timeout_s: float
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("warmup", 1), ("num_layers", 1), ("flush_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"timing.{name}={value!r}: a whole number of at least {least}. Fix: timing.{name}={least}"
                )
        if self.clock not in ("cpu", "graph", "eager"):
            raise ValueError(f"device.clock={self.clock!r}: cpu, graph or eager. Fix: device.clock=graph")
        if self.order not in ("interleaved", "sequential"):
            raise ValueError(f"timing.order={self.order!r}: interleaved or sequential. Fix: timing.order=interleaved")
        if self.cache not in ("cold", "warm"):
            raise ValueError(f"timing.cache={self.cache!r}: cold or warm. Fix: timing.cache=cold")
        if not self.cell_timeout_s > 0:
            raise ValueError(f"timing.cell_timeout_s={self.cell_timeout_s!r}: above 0. Fix: timing.cell_timeout_s=120")

    def rotated_layers(self, layer_bytes: int) -> int:
        """Layers whose KV is visited in turn: enough to displace the cache twice, as many as the model has at most."""
        if self.clock == "cpu" or self.cache == "warm":
            return 1
        return min(self.num_layers, max(LEAST_ROTATED, -(-2 * self.flush_bytes // max(1, layer_bytes)) + 1))

    def schedule(self, num_cells: int) -> Iterator[tuple[int, int, int]]:
        """(repetition, position, cell) of all warm-ups and trials; warm-ups are the first repetitions of a cell."""
        rng = np.random.default_rng(self.seed)
        repetitions = self.warmup + self.trials
        if self.order == "interleaved":
            for repetition in range(repetitions):
                for position, cell in enumerate(rng.permutation(num_cells)):
                    yield repetition, position, int(cell)
        else:
            for position, cell in enumerate(rng.permutation(num_cells)):
                for repetition in range(repetitions):
                    yield repetition, position, int(cell)


class Clock(Protocol):
    """Host work and device work, timed apart.

    name            as records show it: cpu, graph or eager.
    num_layers      layers over which device work rotates, so that no layer finds its KV in the cache.
    """

    name: str
    num_layers: int

    def chill(self) -> None:
        """Evicts KV from the cache where the regime is cold."""
        ...

    def host_us(self, work: Callable[[], T]) -> tuple[T, float]:
        """The result of `work` and its duration on the host."""
        ...

    def device_us(self, work: Callable[[int], T], captured: dict[str, Any], key: str) -> tuple[T, float]:
        """The result of work(0), and the mean duration of work(layer) over the layers.

        A clock that replays graphs keeps them in `captured` under `key`; the caller clears it when `work` changes.
        """
        ...


class CpuClock:
    """Host wall clock. Work on the CPU is synchronous, so start and stop need no barrier."""

    name = "cpu"
    num_layers = 1

    def __init__(self, timing: Timing) -> None:
        self._flush = torch.zeros(timing.flush_bytes if timing.cache == "cold" else 0, dtype=torch.uint8)

    def chill(self) -> None:
        self._flush.add_(1)

    def host_us(self, work: Callable[[], T]) -> tuple[T, float]:
        start = time.perf_counter_ns()
        result = work()
        return result, (time.perf_counter_ns() - start) / 1e3

    def device_us(self, work: Callable[[int], T], captured: dict[str, Any], key: str) -> tuple[T, float]:
        return self.host_us(lambda: work(0))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises CellTimeout inside the block once `seconds` have passed, as soon as the interpreter gets control.

    Signals reach only the main thread; elsewhere the block is not limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: object) -> None:
        raise CellTimeout(f"over {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
