"""The shape of one attention operator, shared by layouts, kernels, the oracle and the gate."""

from dataclasses import dataclass, field

import torch

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class AttentionSpec:
    """Heads, width, element type and device of one decode-attention operator (one query token a request).

    Raises ValueError when the heads do not form whole groups or a count is not positive.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1. Fix: model.{name}=8")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads={self.num_qo_heads}, num_kv_heads={self.num_kv_heads}: every KV head serves the same "
                f"number of query heads. Fix: make model.num_qo_heads a multiple of model.num_kv_heads"
            )

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head (G = Hq / Hkv)."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def sm_scale(self) -> float:
        """Softmax scale, 1 / sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V that one token occupies in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
