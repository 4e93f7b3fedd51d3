"""How fast a step's attention could be at best on a device whose ceilings were measured (Williams et al., 2009)."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from granikv.spec import AttentionSpec
from granikv.tree import ContextTree


class Floor(NamedTuple):
    """bound_us: all bytes or all arithmetic of a layer, whichever takes longer; no cold time can be below it.

    level_sum_us: the same for the shared tokens and for the rows' own, added; only kernels that overlap both get below.
    """

    bound_us: float
    level_sum_us: float


@dataclass(frozen=True)
class Ceilings:
    """What a device reached: memory_gbs for reading memory, matrix_tflops for a large matrix product."""

    memory_gbs: float
    matrix_tflops: float

    def __post_init__(self) -> None:
        for name in ("memory_gbs", "matrix_tflops"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(
                    f"device.ceilings.{name}={value!r}: above 0. Fix: measure it with experiments.calibrate"
                )

    def floor(self, tree: ContextTree, spec: AttentionSpec) -> Floor:
        """One layer's attention with every token's K and V read once."""
        tokens: Counter[bool] = Counter()
        reads: Counter[bool] = Counter()
        for node in tree.nodes:
            tokens[node.shared] += node.num_tokens
        for request in tree.requests:
            for number in tree.path(request):
                reads[tree.nodes[number].shared] += tree.nodes[number].num_tokens
        moved = {kind: tokens[kind] * spec.kv_token_bytes / (self.memory_gbs * 1e3) for kind in (True, False)}
        per_read = 4 * spec.num_qo_heads * spec.head_dim / (self.matrix_tflops * 1e6)
        multiplied = {kind: reads[kind] * per_read for kind in (True, False)}
        return Floor(
            max(sum(moved.values()), sum(multiplied.values())),
            sum(max(moved[kind], multiplied[kind]) for kind in (True, False)),
        )
