"""From the baseline to slab_token x granikv: what the layout and the kernel each contribute, in both orders."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.attribution import FROM_BASELINE_TO_GRANIKV, attribute_all
from analysis.load import Run
from analysis.style import KERNEL_COLOURS, plain_log_axis, save, title

PATHS = (
    ("layout first", "layout_first", "kernel_second"),
    ("kernel first", "kernel_first", "layout_second"),
    ("Shapley mean", "layout", "kernel"),
)
LAYOUT_COLOUR, TOTAL_COLOUR = "#E69F00", "#444444"


def draw(run: Run, directory: Path) -> list[Path]:
    """waterfall: a panel a block; on the log axis the two bars of a path multiply to the total."""
    data = attribute_all(run)
    if data.empty:
        return []
    blocks = data.sort_values(["backend", "batch_size", "prefix_len"])[["block", "backend"]].drop_duplicates()
    across = min(4, len(blocks))
    down = -(-len(blocks) // across)
    figure, axes = plt.subplots(
        down, across, figsize=(1.0 + 2.7 * across, 1.2 + 3.0 * down), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, (_, place) in zip(axes.flat, blocks.iterrows(), strict=False):
        mine = data[(data.block == place.block) & (data.backend == place.backend)]
        _panel(axis, mine.set_index("effect"))
        first = mine.iloc[0]
        name = f"Lp {first.prefix_len:.0f}, B {first.batch_size}" + (
            f", {place.backend}" if data.backend.nunique() > 1 else ""
        )
        axis.set_title(name, fontsize=8)
    for axis in axes.flat[len(blocks) :]:
        axis.axis("off")
    for row in axes:
        row[0].set_ylabel("speed-up (log)")
    bars = [Rectangle((0, 0), 1, 1, color=c) for c in (LAYOUT_COLOUR, KERNEL_COLOURS["granikv"], TOTAL_COLOUR)]
    figure.legend(bars, ["layout", "kernel", "total"], loc="outside lower center", ncols=3, fontsize=8)
    title(figure, f"{FROM_BASELINE_TO_GRANIKV}: who earns the speed-up", run.cells[run.cells.block.isin(blocks.block)])
    return save(figure, data, directory, "waterfall")


def _panel(axis: Axes, effects: pd.DataFrame) -> None:
    total = effects.loc["total"]
    spots, labels = [], []
    for group, (name, first, second) in enumerate(PATHS):
        reached: Any = 1.0
        for step, effect in enumerate((first, second)):
            row, x = effects.loc[effect], 3 * group + step
            colour = LAYOUT_COLOUR if effect.startswith("layout") else KERNEL_COLOURS["granikv"]
            axis.bar(x, reached * row.factor - reached, bottom=reached, width=0.85, color=colour)
            low, high = ([reached * (row.factor - row.lo)], [reached * (row.hi - row.factor)])
            axis.errorbar(x, reached * row.factor, yerr=[low, high], color="black", capsize=2, linewidth=0.8)
            top = max(reached, reached * row.hi)
            axis.annotate(f"{row.factor:.2f}x", (x, top), (0, 3), textcoords="offset points", ha="center", fontsize=6.5)
            reached = reached * row.factor
        spots.append(3 * group + 0.5)
        labels.append(name.replace(" ", "\n"))
    axis.bar(9, total.factor - 1, bottom=1, width=0.85, color=TOTAL_COLOUR)
    axis.errorbar(
        9,
        total.factor,
        yerr=[[total.factor - total.lo], [total.hi - total.factor]],
        color="black",
        capsize=2,
        linewidth=0.8,
    )
    axis.annotate(f"{total.factor:.2f}x", (9, total.hi), (0, 3), textcoords="offset points", ha="center", fontsize=6.5)
    axis.set_yscale("log")
    plain_log_axis(axis.yaxis)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks([*spots, 9], [*labels, "total"], fontsize=6.5)
    axis.grid(visible=False, axis="x")
    axis.margins(y=0.12)
