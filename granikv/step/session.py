"""Decoding over one layout with one kernel: lengths grow by a token a step, requests come and go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from granikv.binding import GatherPlan, GatherPrefix, bind
from granikv.cell import device_order, run_in_batch_order
from granikv.kernels import AttentionKernel
from granikv.layouts.base import CapacityError, KVLayout
from granikv.selector import NoLegalChoice
from granikv.step.context import Prompts, empty_context, extend, joined
from granikv.step.decoder import Decoder
from granikv.view import KVPool, KVView


@dataclass(frozen=True)
class PlannedStep:
    """Host work of one step, shared by all layers: where new tokens go, and what the kernel is to do."""

    slots: Tensor
    positions: Tensor
    view: KVView
    order: Tensor | None
    gather: GatherPlan | None
    adapter: GatherPrefix | None
    plan: Any


class Prefix(NamedTuple):
    """A shared prefix: its sequence, and K and V from the root to its end, one pool a layer."""

    seq: int
    context: list[KVPool]


class Session:
    """Live requests of a batch, by row, and shared prefixes, by number: those of the prompts' tree have its numbers.

    Prompts are prefilled by `Prompts`; the layout must hold what follows, too.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: KVLayout,
        prompts: Prompts,
        headroom: int,
        fallback: str = "charge",
        seed: int = 0,
    ) -> None:
        self.decoder, self.layout, self.prompts, self.fallback = decoder, layout, prompts, fallback
        spec, tree = decoder.spec, prompts.tree
        layout.reserve(spec.attention, layout.capacity_of(tree, headroom), spec.num_layers, seed)
        self.prefixes: dict[int, Prefix] = {}
        self.rows = []
        for number, node in enumerate(tree.nodes):
            seq = self._fill(node.parent, node.num_tokens if node.shared else 0, prompts.kv[number])
            if node.shared:
                self.prefixes[number] = Prefix(seq, prompts.context(decoder, number))
            else:
                self.rows.append(seq)
        self.tokens = prompts.first.clone()

    def grow(self) -> Tensor:
        """Slots for the next token of every row."""
        return self.layout.grow(self.rows, [1] * len(self.rows)).to(self.decoder.spec.attention.device)

    def shrink(self) -> None:
        """Takes the newest token of every row back."""
        for row in self.rows:
            self.layout.shrink(row, 1)

    def view(self) -> KVView:
        """The batch as it stands."""
        return self.layout.view(self.rows)

    def plan(self, kernel: AttentionKernel, view: KVView, slots: Tensor) -> PlannedStep:
        """Plans one step of all layers. Raises NoLegalChoice if the kernel may not run on `view`."""
        spec = self.decoder.spec.attention
        binding = bind(kernel, view.traits, self.fallback)
        if binding.reason:
            raise NoLegalChoice(binding.reason)
        gather = binding.adapter.plan(view, spec) if binding.adapter else None
        shown = gather.view if gather else view
        lens = view.seq_lens if view.order is None else view.seq_lens[torch.argsort(view.order)]
        positions = (lens - 1).to(spec.device)
        order = device_order(shown, spec.device)
        return PlannedStep(slots, positions, view, order, gather, binding.adapter, kernel.plan(shown, spec))

    def forward(self, kernel: AttentionKernel, step: PlannedStep) -> Tensor:
        """Logits [B, vocab_size] after every row's token; its K and V go into the layout. Device work only."""

        def append(layer: int, k: Tensor, v: Tensor) -> None:
            self.layout.write(layer, step.slots, k, v)

        def attend(layer: int, q: Tensor) -> Tensor:
            kv = [self.layout.pools[layer]] * len(step.view.levels)
            if step.adapter and step.gather:
                kv = step.adapter.run(step.gather, kv)
            return run_in_batch_order(kernel, step.plan, step.order, q, kv).out

        return self.decoder.logits(self.decoder.hidden(self.tokens, step.positions, append, attend))

    def step(self, kernel: AttentionKernel) -> Tensor:
        """One whole step; returns its logits, whose greedy tokens are computed next."""
        slots = self.grow()
        logits = self.forward(kernel, self.plan(kernel, self.view(), slots))
        self.tokens = logits.argmax(-1)
        return logits

    def decode(self, kernel: AttentionKernel, steps: int) -> list[list[int]]:
        """Greedy tokens of `steps` steps, a list a step."""
        chosen = []
        for _ in range(steps):
            self.step(kernel)
            chosen.append(self.tokens.tolist())
        return chosen

    def finish(self, row: int) -> None:
        """Ends the request in `row`; the rows after it move up."""
        self.layout.free(self.rows.pop(row))
        self.tokens = torch.cat((self.tokens[:row], self.tokens[row + 1 :]))

    def arrive(self, prefix: int | None, suffix: Sequence[int]) -> None:
        """A new last row: prefix number `prefix` (None for no prefix), then the tokens of `suffix`, at least one.

        Raises CapacityError, changing nothing, if the layout has no room for it.
        """
        kv, logits = self._computed(prefix, suffix)
        self.rows.append(self._fill(prefix, 0, kv))
        self.tokens = torch.cat((self.tokens, logits.argmax().view(1)))

    def promote(self, parent: int | None, tokens: Sequence[int]) -> int:
        """Makes `tokens`, after prefix `parent`, a shared prefix of its own. Returns its number.

        Raises CapacityError, changing nothing, if the layout has no room for it.
        """
        kv, _ = self._computed(parent, tokens)
        seq = self._fill(parent, len(tokens), kv)
        number = max(self.prefixes, default=-1) + 1
        context = [joined(list(pair)) for pair in zip(self._context(parent), kv, strict=True)]
        self.prefixes[number] = Prefix(seq, context)
        return number

    def evict(self, prefix: int) -> None:
        """Gives up a shared prefix; what live requests still read of it stays until the last of them finishes."""
        self.layout.free(self.prefixes.pop(prefix).seq)

    def _computed(self, prefix: int | None, tokens: Sequence[int]) -> tuple[list[KVPool], Tensor]:
        at = torch.tensor(list(tokens), device=self.decoder.spec.attention.device)
        return extend(self.decoder, self._context(prefix), at)

    def _context(self, prefix: int | None) -> list[KVPool]:
        return empty_context(self.decoder) if prefix is None else self.prefixes[prefix].context

    def _fill(self, prefix: int | None, prefix_len: int, kv: list[KVPool]) -> int:
        """A sequence after `prefix` with these tokens, or CapacityError and no sequence."""
        layout, count = self.layout, kv[0].k.shape[0]
        seq = layout.allocate(prefix_len) if prefix is None else layout.fork(self.prefixes[prefix].seq, prefix_len)
        try:
            slots = layout.grow([seq], [count]).to(self.decoder.spec.attention.device)
        except CapacityError:
            layout.free(seq)
            raise
        for layer, pool in enumerate(kv):
            layout.write(layer, slots, *pool)
        return seq
