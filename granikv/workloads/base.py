"""Workload: a frozen description that yields the same context tree on every machine."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from granikv.tree import ContextTree


@dataclass(frozen=True)
class Workload:
    """A named batch. Subclasses build the tree; equal fields give equal trees."""

    name: str

    def tree(self) -> ContextTree:
        """The batch's context tree. Raises ValueError for values that describe no batch."""
        raise NotImplementedError

    def describe(self, tree: ContextTree | None = None) -> dict[str, Any]:
        """All fields, and what the tree amounts to: rows, mean shared and own tokens a row, number of prefixes."""
        tree = tree or self.tree()
        seq_lens, own = tree.seq_lens(), [tree.nodes[row].num_tokens for row in tree.requests]
        shared = [total - n for total, n in zip(seq_lens, own, strict=True)]
        groups = tree.prefix_groups()
        return {
            **asdict(self),
            "batch_size": len(own),
            "prefix_len": float(np.mean(shared)),
            "suffix_len": float(np.mean(own)),
            "num_prefixes": len(groups),
            "num_tokens": tree.num_tokens,
            "groups": groups,
        }


def require(condition: bool, value: str, rule: str, fix: str) -> None:
    """ValueError `value: rule. Fix: fix` unless the condition holds."""
    if not condition:
        raise ValueError(f"{value}: {rule}. Fix: {fix}")


def spread_lens(mean: int, spread: float, count: int, rng: np.random.Generator) -> list[int]:
    """`count` lengths drawn evenly from mean * (1 - spread) .. mean * (1 + spread), at least 1 where mean is."""
    low, high = round(mean * (1 - spread)), round(mean * (1 + spread))
    return [max(min(mean, 1), int(n)) for n in rng.integers(low, high + 1, count)]
