"""What the FlashInfer adapters hand to the library, read back by a strict stand-in that knows only its documents.

The stand-in takes no argument that the adapters have no need to pass, and answers rows without tokens as badly as the
library may: out NaN, lse -5e4 (its `math::inf` is 5e4). The GPU tests put the library in its place.
"""

import inspect
import math
import sys
from functools import cache
from types import ModuleType

import pytest
import torch
from conftest import KERNELS_OF, LAYOUTS, TREES, filled, make_kernel, make_layout, spec_of

from granikv.binding import bind
from granikv.gate import check
from granikv.kernels import AttentionState, merge_states
from granikv.reference import oracle

NO_TOKENS_LSE = -5e4
HALVES = (torch.float16, torch.bfloat16)
LEGAL = [
    (kernel, layout)
    for kernel in KERNELS_OF["flashinfer"]
    for layout in LAYOUTS
    if bind(make_kernel(kernel, "flashinfer"), make_layout(layout).provides, "charge").reason is None
]


def attend(q, keys, values, sm_scale):
    """Rows q [n, Hq, D] over k, v [L, Hkv, D] in float32: out in q's type, lse in base 2."""
    assert keys.dtype == values.dtype == q.dtype
    if not len(keys):
        return torch.full_like(q, math.nan), torch.full(q.shape[:2], NO_TOKENS_LSE)
    grouped = q.float().unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("nhgd,lhd->nhgl", grouped, keys.float()) * sm_scale
    out = torch.einsum("nhgl,lhd->nhgd", scores.softmax(-1), values.float())
    return out.flatten(1, 2).to(q.dtype), scores.logsumexp(-1).flatten(1, 2) / math.log(2)


class Paged:
    """A planned page table: run() reads a copy of the arrays, as the library keeps its own."""

    def __init__(self, workspace, kv_layout, backend):
        assert (workspace.dtype, workspace.ndim, kv_layout) == (torch.uint8, 1, "NHD")
        self._backend, self.workspace = backend, workspace
        made.append(self)

    def keep(self, qo_indptr, kv_indptr, kv_indices, last_page_len, heads, page_size, types, sm_scale):
        assert self._backend in ("fa2", "fa3"), "a backend is always named"
        assert types[0] == types[1]
        assert types[0] in HALVES
        assert all(x.dtype == torch.int32 for x in (qo_indptr, kv_indptr, kv_indices, last_page_len))
        assert len(qo_indptr) == len(kv_indptr) == len(last_page_len) + 1
        assert len(kv_indices) == int(kv_indptr[-1])
        assert isinstance(sm_scale, float)
        self.arrays = [x.clone() for x in (qo_indptr, kv_indptr, kv_indices, last_page_len)]
        self.heads, self.page_size, self.dtype, self.sm_scale = heads, page_size, types[0], sm_scale

    def run(self, q, paged_kv_cache, *, return_lse=False):
        qo_indptr, kv_indptr, kv_indices, last_page_len = (x.tolist() for x in self.arrays)
        keys, values = paged_kv_cache
        assert keys.shape[1:] == values.shape[1:] == (self.page_size, *self.heads[1:])
        assert q.shape == (qo_indptr[-1], self.heads[0], self.heads[2])
        assert q.dtype == self.dtype
        out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], NO_TOKENS_LSE)
        for entry, last in enumerate(last_page_len):
            pages = kv_indices[kv_indptr[entry] : kv_indptr[entry + 1]]
            length = max(len(pages) - 1, 0) * self.page_size + last
            rows = slice(qo_indptr[entry], qo_indptr[entry + 1])
            k, v = (pool[pages].flatten(0, 1)[:length] for pool in (keys, values))
            out[rows], lse[rows] = attend(q[rows], k, v, self.sm_scale)
        return (out, lse) if return_lse else out


made: list[Paged] = []


class Decode(Paged):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, use_tensor_cores=False, backend="auto"):
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self.tensor_cores = use_tensor_cores

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *, q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        rows, heads = torch.arange(len(indptr), dtype=torch.int32), (num_qo_heads, num_kv_heads, head_dim)
        self.keep(rows, indptr, indices, last_page_len, heads, page_size, (q_data_type, kv_data_type), sm_scale)


class Prefill(Paged):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal=False, q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        assert not causal
        arrays, heads = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len), (num_qo_heads, num_kv_heads)
        types = (q_data_type, kv_data_type)
        self.keep(qo_indptr, *arrays, (*heads, head_dim_qk), page_size, types, sm_scale)


class MultiLevel:
    def __init__(self, num_levels, float_workspace_buffer, kv_layout="NHD"):
        self._batch_prefill_wrappers = [Prefill(float_workspace_buffer, kv_layout) for _ in range(num_levels)]

    def plan(
        self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim, page_size, *, sm_scale=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        levels = zip(qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, strict=True)
        heads, types = (num_qo_heads, num_kv_heads, head_dim), {"q_data_type": q_data_type, "sm_scale": sm_scale}
        for wrapper, level in zip(self._batch_prefill_wrappers, levels, strict=True):
            wrapper.plan(*level, *heads, page_size, kv_data_type=kv_data_type, **types)

    def run(self, q, paged_kv_cache):
        states = [wrapper.run(q, paged_kv_cache, return_lse=True) for wrapper in self._batch_prefill_wrappers]
        return merge_states([AttentionState(*state) for state in states], base=2.0).out


def single_prefill_with_kv_cache(q, k, v, *, causal=False, sm_scale=None, backend="auto", return_lse=False):
    assert backend in ("fa2", "fa3")
    assert return_lse
    assert not causal
    assert len(q)
    assert len(k)
    return attend(q, k, v, sm_scale)


def merge_state(v_a, s_a, v_b, s_b):
    assert s_a.isfinite().all(), "the library divides 0 by 0 where a row has tokens on neither side"
    assert s_b.isfinite().all()
    return tuple(merge_states([AttentionState(v_a, s_a), AttentionState(v_b, s_b)], base=2.0))


CLASSES = {
    "BatchDecodeWithPagedKVCacheWrapper": Decode,
    "BatchPrefillWithPagedKVCacheWrapper": Prefill,
    "MultiLevelCascadeAttentionWrapper": MultiLevel,
}
FUNCTIONS = {"single_prefill_with_kv_cache": single_prefill_with_kv_cache, "merge_state": merge_state}


@pytest.fixture
def stand_in(monkeypatch):
    fake = ModuleType("flashinfer")
    vars(fake).update(CLASSES | FUNCTIONS)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    made.clear()


@cache
def held_of(layout, tree, dtype):
    return filled(layout, TREES[tree], spec_of(dtype=dtype))


@cache
def truth_of(tree, dtype):
    return oracle(held_of(LAYOUTS[0], tree, dtype).logical)


def prepared(kernel, held):
    """(plan, q in the view's order, pools, the view's order) of `kernel` on a filled layout."""
    spec, view = held.logical.spec, held.layout.view(held.rows)
    kv = [held.layout.pools[0]] * len(view.levels)
    if adapter := bind(kernel, view.traits, "charge").adapter:
        gather = adapter.plan(view, spec)
        view, kv = gather.view, adapter.run(gather, kv)
    order = torch.arange(view.batch_size) if view.order is None else view.order
    return kernel.plan(view, spec), held.logical.q[order.to(spec.device)], kv, order.to(spec.device)


def judge(kernel, state, order, truth):
    back = order.argsort()
    result = check(AttentionState(*(x[back] if x.numel() else x for x in state)), kernel.lse_base, truth)
    assert result.passed, result.reason()


def refuses(kernel, held):
    """The library's own cascade takes no row without tokens, and its adapter says so."""
    lens = torch.cat([level.kv_lens for level in held.layout.view(held.rows).levels])
    return "multilevel" in kernel.name and not bool(lens.all())


def assert_right(kernel, held, truth):
    if refuses(kernel, held):
        with pytest.raises(ValueError, match=r"has rows without tokens.*Fix: "):
            prepared(kernel, held)
        return
    plan, q, kv, order = prepared(kernel, held)
    judge(kernel, kernel.run(plan, q, kv), order, truth)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("kernel", "layout"), LEGAL)
def test_the_arrays_of_every_legal_cell_describe_its_tokens(kernel, layout, tree, stand_in):
    assert_right(make_kernel(kernel, "flashinfer"), held_of(layout, tree, torch.float16), truth_of(tree, torch.float16))


@pytest.mark.parametrize(("kernel", "layout"), LEGAL)
def test_bfloat16_is_passed_on(kernel, layout, stand_in):
    tree, dtype = "two_groups_of_unequal_length", torch.bfloat16
    assert_right(make_kernel(kernel, "flashinfer"), held_of(layout, tree, dtype), truth_of(tree, dtype))


@pytest.mark.parametrize(("kernel", "layout"), LEGAL)
def test_two_plans_alive_at_once_keep_their_own_arrays(kernel, layout, stand_in):
    trees = "one_group", "two_groups_of_unequal_length"
    two_plans(make_kernel(kernel, "flashinfer"), [held_of(layout, x, torch.float16) for x in trees])
    assert len({wrapper.workspace.data_ptr() for wrapper in made}) == 1, "one float workspace a kernel"


def two_plans(kernel, both):
    ready = [prepared(kernel, held) for held in both]
    for (plan, q, kv, order), held in zip([*ready, ready[0]], [*both, both[0]], strict=True):
        judge(kernel, kernel.run(plan, q, kv), order, oracle(held.logical))


@pytest.mark.parametrize("name", ["naive", "naive_cudacore"])
def test_naive_decodes_on_the_cores_in_its_name(name, stand_in):
    prepared(make_kernel(name, "flashinfer"), held_of("paged_16", "one_group", torch.float16))
    assert [(type(x), x._backend, x.tensor_cores) for x in made] == [(Decode, "fa2", name == "naive")]


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_every_level_of_the_library_s_cascade_has_the_backend_in_its_name(backend, stand_in):
    kernel = make_kernel(f"cascade_multilevel_{backend}", "flashinfer")
    prepared(kernel, held_of("paged_16", "one_group", torch.float16))
    assert [(type(x), x._backend) for x in made] == [(Prefill, backend)] * 2


def test_a_library_without_the_attribute_to_pin_is_refused(stand_in, monkeypatch):
    class Renamed(Prefill):
        def __init__(self, *args):
            super().__init__(*args)
            del self._backend

    monkeypatch.setattr(sys.modules[__name__], "Prefill", Renamed)
    with pytest.raises(ValueError, match=r"no backend to pin. Fix: "):
        prepared(make_kernel("cascade_multilevel_fa2", "flashinfer"), held_of("paged_16", "one_group", torch.float16))


@pytest.mark.parametrize("library", [*CLASSES, *FUNCTIONS])
def test_the_stand_in_takes_only_what_the_library_takes(library):
    """Where the library is importable: every parameter here is one there, the positional ones at the same place."""
    real = getattr(pytest.importorskip("flashinfer"), library)
    if library in FUNCTIONS:
        return assert_narrower(FUNCTIONS[library], real)
    for method in ("__init__", "plan", "run"):
        # decode's plan() forwards its keywords to _plan_impl(), which names them
        forwards = library.startswith("BatchDecode") and method == "plan"
        assert_narrower(getattr(CLASSES[library], method), getattr(real, "_plan_impl" if forwards else method))


def assert_narrower(mine, theirs):
    ours, real = (list(inspect.signature(x).parameters.values()) for x in (mine, theirs))
    placed = [x.name for x in ours if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert placed == [x.name for x in real][: len(placed)]
    assert {x.name for x in ours} <= {x.name for x in real if x.kind is not x.VAR_KEYWORD}


def on_gpu(kernel, layout, tree, dtype):
    """The kernel and a filled layout on the GPU, with the library itself; skips where either cannot run."""
    pytest.importorskip("flashinfer")
    held = filled(layout, TREES[tree], spec_of(8, 2, 128, dtype, "cuda"))
    made_kernel = make_kernel(kernel, "flashinfer")
    if reason := made_kernel.supports(held.logical.spec):
        pytest.skip(reason)
    return made_kernel, held


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("kernel", "layout"), LEGAL)
def test_the_library_computes_every_legal_cell(kernel, layout, tree, dtype):
    made_kernel, held = on_gpu(kernel, layout, tree, dtype)
    assert_right(made_kernel, held, oracle(held.logical))


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "layout"), LEGAL)
def test_the_library_keeps_two_plans_apart(kernel, layout):
    made_kernel, first = on_gpu(kernel, layout, "one_group", torch.bfloat16)
    _, second = on_gpu(kernel, layout, "two_groups_of_unequal_length", torch.bfloat16)
    two_plans(made_kernel, [first, second])


@pytest.mark.gpu
@pytest.mark.parametrize("tree", ["longer_than_a_chunk", "some_suffixes_empty", "nested_prefixes"])
@pytest.mark.parametrize(("kernel", "layout"), LEGAL)
def test_a_graph_replays_what_was_captured(kernel, layout, tree):
    """Captured once on q = 0, replayed on the real q: a run that waits for the host cannot be captured at all."""
    made_kernel, held = on_gpu(kernel, layout, tree, torch.bfloat16)
    if refuses(made_kernel, held):
        pytest.skip("rows without tokens")
    plan, q, kv, order = prepared(made_kernel, held)
    placed = torch.zeros_like(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made_kernel.run(plan, placed, kv)  # compiles outside the graph
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = made_kernel.run(plan, placed, kv)
    placed.copy_(q)
    graph.replay()
    torch.cuda.synchronize()
    judge(made_kernel, state, order, oracle(held.logical))
