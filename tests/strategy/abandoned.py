"""A training script whose backward fails; `test_abandoned_backward.py` runs it in processes of their own.

python abandoned.py KIND AVERAGER RANK SIZE STORE
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw


def main(kind: str, averager: str, rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(4)]
    model = nn.Sequential(*([nn.Embedding(8, 16, sparse=True)] if kind == "sparse" else []), *layers)
    options = {"bucket_bytes": 1000}  # several buckets, and the same of DDP
    if kind in ("ddp", "sparse-ddp", "interrupt"):
        model, options = DistributedDataParallel(model, bucket_cap_mb=0.001), {}
    handle = tw.compress_gradients(model, tw.parse(averager), **options)
    fails = []

    def explode(gradient: torch.Tensor) -> None:
        if fails and rank == size // 2:
            if kind == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                return
            raise torch.OutOfMemoryError("on purpose")

    layers[1].weight.register_hook(explode)  # some buckets are sent before
    inputs = torch.arange(8) if kind == "sparse" else torch.randn(8, 16)
    for step in range(3):
        fails += [True] if step == 2 else []
        if kind == "context":
            with handle if step == 2 else torch.enable_grad():
                model(inputs).sum().backward()
        else:
            model(inputs).sum().backward()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
