import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from test_analysis import grid, written

from analysis.calibration import candidates, fit, held_out, regret
from analysis.load import load_records
from experiments import calibrate

PUBLISHED = ROOT / "results" / "h200-op"


def test_half_of_the_points_are_held_out_like_a_chessboard():
    points = pd.DataFrame([(b, n) for b in (1, 16, 64) for n in (1024, 4096)], columns=["batch_size", "prefix_len"])
    assert held_out(points).tolist() == [False, True, True, False, False, True]


def test_fitting_finds_the_rates_that_made_the_times():
    rates = np.array([5.0, 250.0, 1.5, 60.0])
    terms = np.random.default_rng(0).random((12, 4)) + np.array([1.0, 0.0, 0.0, 0.0])
    cells = pd.DataFrame({"kernel": "fused", "op_us": terms @ rates})
    assert list(fit(cells, {"fused": terms.tolist()})["fused"].values()) == pytest.approx(list(rates), rel=1e-3)


def test_regret_by_hand():
    columns = ["block", "layout", "backend", "batch_size", "prefix_len", "kernel", "op_us", "num_layers"]
    rows = [("b", "slab_token", "triton", 4, 64.0, kernel, us, 32) for kernel, us in (("naive", 30.0), ("fused", 10.0))]
    cells = pd.DataFrame(rows, columns=columns)
    found = regret(cells, {("b", "slab_token"): "naive"}, decision_us=32.0).iloc[0]
    assert (found.best, found.regret, found.over_naive) == ("fused", pytest.approx(3.1), pytest.approx(30 / 31))


def test_charged_and_failed_cells_are_no_candidates(tmp_path):
    rows = grid()
    rows[2]["legality"] = {"missing": ["DENSE_PREFIX"], "adapter": "gather_prefix", "adapt_bytes": 10}
    found = candidates(load_records(written(tmp_path, rows)), "torch", ["naive", "hydragen"])
    assert len(found) == 5


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_the_published_policy_loses_little_on_points_it_was_not_fitted_to(backend, tmp_path, monkeypatch):
    """What README says of it, derived again from the published records."""
    found = []
    monkeypatch.setattr(calibrate, "CONF", tmp_path)
    monkeypatch.setattr(calibrate, "_show", lambda table, _: found.append(table))
    # what it takes on an idle machine, rounded up; a busy one takes longer
    monkeypatch.setattr(calibrate, "_decision_us", lambda *_: 5.0)
    (tmp_path / "policy").mkdir()
    assert calibrate.policy(PUBLISHED, backend, "again") == 0
    published = ROOT / "conf" / "policy" / f"fitted_h200_{backend}.yaml"
    assert (tmp_path / "policy" / "again.yaml").read_text() == published.read_text()
    table = found[0]
    assert np.exp(np.log(table.regret).mean()) < 1.03
    assert table.regret.max() < 1.10
    assert table.over_naive.min() > 0.98


def test_a_run_without_the_backend_is_an_error_with_the_fix(tmp_path):
    written(tmp_path, grid())
    with pytest.raises(ValueError, match=r"has no native cells of backend triton\. Fix"):
        calibrate.policy(tmp_path, "triton", "none")
