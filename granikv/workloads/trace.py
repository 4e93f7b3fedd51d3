"""trace: a batch cut from a Mooncake-format request trace; the prefix groups are the ones its requests really share.

A line is {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one id per 512-token block]}.
Equal leading ids are a shared prefix (Qin et al., FAST 2025).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from granikv.tree import ContextTree, Node
from granikv.workloads.base import Workload, require

BLOCK_LEN = 512
REPOSITORY = Path(__file__).resolve().parents[2]


class TraceRequest(NamedTuple):
    """One line of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True)
class TraceWorkload(Workload):
    """`batch_size` consecutive requests from line `start` (counted from 0), caught in the middle of decoding.

    length_scale  multiplies every length, so that a small machine can hold the batch; sharing is unchanged.
    progress      fraction of its output that each request has generated so far.
    path          relative to the current folder, or else to the repository.
    """

    path: str
    batch_size: int
    start: int = 0
    length_scale: float = 1.0
    progress: float = 0.5

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"workload.batch_size={self.batch_size}", "at least 1", "workload.batch_size=16")
        require(self.start >= 0, f"workload.start={self.start}", "at least 0", "workload.start=0")
        require(
            0 < self.length_scale <= 1,
            f"workload.length_scale={self.length_scale}",
            "above 0, at most 1",
            "workload.length_scale=0.25",
        )
        require(0 <= self.progress <= 1, f"workload.progress={self.progress}", "from 0 to 1", "workload.progress=0.5")

    def tree(self) -> ContextTree:
        path = Path(self.path)
        requests = read_trace(path if path.exists() else REPOSITORY / path, self.start, self.batch_size)
        nodes: list[Node] = []
        self._add_group(requests, 0, None, nodes)
        return ContextTree(tuple(nodes))

    def _add_group(self, requests: list[TraceRequest], depth: int, parent: int | None, nodes: list[Node]) -> None:
        """Nodes for requests that agree on their first `depth` blocks: sharers of the next block together."""
        by_next: dict[int | None, list[TraceRequest]] = {}
        for request in requests:
            by_next.setdefault(request.hash_ids[depth] if depth < len(request.hash_ids) else None, []).append(request)
        for block, sharers in by_next.items():
            if block is None or len(sharers) == 1:
                nodes += [Node(parent, self._own_len(request, depth), False) for request in sharers]
                continue
            end = _common_depth(sharers, depth)
            tokens = min(min(request.input_length for request in sharers), end * BLOCK_LEN) - depth * BLOCK_LEN
            nodes.append(Node(parent, self._scaled(tokens), True))
            self._add_group(sharers, end, len(nodes) - 1, nodes)

    def _own_len(self, request: TraceRequest, depth: int) -> int:
        unshared = max(0, request.input_length - depth * BLOCK_LEN)
        return self._scaled(unshared + max(1, round(request.output_length * self.progress)))

    def _scaled(self, tokens: int) -> int:
        return max(1, round(tokens * self.length_scale))


def read_trace(path: Path, start: int, count: int) -> list[TraceRequest]:
    """`count` requests from line `start`. ValueError, naming file, line and fix, for what is not the format."""
    if not path.is_file():
        raise ValueError(
            f"workload.path={path}: no such file. "
            f"Fix: workload.path=TRACE.jsonl, absolute or relative to the current folder"
        )
    requests = []
    with path.open() as lines:
        for number, line in enumerate(lines):
            if number >= start + count:
                break
            if number >= start:
                requests.append(_parse(line, f"{path}:{number + 1}"))
    if len(requests) < count:
        raise ValueError(
            f"{path}: {len(requests)} requests from line {start}, but workload.batch_size={count}. "
            f"Fix: workload.batch_size={max(1, len(requests))} or a smaller workload.start"
        )
    return requests


def _parse(line: str, where: str) -> TraceRequest:
    try:
        fields = json.loads(line)
        request = TraceRequest(
            float(fields["timestamp"]),
            int(fields["input_length"]),
            int(fields["output_length"]),
            tuple(map(int, fields["hash_ids"])),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: not a request ({type(error).__name__}: {error}). "
            f"Fix: one JSON object a line with timestamp, input_length, output_length and hash_ids"
        ) from None
    if (
        request.input_length < 1
        or request.output_length < 0
        or len(request.hash_ids) != -(-request.input_length // BLOCK_LEN)
    ):
        raise ValueError(
            f"{where}: input_length={request.input_length} with {len(request.hash_ids)} hash_ids: "
            f"one id per {BLOCK_LEN} tokens, rounded up"
        )
    return request


def _common_depth(requests: list[TraceRequest], depth: int) -> int:
    """First depth, past `depth`, at which the requests' ids end or differ."""
    first = requests[0].hash_ids
    end = depth
    while end < len(first) and all(end < len(r.hash_ids) and r.hash_ids[end] == first[end] for r in requests):
        end += 1
    return end
