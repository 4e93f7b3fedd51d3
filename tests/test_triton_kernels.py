"""Triton kernels: in the interpreter without a GPU (float16 and float32), on the GPU otherwise (bfloat16 too)."""

import pytest
import torch
from conftest import KERNELS_OF, LAYOUTS, TREES, filled, make_kernel, spec_of, state_of

from granikv.gate import check
from granikv.reference import oracle
from granikv.tree import two_level
from granikv.view import KVPool

pytest.importorskip("triton")
KERNELS = KERNELS_OF["triton"]
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if GPU else [torch.float16, torch.float32]
SMALL = [name for name in TREES if GPU or name not in ("batch_of_129", "longer_than_a_chunk")]


def assert_right(kernel, layout, tree, spec):
    held = filled(layout, tree, spec)
    result = check(state_of(held, kernel), kernel.lse_base, oracle(held.logical))
    assert result.passed, result.reason()


@pytest.mark.parametrize("tree", SMALL)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_cell_matches_the_oracle(kernel, layout, tree):
    spec = spec_of(dtype=DTYPES[-1], device=DEVICE)
    assert_right(make_kernel(kernel, "triton"), layout, TREES[tree], spec)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(2, 2), (8, 2), (10, 2), (7, 1), (8, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_group_size_matches_the_oracle(kernel, num_qo_heads, num_kv_heads, dtype):
    spec = spec_of(num_qo_heads, num_kv_heads, dtype=dtype, device=DEVICE)
    assert_right(make_kernel(kernel, "triton"), "slab_token", TREES["nested_prefixes"], spec)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [3, 9, 40], ids=["16 folded rows", "64 folded rows", "128 folded rows"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_head_dim_and_tile_height_matches_the_oracle(kernel, rows, head_dim):
    spec = spec_of(8, 2, head_dim, DTYPES[0], DEVICE)
    assert_right(make_kernel(kernel, "triton"), "slab_token", two_level([(90, [5] * rows)]), spec)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_it_cannot_compute_is_refused_with_the_fix(kernel):
    made = make_kernel(kernel, "triton")
    assert "head_dim 80" in made.supports(spec_of(head_dim=80, device=DEVICE))
    assert "group_size 128" in made.supports(spec_of(128, 1, 64, torch.float16, DEVICE))


def planned(kernel, tree):
    """A filled layout, a kernel, and its plan for it."""
    held = filled("slab_token", tree, spec_of(dtype=torch.float16, device=DEVICE))
    made = make_kernel(kernel, "triton")
    return held, made, made.plan(held.layout.view(held.rows), held.logical.spec)


@pytest.mark.parametrize("kernel", KERNELS)
def test_replan_puts_other_lengths_into_the_same_plan(kernel):
    """What a captured graph reads are the plan's words, so that a run of the old plan must compute the new view."""
    _, made, plan = planned(kernel, two_level([(200, [60] * 4)]))
    grown = filled("slab_token", two_level([(200, [75, 61, 60, 9])]), spec_of(dtype=torch.float16, device=DEVICE))
    view = grown.layout.view(grown.rows)
    made.replan(plan, view)
    state = made.run(plan, grown.logical.q, [grown.layout.pools[0]] * len(view.levels))
    result = check(state, made.lse_base, oracle(grown.logical))
    assert result.passed, result.reason()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("own_lens", [[60] * 5, [4096] * 4], ids=["batch", "length"])
def test_replan_refuses_what_does_not_fit(kernel, own_lens):
    _, made, plan = planned(kernel, two_level([(200, [60] * 4)]))
    other = filled("slab_token", two_level([(200, own_lens)]), spec_of(dtype=torch.float16, device=DEVICE))
    with pytest.raises(ValueError, match="Fix: plan and capture anew"):
        made.replan(plan, other.layout.view(other.rows))


def test_two_plans_of_one_kernel_do_not_disturb_each_other():
    made = make_kernel("fused", "triton")
    held = [filled("slab_token", TREES[name], spec_of(dtype=torch.float16, device=DEVICE)) for name in SMALL[:2]]
    views = [one.layout.view(one.rows) for one in held]
    plans = [made.plan(view, one.logical.spec) for view, one in zip(views, held)]
    for plan, view, one in zip(plans, views, held):
        state = made.run(plan, one.logical.q, [one.layout.pools[0]] * len(view.levels))
        assert check(state, made.lse_base, oracle(one.logical)).passed


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_captured_graph_follows_growing_lengths(kernel):
    """Lengths grow between replays, as they do while decoding: 128 tokens to 160; far more is refused (see above)."""
    trees = [two_level([(1024, [n] * 8)]) for n in (128, 144, 160)]
    held = [filled("slab_token", tree, spec_of(dtype=torch.bfloat16, device="cuda"), seed=1) for tree in trees]
    made = make_kernel(kernel, "triton")
    views = [one.layout.view(one.rows) for one in held]
    plan = made.plan(views[0], held[0].logical.spec)
    pool, q = KVPool(*(x.clone() for x in held[-1].layout.pools[0])), held[0].logical.q.clone()
    made.run(plan, q, [pool, pool])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = made.run(plan, q, [pool, pool])
    for one, view in zip(held, views):
        for target, source in zip(pool, one.layout.pools[0]):
            target[: source.shape[0]].copy_(source)
        q.copy_(one.logical.q)
        made.replan(plan, view)
        graph.replay()
        result = check(state, made.lse_base, oracle(one.logical))
        assert result.passed, result.reason()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_last_slots_of_a_pool_of_more_than_2_to_the_31_elements_are_read(kernel):
    from granikv.layouts.base import Capacity
    from granikv.layouts.slab_token import SlabTokenLayout
    from granikv.logical import materialize

    spec, tree = spec_of(32, 8, 128, torch.bfloat16, "cuda"), two_level([(3000, [40] * 8)])
    logical = materialize(tree, spec, 0)
    slots = (1 << 31) // (8 * 128) + 4096
    layout = SlabTokenLayout("slab_token")
    layout.reserve(spec, Capacity(slots, slots - 400))
    filler = layout.allocate(slots - 400 - 3000)
    root = layout.allocate(3000)
    layout.append(root, *logical.kv[0])
    rows = []
    for node in range(1, 9):
        rows.append(layout.fork(root))
        layout.append(rows[-1], *logical.kv[node])
    view = layout.view(rows)
    assert int(view.levels[0].slab_starts[0]) * 8 * 128 > (1 << 31)
    made = make_kernel(kernel, "triton")
    assert view.order is None
    state = made.run(made.plan(view, spec), logical.q, [KVPool(*layout.pools[0])] * 2)
    result = check(state, made.lse_base, oracle(logical))
    assert result.passed, result.reason()
    layout.free(filler)
