"""Checks of the fields that several quantizers have."""

from __future__ import annotations

from ...algorithm import require


def check_buckets(codec: str, bucket_size: int, norm: str) -> None:
    """Raise ValueError unless `bucket_size` is a positive integer and `norm` is known; `codec` is its name."""
    require(
        isinstance(bucket_size, int) and bucket_size >= 1,
        f"{codec}: bucket_size must be a positive integer, got {bucket_size!r}",
    )
    check_norm(codec, norm)


def check_norm(codec: str, norm: str) -> None:
    """Raise ValueError unless `norm` is known; `codec` is its name."""
    require(norm in ("max", "l2"), f"{codec}: norm must be 'max' or 'l2', got {norm!r}")


def check_bucket_size(codec: str, bucket_size: int | None) -> None:
    """Raise ValueError unless `bucket_size` is a positive integer or None; `codec` is its name."""
    require(
        bucket_size is None or (isinstance(bucket_size, int) and bucket_size >= 1),
        f"{codec}: bucket_size must be a positive integer or None, got {bucket_size!r}",
    )
