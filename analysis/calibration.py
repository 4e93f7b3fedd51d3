"""A cost for every kernel fitted to one part of a run, and how much its choices lose on the other part."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from analysis.load import Run

TERMS = ("launch_us", "us_per_gb", "us_per_gflop", "us_per_mstate")


def held_out(cells: pd.DataFrame) -> pd.Series:
    """True for every other point of the grid of batch sizes and prefix lengths, as on a chessboard."""
    batch, prefix = (cells[column].rank(method="dense").astype(int) for column in ("batch_size", "prefix_len"))
    return (batch + prefix) % 2 == 1


def candidates(run: Run, backend: str, names: Sequence[str]) -> pd.DataFrame:
    """Native ok cells of the named kernels in one backend."""
    cells = run.cells[(run.cells.status == "ok") & ~run.cells.placebo & (run.cells.backend == backend)]
    return cells[cells.kernel.isin(list(names)) & (cells.adapter == "")]


def fit(cells: pd.DataFrame, terms: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Non-negative rates of every kernel that make the relative error of its predicted time least.

    `terms[kernel]` are the cost terms of the kernel's rows in `cells`, in their order.
    """
    rates = {}
    for kernel, group in cells.groupby("kernel", sort=False):
        times = group.op_us.to_numpy(dtype=float)
        scaled = np.asarray(terms[str(kernel)], dtype=float) / times[:, None]
        found, _ = nnls(scaled, np.ones(len(times)))
        rates[str(kernel)] = {term: round(float(rate), 4) for term, rate in zip(TERMS, found, strict=True)}
    return rates


def regret(cells: pd.DataFrame, chosen: Mapping[tuple[str, str], str], decision_us: float) -> pd.DataFrame:
    """For each (block, layout): time of the chosen kernel plus a layer's part of deciding, over the best one's.

    Also how many times as fast as naive the choice is.
    """
    rows = []
    for (block, layout), group in cells.groupby(["block", "layout"], sort=False):
        times = group.set_index("kernel").op_us
        took = times[chosen[str(block), str(layout)]] + decision_us / float(group.num_layers.iloc[0])
        rows.append(
            {
                **group.iloc[0][["block", "layout", "backend", "batch_size", "prefix_len"]].to_dict(),
                "chosen": chosen[str(block), str(layout)],
                "best": times.idxmin(),
                "regret": took / times.min(),
                "over_naive": times["naive"] / took if "naive" in times else float("nan"),
            }
        )
    return pd.DataFrame(rows)
