"""Checks of the fields that several quantizers have."""

from __future__ import annotations

from ...options import require_choice, require_integer


def check_buckets(codec: str, bucket_size: int | None, norm: str, or_none: bool = False) -> None:
    """Raise ValueError unless `bucket_size` is an integer, 1 or more, and `norm` is known; `codec` is its name."""
    require_integer(f"{codec}: bucket_size", bucket_size, 1, or_none=or_none)
    require_choice(f"{codec}: norm", norm, ("max", "l2"))
