import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from experiments.preflight import preflight

SMALL = [
    "model=tiny",
    "workload.batch_size=4",
    "workload.suffix_len=8",
    "timing.trials=3",
    "timing.warmup=1",
    "timing.flush_bytes=1024",
]


def command(folder, *words, base=SMALL):
    """Options before overrides, as argparse wants them."""
    options = [word for word in words if word.startswith("-")]
    overrides = [word for word in words if not word.startswith("-")]
    return [sys.executable, "-m", "experiments.run", *options, f"output_dir={folder}", *base, *overrides]


def run(folder, *words, base=SMALL, **environment):
    return subprocess.run(
        command(folder, *words, base=base),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )


def rows(folder):
    return [json.loads(line) for path in sorted((folder / "records").glob("*.jsonl")) for line in path.open()]


REFUSED = [
    (["kernel=[naive,", "cascade]"], False, "the shell split the list", "'kernel=[naive,cascade]'"),
    (["workload.batch_size=8,16"], False, "needs -m", "-m workload.batch_size=8,16"),
    (["experiment=a,b"], True, "Hydra would apply only one", "experiment=a; python -m experiments.run experiment=b"),
    (["experiment=[a,b]"], False, "Hydra would apply only one", "experiment=a"),
    (["kernel=naive,cascade"], True, "timed interleaved", "'kernel=[naive,cascade]'"),
    (["layout=paged_16,paged_1"], True, "timed interleaved", "'layout=[paged_16,paged_1]'"),
    (["workload.prefx_len=5"], False, "no such key", "Did you mean workload.prefix_len?"),
    (["+workload.foo=5"], False, "unexpected keyword argument 'foo'", "It takes name, batch_size"),
    (["+foo=5"], False, "unknown key 'foo'", "Known: layout"),
    (["workload=unifrm"], False, "no conf/workload/unifrm.yaml", "Did you mean uniform?"),
    (["kernel=[naiv]"], False, "no conf/kernel/naiv.yaml", "Did you mean naive?"),
    (["model.head_dim=0"], False, "head_dim=0", "Fix"),
    (["model.num_kv_heads=5"], False, "num_kv_heads=5", "multiple"),
    (["workload.prefix_len=-5"], False, "workload.prefix_len=-5", "Fix"),
    (["workload.prefix_len="], True, "prefix_len=''", "Fix"),
    (["workload.prefix_len=1,"], True, "workload.prefix_len=1,", "Fix"),
    (["workload"], False, "not an override", "key=value"),
    (["timing.cache=hot"], False, "timing.cache='hot'", "Fix"),
    (["fallback=silent"], False, "fallback='silent'", "Fix"),
    (["device.num_threads=4096"], False, "device.num_threads=4096", "Fix"),
    (["device.dtype=int8"], False, "device.dtype='int8'", "Fix"),
    (["backend=nope"], False, "backend='nope'", "Known: flashinfer, torch, triton"),
    (["layout=[]"], False, "empty grid", "Fix"),
    (["layout.paged_16.page_size=0"], False, "page_size=0", "Fix"),
    (["workload=trace", "workload.path=/nope"], False, "no such file", "Fix"),
    (["policy=fixed", "policy.kernel=nope"], False, "policy names 'nope'", "Fix"),
    (["baseline.kernel=nope"], False, "baseline.kernel=nope", "Fix"),
    (["workload.prefix_len=0", "workload.suffix_len=0"], False, "at least one token", "Fix"),
]


@pytest.mark.parametrize(("words", "multirun", "said", "fix"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_before_any_work_with_the_fix(words, multirun, said, fix):
    with pytest.raises(ValueError, match=r"Fix: ") as caught:
        preflight(words, multirun)
    assert said in str(caught.value)
    assert fix in str(caught.value)


def test_refusal_is_one_line_on_stderr_and_exit_code_2(tmp_path):
    done = run(tmp_path, "workload.prefx_len=5")
    assert done.returncode == 2
    assert done.stderr.startswith("error: workload.prefx_len=5")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_sweep_with_one_bad_point_starts_nothing(tmp_path):
    done = run(tmp_path, "-m", "workload.prefix_len=64,-1")
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "multirun", "prefix_lens"),
    [
        (["'kernel=[naive, cascade]'".strip("'")], False, [1024]),
        (["workload.prefix_len=64,128"], True, [64, 128]),
        (["workload.prefix_len=range(256,1025,256)"], True, [256, 512, 768, 1024]),
        (["experiment=ablation"], False, [256, 1024, 2048, 4096] * 2),
        (["experiment=ablation", "workload.prefix_len=64"], False, [64] * 2),
        (["experiment=ablation", "workload.prefix_len=64,128"], False, [64, 128] * 2),
        (["experiment=ablation", "workload.prefix_len=64", "workload.batch_size=4"], False, [64]),
        (["layout.paged_16.page_size=3"], False, [1024]),
    ],
)
def test_sweep_points_are_what_hydra_will_run(words, multirun, prefix_lens):
    assert [block.workload.prefix_len for block in preflight(words, multirun).blocks] == prefix_lens


def test_a_sweep_runs_resumes_and_prints_where_its_records_are(tmp_path):
    words = ["-m", "workload.prefix_len=32,64", "kernel=[naive,cascade]", "layout=[paged_16,slab_token]"]
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "records") in done.stdout
    first = rows(tmp_path)
    assert len(first) == 2 * 5
    assert {row["status"] for row in first} == {"ok"}
    again = run(tmp_path, *words)
    assert again.returncode == 0
    assert again.stdout.count("resumed") == 2
    assert rows(tmp_path) == first


def test_every_row_of_the_table_is_there_and_the_placebo_contains_1(tmp_path):
    import pandas as pd

    done = run(tmp_path, "workload.prefix_len=64", "timing.trials=40", "figures=true", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    cells = pd.read_parquet(tmp_path / "cells.parquet")
    placebo = cells[cells.placebo].iloc[0]
    assert placebo.ratio_lo < 1.15
    assert placebo.ratio_hi > 0.87
    assert len(cells) == 13


def test_the_second_point_failing_leaves_the_others_and_sets_the_exit_code(tmp_path):
    done = run(tmp_path, "-m", "workload.prefix_len=32,64,96", "timing.cell_timeout_s=60,1e-4", "kernel=[naive]")
    statuses = {
        (row["workload"]["prefix_len"], row["config"]["timing"]["cell_timeout_s"]): row["status"]
        for row in rows(tmp_path)
    }
    assert done.returncode == 1
    assert statuses == {(n, t): "ok" if t == 60 else "timeout" for n in (32.0, 64.0, 96.0) for t in (60.0, 1e-4)}
    assert "cells failed: timeout" in done.stdout


def start(folder, *words):
    """A run that Ctrl-C reaches, also where the tests themselves run in the background."""
    return subprocess.Popen(
        command(folder, *words),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen in time")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "Ctrl-C"])
def test_killing_a_sweep_loses_at_most_the_running_block(tmp_path, how):
    words = ["-m", "workload.prefix_len=32,64,96,128", "timing.trials=30"]
    process = start(tmp_path, *words)
    wait_for(lambda: len(list(tmp_path.glob("records/*.jsonl"))) >= 2)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    kept = {path: path.read_text() for path in tmp_path.glob("records/*.jsonl")}
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resumed") >= 2
    assert all(path.read_text() == text for path, text in kept.items() if len(text.splitlines()) == 13)
    assert len(rows(tmp_path)) == 4 * 13


def test_two_runs_started_together_measure_each_block_once_in_folders_of_their_own(tmp_path):
    words = ["-m", "workload.prefix_len=32,64", "kernel=[naive]"]
    processes = [start(tmp_path, *words) for _ in range(2)]
    for process in processes:
        process.communicate(timeout=240)
    assert len(rows(tmp_path)) == 2 * 4
    assert len(list((tmp_path / "hydra").iterdir())) == 2


def test_a_trace_prints_its_prefix_groups(tmp_path):
    quick = [word for word in SMALL if word.startswith(("timing", "model"))]
    words = ["workload=trace", "workload.length_scale=0.02", "kernel=[naive,cascade]"]
    done = run(tmp_path, *words, base=quick)
    assert done.returncode == 0, done.stderr
    assert re.search(r"prefix groups: \d+ requests x \d+ tokens", done.stdout)


def test_a_layout_and_a_kernel_are_added_as_one_python_file_and_one_yaml_each(tmp_path):
    """Both live outside the repository, and show up in the grid, the tables and the figures."""
    for group in ("layout", "kernel"):
        (tmp_path / "conf" / group).mkdir(parents=True)
    (tmp_path / "paged_7.py").write_text(
        "from granikv.layouts.paged import PagedLayout\n\n\nclass PagedSeven(PagedLayout):\n    pass\n"
    )
    (tmp_path / "conf/layout/paged_7.yaml").write_text(
        "paged_7:\n  _target_: paged_7.PagedSeven\n  name: paged_7\n  page_size: 7\n"
    )
    (tmp_path / "twice.py").write_text(
        "from baselines.naive_torch import NaiveTorch\n\n\n"
        "class Twice(NaiveTorch):\n    name = 'twice'\n\n"
        "    def run(self, plan, q, kv):\n        super().run(plan, q, kv)\n        return super().run(plan, q, kv)\n"
    )
    (tmp_path / "conf/kernel/twice.yaml").write_text("twice:\n  torch:\n    _target_: twice.Twice\n")
    grid = ["layout=[paged_16,paged_7]", "kernel=[naive,twice]", "workload.prefix_len=64", "figures=true"]
    done = run(tmp_path / "out", f"--config-dir={tmp_path / 'conf'}", *grid, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, done.stderr
    cells = {(row["cell"]["layout"], row["cell"]["kernel"]): row["status"] for row in rows(tmp_path / "out")}
    assert cells == {(layout, kernel): "ok" for layout in ("paged_16", "paged_7") for kernel in ("naive", "twice")}
    assert "paged_7" in done.stdout
    assert "paged_7" in "".join(path.read_text() for path in (tmp_path / "out/figures").glob("*.csv"))


def test_a_figure_is_written_whatever_the_display_settings(tmp_path):
    done = run(tmp_path, "kernel=[naive]", "workload.prefix_len=32", "figures=true", MPLBACKEND="TkAgg", DISPLAY="")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("figures/*.png"))


def test_the_configuration_can_be_shown_without_running(tmp_path):
    done = run(tmp_path, "--cfg=job")
    assert done.returncode == 0
    assert "paged_16" in done.stdout
    assert not list(tmp_path.iterdir())
