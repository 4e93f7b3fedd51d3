"""Tensor parallelism (Shoeybi et al., 2019): every rank holds a share of the heads and of the MLP, and sums are reduced
over the ranks after each of the two projections back to the hidden size. Embedding and LM head are on every rank.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, distributed

from granikv.step.decoder import DecoderSpec, LayerWeights


@dataclass(frozen=True)
class TensorParallel:
    """Rank `rank` of `size` in the default process group, which the caller has made."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank} of size={self.size}: ranks are 0..{self.size - 1}")

    def local(self, spec: DecoderSpec) -> DecoderSpec:
        """`spec` with this rank's heads and share of the MLP. ValueError where they do not divide."""
        attention = spec.attention
        for name, count in (
            ("num_qo_heads", attention.num_qo_heads),
            ("num_kv_heads", attention.num_kv_heads),
            ("intermediate_size", spec.intermediate_size),
        ):
            if count % self.size:
                raise ValueError(
                    f"tensor parallel size {self.size}: model.{name}={count} does not divide by it. "
                    f"Fix: a size that divides {count}"
                )
        local = replace(
            attention,
            num_qo_heads=attention.num_qo_heads // self.size,
            num_kv_heads=attention.num_kv_heads // self.size,
        )
        return replace(spec, attention=local, intermediate_size=spec.intermediate_size // self.size)

    def shard(self, full: LayerWeights, spec: DecoderSpec) -> LayerWeights:
        """This rank's part of a block of the whole model `spec`."""
        attention, dim = spec.attention, spec.attention.head_dim
        widths = [attention.num_qo_heads * dim, attention.num_kv_heads * dim, attention.num_kv_heads * dim]
        return LayerWeights(
            input_norm=full.input_norm,
            qkv=self._rows(full.qkv, widths),
            qkv_bias=None if full.qkv_bias is None else self._rows(full.qkv_bias, widths),
            out=full.out.chunk(self.size, dim=1)[self.rank].contiguous(),
            mlp_norm=full.mlp_norm,
            gate_up=self._rows(full.gate_up, [spec.intermediate_size] * 2),
            down=full.down.chunk(self.size, dim=1)[self.rank].contiguous(),
        )

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place."""
        distributed.all_reduce(x)
        return x

    def _rows(self, weight: Tensor, widths: list[int]) -> Tensor:
        """This rank's share of each of the parts, `widths` rows long, that `weight` stacks."""
        parts = torch.split(weight, widths)
        return torch.cat([part.chunk(self.size)[self.rank] for part in parts])
