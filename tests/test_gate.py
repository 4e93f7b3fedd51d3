import math
from dataclasses import replace

import pytest
import torch
from conftest import CONF, TREES, filled, make_kernel, spec_of
from omegaconf import OmegaConf

from granikv import gate
from granikv.gate import GateError, check, self_test
from granikv.kernels import AttentionState
from granikv.logical import LogicalKV, materialize
from granikv.reference import oracle, planted_faults
from granikv.spec import AttentionSpec
from granikv.tree import two_level
from granikv.view import KVPool

ablation = OmegaConf.load(CONF / "experiment" / "ablation.yaml")
POINTS = [
    (int(batch_size), int(prefix_len))
    for batch_size in ablation.hydra.sweeper.params["workload.batch_size"].split(",")
    for prefix_len in ablation.hydra.sweeper.params["workload.prefix_len"].split(",")
]
FAULTS = ["dropped_suffix", "off_by_one_last_page", "swapped_lse_base", "permuted_lse", "swapped_table_rows"]


@pytest.fixture(scope="module")
def ablation_blocks():
    model = OmegaConf.load(CONF / "model" / "llama31_8b.yaml")
    spec = AttentionSpec(model.num_qo_heads, model.num_kv_heads, model.head_dim)
    made = {}
    for batch_size, prefix_len in POINTS:
        tree = two_level([(prefix_len, [ablation.workload.suffix_len] * batch_size)])
        logical = materialize(tree, spec, seed=0)
        made[batch_size, prefix_len] = logical, oracle(logical)
    return made


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_planted_fault_is_caught_at_the_size_of_the_ablation(point, fault, ablation_blocks):
    logical, truth = ablation_blocks[point]
    state = planted_faults(truth, logical)[fault]
    result = check(AttentionState(state.out.float(), state.lse), math.e, truth)
    assert not result.passed
    assert result.out_error > 1000 * result.out_budget


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_the_right_answer_passes_at_the_size_of_the_ablation(point, ablation_blocks):
    _, truth = ablation_blocks[point]
    assert check(AttentionState(truth.whole.out.float(), truth.whole.lse), math.e, truth).passed


def mutated_run(mutate, kernel="cascade", layout="paged_16"):
    """What `kernel` computes on a view that `mutate` spoilt."""
    held = filled(layout, TREES["one_group"])
    view = mutate(held.layout.view(held.rows))
    chosen = make_kernel(kernel)
    state = chosen.run(chosen.plan(view, held.logical.spec), held.logical.q, [held.layout.pools[0]] * len(view.levels))
    return check(state, math.e, oracle(held.logical))


def own_changed(view, **changes):
    return replace(view, levels=(*view.levels[:-1], replace(view.levels[-1], **changes)))


def test_an_unspoilt_view_passes():
    assert mutated_run(lambda view: view).passed


def test_a_dropped_suffix_is_caught_in_a_real_kernel():
    def drop(view):
        own = view.levels[-1]
        return own_changed(
            view, kv_indptr=torch.zeros_like(own.kv_indptr), last_page_len=torch.zeros_like(own.last_page_len)
        )

    assert not mutated_run(drop).passed


@pytest.mark.parametrize("shift", [-1, 1])
def test_an_off_by_one_last_page_is_caught_in_a_real_kernel(shift):
    result = mutated_run(lambda view: own_changed(view, last_page_len=view.levels[-1].last_page_len + shift))
    assert not result.passed


def test_two_swapped_table_rows_are_caught_in_a_real_kernel():
    def swap(view):
        pages = view.levels[-1].kv_indices.clone()
        pages[[0, 1]] = pages[[1, 0]]
        return own_changed(view, pages=pages)

    assert not mutated_run(swap).passed


@pytest.mark.parametrize("declared", [2.0, 10.0])
def test_a_wrongly_declared_lse_base_is_caught(declared):
    truth = oracle(materialize(TREES["one_group"], spec_of(), 0))
    assert not check(AttentionState(truth.whole.out.float(), truth.whole.lse), declared, truth).passed


def test_nan_and_a_wrong_shape_never_pass():
    truth = oracle(materialize(TREES["one_group"], spec_of(), 0))
    spoilt = truth.whole.out.float().clone()
    spoilt[0, 0, 0] = math.nan
    assert not check(AttentionState(spoilt, truth.whole.lse), math.e, truth).passed
    assert not check(AttentionState(truth.whole.out[:1].float(), truth.whole.lse), math.e, truth).passed


def test_peaked_queries_show_mixed_lse_bases_between_libraries():
    """Lp=4096, Ls=16, peaked q: the merge of a log2 and a natural lse is off by far more than rounding."""
    logical = materialize(two_level([(4096, [16] * 2)]), spec_of(8, 2, 128), 0)
    truth = oracle(logical)
    wrong = planted_faults(truth, logical)["swapped_lse_base"]
    assert float((wrong.out - truth.whole.out).abs().max()) > 0.1


def test_gaussian_data_would_hide_a_dropped_suffix():
    """The reason for structured data: on Gaussian K, V and q the same fault moves the output by less than 1e-2."""
    spec, tree = spec_of(8, 2, 128), two_level([(16384, [16] * 2)])
    generator = torch.Generator().manual_seed(0)
    kv = [KVPool(*(torch.randn(n.num_tokens, 2, 128, generator=generator) for _ in range(2))) for n in tree.nodes]
    truth = oracle(LogicalKV(tree, spec, kv, torch.randn(2, 8, 128, generator=generator)))
    assert float((truth.shared.out - truth.whole.out).abs().max()) < 1e-2


def test_a_gate_that_cannot_see_a_fault_vouches_for_nothing(monkeypatch):
    logical = materialize(TREES["one_group"], spec_of(), 0)
    truth = oracle(logical)
    assert set(self_test(truth, logical)) == set(FAULTS)
    monkeypatch.setattr(gate, "scaled_error", lambda value, reference: 0.0)
    with pytest.raises(GateError, match="dropped_suffix"):
        self_test(truth, logical)


def test_bf16_faults_are_caught_too():
    logical = materialize(two_level([(2048, [64] * 4)]), spec_of(8, 2, 128, torch.bfloat16), 0)
    assert min(self_test(oracle(logical), logical).values()) > 5
