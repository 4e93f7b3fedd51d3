import math
from dataclasses import replace

import pytest
import torch
from conftest import LAYOUTS, TORCH_KERNELS, TREES, filled, make_kernel, make_layout, spec_of, state_of

from granikv.binding import GatherPrefix
from granikv.gate import check
from granikv.kernels import AttentionKernel, AttentionState, merge_states
from granikv.reference import oracle
from granikv.tree import two_level
from granikv.view import KVPool


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", TORCH_KERNELS)
def test_every_cell_matches_the_oracle(kernel, layout, tree):
    held = filled(layout, tree)
    held.verify()
    result = check(state_of(held, make_kernel(kernel)), math.e, oracle(held.logical))
    assert result.passed, result.reason()


@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(2, 2), (8, 2), (10, 2), (7, 1), (8, 1)])
@pytest.mark.parametrize("kernel", TORCH_KERNELS)
def test_every_group_size_matches_the_oracle(kernel, num_qo_heads, num_kv_heads):
    held = filled("slab_token", TREES["nested_prefixes"], spec_of(num_qo_heads, num_kv_heads))
    assert check(state_of(held, make_kernel(kernel)), math.e, oracle(held.logical)).passed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", TORCH_KERNELS)
def test_every_element_type_matches_the_oracle(kernel, dtype):
    held = filled("slab_token", TREES["two_groups_of_unequal_length"], spec_of(dtype=dtype))
    state = state_of(held, make_kernel(kernel))
    assert state.out.dtype == dtype
    assert state.lse.dtype == torch.float32
    assert check(state, math.e, oracle(held.logical)).passed


@pytest.mark.parametrize("head_dim", [72, 80, 96, 256])
@pytest.mark.parametrize("kernel", TORCH_KERNELS)
def test_odd_head_dims_are_correct(kernel, head_dim):
    held = filled("slab_token", TREES["one_group"], spec_of(head_dim=head_dim))
    assert check(state_of(held, make_kernel(kernel)), math.e, oracle(held.logical)).passed


@pytest.mark.parametrize("kernel", TORCH_KERNELS)
def test_a_request_gets_the_same_output_alone_and_in_a_batch(kernel):
    tree = two_level([(100, [5, 7, 9] * 20)])
    held = filled("slab_token", tree)
    chosen = make_kernel(kernel)
    whole = state_of(held, chosen).out[1]
    view = held.layout.view([held.rows[1]])
    alone = chosen.run(chosen.plan(view, held.logical.spec), held.logical.q[1:2], [held.layout.pools[0]] * 2)
    torch.testing.assert_close(alone.out[0], whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", TORCH_KERNELS)
def test_rows_in_any_order_give_the_same_rows(kernel):
    held = filled("slab_token", TREES["two_groups_of_unequal_length"])
    expected = state_of(held, make_kernel(kernel))
    shuffle = [3, 0, 4, 1, 2]
    held.rows = [held.rows[i] for i in shuffle]
    held.logical = replace(held.logical, q=held.logical.q[shuffle])
    view = held.layout.view(held.rows)
    assert view.order is not None
    torch.testing.assert_close(state_of(held, make_kernel(kernel)).out, expected.out[shuffle])


def test_batch_global_cascade_sees_only_what_the_whole_batch_shares():
    spec = spec_of()
    one, two = (filled("paged_16", TREES[name], spec) for name in ("one_group", "two_groups_of_unequal_length"))
    kernel = make_kernel("cascade_batch")
    assert kernel.plan(one.layout.view(one.rows), spec).notes["num_levels"] == 2
    assert kernel.plan(two.layout.view(two.rows), spec).notes["num_levels"] == 1


def test_hydragen_reads_a_slab_without_copying_it():
    held = filled("slab_token", TREES["one_group"])
    kernel = make_kernel("hydragen")
    plan = kernel.plan(held.layout.view(held.rows), held.logical.spec)
    ((first, past, slot, length),) = plan.shared[0].entries
    assert (first, past, length) == (0, 4, 100)
    assert torch.equal(held.layout.pools[0].k[slot : slot + length, 0], held.logical.kv[0].k)


def test_the_gather_adapter_makes_a_paged_prefix_dense():
    held = filled("paged_16", TREES["two_groups_of_unequal_length"])
    view = held.layout.view(held.rows)
    plan = GatherPrefix().plan(view, held.logical.spec)
    dense = GatherPrefix().run(plan, [held.layout.pools[0]] * 2)
    start = int(plan.view.levels[0].slab_starts[1])
    assert torch.equal(dense[0].k[start : start + 16, 0], held.logical.kv[3].k[:16])
    assert plan.num_bytes == 2 * (64 + 16) * held.logical.spec.kv_token_bytes


@pytest.mark.parametrize("base", [math.e, 2.0])
def test_merging_states_equals_attention_over_the_union(base):
    held = filled("paged_1", TREES["one_group"])
    truth = oracle(held.logical)
    parts = [AttentionState(s.out, s.lse / math.log(base)) for s in (truth.shared, truth.own)]
    merged = merge_states(parts, base)
    torch.testing.assert_close(merged.out, truth.whole.out)
    torch.testing.assert_close(merged.lse * math.log(base), truth.whole.lse)


def test_merging_rows_without_tokens_gives_zero_and_minus_infinity():
    empty = AttentionState(torch.zeros(1, 2, 4), torch.full((1, 2), -math.inf))
    merged = merge_states([empty, empty])
    assert not merged.out.any()
    assert bool((merged.lse == -math.inf).all())


@pytest.mark.parametrize("kernel", TORCH_KERNELS)
def test_kernels_keep_the_protocol(kernel):
    assert isinstance(make_kernel(kernel), AttentionKernel)


def test_unowned_slots_would_be_noticed():
    held = filled("paged_16", two_level([(0, [5])]))
    page = int(held.layout.view(held.rows).levels[0].kv_indices[0])
    assert held.layout.pools[0].k[page, 5, 0, 0] == 1e4
    assert isinstance(held.layout.pools[0], KVPool)
    assert make_layout("paged_16").page_size == 16
