import json
import math
from dataclasses import replace

import pytest

from granikv.record import BlockBusy, BlockFile, Record


def record(attempt="a1", kernel="naive", status="ok", **changes):
    ok = status == "ok"
    fields = {
        "level": "op",
        "run": "test",
        "block": "b",
        "attempt": attempt,
        "expected_cells": 2,
        "cell": {"layout": "paged_16", "kernel": kernel, "backend": "torch", "placebo": False},
        "status": status,
        "reason": None if ok else "because",
        "workload": {},
        "model": {},
        "measure": {},
        "baseline": {},
        "legality": {},
        "plan": {},
        "gate": {"out_error": 0.0} if ok else None,
        "footprint": None,
        "floor_us": None,
        "bound_us": None,
        "samples": {"run_us": [1.0, 2.0] if ok else []},
        "provenance": {},
        "hashes": {},
        "config": {},
    }
    return Record(**{**fields, **changes})


def test_rows_come_back_as_written(tmp_path):
    file = BlockFile(tmp_path, "b")
    file.append([record(), record(kernel="cascade")])
    assert [row["cell"]["kernel"] for row in file.rows()] == ["naive", "cascade"]
    assert file.rows()[0]["samples"]["run_us"] == [1.0, 2.0]


def test_a_complete_attempt_is_finished(tmp_path):
    file = BlockFile(tmp_path, "b")
    assert file.finished_attempt() is None
    file.append([record()])
    assert file.finished_attempt() is None
    file.append([record("a2"), record("a2", "cascade")])
    assert {row["attempt"] for row in file.finished_attempt()} == {"a2"}


@pytest.mark.parametrize(
    ("status", "retried"),
    [("crash", True), ("timeout", True), ("oom", False), ("illegal", False), ("incorrect", False)],
)
def test_only_crashes_and_timeouts_are_tried_again(tmp_path, status, retried):
    file = BlockFile(tmp_path, "b")
    file.append([record(), record(kernel="cascade", status=status)])
    assert (file.finished_attempt() is None) == retried


@pytest.mark.parametrize("cut", [1, 50, 200])
def test_a_truncated_last_line_loses_only_itself_and_can_be_appended_to(tmp_path, cut):
    file = BlockFile(tmp_path, "b")
    file.append([record(), record(kernel="cascade")])
    file.path.write_bytes(file.path.read_bytes()[:-cut])
    lost = 0 if cut == 1 else 1
    assert len(file.rows()) == 2 - lost
    file.append([record("a2"), record("a2", "cascade")])
    assert len(file.finished_attempt()) == 2
    assert len(file.rows()) == 4 - lost


def test_a_block_is_held_by_one_process_at_a_time(tmp_path):
    with BlockFile(tmp_path, "b").locked():
        with pytest.raises(BlockBusy, match="another process"), BlockFile(tmp_path, "b").locked():
            pass
        with BlockFile(tmp_path, "c").locked():
            pass
    with BlockFile(tmp_path, "b").locked():
        pass


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_sample_that_is_no_duration_is_refused(value):
    with pytest.raises(ValueError, match="run_us"):
        record(samples={"run_us": [1.0, value]})


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "incorrect", "samples": {"run_us": [1.0]}},
        {"status": "ok", "samples": {"run_us": []}},
        {"status": "ok", "reason": "but"},
        {"status": "ok", "gate": None},
        {"status": "fine"},
        {"status": "oom", "reason": None},
    ],
)
def test_a_record_cannot_lie(changes):
    with pytest.raises(ValueError, match=r"status|gate|ok and has samples"):
        record(**changes)


def test_a_line_is_strict_json():
    assert json.loads(record().line(), parse_constant=lambda name: pytest.fail(name))["schema"] == 1
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(record(), floor_us=math.nan).line()
