import pytest
import torch
from conftest import LAYOUTS, make_kernel, make_layout, spec_of
from test_analysis import written

from analysis.load import load_records
from baselines.cascade_torch import CascadeTorch
from experiments.preflight import preflight
from granikv.block import Block, run_block
from granikv.cell import CellName
from granikv.kernels import AttentionState
from granikv.step.decoder import DecoderSpec
from granikv.timing import Timing
from granikv.workloads.uniform import UniformWorkload

SPEC = spec_of(4, 2, 16)
DECODER = DecoderSpec(SPEC, 2, 48, 64, 97, True, 10000.0, 1e-6)


def step_block(kernels=("naive", "cascade", "hydragen", "granikv"), fallback="charge", replaced=None):
    made = {(name, "torch"): made_kernel(name) for name in kernels}
    made |= {(name, "torch"): kernel for name, kernel in (replaced or {}).items()}
    return Block(
        run="test",
        workload=UniformWorkload("uniform", 4, 50, 6),
        spec=SPEC,
        model={"name": "tiny", "num_layers": 2, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16},
        timing=Timing(3, 1, "cpu", "interleaved", "cold", 1024, 2, 60.0, 0),
        fallback=fallback,
        layouts={name: lambda name=name: make_layout(name) for name in LAYOUTS if name != "unshared_16"},
        kernels=made,
        baseline=CellName("paged_16", kernels[0], "torch"),
        config={"fallback": fallback},
        decoder=DECODER,
    )


def made_kernel(name):
    if name != "granikv":
        return make_kernel(name)
    words = ["model=tiny", "kernel=[granikv]"]
    return preflight(words).blocks[0].kernels["granikv", "torch"]


def test_twelve_cells_and_the_placebo_are_ok_with_tokens_a_second(tmp_path):
    records = run_block(step_block())
    assert [record.status for record in records] == ["ok"] * 13
    assert {record.level for record in records} == {"step"}
    rows = [record.__dict__ for record in records]
    for row in rows:
        row["model"] = {**row["model"], "dtype": "float32"}
    run = load_records(written(tmp_path, rows))
    expected = 4 / run.cells.total_us * 1e6
    assert run.cells.tokens_per_s.tolist() == pytest.approx(expected.tolist())
    assert (run.cells.op_us == run.cells.total_us).all()


def test_a_step_s_time_is_all_it_does():
    samples = run_block(step_block(kernels=("naive",)))[0].samples
    for i in range(3):
        parts = sum(samples[part][i] for part in ("alloc_us", "view_us", "plan_us", "run_us"))
        assert samples["total_us"][i] == pytest.approx(parts)


def test_charged_gathers_of_all_layers_are_counted():
    by_cell = {(r.cell["layout"], r.cell["kernel"]): r for r in run_block(step_block(kernels=("naive", "hydragen")))}
    charged = by_cell["paged_16", "hydragen"].legality
    assert charged["adapter"] == "gather_prefix"
    assert charged["adapt_bytes"] == 2 * 48 * SPEC.kv_token_bytes * DECODER.num_layers
    assert by_cell["slab_token", "hydragen"].legality["adapter"] is None


def test_forbid_makes_the_cell_illegal():
    records = run_block(step_block(kernels=("naive", "hydragen"), fallback="forbid"))
    illegal = [r for r in records if r.status == "illegal"]
    assert {(r.cell["layout"], r.cell["kernel"]) for r in illegal} == {
        ("paged_16", "hydragen"),
        ("paged_1", "hydragen"),
    }


class Faulty(CascadeTorch):
    """Leaves the suffix out: the logits move, and the gate must see it through the whole model."""

    name = "faulty"

    def run(self, plan, q, kv):
        state = super().run(plan, q, kv)
        return AttentionState(torch.zeros_like(state.out), state.lse)


def test_a_kernel_that_is_wrong_in_a_layer_has_no_latency():
    records = run_block(step_block(kernels=("naive", "cascade"), replaced={"cascade": Faulty()}))
    wrong = [record for record in records if record.cell["kernel"] == "cascade"]
    assert {record.status for record in wrong} == {"incorrect"}
    assert all("logits" in record.reason for record in wrong)
    assert not any(any(record.samples.values()) for record in wrong)


def test_the_batch_is_put_back_after_every_step():
    records = run_block(step_block(kernels=("naive",)))
    lens = {record.footprint["used_bytes"] for record in records if record.cell["layout"] == "paged_1"}
    assert lens == {(50 + 4 * 6) * SPEC.kv_token_bytes * DECODER.num_layers}


def test_a_model_file_without_sizes_is_refused_with_the_fix():
    with pytest.raises(ValueError, match=r"model=qwen25_14b_tp2 has no num_layers|has no hidden_size.*Fix: level=op"):
        preflight(["level=step", "model=qwen25_14b_tp2"])
    with pytest.raises(ValueError, match=r"level='serve': op or step. Fix: level=op"):
        preflight(["level=serve"])


def test_the_step_experiment_composes():
    blocks = preflight(["experiment=step_tiny"]).blocks
    assert [block.level for block in blocks] == ["step"] * 4
    assert len({block.key() for block in blocks}) == 4
