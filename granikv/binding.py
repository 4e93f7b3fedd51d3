"""Legality as set algebra: what a kernel requires minus what a view provides, and what bridges the difference."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from granikv.kernels import AttentionKernel
from granikv.spec import AttentionSpec
from granikv.view import KVPool, KVView, Trait, indptr_of


@dataclass(frozen=True)
class GatherPlan:
    """The view after the gather, the page ids to copy (all shared levels), and the bytes read and written a layer."""

    view: KVView
    pages: Tensor
    num_bytes: int


class GatherPrefix:
    """Copies all paged shared levels into one contiguous buffer. Gives DENSE_PREFIX, takes ONE_POOL away."""

    name = "gather_prefix"
    needs = Trait.LEVELED
    gives = Trait.DENSE_PREFIX
    takes = Trait.ONE_POOL

    def plan(self, view: KVView, spec: AttentionSpec) -> GatherPlan:
        """Which pages become which contiguous run."""
        pages, levels, gathered = [view.levels[0].kv_indices[:0]], [], 0
        for level in view.levels[:-1]:
            pages.append(level.kv_indices)
            lens = level.kv_lens.int()
            dense = replace(
                level,
                page_size=1,
                kv_indptr=indptr_of(lens),
                last_page_len=lens.clamp_max(1),
                pages=None,
                slab_starts=gathered + level.kv_indptr[:-1].long() * level.page_size,
            )
            levels.append(dense)
            gathered += int(level.kv_indptr[-1]) * level.page_size
        return GatherPlan(
            replace(view, levels=(*levels, view.levels[-1]), traits=(view.traits | self.gives) & ~self.takes),
            torch.cat(pages).long().to(spec.device),
            2 * gathered * spec.kv_token_bytes,
        )

    def run(self, plan: GatherPlan, kv: Sequence[KVPool]) -> list[KVPool]:
        """The pools of the adapted view's levels: one fresh copy for all shared ones."""
        gathered = KVPool(*(x.index_select(0, plan.pages).view(-1, 1, *x.shape[2:]) for x in kv[-1]))
        return [*([gathered] * (len(kv) - 1)), kv[-1]]


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
