"""From a composed configuration to a Block: the only place that turns yaml into objects."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from granikv.block import Block
from granikv.cell import CellName
from granikv.kernels import AttentionKernel
from granikv.layouts.base import KVLayout
from granikv.spec import DTYPES, AttentionSpec
from granikv.step.decoder import DecoderSpec

NOT_MEASURED = ("name", "output_dir", "figures", "experiment", "hydra")
"""Top-level keys that change where results go, not what they are: left out of the block's identity."""

KNOWN_KEYS = (
    "layout",
    "kernel",
    "workload",
    "model",
    "device",
    "timing",
    "policy",
    "backend",
    "fallback",
    "level",
    "seed",
    "baseline",
    *NOT_MEASURED,
)


def build_block(cfg: DictConfig) -> Block:
    """The block that `cfg` describes. Allocates nothing; sets the number of CPU threads.

    Raises ValueError naming value, rule and fix for anything a user may have got wrong.
    """
    unknown = [str(key) for key in cfg if key not in KNOWN_KEYS]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}. Known: {', '.join(KNOWN_KEYS)}. Fix: remove it")
    device = _device(cfg.device)
    if cfg.device.dtype not in DTYPES:
        raise ValueError(f"device.dtype={cfg.device.dtype!r}: one of {', '.join(DTYPES)}. Fix: device.dtype=float32")
    model = _plain(cfg.model)
    spec = AttentionSpec(
        model["num_qo_heads"], model["num_kv_heads"], model["head_dim"], DTYPES[cfg.device.dtype], device
    )
    empty = [axis for axis in ("layout", "kernel", "backend") if not cfg.get(axis)]
    if empty:
        raise ValueError(
            f"{empty[0]}=[]: an empty grid; name at least one {empty[0]}. Fix: see conf/{empty[0]} for names"
        )
    layouts = {str(name): _maker(node, f"layout.{name}") for name, node in cfg.layout.items()}
    backends = [cfg.backend] if isinstance(cfg.backend, str) else list(cfg.backend)
    for make in layouts.values():
        make()
    kernels = {
        (str(name), backend): _kernel(cfg, str(name), backend)
        for name in cfg.kernel
        for backend in _backends_of(cfg.kernel[name], backends)
    }
    measured = {key: value for key, value in _plain(cfg).items() if key not in NOT_MEASURED}
    return Block(
        run=cfg.name,
        workload=make_object(cfg.workload, "workload"),
        spec=spec,
        model=model,
        timing=make_object(cfg.timing, "timing"),
        fallback=_fallback(cfg.fallback),
        layouts=layouts,
        kernels=kernels,
        baseline=_baseline(cfg.baseline, list(layouts), [str(name) for name in cfg.kernel], backends),
        config=measured,
        ceilings=make_object(cfg.device.ceilings, "device.ceilings") if cfg.device.ceilings else None,
        decoder=_decoder(cfg.level, model, spec),
    )


def make_object(node: Any, where: str) -> Any:
    """instantiate(), with a ValueError that says what was wrong instead of a stack of wrappers."""
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, TypeError):
            known = ", ".join(inspect.signature(get_object(node._target_)).parameters)
            raise ValueError(
                f"{where}: {str(cause).splitlines()[0]}. It takes {known}. Fix: correct or remove the key"
            ) from error
        message = str(cause)
        raise ValueError(message if message.startswith(where) else f"{where}: {message}") from error


def _device(node: DictConfig) -> torch.device:
    if node.type not in ("cpu", "cuda"):
        raise ValueError(f"device.type={node.type!r}: cpu or cuda. Fix: device=cpu")
    if node.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device.type=cuda: this torch sees no GPU. Fix: device=cpu")
    cores = os.cpu_count() or 1
    if not isinstance(node.num_threads, int) or not 1 <= node.num_threads <= cores:
        raise ValueError(
            f"device.num_threads={node.num_threads!r}: this machine has 1..{cores} cores. "
            f"Fix: device.num_threads={cores}"
        )
    torch.set_num_threads(node.num_threads)
    return torch.device(node.type, torch.cuda.current_device()) if node.type == "cuda" else torch.device("cpu")


def _baseline(node: DictConfig, layouts: list[str], kernels: list[str], backends: list[str]) -> CellName:
    """The named cell; what is null is the first of its axis."""
    chosen = []
    for axis, names in (("layout", layouts), ("kernel", kernels), ("backend", backends)):
        name = names[0] if node[axis] is None else node[axis]
        if name not in names:
            fix = f"Fix: baseline.{axis}={names[0]}, or add {name} to {axis}"
            raise ValueError(f"baseline.{axis}={name}: the grid has {', '.join(names)}. {fix}")
        chosen.append(name)
    return CellName(*chosen)


def _decoder(level: str, model: Mapping[str, Any], spec: AttentionSpec) -> DecoderSpec | None:
    """The model's sizes at level step; None at level op, which needs its heads alone."""
    if level not in ("op", "step"):
        raise ValueError(f"level={level!r}: op or step. Fix: level=op")
    if level == "op":
        return None
    names = [field.name for field in fields(DecoderSpec) if field.name != "attention"]
    absent = [name for name in names if name not in model]
    if absent:
        raise ValueError(
            f"model={model['name']} has no {absent[0]}: its file holds one rank's heads, which is enough for level=op. "
            f"Fix: level=op or model=llama31_8b"
        )
    return DecoderSpec(spec, **{name: model[name] for name in names})


def _fallback(value: str) -> str:
    if value not in ("charge", "forbid"):
        raise ValueError(f"fallback={value!r}: charge or forbid. Fix: fallback=charge")
    return value


def _maker(node: DictConfig, where: str) -> Callable[[], KVLayout]:
    def make() -> KVLayout:
        layout: KVLayout = make_object(node, where)
        return layout

    return make


def _backends_of(node: Mapping[str, Any], wanted: list[str]) -> list[str]:
    """Those of `wanted` that the kernel has; all of them, to be recorded as unsupported, if it has none."""
    return [backend for backend in wanted if backend in node] or wanted


def _kernel(cfg: DictConfig, name: str, backend: str) -> AttentionKernel | str:
    """The kernel, or the reason why there is none by that name in this backend."""
    backends: Mapping[str, Any] = cfg.kernel[name]
    if backend not in backends or "_target_" not in backends[backend]:
        has = [key for key, node in backends.items() if isinstance(node, DictConfig) and "_target_" in node]
        every = sorted(
            {
                key
                for node in cfg.kernel.values()
                for key, value in node.items()
                if isinstance(value, DictConfig) and "_target_" in value
            }
        )
        if backend not in every:
            raise ValueError(
                f"backend={backend!r}: no selected kernel has it. Known: {', '.join(every)}. "
                f"Fix: 'backend=[{every[0]}]'"
            )
        return f"backend {backend}: kernel {name} has {', '.join(has)}"
    kernel: AttentionKernel = make_object(backends[backend], f"kernel.{name}.{backend}")
    return kernel


def _plain(node: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
