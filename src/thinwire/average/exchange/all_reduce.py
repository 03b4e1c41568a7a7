"""The backend adds payloads in an all-reduce: 2(W-1) steps, 2(W-1)/W (p + d) bytes per worker."""

from __future__ import annotations

from torch import Tensor

from ...kernels import Flag
from .base import Finish, Job


def all_reduce(job: Job) -> Finish:
    """The result is `1/W decode(sum_i encode(x_i))`, for codecs with summable payloads."""
    sum_dtype = job.codec.sum_dtype
    assert sum_dtype is not None, f"{job.codec} is not summable"  # `Mean` refuses it
    payload = job.encode(job.tensors, job.keys, job.masked)
    with job.clock("exchange"):
        handles = [job.comm.all_reduce(part) for part in (payload.view(sum_dtype), job.dense) if part.numel()]

    def finish(totals: list[Tensor], dense_total: Tensor) -> Flag:
        with job.clock("wait"):
            for handle in handles:
                handle.wait()
        dense_total.add_(job.dense, alpha=1.0 / job.comm.size)
        return job.decode([payload], totals, job.scale / job.comm.size, job.keys)

    return finish
