"""Each worker sends its message to all others: 1 step, (W-1)(p + d) bytes per worker.

If the codec's size is not fixed, workers first send sizes: 2 steps, (W-1)(p + d + 8) bytes.
"""

from __future__ import annotations

from torch import Tensor

from ...kernels import Flag
from .base import Finish, Job, pack, unpack


def all_gather(job: Job) -> Finish:
    """The result is `1/W sum_i C(x_i)`, for any codec; each worker encodes once."""
    message = pack(job.dense, job.encode(job.tensors, job.keys, job.masked))
    with job.clock("exchange"):
        limit = job.message_nbytes(job.tensors, job.dense)
        handle = job.comm.all_gather(message, variable=not job.codec.fixed_size, limit=limit)

    def finish(totals: list[Tensor], dense_total: Tensor) -> Flag:
        with job.clock("wait"):
            messages = [unpack(m, job.dense.numel()) for m in handle.wait()]
        for dense, _ in messages:
            dense_total.add_(dense, alpha=1.0 / job.comm.size)
        return job.decode([payload for _, payload in messages], totals, job.scale / job.comm.size, job.keys)

    return finish
