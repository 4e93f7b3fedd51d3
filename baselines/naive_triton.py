"""naive in Triton: own tiles over each request's whole sequence."""

from granikv.tile_attention import TileAttention


class NaiveTriton(TileAttention):
    """Paged flash-decoding: the flat page table, split over the GPU, merged."""

    def __init__(self, name: str = "naive") -> None:
        super().__init__(name, dense=False, fused=False, flat=True)
