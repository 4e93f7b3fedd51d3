import pytest
from conftest import make_kernel, make_layout

from granikv.binding import GatherPrefix, bind
from granikv.view import Trait


@pytest.mark.parametrize(
    ("layout", "kernel", "outcome"),
    [
        ("paged_16", "naive", "native"),
        ("paged_16", "cascade", "native"),
        ("paged_16", "hydragen", "charged"),
        ("paged_1", "hydragen_gemm", "charged"),
        ("slab_token", "naive", "native"),
        ("slab_token", "cascade", "native"),
        ("slab_token", "hydragen", "native"),
        ("unshared_16", "naive", "native"),
        ("unshared_16", "cascade", "illegal"),
        ("unshared_16", "hydragen", "illegal"),
    ],
)
def test_the_grid_is_as_documented(layout, kernel, outcome):
    binding = bind(make_kernel(kernel), make_layout(layout).provides, "charge")
    assert outcome == ("illegal" if binding.reason else "charged" if binding.adapter else "native")


def test_forbid_names_the_missing_trait():
    binding = bind(make_kernel("hydragen"), make_layout("paged_16").provides, "forbid")
    assert binding.missing == Trait.DENSE_PREFIX
    assert binding.reason == "hydragen requires DENSE_PREFIX, which the layout does not provide (fallback=forbid)"


def test_an_adapter_that_takes_away_what_the_kernel_needs_is_not_used():
    class NeedsBoth:
        name = "needs_both"
        requires = Trait.DENSE_PREFIX | Trait.ONE_POOL

    assert GatherPrefix.takes == Trait.ONE_POOL
    assert "no adapter bridges it" in bind(NeedsBoth(), Trait.LEVELED | Trait.ONE_POOL, "charge").reason


def test_an_unknown_fallback_is_refused():
    with pytest.raises(ValueError, match="fallback='silent'"):
        bind(make_kernel("naive"), Trait.ONE_POOL, "silent")
