"""Agents come, go, are promoted and evicted ten thousand times: no slot is lost, and no token is ever wrong."""

import numpy as np
import pytest
import torch
from conftest import make_kernel, make_layout, spec_of

from granikv.layouts.base import Capacity, CapacityError
from granikv.step.context import Prompts, empty_context, extend, joined
from granikv.step.decoder import Decoder, DecoderSpec
from granikv.step.session import Session
from granikv.tree import two_level

OPERATIONS, CHECKED_EVERY = 10_000, 100
VOCABULARY = 61
ROOM = 400


def small_session(layout_name, seed):
    decoder = Decoder(DecoderSpec(spec_of(2, 1, 8, torch.float64), 1, 16, 24, VOCABULARY, False, 10000.0, 1e-6), seed)
    layout = make_layout(layout_name)
    hot = 120 if layout_name == "slab_token" else 0
    layout.capacity_of = lambda tree, headroom: Capacity(ROOM // layout.page_size, hot)
    return Session(decoder, layout, Prompts(decoder, two_level([(0, [3])]), seed), headroom=0)


class Churn:
    """Random operations on a session, and what its rows must say by the plain way: tokens in, logits out."""

    def __init__(self, session, seed):
        self.session, self.rng = session, np.random.default_rng(seed)
        self.prefixes = {}  # number -> all its tokens, from the root on
        self.rows = [session.prompts.tokens[0].tolist()]
        self.counts = dict.fromkeys(("arrive", "finish", "promote", "evict", "decode", "refused"), 0)

    def tokens(self, low, high):
        return [int(x) for x in self.rng.integers(0, VOCABULARY, int(self.rng.integers(low, high)))]

    def some_prefix(self):
        return None if not self.prefixes or self.rng.random() < 0.2 else int(self.rng.choice(list(self.prefixes)))

    def operate(self):
        name = str(self.rng.choice(["arrive", "finish", "promote", "evict", "decode"], p=[0.3, 0.25, 0.12, 0.11, 0.22]))
        self.counts[name] += 1
        before = self.session.layout.footprint()
        try:
            getattr(self, name)()
        except CapacityError:
            self.counts["refused"] += 1
            assert self.session.layout.footprint() == before

    def arrive(self):
        prefix, suffix = self.some_prefix(), self.tokens(1, 7)
        self.session.arrive(prefix, suffix)
        self.rows.append([*self.prefixes.get(prefix, []), *suffix])

    def finish(self):
        if self.rows:
            row = int(self.rng.integers(len(self.rows)))
            self.session.finish(row)
            del self.rows[row]

    def promote(self):
        parent = self.some_prefix()
        if parent is not None and len(self.prefixes[parent]) > 60:
            parent = None
        tokens = self.tokens(5, 40)
        number = self.session.promote(parent, tokens)
        self.prefixes[number] = [*self.prefixes.get(parent, []), *tokens]

    def evict(self):
        if self.prefixes:
            number = int(self.rng.choice(list(self.prefixes)))
            self.session.evict(number)
            del self.prefixes[number]

    def decode(self):
        if self.rows:
            computed = self.session.tokens.tolist()
            self.session.step(KERNEL)
            for row, token in zip(self.rows, computed):
                row.append(token)

    def check(self):
        """The token that each row will compute next is the greedy one after all its tokens."""
        decoder = self.session.decoder
        for row, token in zip(self.rows, self.session.tokens.tolist()):
            _, logits = extend(decoder, empty_context(decoder), torch.tensor(row))
            assert token == int(logits.argmax())
        self.session.view().check()


KERNEL = make_kernel("cascade")


@pytest.mark.parametrize("layout", ["slab_token", "paged_16", "paged_1"])
def test_ten_thousand_operations_lose_no_slot_and_make_no_wrong_token(layout):
    churn = Churn(small_session(layout, seed=0), seed=1)
    spilled = 0
    for number in range(OPERATIONS):
        churn.operate()
        spilled = max(spilled, churn.session.layout.footprint().spilled_pages)
        if number % CHECKED_EVERY == 0:
            churn.check()
    churn.check()
    assert min(churn.counts.values()) > 50, churn.counts
    assert (spilled > 0) == (layout == "slab_token")
    while churn.rows:
        churn.finish()
    while churn.prefixes:
        churn.evict()
    footprint = churn.session.layout.footprint()
    assert footprint.free_pages == churn.session.layout.capacity.pages
    assert footprint.spilled_pages == 0
    assert footprint.used_bytes == 0


def test_an_evicted_prefix_is_read_by_its_requests_until_they_finish():
    session = small_session("slab_token", seed=0)
    number = session.promote(None, list(range(30)))
    free = session.layout.footprint().free_pages
    session.arrive(number, [1, 2])
    session.evict(number)
    assert session.layout.footprint().free_pages == free - 2
    kv, _ = extend(session.decoder, empty_context(session.decoder), torch.arange(30))
    past = [joined(pair) for pair in zip(kv, extend(session.decoder, kv, torch.tensor([1, 2]))[0])]
    token = session.tokens[-1:].clone()
    session.step(KERNEL)
    _, logits = extend(session.decoder, past, token)
    assert int(session.tokens[-1]) == int(logits.argmax())
    session.finish(1)
    assert session.layout.footprint().free_pages == free + 30 - 1
