"""How cells look in every figure: colour is the kernel, marker the layout, line the backend, hatch a charged gather."""

import logging
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

logging.getLogger("fontTools").setLevel(logging.WARNING)

# Okabe and Ito's colours, distinguishable with every common colour vision deficiency
KERNEL_COLOURS = {
    "naive": "#7F7F7F",
    "cascade": "#0072B2",
    "hydragen": "#D55E00",
    "granikv": "#009E73",
    "hydragen_gemm": "#CC79A7",
    "cascade_batch": "#56B4E9",
    "fused": "#E69F00",
    "fused_paged": "#F0E442",
}
FURTHER_COLOURS = ("#000000", "#B8A900", "#882255", "#44AA99", "#332288", "#999933")
LAYOUT_MARKERS = {"paged_16": "o", "paged_1": "s", "slab_token": "D", "unshared_16": "X"}
FURTHER_MARKERS = ("^", "v", "P", "*", "<", ">")
BACKEND_LINES = ("-", "--", ":", "-.")
CHARGED_HATCH = "////"
COMPARABLE = ("level", "device_name", "clock", "l2", "order", "dtype", "num_threads", "environment_hash")

plt.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "figure.dpi": 150,
        "savefig.bbox": "tight",
        "pdf.fonttype": 42,
    }
)


def kernel_colour(kernel: str, kernels: Sequence[str]) -> str:
    """The kernel's own colour; kernels unknown here take further ones by their place in `kernels`."""
    unknown = [name for name in kernels if name not in KERNEL_COLOURS]
    return KERNEL_COLOURS.get(kernel) or FURTHER_COLOURS[unknown.index(kernel) % len(FURTHER_COLOURS)]


def layout_marker(layout: str, layouts: Sequence[str]) -> str:
    """The layout's own marker; layouts unknown here take further ones by their place in `layouts`."""
    unknown = [name for name in layouts if name not in LAYOUT_MARKERS]
    return LAYOUT_MARKERS.get(layout) or FURTHER_MARKERS[unknown.index(layout) % len(FURTHER_MARKERS)]


def in_order(values: pd.Series, known: dict[str, str]) -> list[str]:
    """Distinct values: the known ones in their usual order, then others as they come."""
    present = list(dict.fromkeys(values))
    return [name for name in known if name in present] + [name for name in present if name not in known]


def column_label(kernel: str, backend: str, backends: Sequence[str]) -> str:
    """kernel, its long name broken, and the backend where there are several."""
    name = kernel if len(kernel) < 14 else kernel.replace("_", "_\n", 1)
    return name if len(backends) == 1 else f"{name}\n{backend}"


def conditions(cells: pd.DataFrame) -> str:
    """Device, clock and what else must be equal, as a subtitle. Raises ValueError if the cells do not agree on it."""
    for column in COMPARABLE:
        values = sorted({str(value) for value in cells[column]})
        if len(values) > 1:
            raise ValueError(
                f"{column} differs: {', '.join(values)}. A figure shows one environment. Fix: draw them apart"
            )
    first = cells.iloc[0]
    device = f"{first.device_name}, {first.num_threads} threads" if first.device == "cpu" else str(first.device_name)
    heads = f"{first.model}: Hq {first.num_qo_heads}, Hkv {first.num_kv_heads}, D {first.head_dim}, {first['dtype']}"
    return f"{str(first.device).upper()}: {device} | clock {first.clock}, {first.l2} cache | {heads}"


def token_label(tokens: float) -> str:
    """512, 1K, 64K."""
    return f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}"


def what(cells: pd.DataFrame) -> str:
    """What a time in these cells is of."""
    return "a whole decode step" if cells.level.iloc[0] == "step" else "one layer's attention in a decode step"


def plain_log_axis(axis: Axis) -> None:
    """Labels of a log axis as plain numbers, at 1, 2, 3 and 5 times each power of ten."""
    axis.set_major_locator(LogLocator(10, (1.0, 2.0, 3.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def title(figure: Figure, text: str, cells: pd.DataFrame, legend_inches: float = 0.0) -> None:
    """Title and conditions above the axes of a constrained figure; `legend_inches` stay free below them."""
    height = float(figure.get_size_inches()[1])
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    bottom = legend_inches / height
    engine.set(rect=(0, bottom, 1, 1 - 0.5 / height - bottom))
    figure.text(0.5, 1 - 0.05 / height, text, ha="center", va="top", fontsize=11, fontweight="bold")
    figure.text(0.5, 1 - 0.29 / height, conditions(cells), ha="center", va="top", fontsize=7.5, color="#444444")


def save(figure: Figure, data: pd.DataFrame, directory: Path, name: str) -> list[Path]:
    """Writes NAME.pdf, NAME.png and NAME.csv, the data behind the figure."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.{suffix}" for suffix in ("pdf", "png", "csv")]
    figure.savefig(paths[0])
    figure.savefig(paths[1], dpi=130)
    plt.close(figure)
    data.to_csv(paths[2], index=False)
    return paths


def point_label(cell: pd.Series) -> str:
    """The workload point of a cell's block, for panel titles."""
    prefix = (
        f"Lp {cell.prefix_len:.0f}" if cell.workload == "uniform" else f"{cell.workload}, mean Lp {cell.prefix_len:.0f}"
    )
    groups = f", {cell.num_prefixes} prefixes" if cell.num_prefixes != 1 else ""
    return f"{prefix}, Ls {cell.suffix_len:.0f}, B {cell.batch_size}{groups}"
