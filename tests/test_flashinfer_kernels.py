"""FlashInfer kernels. On a GPU the library itself; without one, a torch reader of the arrays that they pass to it."""

import inspect
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import KERNELS_OF, LAYOUTS, TREES, filled, make_kernel, spec_of, state_of

from baselines import flashinfer_levels
from granikv.gate import check
from granikv.kernels import AttentionState, merge_states
from granikv.reference import oracle

KERNELS = KERNELS_OF["flashinfer"]


def attend(q, keys, values, sm_scale):
    """Rows q [n, Hq, D] over k, v [L, Hkv, D], in float32; lse in base 2 as the library gives it."""
    n, heads, dim = q.shape
    grouped = q.float().view(n, keys.shape[1], -1, dim)
    scores = torch.einsum("nhgd,lhd->nhgl", grouped, keys.float()) * sm_scale
    out = torch.einsum("nhgl,lhd->nhgd", torch.softmax(scores, -1), values.float())
    lse = torch.logsumexp(scores, -1) / math.log(2)
    return torch.nan_to_num(out).reshape(q.shape).to(q.dtype), lse.reshape(n, heads)


class FakeWrapper:
    """Reads pages as FlashInfer documents them: NHD pools, host or device index arrays."""

    def __init__(self, workspace, kv_layout="NHD", use_cuda_graph=False, backend="auto", use_tensor_cores=False):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self._backend = backend

    def arrays(self, qo_indptr, kv_indptr, kv_indices, last_page_len, page_size, **types):
        assert self._backend in ("fa2", "fa3"), "a backend is always named"
        assert types["q_data_type"] == types["kv_data_type"] == torch.float16
        for array in (qo_indptr, kv_indptr, kv_indices, last_page_len):
            assert array.dtype == torch.int32
        self.planned = qo_indptr, kv_indptr, kv_indices, last_page_len, page_size, types["sm_scale"]

    def run(self, q, paged_kv_cache, return_lse=False):
        qo_indptr, kv_indptr, kv_indices, last_page_len, page_size, sm_scale = self.planned
        keys, values = paged_kv_cache
        assert keys.shape[1] == page_size
        out, lse = torch.full_like(q, 1e4), torch.full(q.shape[:2], 1e4)
        for entry in range(len(kv_indptr) - 1):
            pages = kv_indices[int(kv_indptr[entry]) : int(kv_indptr[entry + 1])].long()
            length = max(0, len(pages) - 1) * page_size + int(last_page_len[entry])
            rows = slice(int(qo_indptr[entry]), int(qo_indptr[entry + 1]))
            k, v = (pool[pages].flatten(0, 1)[:length] for pool in (keys, values))
            if length:
                out[rows], lse[rows] = attend(q[rows], k, v, sm_scale)
        return (out, lse) if return_lse else out


class FakeDecode(FakeWrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *, q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        rows = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        types = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "sm_scale": sm_scale}
        self.arrays(rows, indptr, indices, last_page_len, page_size, **types)


class FakePrefill(FakeWrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal=False, q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        assert not causal
        types = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "sm_scale": sm_scale}
        self.arrays(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, **types)


class FakeMultiLevel:
    def __init__(self, num_levels, float_workspace_buffer, kv_layout="NHD"):
        self._batch_prefill_wrappers = [FakePrefill(float_workspace_buffer, kv_layout) for _ in range(num_levels)]

    def plan(
        self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim, page_size, *, sm_scale=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        levels = zip(qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, strict=True)
        for wrapper, arrays in zip(self._batch_prefill_wrappers, levels, strict=True):
            heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
            wrapper.plan(*arrays, *heads, sm_scale=sm_scale, q_data_type=q_data_type, kv_data_type=kv_data_type)

    def run(self, q, paged_kv_cache):
        states = [AttentionState(*w.run(q, paged_kv_cache, return_lse=True)) for w in self._batch_prefill_wrappers]
        return merge_states(states, base=2.0).out


def single_prefill(q, k, v, *, causal, sm_scale, backend, return_lse):
    assert not causal
    assert return_lse
    assert backend in ("fa2", "fa3")
    return attend(q, k, v, sm_scale)


@pytest.fixture
def fake_flashinfer(monkeypatch):
    fake = ModuleType("flashinfer")
    fake.BatchDecodeWithPagedKVCacheWrapper = FakeDecode
    fake.BatchPrefillWithPagedKVCacheWrapper = FakePrefill
    fake.MultiLevelCascadeAttentionWrapper = FakeMultiLevel
    fake.single_prefill_with_kv_cache = single_prefill
    fake.merge_state = lambda va, sa, vb, sb: tuple(
        merge_states([AttentionState(va, sa), AttentionState(vb, sb)], base=2.0)
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("baselines.") and hasattr(module, "unsupported"):
            monkeypatch.setattr(module, "unsupported", lambda *_: None)


def assert_right(kernel, layout, tree, spec):
    held = filled(layout, tree, spec)
    made = make_kernel(kernel, "flashinfer")
    if "multilevel" in kernel and 0 in torch.cat([x.kv_lens for x in held.layout.view(held.rows).levels]):
        with pytest.raises(ValueError, match="has rows without tokens"):
            state_of(held, made)
        return
    result = check(state_of(held, made), made.lse_base, oracle(held.logical))
    assert result.passed, result.reason()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_arrays_that_adapters_pass_describe_the_batch(kernel, layout, tree, fake_flashinfer):
    make_kernel(kernel, "flashinfer")  # imports its module, so that the fixture of the next line finds it
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("baselines.") and hasattr(module, "unsupported"):
            module.unsupported = lambda *_: None
    assert_right(kernel, layout, TREES[tree], spec_of(dtype=torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_cell_matches_the_oracle(kernel, layout, tree):
    assert_right(kernel, layout, TREES[tree], spec_of(8, 2, 128, torch.bfloat16, "cuda"))


@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(40, 8), (28, 4), (64, 4)])
def test_group_sizes_that_cuda_cores_do_not_have_are_unsupported(num_qo_heads, num_kv_heads):
    spec = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=128, group_size=num_qo_heads // num_kv_heads
    )
    assert f"group_size {num_qo_heads // num_kv_heads}" in flashinfer_levels.unsupported(spec, tensor_cores=False)


@pytest.mark.parametrize("head_dim", [72, 80, 96])
def test_head_dims_that_it_does_not_have_are_unsupported(head_dim):
    spec = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=head_dim, group_size=4)
    assert f"head_dim {head_dim}" in flashinfer_levels.unsupported(spec)


@pytest.mark.parametrize("version", ["0.6.16", "0.5.0", "0.7.0", "1.0"])
def test_another_version_is_named_up_front(version, monkeypatch):
    flashinfer_levels.missing.cache_clear()
    monkeypatch.setattr(flashinfer_levels.metadata, "version", lambda _: version)
    assert f"flashinfer {version}" in flashinfer_levels.missing()
    flashinfer_levels.missing.cache_clear()


def test_a_workspace_that_is_too_small_says_what_to_change():
    with (
        pytest.raises(ValueError, match=r"workspace_bytes=16 is too small.*size 99.*Fix: a larger workspace_bytes"),
        flashinfer_levels._workspace_errors(flashinfer_levels.Workspace(16)),
    ):
        raise RuntimeError("Failed to allocate memory for batch_prefill_tmp_v with size 99")


@pytest.mark.gpu
def test_the_calls_made_are_the_library_s():
    flashinfer = pytest.importorskip("flashinfer")
    for fake, real in (
        (FakeDecode, flashinfer.BatchDecodeWithPagedKVCacheWrapper),
        (FakePrefill, flashinfer.BatchPrefillWithPagedKVCacheWrapper),
        (FakeMultiLevel, flashinfer.MultiLevelCascadeAttentionWrapper),
    ):
        for method in ("plan", "run"):
            taken = set(inspect.signature(getattr(real, method)).parameters)
            if "kwargs" not in taken:
                assert set(inspect.signature(getattr(fake, method)).parameters) <= taken
