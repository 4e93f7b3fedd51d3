"""GraniKV's native backend: all prefix groups and all suffixes of a layer in one persistent launch, and a merge."""

from granikv.tile_attention import TileAttention


class FusedTriton(TileAttention):
    """dense=True reads shared prefixes as slabs. dense=False is the same kernel reading them through page tables, so
    that the difference between the two is the layout's alone.
    """

    def __init__(self, name: str, dense: bool) -> None:
        super().__init__(name, dense=dense, fused=True)
