import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton kernels run in its interpreter; it reads this when it is imported

from hydra.utils import instantiate
from omegaconf import OmegaConf

from granikv.binding import bind
from granikv.cell import FilledLayout, device_order, run_in_batch_order
from granikv.kernels import AttentionKernel, AttentionState
from granikv.layouts.base import KVLayout
from granikv.logical import LogicalKV, materialize
from granikv.spec import AttentionSpec
from granikv.tree import ContextTree, Node, two_level

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"

TREES = {
    "one_group": two_level([(100, [5, 7, 9, 1])]),
    "two_groups_of_unequal_length": two_level([(65, [3, 30]), (17, [8, 2, 4])]),
    "prefix_shorter_than_a_page": two_level([(9, [4, 6])]),
    "prefix_of_exactly_a_page": two_level([(16, [4, 6])]),
    "prefix_of_one_token": two_level([(1, [3, 3])]),
    "no_prefix": two_level([(0, [40, 3, 17])]),
    "some_suffixes_empty": two_level([(48, [0, 5, 0])]),
    "all_suffixes_empty": two_level([(48, [0, 0])]),
    "a_request_in_no_group": two_level([(50, [4, 4]), (0, [61])]),
    "as_many_groups_as_requests": two_level([(20, [3]), (33, [4]), (7, [5])]),
    "batch_of_one": two_level([(70, [11])]),
    "batch_of_129": two_level([(40, [1 + i % 5 for i in range(129)])]),
    "longer_than_a_chunk": two_level([(2100, [70, 3])]),
    "nested_prefixes": ContextTree(
        (
            Node(None, 40, True),
            Node(0, 5, False),
            Node(0, 33, True),
            Node(2, 7, False),
            Node(2, 0, False),
            Node(0, 2, False),
            Node(None, 9, True),
            Node(6, 3, False),
            Node(6, 50, False),
            Node(None, 21, False),
        )
    ),
}


def configured(group: str) -> dict[str, object]:
    """Every entry of conf/GROUP by name, so that what a new yaml adds is tested on arrival."""
    nodes: dict[str, object] = {}
    for path in sorted((CONF / group).glob("*.yaml")):
        nodes |= {str(name): node for name, node in OmegaConf.load(path).items_ex(resolve=False) if name != "defaults"}
    return nodes


LAYOUTS = list(configured("layout"))


KERNELS_OF = {
    backend: [
        name for name, node in configured("kernel").items() if backend in node and "candidates" not in node[backend]
    ]
    for backend in ("torch", "triton", "flashinfer")
}
TORCH_KERNELS = KERNELS_OF["torch"]


def make_layout(name: str) -> KVLayout:
    return instantiate(configured("layout")[name])


def make_kernel(name: str, backend: str = "torch"):
    return instantiate(configured("kernel")[name][backend], _convert_="all")


def spec_of(
    num_qo_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> AttentionSpec:
    return AttentionSpec(num_qo_heads, num_kv_heads, head_dim, dtype, torch.device(device))


def state_of(held: FilledLayout, kernel: AttentionKernel, fallback: str = "charge") -> AttentionState:
    """What `kernel` computes on a filled layout, through the adapter it needs; skips where it may not run."""
    view = held.layout.view(held.rows)
    spec, kv = held.logical.spec, [held.layout.pools[0]] * len(view.levels)
    binding = bind(kernel, view.traits, fallback)
    if reason := kernel.supports(spec) or binding.reason:
        pytest.skip(reason)
    if binding.adapter:
        gather = binding.adapter.plan(view, spec)
        view, kv = gather.view, binding.adapter.run(gather, kv)
    return run_in_batch_order(kernel, kernel.plan(view, spec), device_order(view, spec.device), held.logical.q, kv)


def filled(layout: str, tree: ContextTree, spec: AttentionSpec | None = None, seed: int = 0) -> FilledLayout:
    logical: LogicalKV = materialize(tree, spec or spec_of(), seed)
    return FilledLayout(make_layout(layout), logical, seed)


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in itertools.compress(items, ["gpu" in item.keywords for item in items]):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
