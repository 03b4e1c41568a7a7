"""Our connections as a backend of `torch.distributed`, for tensors in main memory.

Importing this module registers it, and then any script can use it:

    import thinwire.comm.backend

    torch.distributed.init_process_group("thinwire")                    # or "cpu:thinwire,cuda:nccl"

`group` has the collectives, which `TcpCommunicator` carries; `work` the results that are still on their way; `reductions` what
`ReduceOp` means. Every process group, new ones over fewer ranks too, has connections of its own. Sums, and the results of all
other operations, are taken in rank order, so that all ranks have the same bits.
"""

from __future__ import annotations

import torch.distributed as dist

from .group import ThinwireGroup

NAME = "thinwire"

dist.Backend.register_backend(NAME, ThinwireGroup, devices=["cpu"])

__all__ = ["NAME", "ThinwireGroup"]
