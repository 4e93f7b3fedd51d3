"""What FlashInfer kernels refuse, and in which words; test_flashinfer_arrays.py checks what they compute."""

from types import SimpleNamespace

import pytest
import torch

from baselines import flashinfer_levels


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
