"""cascade in Triton: shared tiles through page tables, own tiles, and the merge, one launch each."""

from granikv.tile_attention import TileAttention


class CascadeTriton(TileAttention):
    """Cascade attention (Ye et al., 2024) with GraniKV's tiles, but without its overlap of both kinds."""

    def __init__(self, name: str = "cascade") -> None:
        super().__init__(name, dense=False, fused=False)
