"""Every published run can be read and drawn again by this code."""

import pytest
from conftest import ROOT

from analysis.audit import draw
from analysis.load import load_records
from analysis.report import attribution_tables, ratio_tables, write_figures

RUNS = sorted(path.parent for path in (ROOT / "results").glob("*/cells.parquet"))


def test_there_are_published_runs():
    assert len(RUNS) >= 3


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_its_figures_are_drawn_again(run, tmp_path):
    found = load_records(run)
    written = draw(found, tmp_path) if "audit" in run.name else write_figures(found, tmp_path)
    assert all(path.stat().st_size > 100 for path in written)
    assert {path.suffix for path in written} == {".pdf", ".png", ".csv"}


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_its_tables_and_provenance_are_whole(run):
    found = load_records(run)
    assert ratio_tables(found).renderables
    assert "audit" in run.name or attribution_tables(found).renderables
    for origin in found.provenance:
        assert origin["hashes"]["code"]
        assert origin["environment"]["versions"]["torch"]
        assert set(origin["configs"]) <= set(found.cells.block)
    assert {block for origin in found.provenance for block in origin["configs"]} == set(found.cells.block)


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_its_placebos_hold(run):
    """A/A: two copies of a cell differ by noise. One interval in twenty misses 1, so that one of a few may."""
    cells = load_records(run).cells
    placebo = cells[cells.placebo & (cells.status == "ok") & (cells.order == "interleaved")]
    missed = (placebo.ratio_lo > 1) | (placebo.ratio_hi < 1)
    assert len(placebo)
    assert missed.sum() <= max(1, len(placebo) // 8)
    assert ((placebo.ratio - 1).abs() < 0.06).all()
