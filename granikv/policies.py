"""Policies for the selector: pure functions from a BatchShape and the legal candidates to a choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from granikv.selector import BatchShape, Choice, NoLegalChoice

VLLM_MIN_PREFIX_LEN = 256
VLLM_MIN_REQUESTS = 8
VLLM_TILE = 128


def first_legal(preferred: Sequence[str], legal: Sequence[str]) -> str:
    """The first of `preferred` that is legal; NoLegalChoice if none is."""
    for name in preferred:
        if name in legal:
            return name
    raise NoLegalChoice(f"none of {', '.join(preferred)} is legal here; legal: {', '.join(legal) or 'none'}")


@dataclass(frozen=True)
class FixedPolicy:
    """Always the same candidate."""

    kernel: str

    def choose(self, shape: BatchShape, legal: Sequence[str]) -> Choice:
        return Choice(first_legal([self.kernel], legal), f"fixed to {self.kernel}")

    def needs(self) -> tuple[str, ...]:
        return (self.kernel,)


@dataclass(frozen=True)
class ThresholdPolicy:
    """GraniKV's idea (arXiv 2608.15584): share when enough requests read enough prefix.

    A prefix kernel is taken when the effective batch per prefix group reaches min_effective_batch and the longest
    prefix min_prefix tokens; `shared` and `unshared` are candidates in order of preference.
    """

    min_effective_batch: float
    min_prefix: int
    shared: Sequence[str]
    unshared: Sequence[str]

    def choose(self, shape: BatchShape, legal: Sequence[str]) -> Choice:
        longest = max((length for _, length in shape.groups), default=0)
        shares = shape.effective_batch >= self.min_effective_batch and longest >= self.min_prefix
        reason = (
            f"effective batch {shape.effective_batch:.1f} against {self.min_effective_batch}, "
            f"longest prefix {longest} against {self.min_prefix}"
        )
        wanted = self.shared if shares and any(name in legal for name in self.shared) else self.unshared
        return Choice(first_legal(wanted, legal), reason)

    def needs(self) -> tuple[str, ...]:
        return tuple(self.unshared)


@dataclass(frozen=True)
class VllmPolicy:
    """vLLM's gate for cascade attention, from its documented conditions (`use_cascade_attention` of the FlashAttention
    backend, vLLM V1): only a prefix common to the whole batch counts, of at least 256 tokens and 8 requests; then the
    waves of 128 x 128 tiles that cascade needs are compared with those of flash-decoding, on `num_sms` processors.
    """

    num_sms: int
    shared: Sequence[str]
    unshared: Sequence[str]

    def choose(self, shape: BatchShape, legal: Sequence[str]) -> Choice:
        common = sum(length for rows, length in shape.groups if rows == shape.batch_size)
        shares, reason = self._shares(shape, common)
        wanted = self.shared if shares and any(name in legal for name in self.shared) else self.unshared
        return Choice(first_legal(wanted, legal), reason)

    def needs(self) -> tuple[str, ...]:
        return tuple(self.unshared)

    def _shares(self, shape: BatchShape, common: int) -> tuple[bool, str]:
        if common < VLLM_MIN_PREFIX_LEN:
            return False, f"prefix common to the whole batch {common} under {VLLM_MIN_PREFIX_LEN}"
        if shape.batch_size < VLLM_MIN_REQUESTS:
            return False, f"{shape.batch_size} requests under {VLLM_MIN_REQUESTS}"
        group_size = shape.num_qo_heads // shape.num_kv_heads
        if group_size == 1:
            return True, "no grouped queries, so flash-decoding does not apply"
        prefix_tiles = -(-common // VLLM_TILE)
        cascade = -(-shape.num_qo_heads * -(-shape.batch_size // VLLM_TILE) // self.num_sms) * prefix_tiles
        split = shape.batch_size * shape.num_kv_heads * -(-group_size // VLLM_TILE) * prefix_tiles
        decoding = -(-split // self.num_sms)
        return cascade < decoding, f"cascade {cascade} tile times against flash-decoding {decoding}"


@dataclass(frozen=True)
class CostModelPolicy:
    """Roofline of one layer: max(bytes / bandwidth, flops / peak) for each level, plus a fixed cost a launch.

    bandwidth_gbs, peak_tflops  what the device reaches, gather and element type included; level_us  cost of a level
    launch and its merge; gemm_score_bytes  bytes that an unfused kernel moves per score (written, read and rewritten
    by softmax, read again).
    naive reads every shared token once a row, reduced by `l2_reuse` (>= 1); prefix kernels read it once.
    """

    bandwidth_gbs: float
    peak_tflops: float
    level_us: float
    l2_reuse: float = 1.0
    gemm_score_bytes: float = 10.0

    def choose(self, shape: BatchShape, legal: Sequence[str]) -> Choice:
        costs = {name: cost for name in legal if (cost := self.cost_us(name, shape)) is not None}
        if not costs:
            raise NoLegalChoice(f"the cost model knows none of {', '.join(legal) or 'no candidates'}")
        best = min(costs, key=lambda name: costs[name])
        return Choice(best, "predicted us: " + ", ".join(f"{name} {cost:.0f}" for name, cost in costs.items()))

    def needs(self) -> tuple[str, ...]:
        return ()

    def cost_us(self, name: str, shape: BatchShape) -> float | None:
        """Predicted time of one layer's attention; None for a candidate that the model does not describe."""
        token_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.element_bytes
        own = sum(shape.own_lens)
        shared_reads = sum(rows * length for rows, length in shape.groups)
        shared_tokens = sum(length for _, length in shape.groups)
        if name == "naive":
            return self._level_us(token_bytes * (shared_reads / self.l2_reuse + own), shared_reads + own, shape)
        if name not in ("cascade", "hydragen", "hydragen_gemm", "fused", "fused_paged"):
            return None
        scores = shape.num_qo_heads * shared_reads * self.gemm_score_bytes if name == "hydragen_gemm" else 0.0
        prefix = self._level_us(token_bytes * shared_tokens + scores, shared_reads, shape) if shared_tokens else 0.0
        suffix = self._level_us(token_bytes * own, own, shape)
        if name.startswith("fused"):
            return prefix + suffix - (self.level_us if shared_tokens else 0.0)
        return prefix + suffix

    def _level_us(self, num_bytes: float, token_reads: float, shape: BatchShape) -> float:
        flops = 4 * shape.num_qo_heads * shape.head_dim * token_reads
        return self.level_us + max(num_bytes / (self.bandwidth_gbs * 1e3), flops / (self.peak_tflops * 1e6))


class CostTerms(NamedTuple):
    """What a layer's time is taken to be linear in: 1, gigabytes of distinct K and V, gigaflops, millions of outputs.

    Reading a shared token once a row costs time like arithmetic does, so naive needs no terms of its own.
    """

    launches: float
    gigabytes: float
    gigaflops: float
    megastates: float

    @classmethod
    def of(cls, shape: BatchShape) -> "CostTerms":
        """The terms of one step's batch."""
        own, reads = sum(shape.own_lens), sum(rows * length for rows, length in shape.groups)
        tokens = own + sum(length for _, length in shape.groups)
        token_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.element_bytes
        width = shape.num_qo_heads * shape.head_dim
        return cls(1.0, tokens * token_bytes / 1e9, 4 * width * (own + reads) / 1e9, shape.batch_size * width / 1e6)


@dataclass(frozen=True)
class CandidateCost:
    """One candidate's rates for CostTerms."""

    launch_us: float
    us_per_gb: float
    us_per_gflop: float
    us_per_mstate: float

    def us(self, terms: CostTerms) -> float:
        """Predicted time of one layer."""
        return (
            self.launch_us * terms.launches
            + self.us_per_gb * terms.gigabytes
            + self.us_per_gflop * terms.gigaflops
            + self.us_per_mstate * terms.megastates
        )


@dataclass(frozen=True)
class FittedPolicy:
    """The candidate whose fitted cost is least; experiments/calibrate.py fits `costs` to measurements."""

    costs: Mapping[str, CandidateCost]

    def choose(self, shape: BatchShape, legal: Sequence[str]) -> Choice:
        terms = CostTerms.of(shape)
        predicted = {name: self.costs[name].us(terms) for name in legal if name in self.costs}
        if not predicted:
            raise NoLegalChoice(f"no costs were fitted for {', '.join(legal) or 'no candidates'}")
        best = min(predicted, key=predicted.__getitem__)
        return Choice(best, f"predicted at {predicted[best]:.1f} us, the least of {len(predicted)}")

    def needs(self) -> tuple[str, ...]:
        return ()
