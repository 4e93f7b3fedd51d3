"""A Llama- or Qwen-shaped decoder in plain torch, with random weights shared by all cells of a block.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU MLP (Touvron et al., 2023); Qwen2.5 adds a
bias to the query, key and value projections. The first half of a head's dimensions is rotated against the second.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from granikv.spec import AttentionSpec

if TYPE_CHECKING:
    from granikv.step.tensor_parallel import TensorParallel

INITIAL_STD = 0.02
"""Of all weights, as these models are initialised; norms start at 1."""


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes of a decoder. `attention` has its heads, element type and device."""

    attention: AttentionSpec
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    qkv_bias: bool
    rope_theta: float
    rms_norm_eps: float

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "intermediate_size", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"model.{name}={value!r}: a whole number of at least 1. Fix: see conf/model/tiny.yaml")
        if self.attention.head_dim % 2:
            raise ValueError(
                f"model.head_dim={self.attention.head_dim}: rotary positions need an even one. Fix: model.head_dim=64"
            )

    @property
    def num_weights(self) -> int:
        """Parameters, embedding and LM head included."""
        qkv = (self.attention.num_qo_heads + 2 * self.attention.num_kv_heads) * self.attention.head_dim
        out = self.attention.num_qo_heads * self.attention.head_dim
        layer = self.hidden_size * (qkv + out + 3 * self.intermediate_size + 2) + (qkv if self.qkv_bias else 0)
        return self.num_layers * layer + 2 * self.vocab_size * self.hidden_size + self.hidden_size


@dataclass
class LayerWeights:
    """Weights of one block; matrices are [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


Append = Callable[[int, Tensor, Tensor], None]
"""append(layer, k, v) stores k, v [n, num_kv_heads, head_dim] of the tokens being computed."""

Attend = Callable[[int, Tensor], Tensor]
"""attend(layer, q [n, num_qo_heads, head_dim]) -> the attention's output, shaped as q."""


@dataclass
class Decoder:
    """Random weights for `spec`, equal for equal seeds on one device type.

    With `parallel`, `spec` is given for the whole model; afterwards it is this rank's, and so are the layers' weights.
    """

    spec: DecoderSpec
    seed: int
    parallel: "TensorParallel | None" = None
    layers: list[LayerWeights] = field(init=False)

    def __post_init__(self) -> None:
        spec, attention = self.spec, self.spec.attention
        if self.parallel:
            self.spec = self.parallel.local(spec)
        generator = torch.Generator(device=attention.device).manual_seed(self.seed)

        def weight(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=attention.device, dtype=torch.float32)
            return drawn.mul_(INITIAL_STD).to(attention.dtype)

        def ones() -> Tensor:
            return torch.ones(spec.hidden_size, dtype=attention.dtype, device=attention.device)

        qkv = (attention.num_qo_heads + 2 * attention.num_kv_heads) * attention.head_dim
        self.embedding = weight(spec.vocab_size, spec.hidden_size)
        self.layers = []
        for _ in range(spec.num_layers):
            layer = LayerWeights(
                input_norm=ones(),
                qkv=weight(qkv, spec.hidden_size),
                qkv_bias=weight(qkv) if spec.qkv_bias else None,
                out=weight(spec.hidden_size, attention.num_qo_heads * attention.head_dim),
                mlp_norm=ones(),
                gate_up=weight(2 * spec.intermediate_size, spec.hidden_size),
                down=weight(spec.hidden_size, spec.intermediate_size),
            )
            self.layers.append(self.parallel.shard(layer, spec) if self.parallel else layer)
        self.final_norm = ones()
        self.lm_head = weight(spec.vocab_size, spec.hidden_size)
        exponents = torch.arange(0, attention.head_dim, 2, device=attention.device, dtype=torch.float32)
        self.inverse_frequencies = spec.rope_theta ** (-exponents / attention.head_dim)

    def hidden(self, tokens: Tensor, positions: Tensor, append: Append, attend: Attend) -> Tensor:
        """The last hidden states [n, hidden_size] of tokens [n] at positions [n]."""
        spec, attention = self.spec, self.spec.attention
        cos, sin = self._rotation(positions)
        x = self.embedding[tokens]
        widths = [attention.num_qo_heads, attention.num_kv_heads, attention.num_kv_heads]
        for number, layer in enumerate(self.layers):
            projected = functional.linear(rms_norm(x, layer.input_norm, spec.rms_norm_eps), layer.qkv, layer.qkv_bias)
            q, k, v = torch.split(projected.view(len(tokens), -1, attention.head_dim), widths, dim=1)
            append(number, rotate(k, cos, sin), v.contiguous())
            mixed = attend(number, rotate(q, cos, sin))
            x = x + self._reduced(functional.linear(mixed.flatten(1), layer.out))
            gate, up = functional.linear(rms_norm(x, layer.mlp_norm, spec.rms_norm_eps), layer.gate_up).chunk(2, dim=-1)
            x = x + self._reduced(functional.linear(functional.silu(gate) * up, layer.down))
        return rms_norm(x, self.final_norm, spec.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab_size] in the model's element type."""
        return functional.linear(hidden, self.lm_head)

    def _reduced(self, x: Tensor) -> Tensor:
        return self.parallel.reduce(x) if self.parallel else x

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies
        return torch.cos(angles)[:, None], torch.sin(angles)[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 at least (Zhang and Sennrich, 2019)."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021) for x [n, heads, head_dim]; cos and sin [n, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
