import math
from dataclasses import replace

import pytest
from conftest import CONF, TREES, filled, make_kernel
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import experiments.preflight  # noqa: F401  registers the resolvers of conf/
from granikv.gate import check
from granikv.policies import (
    CandidateCost,
    CostModelPolicy,
    CostTerms,
    FittedPolicy,
    FixedPolicy,
    ThresholdPolicy,
    VllmPolicy,
)
from granikv.reference import oracle
from granikv.selector import BatchShape, NoLegalChoice, Selector

ALL = ["naive", "cascade", "hydragen"]
THRESHOLD = ThresholdPolicy(4, 256, shared=["hydragen", "cascade"], unshared=["naive"])
VLLM = VllmPolicy(132, shared=["cascade"], unshared=["naive"])


def shape(groups, own=(64,) * 16, num_qo_heads=32, num_kv_heads=8):
    return BatchShape(tuple(groups), tuple(own), num_qo_heads, num_kv_heads, 128, 2)


def selector(policy, names=ALL):
    return Selector("granikv", policy, {name: make_kernel(name) for name in names})


def test_effective_batch_weights_groups_by_their_tokens():
    assert shape([(10, 300), (2, 100)]).effective_batch == 8.0
    assert shape([]).effective_batch == 0.0


def test_threshold_prefers_a_dense_kernel_and_takes_cascade_where_it_is_illegal():
    assert THRESHOLD.choose(shape([(16, 1024)]), ALL).name == "hydragen"
    assert THRESHOLD.choose(shape([(16, 1024)]), ["naive", "cascade"]).name == "cascade"
    assert THRESHOLD.choose(shape([(16, 1024)]), ["naive"]).name == "naive"


@pytest.mark.parametrize(
    ("change", "groups"),
    [({"min_prefix": 10**9}, [(16, 10**6)]), ({"min_effective_batch": 17}, [(16, 1024)])],
)
def test_each_threshold_is_live(change, groups):
    assert THRESHOLD.choose(shape(groups), ALL).name == "hydragen"
    assert replace(THRESHOLD, **change).choose(shape(groups), ALL).name == "naive"


def test_thresholds_take_effect_at_their_value():
    assert THRESHOLD.choose(shape([(4, 256)]), ALL).name == "hydragen"
    assert THRESHOLD.choose(shape([(4, 255)]), ALL).name == "naive"
    assert THRESHOLD.choose(shape([(3, 256)]), ALL).name == "naive"


def test_vllm_ignores_a_prefix_that_the_whole_batch_does_not_share():
    assert VLLM.choose(shape([(64, 4096)], own=(64,) * 64), ALL).name == "cascade"
    assert VLLM.choose(shape([(32, 4096), (32, 4096)], own=(64,) * 64), ALL).name == "naive"


@pytest.mark.parametrize(
    ("batch", "prefix_len", "chosen"), [(8, 256, "naive"), (7, 8192, "naive"), (64, 255, "naive"), (64, 256, "cascade")]
)
def test_vllm_conditions_by_hand(batch, prefix_len, chosen):
    """B=8, Lp=256: cascade takes ceil(32/132) * 2 = 2 tile times, flash-decoding ceil(8*8*2/132) = 1. B=64: 2 and 8."""
    assert VLLM.choose(shape([(batch, prefix_len)], own=(64,) * batch), ALL).name == chosen


def test_vllm_takes_cascade_without_grouped_queries():
    assert VLLM.choose(shape([(8, 256)], own=(64,) * 8, num_qo_heads=8), ALL).name == "cascade"


def test_the_cost_model_follows_bytes_by_hand():
    """No launch cost, endless compute, 1 GB/s: naive moves 16 * 1010 tokens of 4096 bytes, cascade 1160."""
    model = CostModelPolicy(bandwidth_gbs=1.0, peak_tflops=1e9, level_us=0.0)
    batch = shape([(16, 1000)], own=(10,) * 16)
    assert model.cost_us("naive", batch) == pytest.approx(16 * 1010 * 4096 / 1e3)
    assert model.cost_us("cascade", batch) == pytest.approx(1160 * 4096 / 1e3)
    assert model.choose(batch, ALL).name in ("cascade", "hydragen")
    assert model.cost_us("hydragen_gemm", batch) > model.cost_us("hydragen", batch)
    assert model.cost_us("of_unknown_cost", batch) is None


def test_the_cost_model_takes_naive_where_nothing_is_shared_or_launches_dominate():
    model = CostModelPolicy(bandwidth_gbs=1000.0, peak_tflops=100.0, level_us=50.0)
    assert model.choose(shape([(2, 16)], own=(4, 4)), ALL).name == "naive"


def test_a_tie_between_equal_costs_goes_to_the_first_candidate():
    model = CostModelPolicy(bandwidth_gbs=1.0, peak_tflops=1e9, level_us=1.0)
    assert model.choose(shape([], own=(10,) * 16), ALL).name == "naive"


def test_fixed_is_refused_where_its_kernel_is_illegal():
    assert FixedPolicy("cascade").choose(shape([]), ALL).name == "cascade"
    with pytest.raises(NoLegalChoice, match="hydragen"):
        FixedPolicy("hydragen").choose(shape([]), ["naive", "cascade"])


@pytest.mark.parametrize("policy", [path.stem for path in sorted((CONF / "policy").glob("*.yaml"))])
def test_every_configured_policy_composes_and_chooses(policy):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"policy={policy}"])
        made = instantiate(cfg.policy, _convert_="all")
    assert made.choose(shape([(16, 4096)]), ALL).name in ALL


def test_the_plan_says_what_was_chosen_and_why():
    held = filled("slab_token", TREES["one_group"])
    plan = selector(FixedPolicy("hydragen")).plan(held.layout.view(held.rows), held.logical.spec)
    assert plan.ran == "hydragen_torch"
    assert plan.notes["chosen"] == "hydragen"
    assert plan.notes["legal"] == ALL
    assert "fixed" in plan.notes["reason"]


def test_only_legal_candidates_are_offered():
    held = filled("paged_16", TREES["one_group"])
    plan = selector(THRESHOLD).plan(held.layout.view(held.rows), held.logical.spec)
    assert plan.notes["legal"] == ["naive", "cascade"]


@pytest.mark.parametrize("layout", ["paged_16", "slab_token", "unshared_16"])
@pytest.mark.parametrize(
    "policy",
    [THRESHOLD, VLLM, replace(THRESHOLD, min_prefix=1, min_effective_batch=1)],
    ids=["threshold", "vllm", "eager"],
)
def test_whatever_is_chosen_is_right(layout, policy):
    held = filled(layout, TREES["two_groups_of_unequal_length"])
    view, kernel = held.layout.view(held.rows), selector(policy)
    state = kernel.run(kernel.plan(view, held.logical.spec), held.logical.q, [held.layout.pools[0]] * len(view.levels))
    assert check(state, kernel.lse_base, oracle(held.logical)).passed


def test_candidates_with_different_lse_bases_are_refused():
    odd = make_kernel("cascade")
    odd.lse_base = 2.0
    with pytest.raises(ValueError, match="same lse_base"):
        Selector("granikv", THRESHOLD, {"naive": make_kernel("naive"), "cascade": odd})
    assert make_kernel("naive").lse_base == math.e


def fitted(**launches):
    return FittedPolicy({name: CandidateCost(launch, 0.0, 0.0, 0.0) for name, launch in launches.items()})


def test_the_fitted_policy_takes_the_least_of_the_legal_costs():
    shape = BatchShape(((4, 1000),), (10,) * 4, 8, 2, 64, 2)
    policy = fitted(naive=30.0, cascade=20.0, fused=10.0)
    assert policy.choose(shape, ["naive", "cascade", "fused"]).name == "fused"
    assert policy.choose(shape, ["naive", "cascade"]).name == "cascade"
    with pytest.raises(NoLegalChoice, match="no costs were fitted for hydragen"):
        policy.choose(shape, ["hydragen"])


@pytest.mark.parametrize("rate", ["us_per_gb", "us_per_gflop", "us_per_mstate"])
def test_every_fitted_rate_is_live(rate):
    zero = {"launch_us": 0.0, "us_per_gb": 0.0, "us_per_gflop": 0.0, "us_per_mstate": 0.0}
    policy = FittedPolicy(
        {"naive": CandidateCost(**{**zero, "launch_us": 1.0}), "fused": CandidateCost(**{**zero, rate: 1e9})}
    )
    assert policy.choose(BatchShape(((4, 1000),), (10,) * 4, 8, 2, 64, 2), ["naive", "fused"]).name == "naive"


def test_cost_terms_by_hand():
    """2 rows share 100 tokens and own 10 and 20; 4 query heads on 1 KV head of 8, 2 bytes: 32 bytes a token."""
    terms = CostTerms.of(BatchShape(((2, 100),), (10, 20), 4, 1, 8, 2))
    assert terms == pytest.approx((1.0, 130 * 32 / 1e9, 4 * 32 * 230 / 1e9, 64 / 1e6))
