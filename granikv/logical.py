"""The numbers of a block: K, V and q, made once and given to every cell.

They are structured, because Gaussian K and V hide faults: with 16K random tokens, a dropped suffix moves the output by
0.005. Here each query head looks for needles, tokens whose key it points at: one in the shared prefix, one among the
row's own tokens (its very last for every fourth head), or sharply at a single one; the first value channel holds the
token's position. Losing, moving or misweighting tokens then moves the output far beyond rounding.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from granikv.spec import AttentionSpec
from granikv.tree import ContextTree
from granikv.view import KVPool

NEEDLE_RATIO = 2.0
"""Softmax mass of one needle over the mass of all ordinary tokens together."""


@dataclass(frozen=True)
class LogicalKV:
    """kv[node] are K and V [num_tokens, num_kv_heads, head_dim] of a node; q [B, num_qo_heads, head_dim]."""

    tree: ContextTree
    spec: AttentionSpec
    kv: list[KVPool]
    q: Tensor

    def row(self, row: int) -> KVPool:
        """K and V of one row's whole sequence."""
        path = self.tree.path(self.tree.requests[row])
        k, v = (torch.cat([self.kv[node][part] for node in path]) for part in (0, 1))
        return KVPool(k, v)

    def digest(self) -> str:
        """sha256 over K, V and q, 16 hex digits."""
        sha = hashlib.sha256()
        for tensor in [*(x for pool in self.kv for x in pool), self.q]:
            sha.update(tensor.float().cpu().contiguous().numpy().data)
        return sha.hexdigest()[:16]


def logical_bytes(tree: ContextTree, spec: AttentionSpec) -> int:
    """Bytes that materialize() allocates for K and V: what one layer's attention has to read at least."""
    return tree.num_tokens * spec.kv_token_bytes


def materialize(tree: ContextTree, spec: AttentionSpec, seed: int) -> LogicalKV:
    """Structured K, V and q for `tree`. Equal arguments give equal numbers on one device type."""
    generator = torch.Generator(device=spec.device).manual_seed(seed)
    kv = [_node_kv(tree, number, spec, generator) for number in range(len(tree.nodes))]
    logical = LogicalKV(tree, spec, kv, torch.empty(0))
    q = torch.stack([_row_query(logical, row, generator) for row in range(len(tree.requests))])
    return LogicalKV(tree, spec, kv, q.to(spec.dtype))


def _node_kv(tree: ContextTree, number: int, spec: AttentionSpec, generator: torch.Generator) -> KVPool:
    shape = (tree.nodes[number].num_tokens, spec.num_kv_heads, spec.head_dim)
    k, v = (torch.randn(shape, generator=generator, device=spec.device) for _ in range(2))
    begin = sum(tree.nodes[i].num_tokens for i in tree.path(number)[:-1])
    positions = torch.arange(begin, begin + shape[0], device=spec.device)
    v[..., 0] = 2.0 * (positions % 1024).unsqueeze(-1) / 1024 - 1.0
    return KVPool(k.to(spec.dtype), v.to(spec.dtype))


def _row_query(logical: LogicalKV, row: int, generator: torch.Generator) -> Tensor:
    """Heads by kind (modulo 4): prefix and last token; prefix and own token; two own tokens; one prefix token."""
    spec, own_len = logical.spec, logical.tree.nodes[logical.tree.requests[row]].num_tokens
    keys = logical.row(row).k.float()
    total, heads = keys.shape[0], spec.num_qo_heads
    device = keys.device

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (heads,), generator=generator, device=device)

    shared_len = total - own_len
    shared = draw(0, shared_len) if shared_len else draw(0, total)
    own = draw(shared_len, total) if own_len else draw(0, total)
    kind = torch.arange(heads, device=device) % 4
    first = torch.where(kind == 2, draw(shared_len, total) if own_len else shared, shared)
    second = torch.where(kind == 0, total - 1, own)
    # a needle of strength a scores a * sqrt(D); ordinary tokens then score N(0, 2 a^2), so their mass is L * exp(a^2)
    discriminant = max(0.0, spec.head_dim - 4 * math.log(NEEDLE_RATIO * total))
    strength = (math.sqrt(spec.head_dim) - math.sqrt(discriminant)) / 2
    jitter = 1 + 0.2 * (torch.rand(2, heads, generator=generator, device=device) - 0.5)
    weights = strength * jitter
    weights[0] = torch.where(kind == 3, 1.5 * weights[0], weights[0])
    weights[1] = torch.where(kind == 3, 0.0, weights[1])
    kv_head = torch.arange(heads, device=device) // spec.group_size
    return weights[0].unsqueeze(-1) * keys[first, kv_head] + weights[1].unsqueeze(-1) * keys[second, kv_head]
