"""How segments are cut into tiles, one for each program of a launch."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 2048  # elements of a tile, but for a bucket that is larger
MAX_BUCKET = 8192  # a larger bucket is not held by one program


@dataclass(frozen=True)
class TileRows:
    """Rows of a tile; see `thinwire.kernels.triton.device`.

    Args:
        size: elements of a row, a multiple of 8.
        width: the least power of two that is at least `size`.
        rows: rows of a tile.
    """

    size: int
    width: int
    rows: int

    @classmethod
    def of_elements(cls, bucket_size: int) -> TileRows:
        """Tiles for element-wise work: a row is a bucket if it can be, so that one scale serves it.

        It cannot be if it is too large, or its codes may share a byte with the next.
        """
        if bucket_size % 8 or bucket_size > MAX_BUCKET:
            return cls(TILE // 4, TILE // 4, 4)
        width = 1 << (bucket_size - 1).bit_length()
        return cls(bucket_size, width, max(1, TILE // width))

    @property
    def constants(self) -> dict[str, int]:
        """The constants of kernels that work on these tiles."""
        return {"SIZE": self.size, "WIDTH": self.width, "ROWS": self.rows}

    @property
    def numel(self) -> int:
        """Elements of a tile."""
        return self.size * self.rows
