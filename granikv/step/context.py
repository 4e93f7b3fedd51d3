"""What the decoder itself writes for a batch's prompts: K and V of every node of a context tree, layer by layer."""

from collections.abc import Callable

import torch
from torch import Tensor

from granikv.step.decoder import Decoder
from granikv.tree import ContextTree
from granikv.view import KVPool

PREFILL_CHUNK = 2048
"""Prompt tokens that are computed at once."""

DenseAttention = Callable[[Tensor, KVPool, float], Tensor]
"""Attention of q [n, Hq, D] over K and V in one piece, with a softmax scale."""


def causal_attention(q: Tensor, kv: KVPool, sm_scale: float) -> Tensor:
    """Queries q [n, Hq, D] of the last n of kv's tokens, each over the tokens up to its own; computed in float32."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    total, n = kv.k.shape[0], q.shape[0]
    grouped = q.to(wide).view(n, kv.k.shape[1], -1, q.shape[-1])
    scores = torch.einsum("nhgd,lhd->hgnl", grouped, kv.k.to(wide)) * sm_scale
    allowed = torch.arange(total, device=q.device) <= torch.arange(total - n, total, device=q.device)[:, None]
    weights = torch.softmax(scores.masked_fill(~allowed, float("-inf")), -1)
    return torch.einsum("hgnl,lhd->nhgd", weights, kv.v.to(wide)).reshape(q.shape).to(q.dtype)


def extend(
    decoder: Decoder, past: list[KVPool], tokens: Tensor, attention: DenseAttention = causal_attention
) -> tuple[list[KVPool], Tensor]:
    """Computes `tokens` [n] after `past` (one pool [len, Hkv, D] a layer).

    Returns the K and V of the new tokens alone, one pool a layer, and the last token's logits [vocab_size].
    """
    spec = decoder.spec.attention
    fresh: list[list[KVPool]] = [[] for _ in past]
    hidden = torch.empty(0)
    for chunk in torch.split(tokens, PREFILL_CHUNK):
        begin = past[0].k.shape[0] + sum(pool.k.shape[0] for pool in fresh[0])
        positions = torch.arange(begin, begin + len(chunk), device=tokens.device)

        def append(layer: int, k: Tensor, v: Tensor) -> None:
            fresh[layer].append(KVPool(k, v))

        def attend(layer: int, q: Tensor) -> Tensor:
            return attention(q, joined([past[layer], *fresh[layer]]), spec.sm_scale)

        hidden = decoder.hidden(chunk, positions, append, attend)
    return [joined(pools) for pools in fresh], decoder.logits(hidden[-1:])[0]


def joined(pools: list[KVPool]) -> KVPool:
    """Pools one after the other."""
    return KVPool(*(torch.cat(parts) for parts in zip(*pools, strict=True)))


def empty_context(decoder: Decoder) -> list[KVPool]:
    """No tokens, in every layer."""
    spec = decoder.spec.attention
    nothing = torch.empty(0, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
    return [KVPool(nothing, nothing) for _ in range(decoder.spec.num_layers)]


class Prompts:
    """Random prompt tokens of a context tree and what the decoder makes of them.

    kv[node]   K and V of the node's own tokens, one pool a layer.
    first[row] the greedy token after the row's prompt: what its first decode step computes.
    """

    def __init__(self, decoder: Decoder, tree: ContextTree, seed: int) -> None:
        self.tree = tree
        spec, device = decoder.spec, decoder.spec.attention.device
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randint(spec.vocab_size, (node.num_tokens,), generator=generator) for node in tree.nodes]
        self.kv: list[list[KVPool]] = []
        logits: list[Tensor] = []
        for number, node in enumerate(tree.nodes):
            past = self.context(decoder, node.parent)
            if not node.num_tokens:
                if node.parent is None:
                    raise ValueError(
                        "a request without any token: it has nothing to continue. Fix: workload.suffix_len=1"
                    )
                self.kv.append(empty_context(decoder))
                logits.append(logits[node.parent])
                continue
            kv, last = extend(decoder, past, self.tokens[number].to(device))
            self.kv.append(kv)
            logits.append(last)
        self.first = torch.stack([logits[number].argmax() for number in tree.requests])

    def context(self, decoder: Decoder, node: int | None) -> list[KVPool]:
        """K and V of everything from the root to `node`, which is included, one pool a layer."""
        if node is None:
            return empty_context(decoder)
        path = self.tree.path(node)
        return [joined([self.kv[number][layer] for number in path]) for layer in range(decoder.spec.num_layers)]
