"""Everything that can be refused before any work starts: overrides, sweep points, values."""

import difflib
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.build import build_block
from granikv.block import Block

CONF = Path(__file__).resolve().parent.parent / "conf"
GRID_AXES = ("layout", "kernel", "backend")

OmegaConf.register_new_resolver("pid", lambda: str(os.getpid()), replace=True)


@dataclass(frozen=True)
class Preflight:
    """All blocks of a run, in the order in which Hydra will start them, and where their records go."""

    blocks: list[Block]
    output_dir: Path
    figures: bool


def preflight(words: Sequence[str], multirun: bool = False, config_dir: str | None = None) -> Preflight:
    """Composes and builds every sweep point of the command line `words`. Raises ValueError with the fix.

    `config_dir` is Hydra's --config-dir: a folder with further layout/, kernel/, ... yaml files.
    """
    overrides = _parse(words)
    _refuse_traps(overrides, multirun)
    fixed = [override.input_line or "" for override in overrides if not override.is_sweep_override()]
    search = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        base = _compose([*search, *fixed], hydra_too=True)
        multirun = multirun or str(base.hydra.mode).endswith("MULTIRUN")
        swept = [override for override in overrides if override.is_sweep_override()]
        if swept and not multirun:
            line = swept[0].input_line
            raise ValueError(
                f"{line}: several values make a sweep, which needs -m. Fix: python -m experiments.run -m {line}"
            )
        axes = _axes(base, overrides) if multirun else {}
        plain = [o.input_line or "" for o in overrides if o.get_key_element() not in axes and not _is_hydra(o)]
        points = [_compose([*search, *plain, *point]) for point in itertools.product(*axes.values())]
    blocks = [build_block(point) for point in points]
    for block in blocks:
        block.workload.tree()  # reads a trace, and refuses what makes no batch
    return Preflight(blocks, Path(points[0].output_dir).resolve(), bool(points[0].figures))


def _parse(words: Sequence[str]) -> list[Override]:
    for word in words:
        if word.count("[") != word.count("]"):
            raise ValueError(
                f"{word}: the brackets do not match, because the shell split the list at a space. "
                f"Fix: put the whole override in quotes, as in 'kernel=[naive,cascade]'"
            )
        if "=" not in word and not word.startswith("~"):
            raise ValueError(f"{word}: not an override. Fix: key=value, as in workload.prefix_len=1024")
    try:
        return OverridesParser.create().parse_overrides(list(words))
    except OverrideParseException as error:
        raise ValueError(
            f"{error.override}: {str(error).splitlines()[0]}. Fix: quote the value, as in 'key=\"value\"'"
        ) from error


def _refuse_traps(overrides: Sequence[Override], multirun: bool) -> None:
    for override in overrides:
        values = override.value() if not override.is_sweep_override() else None
        if override.get_key_element() == "experiment":
            if override.is_sweep_override() or isinstance(values, list):
                names = (override.input_line or "").split("=", 1)[1].strip("[]").split(",")
                runs = "; ".join(f"python -m experiments.run experiment={name.strip()}" for name in names)
                raise ValueError(
                    f"{override.input_line}: each experiment brings its own sweep, and Hydra would apply only one. "
                    f"Fix: {runs}"
                )
        elif override.is_sweep_override() and override.get_key_element() in GRID_AXES:
            key, names = (override.input_line or "").split("=", 1)
            raise ValueError(
                f"{override.input_line}: cells of one block are timed interleaved, so a job holds them all. "
                f"Fix: '{key}=[{names}]', without sweeping it"
            )


def _axes(base: DictConfig, overrides: Sequence[Override]) -> dict[str, list[str]]:
    """Swept keys with the override of each value: the experiment's own sweep, then the command line's."""
    params = base.hydra.sweeper.params or {}
    swept = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
    axes: dict[str, list[str]] = {}
    for override in [*swept, *overrides]:
        if _is_hydra(override):
            continue
        key = override.get_key_element()
        if override.is_sweep_override():
            values = [f"{key}={value}" for value in override.sweep_string_iterator()]
            if not values:
                raise ValueError(f"{override.input_line}: an empty sweep. Fix: name at least one value")
            axes[key] = values
        elif key in axes:
            axes[key] = [override.input_line or ""]
    return axes


def _is_hydra(override: Override) -> bool:
    return override.get_key_element().startswith("hydra")


def _compose(overrides: list[str], hydra_too: bool = False) -> DictConfig:
    try:
        cfg = compose("config", overrides, return_hydra_config=hydra_too)
        if not hydra_too:
            OmegaConf.resolve(cfg)
        return cfg
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(error, overrides)) from error


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's message, with the key that was probably meant."""
    message = str(error).splitlines()[0]
    if isinstance(error, ConfigCompositionException) and message.startswith("Could not override"):
        known = list(_leaves(compose("config")))
        for override in overrides:
            key = override.split("=", 1)[0].lstrip("+~")
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known[:12])}, ..."
                return f"{override}: there is no such key. {hint} Fix: correct the key; --cfg job shows them all"
    named = re.search(r"Could not (?:find|load) '(\w+)/([\w/]+)'", message)
    if named:
        group, wrong = named.groups()
        options = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        close = difflib.get_close_matches(wrong, options, n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]}? " if close else ""
        return f"{group}={wrong}: there is no conf/{group}/{wrong}.yaml. {hint}Fix: one of {', '.join(options)}"
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _leaves(node: Any, prefix: str = "") -> Any:
    for key in node:
        path = f"{prefix}{key}"
        child = None if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) else node[key]
        yield path
        if isinstance(child, DictConfig):
            yield from _leaves(child, f"{path}.")
