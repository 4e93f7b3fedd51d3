"""uniform: equal groups of requests, each group with its own prefix of about the same length."""

from dataclasses import dataclass

import numpy as np

from granikv.tree import ContextTree, two_level
from granikv.workloads.base import Workload, require, spread_lens


@dataclass(frozen=True)
class UniformWorkload(Workload):
    """`batch_size` requests in `num_prefixes` groups whose sizes differ by at most one.

    prefix_len, suffix_len  tokens; a spread of 0.5 draws lengths from 0.5x to 1.5x.
    num_ungrouped           requests, of the batch, that share nothing: their whole prompt is their own.
    """

    batch_size: int
    prefix_len: int
    suffix_len: int
    num_prefixes: int = 1
    prefix_spread: float = 0.0
    suffix_spread: float = 0.0
    num_ungrouped: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("batch_size", "num_prefixes"):
            value = getattr(self, field)
            require(
                isinstance(value, int) and value >= 1,
                f"workload.{field}={value!r}",
                "a whole number of at least 1",
                f"workload.{field}=1",
            )
        for field in ("prefix_len", "suffix_len", "num_ungrouped"):
            value = getattr(self, field)
            require(
                isinstance(value, int) and value >= 0,
                f"workload.{field}={value!r}",
                "a whole number of at least 0",
                f"workload.{field}=0",
            )
        for field in ("prefix_spread", "suffix_spread"):
            value = getattr(self, field)
            require(
                0 <= value < 1, f"workload.{field}={value!r}", "a fraction from 0 to below 1", f"workload.{field}=0.5"
            )
        require(
            self.prefix_len + self.suffix_len > 0,
            "workload.prefix_len=0 with workload.suffix_len=0",
            "a request needs at least one token to attend to",
            "workload.suffix_len=1",
        )
        grouped = self.batch_size - self.num_ungrouped
        require(
            grouped >= self.num_prefixes or (grouped == 0 and self.num_ungrouped > 0),
            f"workload.num_prefixes={self.num_prefixes} with {grouped} grouped requests",
            "every prefix needs a request",
            f"workload.num_prefixes={max(1, grouped)}",
        )

    def tree(self) -> ContextTree:
        rng = np.random.default_rng(self.seed)
        grouped = self.batch_size - self.num_ungrouped
        prefixes = spread_lens(self.prefix_len, self.prefix_spread, self.num_prefixes, rng)
        own = spread_lens(self.suffix_len, self.suffix_spread, self.batch_size, rng)
        shares = [len(part) for part in np.array_split(np.arange(grouped), self.num_prefixes)]
        groups, at = [], 0
        for prefix_len, size in zip(prefixes, shares, strict=True):
            groups.append((prefix_len, own[at : at + size]))
            at += size
        return two_level([*groups, (0, [self.prefix_len + n for n in own[at:]])])
