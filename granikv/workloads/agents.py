"""agents: distinct prefixes of different lengths with Zipf-sized groups, as a fleet of unlike agents makes them."""

from dataclasses import dataclass

import numpy as np

from granikv.tree import ContextTree, two_level
from granikv.workloads.base import Workload, require, spread_lens


@dataclass(frozen=True)
class AgentsWorkload(Workload):
    """`batch_size` requests over len(prefix_lens) agents; agent i, counted from 1, has a share of i ** -zipf.

    Every agent gets at least one request; zipf=0 gives equal groups.
    """

    batch_size: int
    prefix_lens: tuple[int, ...]
    suffix_len: int
    suffix_spread: float = 0.5
    zipf: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix_lens", tuple(self.prefix_lens))
        lens = list(self.prefix_lens)
        require(
            bool(lens) and all(isinstance(n, int) and n >= 1 for n in lens),
            f"workload.prefix_lens={lens}",
            "a list of whole numbers of at least 1",
            "workload.prefix_lens=[512,2048]",
        )
        require(
            isinstance(self.batch_size, int) and self.batch_size >= len(lens),
            f"workload.batch_size={self.batch_size!r} with {len(lens)} agents",
            "every agent needs a request",
            f"workload.batch_size={len(lens)}",
        )
        require(
            isinstance(self.suffix_len, int) and self.suffix_len >= 0,
            f"workload.suffix_len={self.suffix_len!r}",
            "at least 0",
            "workload.suffix_len=64",
        )
        require(
            0 <= self.suffix_spread < 1,
            f"workload.suffix_spread={self.suffix_spread!r}",
            "a fraction from 0 to below 1",
            "workload.suffix_spread=0.5",
        )
        require(self.zipf >= 0, f"workload.zipf={self.zipf!r}", "at least 0", "workload.zipf=1.0")

    def group_sizes(self) -> list[int]:
        """Requests of each agent; they add up to batch_size (largest remainders get what rounding leaves)."""
        count = len(self.prefix_lens)
        shares = np.arange(1, count + 1, dtype=float) ** -self.zipf
        extra = (self.batch_size - count) * shares / shares.sum()
        sizes = 1 + np.floor(extra).astype(int)
        by_remainder = np.argsort(-(extra - np.floor(extra)), kind="stable")
        sizes[by_remainder[: self.batch_size - int(sizes.sum())]] += 1
        return [int(n) for n in sizes]

    def tree(self) -> ContextTree:
        rng = np.random.default_rng(self.seed)
        own = spread_lens(self.suffix_len, self.suffix_spread, self.batch_size, rng)
        groups, at = [], 0
        for prefix_len, size in zip(self.prefix_lens, self.group_sizes(), strict=True):
            groups.append((prefix_len, own[at : at + size]))
            at += size
        return two_level(groups)
