import math
from dataclasses import replace

import pytest
import torch
from conftest import LAYOUTS, TORCH_KERNELS, make_kernel, make_layout, spec_of

from granikv.selector import NoLegalChoice
from granikv.step.context import Prompts, empty_context, extend, joined
from granikv.step.decoder import Decoder, DecoderSpec, rms_norm, rotate
from granikv.step.session import Session
from granikv.tree import ContextTree, Node, two_level
from granikv.view import KVPool

TREE = ContextTree(
    (
        Node(None, 40, True),
        Node(0, 5, False),
        Node(0, 9, False),
        Node(0, 19, True),
        Node(3, 3, False),
        Node(3, 1, False),
        Node(None, 12, False),
    )
)


def tiny(dtype=torch.float64, qkv_bias=True, num_layers=2):
    """A decoder of two layers with grouped queries, wide enough that greedy tokens vary."""
    return DecoderSpec(spec_of(4, 2, 16, dtype), num_layers, 48, 64, 97, qkv_bias, 10000.0, 1e-6)


def dense_decode(decoder, prompts, node, suffix, first, steps):
    """Greedy tokens of one request by the plain way: all K and V in one piece, no layout, no kernel of ours."""
    past = prompts.context(decoder, node)
    if suffix is not None:
        kv, _ = extend(decoder, past, suffix)
        past = [joined(pair) for pair in zip(past, kv)]
    token, chosen = first, []
    for _ in range(steps):
        kv, logits = extend(decoder, past, torch.tensor([token]))
        past = [joined(pair) for pair in zip(past, kv)]
        token = int(logits.argmax())
        chosen.append(token)
    return chosen


@pytest.fixture(scope="module")
def made():
    decoder = Decoder(tiny(), seed=0)
    prompts = Prompts(decoder, TREE, seed=1)
    return decoder, prompts


@pytest.fixture(scope="module")
def expected(made):
    """32 tokens of every row, and 16 of a request that arrives after 16 steps."""
    decoder, prompts = made
    rows = [
        dense_decode(decoder, prompts, node, None, int(first), 32) for node, first in zip(TREE.requests, prompts.first)
    ]
    suffix = torch.arange(7)
    _, logits = extend(decoder, prompts.context(decoder, 3), suffix)
    return rows, dense_decode(decoder, prompts, 3, suffix, int(logits.argmax()), 16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", TORCH_KERNELS)
def test_every_cell_emits_the_tokens_of_a_dense_decoder_while_requests_come_and_go(kernel, layout, made, expected):
    decoder, prompts = made
    session, made_kernel = Session(decoder, make_layout(layout), prompts, headroom=40), make_kernel(kernel)
    if layout == "unshared_16" and kernel != "naive":
        with pytest.raises(NoLegalChoice, match="requires LEVELED"):
            session.step(made_kernel)
        return
    chosen = session.decode(made_kernel, 16)
    rows, late = expected
    assert [list(row) for row in zip(*chosen)] == [row[:16] for row in rows]
    session.finish(1)
    session.finish(3)
    session.arrive(3, range(7))
    chosen = [list(row) for row in zip(*session.decode(made_kernel, 16))]
    assert chosen == [rows[0][16:], rows[2][16:], rows[3][16:], late]
    assert len({tuple(row) for row in chosen}) == len(chosen), "rows that all say the same would prove little"


def test_computing_a_prompt_at_once_or_token_by_token_gives_the_same_logits(made):
    decoder, _ = made
    tokens = torch.tensor([5, 7, 3, 90, 12, 5, 41])
    _, whole = extend(decoder, empty_context(decoder), tokens)
    past = empty_context(decoder)
    for token in tokens:
        kv, logits = extend(decoder, past, token.view(1))
        past = [joined(pair) for pair in zip(past, kv)]
    assert torch.allclose(whole, logits, rtol=1e-10, atol=1e-12)


def test_the_first_token_depends_on_the_whole_prompt(made):
    decoder, _ = made
    _, logits = extend(decoder, empty_context(decoder), torch.tensor([5, 7, 3]))
    _, other = extend(decoder, empty_context(decoder), torch.tensor([6, 7, 3]))
    assert not torch.allclose(logits, other, atol=1e-6)


def test_equal_seeds_give_equal_weights_and_others_do_not():
    one, same, other = (Decoder(tiny(), seed).lm_head for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_the_number_of_weights_is_counted_right(qkv_bias):
    decoder = Decoder(tiny(qkv_bias=qkv_bias), 0)
    tensors = [decoder.embedding, decoder.lm_head, decoder.final_norm]
    tensors += [x for layer in decoder.layers for x in vars(layer).values() if x is not None]
    assert decoder.spec.num_weights == sum(x.numel() for x in tensors)


def test_llama_31_8b_has_8_030_million_weights():
    spec = DecoderSpec(spec_of(32, 8, 128), 32, 4096, 14336, 128256, False, 500000.0, 1e-5)
    assert spec.num_weights == 8_030_261_248


def test_rms_norm_by_hand():
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    rms = math.sqrt(12.5 + 1e-6)
    assert torch.allclose(rms_norm(x, torch.tensor([1.0, 2.0]), 1e-6), torch.tensor([[3 / rms, 8 / rms]]).double())


def test_rotation_keeps_lengths_and_makes_scores_depend_on_the_distance_alone(made):
    decoder, _ = made
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 16, generator=generator, dtype=torch.float64) for _ in range(2))

    def score(at, other):
        turned = [rotate(x, *decoder._rotation(torch.tensor([position]))) for x, position in ((q, at), (k, other))]
        assert torch.allclose(turned[0].norm(dim=-1), q.norm(dim=-1), rtol=1e-6)
        return (turned[0] * turned[1]).sum(-1)

    assert torch.allclose(score(9, 4), score(105, 100), rtol=1e-4)
    assert not torch.allclose(score(9, 4), score(9, 5), rtol=1e-2)


def test_a_float32_model_agrees_with_its_float64_twin(made):
    decoder, prompts = made
    low = Decoder(tiny(torch.float32), seed=0)
    _, logits = extend(low, empty_context(low), prompts.tokens[0])
    _, truth = extend(decoder, empty_context(decoder), prompts.tokens[0])
    assert (logits.double() - truth).abs().max() < 1e-4 * truth.abs().max()


def test_bad_sizes_are_refused_with_the_fix():
    with pytest.raises(ValueError, match=r"model.hidden_size=0.*Fix"):
        replace(tiny(), hidden_size=0)
    with pytest.raises(ValueError, match=r"model.head_dim=15: rotary positions need an even one"):
        replace(tiny(), attention=spec_of(4, 2, 15))


def test_a_request_with_nothing_to_continue_is_refused(made):
    decoder, _ = made
    with pytest.raises(ValueError, match="nothing to continue"):
        Prompts(decoder, two_level([(0, [0])]), 0)


def test_a_row_without_tokens_of_its_own_continues_its_prefix(made):
    decoder, _ = made
    prompts = Prompts(decoder, two_level([(20, [0, 3])]), 0)
    _, logits = extend(decoder, empty_context(decoder), prompts.tokens[0])
    assert int(prompts.first[0]) == int(logits.argmax())


def test_freed_slots_are_reused_without_a_trace(made):
    """Requests come and go many times through a pool that has room for few; tokens stay right, slots come back."""
    decoder, prompts = made
    session, kernel = Session(decoder, make_layout("slab_token"), prompts, headroom=12), make_kernel("hydragen")
    free = session.layout.footprint().free_pages
    for arrival in range(12):
        session.finish(0)
        session.arrive(3, range(arrival, arrival + 4))
        session.decode(kernel, 1)
    suffix = torch.arange(11, 15)
    _, logits = extend(decoder, prompts.context(decoder, 3), suffix)
    late = dense_decode(decoder, prompts, 3, suffix, int(logits.argmax()), 1)
    assert session.tokens[-1].item() == late[0]
    while session.rows:
        session.finish(0)
    for number in (3, 0):
        session.evict(number)
    assert session.layout.footprint().free_pages == session.layout.capacity.pages
    assert free < session.layout.capacity.pages


def test_pools_are_one_a_layer(made):
    decoder, prompts = made
    session = Session(decoder, make_layout("paged_16"), prompts, headroom=8)
    assert len(session.layout.pools) == decoder.spec.num_layers
    assert all(isinstance(pool, KVPool) for pool in session.layout.pools)
