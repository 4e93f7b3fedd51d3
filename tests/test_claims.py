import pytest
from test_analysis import grid, row, written

from analysis.claims import claims
from analysis.load import load_records

C1, C1_14B, C1_32B, C2, C3, C4 = range(6)


def step_rows(block, batch_size, ours, prefix_len=16384.0, model="llama31_8b"):
    """Two cells of whole decode steps, the baseline at 1000 us."""
    made = []
    for layout, kernel, us in (("paged_16", "naive", 1000.0), ("slab_token", "granikv", 1000.0 / ours)):
        one = row(block, layout, kernel, False, [us, us * 1.001, us * 0.999], expected_cells=2, level="step")
        one["model"] = {**one["model"], "name": model}
        one["workload"] = {**one["workload"], "batch_size": batch_size, "prefix_len": prefix_len}
        made.append(one)
    return made


def found(folder, *blocks):
    return claims([("here", load_records(written(folder, *blocks)))])


def test_what_was_not_measured_is_not_testable(tmp_path):
    table = found(tmp_path, grid())
    assert table[C1].verdict.startswith("not testable here: no decode steps of llama31_8b")
    assert table[C4].verdict.startswith("not testable here")
    assert table[C1].ours == ""


def test_a_throughput_within_a_tenth_at_every_batch_is_reproduced(tmp_path):
    table = found(tmp_path, step_rows("a", 16, 2.1), step_rows("b", 64, 2.2))
    assert table[C1].verdict == "reproduced"
    assert table[C1].records == "here"
    assert "B 16: 2.10" in table[C1].ours
    assert "B 64: 2.20" in table[C1].ours
    assert table[C1_14B].verdict.startswith("not testable")


def test_a_throughput_that_moves_with_the_batch_says_so(tmp_path):
    table = found(tmp_path, step_rows("a", 16, 1.3), step_rows("b", 256, 4.0))
    assert table[C1].verdict == "depends on the batch: 1.30x to 4.00x"


def test_another_throughput_is_not_reproduced_and_short_prefixes_do_not_count(tmp_path):
    assert found(tmp_path / "a", step_rows("a", 64, 1.2))[C1].verdict == "not reproduced"
    short = found(tmp_path / "b", step_rows("a", 64, 2.16, prefix_len=1024.0))
    assert short[C1].verdict.startswith("not testable")


def test_decomposition_follows_the_attribution(tmp_path):
    """grid() has a kernel factor of 4 and a layout factor of 1.25."""
    assert found(tmp_path, grid())[C2].verdict == "kernel: reproduced; layout: not"


def test_a_charged_gather_decides_contiguity(tmp_path):
    rows = grid()
    for one in rows:
        if one["cell"]["kernel"] == "hydragen" and one["cell"]["layout"] != "slab_token":
            one["legality"] = {"missing": ["DENSE_PREFIX"], "adapter": "gather_prefix", "adapt_bytes": 10}
    assert found(tmp_path, rows)[C3].ours.startswith("a gather in every step bridges it: 1.2")


@pytest.mark.parametrize(
    ("batch_global", "grouped", "verdict"),
    [
        (1000.0, 500.0, "reproduced against batch-global; so does a grouped cascade on pages"),
        (1000.0, 990.0, "reproduced against batch-global; a grouped cascade on pages does not"),
        (600.0, 500.0, "not reproduced"),
    ],
)
def test_many_agents_are_judged_beside_the_fair_baseline(tmp_path, batch_global, grouped, verdict):
    times = {
        ("paged_16", "naive"): 1000.0,
        ("paged_16", "cascade"): grouped,
        ("paged_16", "cascade_batch"): batch_global,
        ("slab_token", "granikv"): 500.0,
    }
    rows = []
    for (layout, kernel), us in times.items():
        one = row("a", layout, kernel, False, [us, us * 1.001, us * 0.999], expected_cells=4)
        one["workload"] = {**one["workload"], "num_prefixes": 4}
        rows.append(one)
    assert found(tmp_path, rows)[C4].verdict == verdict


def test_a_gpu_s_records_come_before_a_processor_s(tmp_path):
    gpu = [{**one, "measure": {**one["measure"], "device": "cuda", "device_name": "A GPU"}} for one in grid()]
    runs = [("cpu", load_records(written(tmp_path / "c", grid()))), ("gpu", load_records(written(tmp_path / "g", gpu)))]
    table = claims(runs)
    assert table[C2].records == "gpu"
    assert table[C2].conditions.startswith("cuda: A GPU")
