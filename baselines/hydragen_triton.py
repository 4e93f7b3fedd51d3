"""hydragen in Triton: shared tiles over slabs, own tiles, and the merge, one launch each."""

from granikv.tile_attention import TileAttention


class HydragenTriton(TileAttention):
    """Hydragen (Juravsky et al., 2024) with GraniKV's tiles, but without its overlap of both kinds."""

    def __init__(self, name: str = "hydragen") -> None:
        super().__init__(name, dense=True, fused=False)
