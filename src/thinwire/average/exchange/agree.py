"""What comes before the all-reduce of an `AgreedCodec`: 1 step, 4 (W-1) bytes per worker for each number proposed.

Each worker sends its proposal to all others, takes the sum or the maximum in rank order, and encodes with the codec
that results. All collectives are issued in `finish`, so that they come in the order of the steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...codec import Codec, Identity
from .all_reduce import all_reduce
from .base import Finish, Job, flatten


def agreed_all_reduce(job: Job) -> Finish:
    """Codecs that need an agreement. The result is `1/W decode(sum_i encode(x_i))` with the codec agreed upon."""
    own = [t.to(torch.float32, copy=True).contiguous() for t in job.tensors]  # the tensors may be overwritten

    def finish(totals: list[Tensor], dense_total: Tensor) -> bool:
        codec: Codec = Identity()  # where nothing is encoded
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
    """Added in rank order."""
    total = torch.zeros_like(proposals[0])
    for proposal in proposals:
        total += proposal
    return total
