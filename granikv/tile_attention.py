"""Decode attention through tile tables in Triton: GraniKV's fused kernel, and pieces that baselines launch apart."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from granikv.kernels import AttentionState, Plan
from granikv.spec import AttentionSpec
from granikv.tiles import FIELDS, TileShape, TileTable, tile_table
from granikv.view import KVPool, KVView, Trait

HEAD_DIMS = (64, 128, 256)
INTERPRETED_PROGRAMS = 6
ALIGNED_WORDS = 16
"""Sections of a plan start at whole multiples, so that Triton compiles one variant for aligned pointers."""

MERGE_SLOTS = 16
"""Slots that a program of the merge reads at once."""


@dataclass(frozen=True)
class LaunchShape:
    """Block sizes of one launch at head_dim 128: tokens a block and blocks in flight, for shared and for own tiles.

    own_h  KV heads of an own tile at most.
    tma    slabs are read by the tensor memory accelerator.
    """

    shared_n: int
    shared_stages: int
    own_h: int
    own_n: int
    own_stages: int
    num_warps: int
    programs_per_sm: int
    tma: bool = True


SHAPES = {
    16: LaunchShape(64, 2, 4, 16, 5, 4, 2),
    64: LaunchShape(64, 2, 4, 16, 5, 4, 2),
    128: LaunchShape(64, 4, 8, 16, 5, 8, 1),
}
"""By the folded rows of a shared tile; measured on an H200, see results/h200-op."""


@dataclass(frozen=True)
class Launch:
    """One call of attend_tiles: which sections of the plan's words it reads, and its shape."""

    sections: dict[str, slice]
    programs: int
    shape: LaunchShape
    tile: TileShape


@dataclass(frozen=True, kw_only=True)
class TilePlan(Plan):
    """words: int32 on the device, all tables and page indices of a step; the rest are facts that launches depend on."""

    spec: AttentionSpec
    batch_size: int
    words: Tensor
    launches: list[Launch]
    pages: slice
    num_slots: slice
    slot_capacity: int
    merge_width: int
    page_size: int
    part_out: Tensor
    part_lse: Tensor


@cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class TileAttention:
    """out and lse of every row from tiles over the shared levels and the rows' own tokens, merged once.

    dense  shared levels are read as slabs (requires DENSE_PREFIX), else through page tables.
    flat   no shared levels: every row's whole sequence is its own.
    fused  shared and own tiles in one launch, else one launch each.

    The words of a plan live at fixed addresses, so a captured graph may be replayed after replan().
    """

    lse_base = 2.0

    def __init__(
        self, name: str, dense: bool, fused: bool, flat: bool = False, shapes: dict[int, LaunchShape] | None = None
    ) -> None:
        self.name, self.dense, self.fused, self.flat = name, dense, fused, flat
        self.requires = Trait.ONE_POOL if flat else Trait.LEVELED | (Trait.DENSE_PREFIX if dense else Trait.ONE_POOL)
        self.shapes = shapes or SHAPES
        self._parts: tuple[Tensor, Tensor] | None = None

    def supports(self, spec: AttentionSpec) -> str | None:
        """Triton on a GPU or in its interpreter; head_dim 64, 128 or 256; groups of up to 64 query heads."""
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim {spec.head_dim}: {self.name}_triton has 64, 128, 256. Fix: backend=torch"
        if spec.group_size > 64:
            return f"group_size {spec.group_size}: {self.name}_triton folds up to 64. Fix: backend=torch"
        if find_spec("triton") is None:
            return "triton is not installed. Fix: pip install 'triton>=3.6', or backend=torch"
        if spec.device.type != "cuda":
            return None if _interpreted() else f"device {spec.device.type}: {self.name}_triton needs a CUDA GPU"
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"dtype {spec.dtype}: {self.name}_triton has float16, bfloat16. Fix: device.dtype=bfloat16"
        return None

    def plan(self, view: KVView, spec: AttentionSpec) -> TilePlan:
        tables, pages = self._tables(view, spec)
        arrays: list[tuple[slice, NDArray[np.int32]]] = []
        launches = []
        at = 0

        def section(array: NDArray[np.int32], room: int) -> slice:
            nonlocal at
            arrays.append((slice(at, at + array.size), array))
            start, at = at, at + -(-room // ALIGNED_WORDS) * ALIGNED_WORDS
            return slice(start, at)

        for table, shape, tile in tables:
            sections = {
                "shared": section(table.shared, _roomy(table.shared.size)),
                "own": section(table.own, _roomy(table.own.size)),
                "shared_starts": section(table.shared_starts, table.shared_starts.size),
                "own_starts": section(table.own_starts, table.own_starts.size),
            }
            launches.append(Launch(sections, len(table.own_starts) - 1, shape, tile))
        num_slots = section(tables[-1][0].num_slots, view.batch_size)
        page_slice = section(pages, _roomy(pages.size))
        most_slots = max(1, tables[-1][0].most_slots)
        width = min(MERGE_SLOTS, _power_of_2(most_slots))
        capacity = max(most_slots + 2, width)
        out, lse = self._workspace(capacity * view.batch_size * spec.num_qo_heads, spec)
        return TilePlan(
            ran=f"{self.name}_triton",
            notes={
                "shared_m": launches[0].tile.shared_m,
                "slots": tables[-1][0].most_slots,
                "launches": len(launches) + 1,
            },
            spec=spec,
            batch_size=view.batch_size,
            words=_to_device(arrays, at, spec.device),
            launches=launches,
            pages=page_slice,
            num_slots=num_slots,
            slot_capacity=capacity,
            merge_width=width,
            page_size=view.levels[-1].page_size,
            part_out=out,
            part_lse=lse,
        )

    def replan(self, plan: TilePlan, view: KVView) -> None:
        """Puts the tables of `view` into the words of `plan`, so that graphs captured with it compute `view`.

        Raises ValueError where they do not fit, because another batch size or far longer sequences need a new plan.
        """
        tables, pages = self._tables(view, plan.spec)
        facts = [view.batch_size, view.levels[-1].page_size, *(tile for _, _, tile in tables)]
        planned = [plan.batch_size, plan.page_size, *(launch.tile for launch in plan.launches)]
        if facts != planned or tables[-1][0].most_slots > plan.slot_capacity:
            raise ValueError(
                f"replan: batch, page_size and tiles {facts} with {tables[-1][0].most_slots} slots do not fit "
                f"a plan of {planned} with {plan.slot_capacity}. Fix: plan and capture anew"
            )
        words = np.zeros(plan.words.numel(), np.int32)

        def put(array: NDArray[np.int32], into: slice) -> None:
            if array.size > into.stop - into.start:
                raise ValueError(
                    f"replan: {array.size} words in a section of {into.stop - into.start}. Fix: plan and capture anew"
                )
            words[into.start : into.start + array.size] = array.ravel()

        for (table, _, _), launch in zip(tables, plan.launches, strict=True):
            for name in ("shared", "own", "shared_starts", "own_starts"):
                put(getattr(table, name), launch.sections[name])
        put(tables[-1][0].num_slots, plan.num_slots)
        put(pages, plan.pages)
        plan.words.copy_(torch.from_numpy(words), non_blocking=True)

    def run(self, plan: TilePlan, q: Tensor, kv: Sequence[KVPool]) -> AttentionState:
        from granikv import tile_kernels

        spec, words = plan.spec, plan.words
        shared, own, pdl = kv[0], kv[-1], not _interpreted()
        for launch in plan.launches:
            shape, tile = launch.shape, launch.tile
            use_tma = shape.tma and self.dense and not _interpreted()
            keys, values = (
                (_descriptor(x, tile.shared_n, spec.head_dim) for x in shared) if use_tma else (shared.k, shared.v)
            )
            tile_kernels.attend_tiles[(launch.programs,)](
                q, shared.k, shared.v, keys, values, own.k, own.v,
                *(words[launch.sections[name]] for name in ("shared", "own", "shared_starts", "own_starts")),
                words[plan.pages], plan.part_out, plan.part_lse,
                plan.batch_size, spec.sm_scale * math.log2(math.e), spec.num_kv_heads * spec.head_dim,
                num_processors(spec.device),
                DENSE=self.dense, TMA=use_tma, PDL=pdl, SHARED_PAGE=shared.k.shape[1], OWN_PAGE=plan.page_size,
                HEADS=spec.num_qo_heads, GROUP=spec.group_size, D=spec.head_dim, FIELDS=len(FIELDS),
                SHARED_M=tile.shared_m, SHARED_N=tile.shared_n, SHARED_STAGES=shape.shared_stages,
                OWN_H=tile.own_h, OWN_M=own_block_m(spec.group_size), OWN_N=tile.own_n, OWN_STAGES=shape.own_stages,
                num_warps=shape.num_warps, **({"launch_pdl": True} if pdl else {}),
            )  # fmt: skip
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        heads = plan.batch_size * spec.num_qo_heads
        dims = min(64, spec.head_dim) if heads < 4096 else spec.head_dim
        tile_kernels.merge_slots[(plan.batch_size, spec.num_qo_heads, spec.head_dim // dims)](
            plan.part_out, plan.part_lse, words[plan.num_slots], out, lse, plan.batch_size,
            PDL=pdl, HEADS=spec.num_qo_heads, D=spec.head_dim, BLOCK_D=dims, SLOTS=plan.merge_width,
            num_warps=1 if heads < 4096 else 2, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
        return AttentionState(out, lse)

    def _tables(
        self, view: KVView, spec: AttentionSpec
    ) -> tuple[list[tuple[TileTable, LaunchShape, TileShape]], NDArray[np.int32]]:
        """Table, launch shape and tile shape of every launch, and the page indices of all paged levels."""
        shared, own = ([], view.flat()) if self.flat else (list(view.levels[:-1]), view.levels[-1])
        shared = [level for level in shared if level.num_entries and int(level.kv_lens.max())]
        most_rows = max((int(level.num_rows.max()) for level in shared), default=0)
        shared_m = shared_block_m(most_rows * spec.group_size, spec.head_dim)
        shape = self.shapes[shared_m or 16]
        tile = TileShape(
            shared_m,
            max(16, shape.shared_n * 128 // max(spec.head_dim, 128)),
            math.gcd(spec.num_kv_heads, shape.own_h),
            max(16, shape.own_n * 128 // max(spec.head_dim, 128)),
        )
        slots = np.zeros(view.batch_size, np.int64)
        programs = num_processors(spec.device) * shape.programs_per_sm
        heads = (spec.num_kv_heads, spec.group_size)
        own_alone = replace(tile, shared_m=0)
        if self.fused or not shared:
            one = tile_table(shared, own, slots, *heads, tile, programs, self.dense)
            tables = [(one, shape, tile)]
        else:
            first = tile_table(shared, None, slots, *heads, tile, programs, self.dense)
            second = tile_table([], own, slots, *heads, own_alone, programs, self.dense)
            if not self.dense:
                second.own[:, FIELDS.index("page_start")] += sum(int(level.kv_indptr[-1]) for level in shared)
            tables = [(first, shape, tile), (second, shape, own_alone)]
        paged = [own] if self.dense else [*shared, own]
        return tables, np.concatenate([level.kv_indices.numpy() for level in paged])

    def _workspace(self, states: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Room for `states` partial outputs and lse, kept between plans; earlier plans keep what they were given."""
        held = self._parts
        if (
            held is None
            or held[0].numel() < states * spec.head_dim
            or held[1].numel() < states
            or held[0].device.type != spec.device.type
        ):
            options: dict[str, Any] = {"dtype": torch.float32, "device": spec.device}
            held = torch.empty(states * spec.head_dim, **options), torch.empty(states, **options)
            self._parts = held
        return held


def shared_block_m(folded_rows: int, head_dim: int) -> int:
    """Rows of a shared tile for entries of up to so many folded rows; 0 if there are none."""
    if folded_rows <= 16:
        return 16 if folded_rows else 0
    return 64 if folded_rows <= 64 or head_dim > 128 else 128


def own_block_m(group_size: int) -> int:
    """Rows of an own tile: one row's query heads of a KV head, and at least what a matrix instruction takes."""
    return max(16, _power_of_2(group_size))


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the GPU; a small number in the interpreter."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _roomy(size: int) -> int:
    """A section's room: half as much again, so that sequences may grow under a captured graph."""
    return max(64, -(-size * 3 // 2 // 16) * 16)


def _to_device(arrays: Sequence[tuple[slice, NDArray[np.int32]]], size: int, device: torch.device) -> Tensor:
    """int32 [size] with each array in its place and 0 elsewhere."""
    words = np.zeros(size, np.int32)
    for place, array in arrays:
        words[place] = array.ravel()
    return torch.from_numpy(words).to(device, non_blocking=True)


def _descriptor(pool: Tensor, block_n: int, head_dim: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(pool.view(-1, pool.shape[2] * pool.shape[3]), [block_n, head_dim])
