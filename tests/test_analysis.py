import copy
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from analysis.attribution import EFFECTS, Corners, attribute, attribute_all, noise_floor
from analysis.load import export, load_records
from analysis.report import attribution_tables, ratio_tables, write_figures
from analysis.stats import joint_medians, median_interval, paired_ratio

LAYOUTS = ("paged_16", "paged_1", "slab_token")
KERNELS = ("naive", "cascade", "hydragen", "granikv")
LAYOUT_FACTOR = {"paged_16": 1.0, "paged_1": 1.05, "slab_token": 1.25}
KERNEL_FACTOR = {"naive": 1.0, "cascade": 2.0, "hydragen": 3.0, "granikv": 4.0}


def row(block="b0", layout="paged_16", kernel="naive", placebo=False, times=(100.0, 104.0, 96.0), **changes):
    """A record as the harness writes it, with `times` as run_us."""
    cell = {"layout": layout, "kernel": kernel, "backend": changes.pop("backend", "torch"), "placebo": placebo}
    count, status = len(times), changes.pop("status", "ok")
    samples = {name: [0.0] * count for name in ("append_us", "alloc_us", "view_us", "plan_us", "adapt_us")}
    samples |= {"position": [0.0] * count, "run_us": list(times), "total_us": list(times)}
    made = {
        "level": "op",
        "run": "test",
        "block": block,
        "attempt": "first",
        "expected_cells": 13,
        "cell": cell,
        "status": status,
        "reason": None if status == "ok" else "it was so",
        "workload": {"name": "uniform", "batch_size": 16, "prefix_len": 1024.0, "suffix_len": 64.0, "num_prefixes": 1},
        "model": {"name": "tiny", "num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 16, "num_layers": 4}
        | {"dtype": "float32"},
        "measure": {"clock": "cpu", "l2": "cold", "device": "cpu", "device_name": "A CPU", "num_threads": 2}
        | {"trials": count, "warmup": 1, "seed": 0},
        "baseline": {"layout": "paged_16", "kernel": "naive", "backend": "torch", "placebo": False},
        "legality": {"missing": [], "adapter": None, "adapt_bytes": 0},
        "plan": {"ran": kernel, "notes": {"chosen": "hydragen", "reason": "-"} if kernel == "granikv" else {}},
        "gate": {"out_error": 0.0, "out_budget": 1.0, "lse_error": 0.0, "lse_budget": 1.0},
        "footprint": {"reserved_bytes": 1, "used_bytes": 1, "copied_tokens": 0, "spilled_pages": 0},
        "floor_us": None,
        "bound_us": None,
        "samples": samples if status == "ok" else {name: [] for name in samples},
        "provenance": {"git_sha": "abc", "dirty": False, "time": "2026-01-01T00:00:00Z", "environment": {}},
        "hashes": {"config": "c", "batch": "b", "code": "code", "environment": "here"},
        "config": {},
    }
    for name, value in changes.items():
        made[name] = {**made[name], **value} if isinstance(value, dict) else value
    return made


def grid(block="b0", noise=0.02, trials=40, **changes):
    """12 cells whose layout and kernel factors are LAYOUT_FACTOR and KERNEL_FACTOR, and a placebo."""
    rng = np.random.default_rng(1)
    common = 1 + 0.3 * rng.random(trials)  # what slows a whole trial down
    rows = []
    for layout, kernel, placebo in [(x, k, False) for x in LAYOUTS for k in KERNELS] + [("paged_16", "naive", True)]:
        middle = 1000.0 / (LAYOUT_FACTOR[layout] * KERNEL_FACTOR[kernel])
        times = middle * common * (1 + noise * rng.standard_normal(trials))
        rows.append(row(block, layout, kernel, placebo, [float(t) for t in times], **copy.deepcopy(changes)))
    return rows


def written(folder: Path, *blocks):
    (folder / "records").mkdir(parents=True, exist_ok=True)
    for rows in blocks:
        path = folder / "records" / f"{rows[0]['block']}.jsonl"
        with path.open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in rows)
    return folder


def shown(renderable):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


# ---- statistics ----


def test_a_ratio_is_of_medians_and_pairs_cancel_what_slowed_a_whole_trial():
    slow_trials = 1 + 9 * (np.arange(30) % 3 == 0)
    estimate = paired_ratio(list(200.0 * slow_trials), list(100.0 * slow_trials))
    assert estimate == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_covers_the_true_ratio_about_19_times_in_20():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        base, other = (mean * np.exp(0.1 * rng.standard_normal(30)) for mean in (150.0, 100.0))
        _, lo, hi = paired_ratio(list(base), list(other), seed)
        covered += lo <= 1.5 <= hi
    assert 0.90 <= covered / 200 <= 0.99


def test_one_trial_has_no_interval():
    value, lo, hi = median_interval([3.0])
    assert value == 3.0
    assert math.isnan(lo)
    assert math.isnan(hi)


@pytest.mark.parametrize("columns", [[[1.0, 2.0], [1.0]], [[], []], [[1.0], [0.0]], [[1.0], [math.nan]]])
def test_unpaired_or_impossible_samples_are_refused(columns):
    with pytest.raises(ValueError, match=r"trials|positive"):
        joint_medians(columns, 0)


# ---- attribution ----


def test_known_factors_come_back(tmp_path):
    run = load_records(written(tmp_path, grid()))
    effects = attribute(run, "b0").set_index("effect")
    expected = {"total": 5.0, "layout": 1.25, "kernel": 4.0, "interaction": 1.0}
    for effect, factor in expected.items():
        assert effects.factor[effect] == pytest.approx(factor, rel=0.02)
        assert effects.lo[effect] < factor < effects.hi[effect]


def test_both_orders_multiply_to_the_total_and_the_means_lie_between(tmp_path):
    effects = attribute(load_records(written(tmp_path, grid(noise=0.2))), "b0").set_index("effect").factor
    assert effects.layout_first * effects.kernel_second == pytest.approx(effects.total)
    assert effects.kernel_first * effects.layout_second == pytest.approx(effects.total)
    assert effects.layout * effects.kernel == pytest.approx(effects.total)
    assert effects.layout**2 == pytest.approx(effects.layout_first * effects.layout_second)
    assert effects.interaction == pytest.approx(effects.layout_second / effects.layout_first)
    assert set(effects.index) == set(EFFECTS)


def test_a_corner_that_is_missing_or_not_ok_is_refused_with_what_there_is(tmp_path):
    rows = grid()
    del rows[0]
    run = load_records(written(tmp_path, [{**one, "expected_cells": 12} for one in rows]))
    with pytest.raises(ValueError, match=r"paged_16 x naive: 0 cells.*slab_token x granikv"):
        attribute(run, "b0")
    assert attribute_all(run).empty


def test_a_failed_corner_is_refused_with_its_reason(tmp_path):
    rows = grid()
    rows[0] = row(status="oom")
    with pytest.raises(ValueError, match=r"paged_16 x naive is oom: it was so"):
        attribute(load_records(written(tmp_path, rows)), "b0")


@pytest.mark.parametrize(("group", "key", "value"), [("measure", "clock", "graph"), ("measure", "device_name", "B")])
def test_corners_that_differ_in_more_than_layout_and_kernel_are_refused(tmp_path, group, key, value):
    rows = grid()
    rows[11][group][key] = value
    with pytest.raises(ValueError, match=f"corners with {key}"):
        attribute(load_records(written(tmp_path, rows)), "b0")


def test_two_backends_in_one_block_are_never_mixed_into_one_attribution(tmp_path):
    rows = grid() + [one | {"cell": {**one["cell"], "backend": "triton"}} for one in grid()[:12]]
    run = load_records(written(tmp_path, [{**one, "expected_cells": 25} for one in rows]))
    with pytest.raises(ValueError, match=r"2 cells"):
        attribute(run, "b0")
    assert sorted(attribute_all(run).backend.unique()) == ["torch", "triton"]


def test_an_effect_inside_the_placebo_noise_says_so(tmp_path):
    rows = grid(noise=0.05)
    run = load_records(written(tmp_path, rows))
    assert noise_floor(run)["b0"] > 1.0
    same = Corners("paged_16", "naive", "paged_16", "naive")
    assert attribute(run, "b0", same).within_noise.all()
    assert not attribute(run, "b0").set_index("effect").within_noise["total"]


# ---- loading ----


def test_torn_lines_and_impossible_samples_are_passed_over_with_a_warning(tmp_path):
    folder = written(tmp_path, grid())
    with (folder / "records" / "b0.jsonl").open("a") as file:
        file.write(json.dumps(row(times=(1.0, -2.0, 3.0))) + "\n")
        file.write(json.dumps(row()).replace("104.0", "NaN") + "\n")
        file.write(json.dumps(row())[:200])
    with pytest.warns(UserWarning, match=r"b0.jsonl:1\d") as caught:
        run = load_records(folder)
    assert len(caught) == 3
    assert len(run.cells) == 13


def test_the_last_complete_attempt_counts(tmp_path):
    unfinished = [{**one, "attempt": "third"} for one in grid()[:5]]
    second = [{**one, "attempt": "second", "reason": None} for one in grid()]
    second[3] = {**row(kernel="granikv", status="timeout"), "attempt": "second"}
    run = load_records(written(tmp_path, grid(), second, unfinished))
    assert len(run.cells) == 13
    assert (run.cells.status == "timeout").sum() == 1


def test_blocks_of_other_code_are_set_aside_with_a_warning(tmp_path):
    old = grid("b1", hashes={"code": "older"}, provenance={"time": "2025-01-01T00:00:00Z"})
    with pytest.warns(UserWarning, match=r"1 blocks made by other code"):
        run = load_records(written(tmp_path, grid(), old))
    assert set(run.cells.block) == {"b0"}


def test_an_empty_folder_is_an_error_with_a_fix(tmp_path):
    with pytest.raises(ValueError, match=r"Fix: name a folder that a run wrote"):
        load_records(tmp_path)
    (tmp_path / "records").mkdir()
    with pytest.raises(ValueError, match=r"Fix: run the experiment first"):
        load_records(tmp_path)


PUBLISHED = set(
    [
        "level",
        "block",
        "layout",
        "kernel",
        "backend",
        "device",
        "status",
        "reason",
        "model",
        "batch_size",
        "prefix_len",
        "suffix_len",
        "num_prefixes",
        "run_us",
        "ratio",
        "ratio_lo",
        "ratio_hi",
        "tokens_per_s",
    ]
)


def test_export_keeps_the_published_names_and_reads_back_the_same(tmp_path):
    run = load_records(written(tmp_path / "run", grid()))
    assert set(run.cells.columns) >= PUBLISHED
    export(run, tmp_path / "published")
    back = load_records(tmp_path / "published")
    pd.testing.assert_frame_equal(back.cells, run.cells, check_dtype=False)
    assert run.samples_of(run.cells.iloc[4]) == back.samples_of(back.cells.iloc[4])
    assert back.provenance == run.provenance


# ---- tables and figures ----


def test_a_slow_down_is_shown_below_1(tmp_path):
    slower = grid()
    for one in slower:
        if one["cell"]["kernel"] == "cascade":
            one["samples"]["run_us"] = [5000.0 + i for i in range(40)]
    run = load_records(written(tmp_path, slower))
    assert re.search(r"paged_16 x cascade +ok +[0-9.]+ +0\.2", shown(ratio_tables(run)))
    write_figures(run, tmp_path / "figures")
    assert pd.read_csv(tmp_path / "figures" / "heatmap.csv").ratio.min() < 0.3


def test_every_status_and_the_placebo_are_in_the_table(tmp_path):
    rows = grid()
    for index, status in zip((1, 2, 3, 4, 5, 6), ("illegal", "unsupported", "incorrect", "oom", "timeout", "crash")):
        rows[index] = row(layout=rows[index]["cell"]["layout"], kernel=rows[index]["cell"]["kernel"], status=status)
    run = load_records(written(tmp_path, rows))
    text = shown(ratio_tables(run))
    assert all(status in text for status in ("illegal", "unsupported", "incorrect", "oom", "timeout", "crash", "A/A"))
    assert write_figures(run, tmp_path / "figures")


def test_a_charged_cell_is_marked_and_only_that_one(tmp_path):
    rows = grid()
    rows[2]["legality"] = {"missing": ["DENSE_PREFIX"], "adapter": "gather_prefix", "adapt_bytes": 10}
    text = shown(ratio_tables(load_records(written(tmp_path, rows))))
    assert text.count("ok, charged") == 1


def test_the_attribution_table_fits_80_columns(tmp_path):
    text = shown(attribution_tables(load_records(written(tmp_path, grid()))))
    assert "Shapley mean" in text
    assert "…" not in text


def several_points():
    points = [(b, n) for b in (1, 16) for n in (256, 1024, 4096)]
    return [grid(f"b{i}", workload={"batch_size": b, "prefix_len": float(n)}) for i, (b, n) in enumerate(points)]


def test_all_figures_are_written_as_pdf_png_and_csv(tmp_path):
    paths = write_figures(load_records(written(tmp_path, *several_points())), tmp_path / "figures")
    stems = {path.stem for path in paths}
    assert stems >= {"heatmap", "scaling", "waterfall", "crossover", "breakdown"}
    for stem in stems:
        for suffix in ("pdf", "png", "csv"):
            assert (tmp_path / "figures" / f"{stem}.{suffix}").stat().st_size > 100


def test_one_point_makes_figures_too(tmp_path):
    one = [{**row(), "expected_cells": 1}]
    assert write_figures(load_records(written(tmp_path, one)), tmp_path / "figures")


def test_a_run_without_a_single_ok_cell_makes_what_it_can(tmp_path):
    rows = [{**one, **{key: row(status="oom")[key] for key in ("status", "reason", "samples")}} for one in grid()]
    paths = write_figures(load_records(written(tmp_path, rows)), tmp_path / "figures")
    assert {path.stem for path in paths} == {"heatmap"}


def test_the_crossover_shows_both_sides_of_1(tmp_path):
    """A prefix kernel that loses to naive (as a cascade does at B=128, Lp=128, Hq=16, Hkv=8) is drawn as losing."""
    blocks = several_points()
    for one in blocks[0]:
        if one["cell"]["kernel"] in ("cascade", "hydragen"):
            one["samples"]["run_us"] = [2000.0 + i for i in range(40)]
    write_figures(load_records(written(tmp_path, *blocks)), tmp_path / "figures")
    ratios = pd.read_csv(tmp_path / "figures" / "crossover.csv").ratio
    assert ratios.min() == pytest.approx(0.57, abs=0.15)
    assert ratios.max() > 2


def test_waterfall_bars_multiply_to_the_total(tmp_path):
    write_figures(load_records(written(tmp_path, *several_points())), tmp_path / "figures")
    data = pd.read_csv(tmp_path / "figures" / "waterfall.csv")
    for _, group in data.groupby("block"):
        factor = group.set_index("effect").factor
        assert factor.layout_first * factor.kernel_second == pytest.approx(factor.total)


def test_unknown_layouts_and_kernels_are_drawn_with_looks_of_their_own(tmp_path):
    rows = grid(trials=3)
    for layout, kernel in (("paged_7", "naive"), ("paged_9", "mine"), ("slab_token", "theirs")):
        rows.append(row(layout=layout, kernel=kernel))
    run = load_records(written(tmp_path, [{**one, "expected_cells": 16} for one in rows]))
    write_figures(run, tmp_path / "figures")
    drawn = pd.read_csv(tmp_path / "figures" / "heatmap.csv")
    assert {"mine", "theirs"} <= set(drawn.kernel)
    assert {"paged_7", "paged_9"} <= set(drawn.layout)


def test_a_figure_refuses_two_environments(tmp_path):
    other = grid("b1", measure={"device_name": "Another CPU"})
    run = load_records(written(tmp_path, grid(), other))
    with pytest.raises(ValueError, match=r"device_name differs: A CPU, Another CPU"):
        write_figures(run, tmp_path / "figures")
