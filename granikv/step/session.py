"""Decoding over one layout with one kernel: lengths grow by a token a step, requests come and go."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from granikv.binding import bind
from granikv.cell import run_in_batch_order
from granikv.kernels import AttentionKernel
from granikv.layouts.base import KVLayout
from granikv.selector import NoLegalChoice
from granikv.step.context import Prompts, extend
from granikv.step.decoder import Decoder
from granikv.view import KVPool


class Session:
    """Live requests of a batch, by row. Prompts are prefilled by `Prompts`; the layout must hold what follows, too."""

    def __init__(
        self,
        decoder: Decoder,
        layout: KVLayout,
        kernel: AttentionKernel,
        prompts: Prompts,
        headroom: int,
        seed: int = 0,
    ) -> None:
        self.decoder, self.layout, self.kernel, self.prompts = decoder, layout, kernel, prompts
        spec, tree = decoder.spec, prompts.tree
        layout.reserve(spec.attention, layout.capacity_of(tree, headroom), spec.num_layers, seed)
        self.sequences: list[int] = []
        for number, node in enumerate(tree.nodes):
            self.sequences.append(self._fill(node.parent, node.num_tokens if node.shared else 0, prompts.kv[number]))
        self.rows = [self.sequences[number] for number in tree.requests]
        self.tokens = prompts.first.clone()

    def step(self) -> Tensor:
        """Computes every live row's token; returns the logits [B, vocab_size] that choose the next ones."""
        spec, rows = self.decoder.spec.attention, self.rows
        slots = self.layout.grow(rows, [1] * len(rows)).to(spec.device)
        view = self.layout.view(rows)
        positions = torch.tensor([self.layout.seq_len(row) - 1 for row in rows], device=spec.device)
        binding = bind(self.kernel, view.traits, "charge")
        if binding.reason:
            raise NoLegalChoice(binding.reason)
        gather = binding.adapter.plan(view, spec) if binding.adapter else None
        shown = gather.view if gather else view
        plan: Any = self.kernel.plan(shown, spec)

        def append(layer: int, k: Tensor, v: Tensor) -> None:
            self.layout.write(layer, slots, k, v)

        def attend(layer: int, q: Tensor) -> Tensor:
            kv = [self.layout.pools[layer]] * len(view.levels)
            if binding.adapter and gather:
                kv = binding.adapter.run(gather, kv)
            return run_in_batch_order(self.kernel, plan, shown, q, kv).out

        logits = self.decoder.logits(self.decoder.hidden(self.tokens, positions, append, attend))
        self.tokens = logits.argmax(-1)
        return logits

    def decode(self, steps: int) -> list[list[int]]:
        """Greedy tokens of `steps` steps, a list a step."""
        chosen = []
        for _ in range(steps):
            self.step()
            chosen.append(self.tokens.tolist())
        return chosen

    def finish(self, row: int) -> None:
        """Ends the request in `row`; the rows after it move up."""
        self.layout.free(self.rows.pop(row))
        self.tokens = torch.cat((self.tokens[:row], self.tokens[row + 1 :]))

    def arrive(self, prefix: int | None, suffix: Sequence[int]) -> None:
        """A new last row: node `prefix` of the prompts' tree (None for no prefix), then the tokens of `suffix`."""
        past = self.prompts.context(self.decoder, prefix)
        tokens = torch.tensor(list(suffix), device=self.decoder.spec.attention.device)
        kv, logits = extend(self.decoder, past, tokens)
        self.rows.append(self._fill(prefix, 0, kv))
        self.tokens = torch.cat((self.tokens, logits.argmax().view(1)))

    def _fill(self, parent: int | None, prefix_len: int, kv: list[KVPool]) -> int:
        """A sequence after tree node `parent` with these tokens."""
        count = kv[0].k.shape[0]
        layout = self.layout
        seq = layout.allocate(prefix_len) if parent is None else layout.fork(self.sequences[parent], prefix_len)
        slots = layout.grow([seq], [count]).to(self.decoder.spec.attention.device)
        for layer, pool in enumerate(kv):
            layout.write(layer, slots, *pool)
        return seq
