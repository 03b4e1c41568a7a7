"""The backend adds payloads in an all-reduce: 2 steps, 2(W-1)/W (p + d) bytes per worker; see `comm/sums.py`.

Between two workers it takes one step, and on nodes of several workers four, of which two pass between nodes. Over NCCL it
goes around a ring in 2(W-1) steps, and passes each node once.

Codecs with an `agreement` come first to one on the sum or the maximum of what workers propose:

    "sum"    an all-reduce     8 (W-1)/W bytes per worker and proposed number: they do not grow with W
    "max"    an all-gather     1 step, 4 (W-1) bytes

All workers then encode with the resulting codec. Then `finish` issues all collectives, so that all workers issue them in the
order of the steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....algorithm import require
from ....codec import AgreedCodec, Codec, Identity
from ....kernels import Flag
from .base import Finish, Job, flatten
from .contract import Exchange, Load


class AllReduce(Exchange):
    """The result is `1/W decode(sum_i encode(x_i))`, for codecs with summable payloads."""

    word = "all_reduce"
    is_uniform = True
    one_step = True
    adds_payloads = True

    def steps(self, size: int, workers_per_node: int) -> int:
        if size <= 2:
            return size - 1
        return 4 if 1 < workers_per_node < size else 2

    def num_bytes(self, size: int, workers_per_node: int, message: float) -> float:
        return 2 * (size - workers_per_node) * message / size

    def price(self, load: Load) -> float:
        # As over NCCL, around a ring: over other backends "auto" has the same choice, but for equal bytes.
        return self.num_bytes(load.size, 1, self.message_nbytes(load)) if load.size > load.workers_per_node else 0.0

    def suits(self, load: Load) -> bool:
        return load.codec.traits.summable

    def check(self, codec: Codec) -> None:
        require(
            codec.traits.summable or codec.traits.agreement is not None,
            f"Mean: payloads of {codec} cannot be added on the wire; use exchange='all_gather' or 'auto'",
        )

    def begin(self, job: Job) -> Finish:
        agreement = job.codec.traits.agreement
        return _all_reduce(job) if agreement is None else _agreed_all_reduce(job, agreement)


def _all_reduce(job: Job) -> Finish:
    sum_dtype = job.codec.traits.sum_dtype
    assert sum_dtype is not None, f"{job.codec} is not summable"  # `Mean` refuses it
    payload = job.encode(job.tensors, job.keys, job.masked)
    if payload.numel() % sum_dtype.itemsize:  # in every round, so the message is built only when it is raised
        raise ValueError(
            f"rank {job.comm.rank}: {job.codec}: a payload of {payload.numel()} bytes holds no whole number of {sum_dtype}, "
            "its sum_dtype"
        )
    with job.clock("exchange"):
        # All workers have the same sizes, so all leave out the same collectives.
        handles = [job.comm.all_reduce(part) for part in (payload.view(sum_dtype), job.dense) if part.numel()]

    def finish(totals: list[Tensor], dense_total: Tensor) -> Flag:
        with job.clock("wait"):
            for handle in handles:
                handle.wait()
        # The all-reduce worked in place: `job.dense` and `payload` hold sums now.
        dense_total.add_(job.dense, alpha=1.0 / job.comm.size)
        return job.decode([payload], totals, job.scale / job.comm.size, job.keys)

    return finish


def _agreed_all_reduce(job: Job, agreement: AgreedCodec) -> Finish:
    own = [t.to(torch.float32, copy=True).contiguous() for t in job.tensors]  # the caller may overwrite the tensors

    def finish(totals: list[Tensor], dense_total: Tensor) -> Flag:
        codec: Codec = Identity()  # if there is nothing to encode
        if own:
            proposal = agreement.propose([flatten(own, job.dense.device)] if job.merged else [t.view(-1) for t in own])
            with job.clock("wait"):
                if agreement.combined_by == "sum":
                    total = job.comm.all_reduce(proposal).wait()
                else:
                    total = torch.stack(job.comm.all_gather(proposal).wait()).amax(0)
            codec = agreement.agreed(total, job.comm.size)
        finite = _all_reduce(replace(job, codec=codec, tensors=own))(totals, dense_total)
        # The encoder left the residuals in the copies.
        if job.keep_residual and own:
            torch._foreach_copy_(job.tensors, own)
        return finite

    return finish
