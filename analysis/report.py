"""Tables, figures and parquet of one run: `python -m analysis.report outputs/ablation`."""

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table

import analysis.figures
from analysis.attribution import FROM_BASELINE_TO_GRANIKV, attribute_all, noise_floor
from analysis.load import Run, export, load_records
from analysis.stats import Estimate


def ratio_tables(run: Run) -> Group:
    """One table a block: every cell's status and choice, operator time, its speed-up, and that of the step."""
    backends, tables = run.cells.backend.nunique(), []
    for _, cells in run.cells.groupby("block", sort=False):
        table = plain_table(f"Speed-up over the baseline: {point(cells.iloc[0])}")
        for name in ("cell", "status", "us", "speed-up, 95%", "step"):
            table.add_column(name, justify="right" if name in ("us", "step") else "left", no_wrap=name != "cell")
        for _, cell in cells.iterrows():
            ok = cell.status == "ok"
            name = f"{cell.layout} x {cell.kernel}" + (f" ({cell.backend})" if backends > 1 else "")
            table.add_row(
                f"{name}, A/A" if cell.placebo else name,
                ", ".join(
                    str(part)
                    for part in (cell.status, "charged" if cell.adapter and ok else "", cell.chosen if ok else "")
                    if part
                ),
                f"{cell.op_us:.1f}" if ok else "",
                str(Estimate(cell.ratio, cell.ratio_lo, cell.ratio_hi)) if ok and not pd.isna(cell.ratio) else "",
                f"{cell.total_ratio:.2f}" if ok and not pd.isna(cell.total_ratio) else "",
            )
        tables.append(table)
    return Group(*tables)


def attribution_tables(run: Run) -> Group:
    """One table a block and backend: layout and kernel factors in both orders, Shapley means, interaction."""
    corners, noise, tables = FROM_BASELINE_TO_GRANIKV, noise_floor(run), []
    for (block, backend), group in attribute_all(run, corners).groupby(["block", "backend"], sort=False):
        shown = {
            row.effect: str(Estimate(row.factor, row.lo, row.hi)) + "*" * row.within_noise
            for _, row in group.iterrows()
        }
        table = plain_table(f"{corners}, {backend}: {point(group.iloc[0])}")
        table.caption = f"A/A noise {noise.get(str(block), float('nan')):.3f}; * = within it"
        for name in ("order", "layout", "kernel", "total"):
            table.add_column(name, no_wrap=True)
        table.add_row("layout first", shown["layout_first"], shown["kernel_second"], shown["total"])
        table.add_row("kernel first", shown["layout_second"], shown["kernel_first"])
        table.add_row("Shapley mean", shown["layout"], shown["kernel"])
        table.add_row("interaction", shown["interaction"])
        tables.append(table)
    return Group(*tables)


def plain_table(title: str) -> Table:
    """A table without lines that fits 80 columns."""
    return Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=0)


def point(cell: pd.Series) -> str:
    """The workload point of a block, as table headings show it."""
    where = f"{cell.workload}, B {cell.batch_size}, Lp {cell.prefix_len:.0f}, Ls {cell.suffix_len:.0f}"
    return where if cell.num_prefixes == 1 else f"{where}, {cell.num_prefixes} prefixes"


def write_figures(run: Run, directory: Path) -> list[Path]:
    """Every figure under analysis/figures that applies to `run`, as PDF, PNG and CSV."""
    written = []
    for module in sorted(pkgutil.iter_modules(analysis.figures.__path__), key=lambda module: module.name):
        written += importlib.import_module(f"analysis.figures.{module.name}").draw(run, directory)
    return written


def main() -> int:
    """Parses the command line, prints the tables, writes figures and parquet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="outputs/NAME or results/NAME")
    parser.add_argument("--figures", type=Path, help="folder for figures (default: RUN/figures)")
    parser.add_argument(
        "--export", type=Path, help="also write cells.parquet, samples.parquet and provenance.json here"
    )
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    try:
        run = load_records(options.run)
        console.print(ratio_tables(run))
        console.print(attribution_tables(run))
        written = write_figures(run, options.figures or options.run / "figures")
        written += export(run, options.export) if options.export else []
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in written:
        console.print(str(path.resolve()), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
