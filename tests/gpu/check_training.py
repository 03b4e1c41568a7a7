"""Training on a GPU: streams under load, two workers on one GPU over Gloo, and one worker over NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from helpers.spawn import spawn
from torch import nn

import thinwire as tw
from thinwire.comm import LocalWorld, ProcessGroupCommunicator

GPU = torch.device("cuda", 0)
AVERAGERS = [
    tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback()),
    tw.Mean(tw.TopK(0.1), tw.MomentumCorrection(0.9)),
    tw.Mean(tw.SignNorm(), tw.ErrorFeedback()),
    tw.Mean(tw.TernGrad(shared=True)),
    tw.Mean(tw.Cast("float8_e4m3fn")),
    tw.PowerSGD(rank=2),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to(GPU)


def train(comm, averager, steps: int = 5, calm: bool = False) -> list[torch.Tensor]:
    """The parameters after some steps; with `calm`, the host waits for the GPU wherever it can."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(comm.rank)
    with tw.compress_gradients(net, averager, comm=comm, bucket_bytes=100_000):
        for _ in range(steps):
            x = torch.randn(64, 256, generator=generator).to(GPU)
            optimizer.zero_grad()
            loss = net(x).square().mean()
            if calm:
                torch.cuda.synchronize()
            loss.backward()
            if calm:
                torch.cuda.synchronize()
            optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_streams_under_load(averager):
    """Kernels of other threads, and memory that they take and free, change nothing."""
    calm = LocalWorld(1).run(train, averager, 5, True)[0]
    stop = threading.Event()

    def load() -> None:
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            x = torch.randn(2048, 2048, device=GPU)
            while not stop.is_set():
                x = (x @ x).clamp(-1, 1)
                _ = torch.full((1000, 1000), float("nan"), device=GPU)
                torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            assert_same(LocalWorld(1).run(train, averager)[0], calm)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_two_workers_on_one_gpu_over_gloo(averager):
    first, second = spawn(2, train, averager, timeout_seconds=300)
    assert_same(first, second)


def backward_beside_a_late_worker(comm) -> tuple[float, float]:
    """Milliseconds on the GPU until backward's last kernel, and until the end of the round."""
    net = model()
    x = torch.randn(64, 256, device=GPU, requires_grad=True)
    began, ended, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    x.register_hook(lambda grad: ended.record())  # the last gradient of all
    with tw.compress_gradients(net, tw.Mean(tw.QSGD(bits=4)), comm=comm, bucket_bytes=100_000):
        for delay in (0.0, 2.0):
            comm.barrier()
            loss = net(x).sum()
            torch.cuda.synchronize()
            time.sleep(delay * comm.rank)
            began.record()
            loss.backward()
            done.record()
        torch.cuda.synchronize()
    return began.elapsed_time(ended), began.elapsed_time(done)


def test_backward_does_not_queue_behind_an_exchange():
    (backward, whole), _ = spawn(2, backward_beside_a_late_worker, timeout_seconds=300)
    assert backward < 500 and whole > 1500, (backward, whole)


@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_one_worker_over_nccl(averager):
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=GPU)
    try:
        with ProcessGroupCommunicator() as comm:
            assert_same(train(comm, averager), LocalWorld(1).run(train, averager)[0])
    finally:
        dist.destroy_process_group()


def test_seconds_are_those_of_the_gpu():
    def worker(comm):
        net = model()
        with tw.compress_gradients(net, tw.Mean(tw.QSGD(bits=4)), comm=comm) as handle:
            net(torch.ones(8, 256, device=GPU)).sum().backward()
            return handle.seconds

    (seconds,) = LocalWorld(1).run(worker)
    assert {"encode", "decode", "blocked"} <= seconds.keys() and all(0 <= s < 60 for s in seconds.values())


def test_a_captured_step_is_refused():
    def worker(comm):
        net = model()
        with tw.compress_gradients(net, tw.Mean(tw.QSGD(bits=4)), comm=comm):
            x = torch.ones(8, 256, device=GPU)
            net(x).sum().backward()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = net(x).sum()
                with pytest.raises(ValueError, match="CUDA graph"):
                    loss.backward()

    LocalWorld(1).run(worker)


def test_two_workers_measure_a_training_step(tmp_path):
    file = tmp_path / "step.json"
    sizes = ["--steps", "2", "--warmup", "1", "--hidden", "64", "--layers", "2", "--batch-size", "4"]
    command = [sys.executable, "-m", "thinwire", "bench", "step", "--device", "cuda", *sizes, "--json", str(file)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    rows = json.loads(file.read_text())
    assert len(rows) == 4 and all(row["device"] == "cuda" and row["step_seconds"] > 0 for row in rows)
