"""The agreement before the all-reduce of an `AgreedCodec`: 1 step, 4 (W-1) bytes per worker and proposed number.

Each worker sends its proposal to all others. It combines all proposals in rank order, by sum or by maximum, and encodes
with the resulting codec. `finish` issues all collectives, so that all workers issue them in the order of the steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...codec import Codec, Identity
from ...kernels import Flag
from .all_reduce import all_reduce
from .base import Finish, Job, flatten


def agreed_all_reduce(job: Job) -> Finish:
    """The result is `1/W decode(sum_i encode(x_i))`, with the codec that workers agree on."""
    own = [t.to(torch.float32, copy=True).contiguous() for t in job.tensors]  # the caller may overwrite the tensors

    def finish(totals: list[Tensor], dense_total: Tensor) -> Flag:
        codec: Codec = Identity()  # if there is nothing to encode
        if own:
            proposal = job.codec.propose([flatten(own, job.dense.device)] if job.merged else [t.view(-1) for t in own])
            with job.clock("wait"):
                proposals = torch.stack(job.comm.all_gather(proposal).wait())
            total = proposals.amax(0) if job.codec.agreement == "max" else _sum(proposals)
            codec = job.codec.agreed(total, job.comm.size)
        finite = all_reduce(replace(job, codec=codec, tensors=own))(totals, dense_total)
        if job.keep_residual and own:
            torch._foreach_copy_(job.tensors, own)
        return finite

    return finish


def _sum(proposals: Tensor) -> Tensor:
    """The sum of the rows, added in rank order."""
    total = torch.zeros_like(proposals[0])
    for proposal in proposals:
        total += proposal
    return total
