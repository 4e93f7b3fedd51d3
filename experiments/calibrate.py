"""Fit what depends on the device: `python -m experiments.calibrate ceilings` and `policy RUN --backend B --name N`."""

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import yaml
from rich.table import Table

from analysis.calibration import candidates, fit, held_out, regret
from analysis.load import load_records
from experiments.display import console
from experiments.preflight import CONF
from granikv.policies import CandidateCost, CostTerms, FittedPolicy
from granikv.selector import BatchShape

KERNELS = ("naive", "cascade", "hydragen", "fused", "fused_paged")
REPEATS = 20


def ceilings() -> int:
    """Measures memory bandwidth (a sum over 8 GB) and the rate of a bf16 product (8192 cubed), and prints the yaml."""
    if not torch.cuda.is_available():
        print("error: ceilings are a GPU's, and this torch sees none. Fix: run it on the GPU machine", file=sys.stderr)
        return 2
    data = torch.randn(2 << 30, dtype=torch.float32, device="cuda")
    factor = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    read_s, product_s = _seconds(data.sum), _seconds(lambda: factor @ factor)
    measured = {"memory_gbs": data.nbytes / read_s / 1e9, "matrix_tflops": 2 * 8192**3 / product_s / 1e12}
    console.print(f"# {torch.cuda.get_device_name()}, put this into a file under conf/device")
    console.print(yaml.safe_dump({"ceilings": {key: round(value, 1) for key, value in measured.items()}}))
    return 0


def _seconds(work: object) -> float:
    """Median time of work() on the GPU."""
    taken = []
    for _ in range(REPEATS + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        taken.append(start.elapsed_time(stop) / 1e3)
    return float(np.median(taken[3:]))


def policy(run_folder: Path, backend: str, name: str) -> int:
    """Fits costs on half of a run's points, writes conf/policy/NAME.yaml, and prints the regret on the other half."""
    cells = candidates(load_records(run_folder), backend, KERNELS)
    if cells.empty:
        raise ValueError(f"{run_folder} has no native cells of backend {backend}. Fix: name one that it has")
    shapes = {row.block: _shape(row) for _, row in cells.iterrows()}
    apart = held_out(cells)
    training, rest = cells[~apart], cells[apart]
    by_kernel = training.groupby("kernel", sort=False)
    terms = {str(kernel): [CostTerms.of(shapes[block]) for block in group.block] for kernel, group in by_kernel}
    rates = fit(training, terms)
    fitted = FittedPolicy({kernel: CandidateCost(**rate) for kernel, rate in rates.items()})
    groups = rest.groupby(["block", "layout"], sort=False)
    chosen = {
        (block, layout): fitted.choose(shapes[block], list(group.kernel)).name for (block, layout), group in groups
    }
    decision_us = _decision_us(fitted, list(shapes.values()))
    _show(regret(rest, chosen, decision_us), decision_us)
    costs = {kernel: {"_target_": "granikv.policies.CandidateCost", **rate} for kernel, rate in rates.items()}
    target = CONF / "policy" / f"{name}.yaml"
    where = f"{run_folder.name}, backend {backend}, {cells.device_name.iloc[0]}"
    document = {"_target_": "granikv.policies.FittedPolicy", "costs": costs}
    head = f"# Fitted by experiments/calibrate.py to half of {where}.\n"
    target.write_text(head + yaml.safe_dump(document, sort_keys=False))
    console.print(f"wrote {target}")
    return 0


def _shape(cell: pd.Series) -> BatchShape:
    """The batch of a uniform point without spread."""
    rows = int(cell.batch_size)
    own = (int(cell.suffix_len),) * rows
    heads = (int(cell.num_qo_heads), int(cell.num_kv_heads), int(cell.head_dim))
    return BatchShape(((rows, int(cell.prefix_len)),), own, *heads, 4 if cell["dtype"] == "float32" else 2)


def _decision_us(fitted: FittedPolicy, shapes: list[BatchShape]) -> float:
    """Median time of one choice on this host."""
    taken = []
    for shape in shapes * REPEATS:
        start = time.perf_counter()
        fitted.choose(shape, list(fitted.costs))
        taken.append(time.perf_counter() - start)
    return float(np.median(taken)) * 1e6


def _show(found: pd.DataFrame, decision_us: float) -> None:
    table = Table(title=f"Held-out regret, {decision_us:.0f} us of deciding a step included")
    for column in ("layout", "points", "geometric mean", "worst", "least over naive"):
        table.add_column(column, no_wrap=True)
    for layout, group in found.groupby("layout", sort=False):
        mean = math.exp(np.log(group.regret).mean())
        worst, least = group.regret.max(), group.over_naive.min()
        table.add_row(str(layout), str(len(group)), f"{mean:.3f}", f"{worst:.3f}", f"{least:.3f}")
    console.print(table)


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("ceilings")
    fitting = verbs.add_parser("policy")
    fitting.add_argument("run", type=Path, help="outputs/NAME or results/NAME")
    fitting.add_argument("--backend", required=True)
    fitting.add_argument("--name", required=True, help="the policy's name: conf/policy/NAME.yaml")
    options = parser.parse_args()
    if options.verb == "ceilings":
        return ceilings()
    try:
        return policy(options.run, options.backend, options.name)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
