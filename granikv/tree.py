"""The logical content of a batch, before any layout: a tree of token runs whose leaves are requests."""

from collections.abc import Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A run of tokens after its parent's. Shared nodes are prefixes; every other node is one request's own suffix."""

    parent: int | None
    num_tokens: int
    shared: bool


class ContextTree(NamedTuple):
    """Nodes, parents before children, in depth-first order: rows that share a prefix are neighbours."""

    nodes: tuple[Node, ...]

    @property
    def requests(self) -> list[int]:
        """Node number of each row of the batch."""
        return [i for i, node in enumerate(self.nodes) if not node.shared]

    @property
    def num_tokens(self) -> int:
        """Distinct tokens, each shared one counted once."""
        return sum(node.num_tokens for node in self.nodes)

    def path(self, number: int) -> list[int]:
        """Node numbers from the root to `number`, which is included."""
        path = [number]
        while (parent := self.nodes[path[0]].parent) is not None:
            path.insert(0, parent)
        return path

    def seq_lens(self) -> list[int]:
        """Tokens that each row attends to."""
        return [sum(self.nodes[i].num_tokens for i in self.path(row)) for row in self.requests]

    def prefix_groups(self) -> list[tuple[int, int]]:
        """(rows, tokens) of every shared node with tokens, in node order."""
        rows = [0] * len(self.nodes)
        for request in self.requests:
            for number in self.path(request)[:-1]:
                rows[number] += 1
        return [(rows[i], node.num_tokens) for i, node in enumerate(self.nodes) if node.shared and node.num_tokens]


def two_level(groups: Sequence[tuple[int, Sequence[int]]]) -> ContextTree:
    """Tree of (prefix_len, own lengths of its requests) groups; prefix_len 0 gives requests without a group."""
    nodes: list[Node] = []
    for prefix_len, own_lens in groups:
        parent = len(nodes) if prefix_len else None
        if prefix_len:
            nodes.append(Node(None, prefix_len, True))
        nodes += [Node(parent, own_len, False) for own_len in own_lens]
    return ContextTree(tuple(nodes))
