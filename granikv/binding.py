"""Legality as set algebra: what a kernel requires minus what a view provides, and what bridges the difference."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from granikv.kernels import AttentionKernel
from granikv.spec import AttentionSpec
from granikv.view import KVPool, KVView, Trait


@dataclass(frozen=True)
class GatherPlan:
    """The view after the gather, the page ids to copy of each shared level, and the bytes read and written a layer."""

    view: KVView
    pages: list[Tensor]
    num_bytes: int


class GatherPrefix:
    """Copies each paged shared level into a contiguous buffer. Gives DENSE_PREFIX, takes ONE_POOL away."""

    name = "gather_prefix"
    needs = Trait.LEVELED
    gives = Trait.DENSE_PREFIX
    takes = Trait.ONE_POOL

    def plan(self, view: KVView, spec: AttentionSpec) -> GatherPlan:
        """Which pages become which contiguous run."""
        pages, levels, tokens = [], [], 0
        for level in view.levels[:-1]:
            pages.append(level.kv_indices.long().to(spec.device))
            starts = level.kv_indptr[:-1].long() * level.page_size
            lens = level.kv_lens.int()
            indptr = torch.zeros_like(level.kv_indptr)
            torch.cumsum(lens, 0, out=indptr[1:])
            levels.append(
                replace(
                    level,
                    page_size=1,
                    kv_indptr=indptr,
                    last_page_len=lens.clamp_max(1),
                    pages=None,
                    slab_starts=starts,
                )
            )
            tokens += int(level.kv_indptr[-1]) * level.page_size
        traits = (view.traits | self.gives) & ~self.takes
        return GatherPlan(
            replace(view, levels=(*levels, view.levels[-1]), traits=traits), pages, 2 * tokens * spec.kv_token_bytes
        )

    def run(self, plan: GatherPlan, kv: Sequence[KVPool]) -> list[KVPool]:
        """The pools of the adapted view's levels: fresh copies for the shared ones."""
        gathered = []
        for pages, pool in zip(plan.pages, kv[:-1], strict=True):
            flat = (x.index_select(0, pages).view(-1, 1, *x.shape[2:]) for x in pool)
            gathered.append(KVPool(*flat))
        return [*gathered, kv[-1]]


ADAPTERS = (GatherPrefix(),)


@dataclass(frozen=True)
class Binding:
    """How a kernel runs on a view: natively, through a charged adapter, or (reason set) not at all."""

    missing: Trait
    adapter: GatherPrefix | None = None
    reason: str | None = None


def bind(kernel: AttentionKernel, traits: Trait, fallback: str) -> Binding:
    """`fallback` is "charge" (use an adapter if one bridges what is missing) or "forbid"."""
    if fallback not in ("charge", "forbid"):
        raise ValueError(f"fallback={fallback!r}: charge or forbid")
    missing = kernel.requires & ~traits
    if not missing:
        return Binding(missing)
    lacks = f"{kernel.name} requires {names(missing)}, which the layout does not provide"
    if fallback == "forbid":
        return Binding(missing, reason=f"{lacks} (fallback=forbid)")
    for adapter in ADAPTERS:
        bridged = (traits | adapter.gives) & ~adapter.takes
        if adapter.needs in traits and kernel.requires in bridged:
            return Binding(missing, adapter)
    return Binding(missing, reason=f"{lacks}, and no adapter bridges it")


def names(traits: Trait) -> str:
    """Trait names as records show them: A+B."""
    return "+".join(trait.name or "" for trait in traits)
