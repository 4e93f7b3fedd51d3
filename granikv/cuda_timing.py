"""Clocks for work on a CUDA GPU: graph replay, as engines decode, and eager launches."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from granikv.timing import Timing

T = TypeVar("T")


class CudaClock:
    """CUDA events around the work of all rotated layers; the duration is a layer's mean.

    mode "graph"  each piece of work is captured once, and replayed in every trial.
    mode "eager"  launches as they come: where the host is slower than the device, this measures the host.
    """

    def __init__(self, timing: Timing, num_layers: int) -> None:
        self.name, self.num_layers = timing.clock, num_layers
        cold = timing.flush_bytes if timing.cache == "cold" else 0
        self._flush = torch.zeros(cold, dtype=torch.uint8, device="cuda")

    def chill(self) -> None:
        self._flush.add_(1)
        torch.cuda.synchronize()

    def host_us(self, work: Callable[[], T]) -> tuple[T, float]:
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        result = work()
        taken = (time.perf_counter_ns() - start) / 1e3
        torch.cuda.synchronize()
        return result, taken

    def device_us(self, work: Callable[[int], T], captured: dict[str, Any], key: str) -> tuple[T, float]:
        if self.name == "eager":
            return self._between_events(lambda: self._every_layer(work))
        if key not in captured:
            captured[key] = (*self._capture(work), work)  # what `work` refers to must outlive the graph
        graph, result, _ = captured[key]
        _, taken = self._between_events(graph.replay)
        return result, taken

    def _capture(self, work: Callable[[int], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of work(0), work(1), ..., and the result of work(0), whose memory the graph keeps."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, allocates workspaces and tunes outside the graph
                work(0)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self._every_layer(work)
        return graph, result

    def _every_layer(self, work: Callable[[int], T]) -> T:
        first = work(0)
        for layer in range(1, self.num_layers):
            work(layer)
        return first

    def _between_events(self, work: Callable[[], T]) -> tuple[T, float]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        result = work()
        stop.record()
        stop.synchronize()
        return result, start.elapsed_time(stop) * 1e3 / self.num_layers
