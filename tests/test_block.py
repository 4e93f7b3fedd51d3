import math
import statistics
import time
from dataclasses import replace

import pytest
import torch
from conftest import make_kernel, make_layout, spec_of

from granikv import block as block_module
from granikv.block import Block, run_block
from granikv.cell import CellName
from granikv.timing import CellTimeout, Timing, time_limit
from granikv.workloads.uniform import UniformWorkload

BASELINE = CellName("paged_16", "naive", "torch")


def block_of(
    kernels=("naive", "cascade"), layouts=("paged_16", "slab_token"), fallback="charge", replace_kernel=None, **timing
):
    made = {(name, "torch"): make_kernel(name) for name in kernels}
    made |= {(name, "torch"): kernel for name, kernel in (replace_kernel or {}).items()}
    settings = {
        "trials": 3,
        "warmup": 1,
        "clock": "cpu",
        "order": "interleaved",
        "cache": "warm",
        "flush_bytes": 1024,
        "num_layers": 4,
        "cell_timeout_s": 60.0,
        "seed": 0,
    }
    return Block(
        run="test",
        workload=UniformWorkload("uniform", 4, 96, 8),
        spec=spec_of(),
        model={"name": "tiny", "num_layers": 4},
        timing=Timing(**{**settings, **timing}),
        fallback=fallback,
        layouts={name: (lambda name=name: make_layout(name)) for name in layouts},
        kernels=made,
        baseline=BASELINE,
        config={"trials": settings["trials"]},
    )


class Spoilt:
    """A kernel that is right until `after` calls of run, then does what `fault` says."""

    lse_base = math.e

    def __init__(self, name, fault, after=0):
        self.inner, self.fault, self.after, self.calls = make_kernel("cascade"), fault, after, 0
        self.name, self.requires = name, self.inner.requires

    def supports(self, spec):
        return None

    def plan(self, view, spec):
        return self.inner.plan(view, spec)

    def run(self, plan, q, kv):
        self.calls += 1
        state = self.inner.run(plan, q, kv)
        return self.fault(state) if self.calls > self.after else state


def by_cell(records):
    return {(r.cell["layout"], r.cell["kernel"], r.cell["placebo"]): r for r in records}


def test_a_block_gives_one_ok_record_a_cell_and_a_placebo():
    records = run_block(block_of())
    assert [r.status for r in records] == ["ok"] * 5
    assert [r.cell["placebo"] for r in records] == [False] * 4 + [True]
    assert {len(values) for r in records for values in r.samples.values()} == {3}
    assert len({r.attempt for r in records}) == 1
    assert {r.expected_cells for r in records} == {5}


def test_every_trial_visits_all_cells_in_its_own_order():
    records = run_block(block_of(trials=8))
    per_trial = list(zip(*(r.samples["position"] for r in records), strict=True))
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in per_trial)
    assert len(set(per_trial)) > 1
    assert [r.samples["position"] for r in run_block(block_of(trials=8))] == [r.samples["position"] for r in records]


def test_host_work_is_shared_by_layers_and_layer_work_is_not():
    samples = run_block(block_of())[0].samples
    for i in range(3):
        host = samples["alloc_us"][i] + samples["view_us"][i] + samples["plan_us"][i]
        layer = samples["append_us"][i] + samples["adapt_us"][i] + samples["run_us"][i]
        assert samples["total_us"][i] == pytest.approx(layer + host / 4)


def test_the_charged_gather_costs_time_and_shows_its_bytes():
    records = by_cell(run_block(block_of(kernels=("naive", "hydragen"))))
    charged, native = records["paged_16", "hydragen", False], records["slab_token", "hydragen", False]
    assert charged.legality == {
        "missing": ["DENSE_PREFIX"],
        "adapter": "gather_prefix",
        "adapt_bytes": 2 * 96 * spec_of().kv_token_bytes,
    }
    assert min(charged.samples["adapt_us"]) > 0
    assert native.legality["adapter"] is None
    assert max(native.samples["adapt_us"]) == 0


def test_forbid_makes_the_cell_illegal_with_the_reason():
    records = by_cell(run_block(block_of(kernels=("naive", "hydragen"), fallback="forbid")))
    assert records["paged_16", "hydragen", False].status == "illegal"
    assert "DENSE_PREFIX" in records["paged_16", "hydragen", False].reason
    assert records["slab_token", "hydragen", False].status == "ok"


def fail_with(error):
    def fault(state):
        raise error

    return fault


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (lambda state: state._replace(out=state.out * 1.01), "incorrect"),
        (lambda state: state._replace(lse=state.lse + 0.01), "incorrect"),
        (lambda state: state._replace(out=state.out * math.nan), "incorrect"),
        (fail_with(RuntimeError("boom")), "crash"),
        (fail_with(torch.OutOfMemoryError("CUDA out of memory. Tried 5 GiB")), "oom"),
        (fail_with(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")), "oom"),
    ],
)
def test_a_bad_cell_has_a_status_and_no_latency_and_the_others_go_on(fault, status):
    records = by_cell(run_block(block_of(replace_kernel={"odd": Spoilt("odd", fault)})))
    bad = records["paged_16", "odd", False]
    assert bad.status == status
    assert bad.reason
    assert not any(bad.samples.values())
    assert records["slab_token", "cascade", False].status == "ok"


def test_a_cell_that_fails_in_a_trial_loses_its_samples():
    records = by_cell(
        run_block(block_of(replace_kernel={"odd": Spoilt("odd", fail_with(RuntimeError("boom")), after=4)}))
    )
    assert [records[layout, "odd", False].status for layout in ("paged_16", "slab_token")].count("crash") >= 1
    assert records["paged_16", "naive", False].status == "ok"


def test_a_slow_cell_times_out_and_leaves_the_layout_whole():
    def stall(state):
        time.sleep(5)
        return state

    records = by_cell(run_block(block_of(replace_kernel={"odd": Spoilt("odd", stall, after=2)}, cell_timeout_s=0.5)))
    assert "timeout" in {records[layout, "odd", False].status for layout in ("paged_16", "slab_token")}
    assert records["paged_16", "cascade", False].status == "ok"


def test_an_unsupported_shape_is_a_row_with_its_reason():
    odd = Spoilt("odd", lambda state: state)
    odd.supports = lambda spec: f"group_size {spec.group_size}: not supported. Fix: backend=torch"
    records = by_cell(run_block(block_of(replace_kernel={"odd": odd})))
    assert records["paged_16", "odd", False].status == "unsupported"
    assert records["paged_16", "odd", False].reason.startswith("group_size 4")


def test_a_block_too_large_for_the_machine_is_rows_of_oom(monkeypatch):
    monkeypatch.setattr(block_module, "fits", lambda needed, device, what: f"{what} needs {needed} bytes")
    records = run_block(block_of())
    assert {r.status for r in records} == {"oom"}
    assert "needs" in records[0].reason


def test_the_memory_estimate_is_what_the_layouts_allocate():
    block = block_of(kernels=("naive",))
    records = run_block(block)
    reserved = sum(r.footprint["reserved_bytes"] for r in records)
    logical = block.workload.tree().num_tokens * block.spec.kv_token_bytes
    assert block.memory_bytes(block.workload.tree()) == reserved + logical


def test_a_blind_gate_vouches_for_no_cell(monkeypatch):
    monkeypatch.setattr("granikv.gate.scaled_error", lambda value, truth: 0.0)
    records = run_block(block_of())
    assert {r.status for r in records} == {"incorrect"}
    assert "planted fault" in records[0].reason


def test_the_key_changes_with_configuration_code_and_batch(monkeypatch):
    block, key = block_of(), block_of().key()
    assert block.key() == key
    assert replace(block, config={"trials": 4}).key() != key
    assert replace(block, workload=UniformWorkload("uniform", 4, 97, 8)).key() != key
    monkeypatch.setattr(block_module, "code_hash", lambda: "other")
    assert block.key() != key


def test_records_name_code_environment_and_numbers():
    record = run_block(block_of())[0]
    assert set(record.hashes) == {"config", "batch", "code", "environment"}
    assert record.provenance["environment"]["num_threads"] == torch.get_num_threads() == record.measure["num_threads"]
    assert len(record.provenance["kv_hash"]) == 16
    assert min(record.provenance["gate_margins"].values()) > 1


def test_a_time_limit_ends_what_runs_over_and_nothing_else():
    with time_limit(5.0):
        time.sleep(0.01)
    with pytest.raises(CellTimeout), time_limit(0.05):
        time.sleep(2)
    time.sleep(0.06)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "timing.trials=0"),
        ({"cache": "lukewarm"}, "lukewarm"),
        ({"cell_timeout_s": 0}, "cell_timeout_s"),
        ({"trials": 2.5}, "2.5"),
    ],
)
def test_bad_timing_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        block_of(**changes)


def test_a_placebo_differs_from_its_twin_by_noise_only():
    records = by_cell(run_block(block_of(trials=40, warmup=5)))
    twin, placebo = (records["paged_16", "naive", flag].samples["total_us"] for flag in (False, True))
    assert 0.5 < statistics.median(twin) / statistics.median(placebo) < 2.0


def test_interleaved_trials_visit_every_cell_once_each_in_orders_of_their_own():
    timing = block_of().timing
    visits = list(timing.schedule(5))
    for repetition in range(4):
        assert sorted(cell for r, _, cell in visits if r == repetition) == list(range(5))
    orders = {tuple(cell for r, _, cell in visits if r == repetition) for repetition in range(4)}
    assert len(orders) > 1
    assert visits == list(timing.schedule(5))


def test_sequential_trials_finish_a_cell_before_the_next():
    visits = [cell for _, _, cell in block_of(order="sequential").timing.schedule(3)]
    assert [visits[i] for i in range(0, 12, 4)] == [visits[i + 3] for i in range(0, 12, 4)]
    assert sorted(visits) == sorted([0, 1, 2] * 4)
