import numpy as np
import pandas as pd
import pytest
from test_analysis import row, written

from analysis.audit import audit, draw
from analysis.load import load_records

BASE = ("paged_16", "naive")
OURS = ("slab_token", "granikv")


def cells(block, times, batch_size=16, order="interleaved", trials=40, **measure):
    """Cells of one block: {(layout, kernel): total_us}, with 1% noise; run_us is 90% of the total."""
    rng = np.random.default_rng(len(block))
    made = []
    for (layout, kernel), middle in times.items():
        total = middle * (1 + 0.01 * rng.standard_normal(trials))
        one = row(block, layout, kernel, False, [float(t) for t in total], expected_cells=len(times))
        one["samples"]["run_us"] = [0.9 * t for t in one["samples"]["total_us"]]
        one["workload"] = {**one["workload"], "batch_size": batch_size}
        one["measure"] = {**one["measure"], "order": order, **measure}
        made.append(one)
    return made


def whole_run(folder):
    blocks = [
        cells(
            "a", {BASE: 1000.0, OURS: 500.0, ("unshared_16", "naive"): 1500.0, ("paged_16", "naive_cudacore"): 3000.0}
        ),
        cells("bb", {BASE: 900.0, OURS: 400.0}, l2="warm"),
        cells("ccc", {BASE: 1100.0, OURS: 440.0}, order="sequential"),
        cells("dddd", {BASE: 600.0, OURS: 450.0}, batch_size=4),
        cells("eeeee", {BASE: 2000.0, OURS: 900.0}, clock="eager"),
    ]
    return load_records(written(folder, *blocks))


EXPECTED = {
    "right": 2.0,
    "copied_prefix": 3.0,
    "cuda_core_baseline": 6.0,
    "graphs_in_one_arm": 4.0,
    "warm_cache_in_one_arm": 2.5,
    "host_work_left_out": 2.0 / 0.9,
    "unlike_batches": 4 * 600 / 500,
    "best_of_all_trials": 2.04,
    "one_after_the_other": 2.5,
}


def test_every_mistake_reports_what_it_would_by_hand(tmp_path):
    found = audit(whole_run(tmp_path)).set_index("mistake").ratio
    assert set(found.index) == set(EXPECTED)
    for mistake, ratio in EXPECTED.items():
        assert found[mistake] == pytest.approx(ratio, rel=0.02), mistake


def test_the_right_block_is_the_cold_interleaved_one_with_the_largest_batch(tmp_path):
    table = audit(whole_run(tmp_path))
    assert set(table.block) == {"a"}
    assert table.error[table.mistake == "right"].item() == 1.0
    assert (table.lo <= table.ratio).all()
    assert (table.ratio <= table.hi).all()


def test_mistakes_that_the_run_cannot_show_are_left_out(tmp_path):
    run = load_records(written(tmp_path, cells("a", {BASE: 1000.0, OURS: 500.0})))
    assert set(audit(run).mistake) == {"right", "host_work_left_out", "best_of_all_trials"}


def test_a_run_without_both_cells_is_an_error_with_the_fix(tmp_path):
    with pytest.raises(ValueError, match=r"slab_token x granikv is missing. Fix: run experiment=audit"):
        audit(load_records(written(tmp_path, cells("a", {BASE: 1000.0}))))
    warm = load_records(written(tmp_path / "warm", cells("b", {BASE: 1.0, OURS: 1.0}, l2="warm")))
    with pytest.raises(ValueError, match=r"no cold, interleaved block.*Fix"):
        audit(warm)


def test_the_figure_shows_every_mistake(tmp_path):
    draw(whole_run(tmp_path), tmp_path / "figures")
    assert set(pd.read_csv(tmp_path / "figures" / "audit.csv").mistake) == set(EXPECTED)
    assert (tmp_path / "figures" / "audit.png").stat().st_size > 10_000
