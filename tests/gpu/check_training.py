"""Training on a GPU: one worker over NCCL, two workers on one GPU over Gloo, and streams under load.

All of it runs on a simulated GPU too, but for what needs the GPU's own clock; see `helpers.simulated_gpu`.
"""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from helpers.on_triton import DEVICE as GPU
from helpers.spawn import retire, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.comm import LocalWorld, ProcessGroupCommunicator, issuer
from thinwire.comm.compare import digests

AVERAGERS = [
    tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback()),
    tw.Mean(tw.TopK(0.1), tw.MomentumCorrection(0.9)),
    tw.Mean(tw.codec.SignNorm(), tw.ErrorFeedback()),
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
def test_streams_under_load(averager, monkeypatch):
    """Kernels of other threads change nothing, nor does memory that they take on the same streams, fill and free.

    The allocator hands memory out again on the stream that freed it. So what one stream freed while another still used it
    is overwritten only if the same streams take memory.
    """
    calm = LocalWorld(1).run(train, averager, 5, True)[0]
    stop, used, stream = threading.Event(), [torch.cuda.default_stream(GPU)], torch.cuda.Stream

    def noted(*args, **kwargs):
        used.append(stream(*args, **kwargs))
        return used[-1]

    monkeypatch.setattr(torch.cuda, "Stream", noted)

    def load() -> None:
        with torch.cuda.stream(stream(GPU)):
            x = torch.randn(2048, 2048, device=GPU)
            while not stop.is_set():
                x = (x @ x).clamp(-1, 1)
                torch.cuda.current_stream().synchronize()

    def fill() -> None:
        while not stop.is_set():
            for each in used[:1] + used[-4:]:
                with torch.cuda.stream(each):
                    for numel in (64, 4096, 65536):  # tables, payloads, buckets
                        torch.full((numel,), float("nan"), device=GPU)
                each.synchronize()

    threads = [threading.Thread(target=target) for target in (load, fill)]
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


@pytest.mark.skipif("helpers.simulated_gpu" in sys.modules, reason="needs a GPU's clock")
def test_backward_does_not_queue_behind_an_exchange():
    (backward, whole), _ = spawn(2, backward_beside_a_late_worker, timeout_seconds=300)
    assert backward < 500 and whole > 1500, (backward, whole)


@pytest.fixture
def one_worker():
    """The default process group of one worker, over NCCL."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=GPU)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_one_worker_over_nccl(one_worker, averager):
    with ProcessGroupCommunicator() as comm:
        assert_same(train(comm, averager), LocalWorld(1).run(train, averager)[0])


@pytest.mark.parametrize("averager", AVERAGERS[:3], ids=repr)
def test_messages_of_a_late_stream_over_nccl(one_worker, averager, monkeypatch):
    """Memory of an exchange is not handed out again while the stream of messages, which works late here, uses it."""
    start = issuer._start_on_stream

    def late(side, ready, tensors, begin):
        return start(side, ready, tensors, lambda: torch.cuda._sleep(20_000_000) or begin())

    monkeypatch.setattr(issuer, "_start_on_stream", late)
    with ProcessGroupCommunicator() as comm:
        assert_same(train(comm, averager), LocalWorld(1).run(train, averager)[0])


@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_ddp_of_one_worker_over_nccl(one_worker, averager):
    """The hook of DDP gives the gradients that plain hooks give, with buckets of its own."""
    net, plain = model(), model()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.1, gradient_as_bucket_view=True)
    tw.compress_gradients(ddp, averager)
    with tw.compress_gradients(plain, averager, bucket_bytes=100_000):
        for step in range(3):
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to(GPU)
            for each in (ddp, plain):
                each.zero_grad()
                each(x).square().mean().backward()
            for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)


def test_bytes_travel_point_to_point_over_nccl(one_worker):
    """A send to itself and its receive, started as one operation as those to peers are."""
    group, sent = dist.group.WORLD, torch.arange(256, dtype=torch.uint8, device=GPU)
    received = torch.zeros_like(sent)
    group._start_coalescing(GPU)
    group.recv([received], 0, 0)
    group.send([sent], 0, 0)
    group._end_coalescing(GPU).wait()
    assert torch.equal(received, sent)


def steps_with(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int = 8) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        optimizer.zero_grad()
        net(torch.randn(64, 256, generator=generator).to(GPU)).square().mean().backward()
        optimizer.step()


def with_ddp(comm) -> list[torch.Tensor]:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.1)
    tw.compress_gradients(ddp, tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback()), comm=comm)
    steps_with(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), comm.rank)
    return [p.detach().cpu() for p in ddp.parameters()]


def with_shards(comm) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    retire()
    net = fully_shard(model(), mesh=dist.init_device_mesh(GPU.type, (comm.size,)))
    with tw.compress_shards(net):
        steps_with(net, torch.optim.SGD(net.parameters(), lr=0.01), comm.rank)
        # Not `full_tensor`: over Gloo, PyTorch 2.11 crashes where it gathers tensors on a GPU.
        found = []
        for p in net.parameters():
            shards = comm.all_gather(p.to_local().detach().cpu().flatten(), variable=True).wait()
            found.append(torch.cat(shards).view(p.shape))
        return found


def with_gossip(comm) -> list[torch.Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with tw.gossip_parameters(net, optimizer, tw.Mix(tw.Complete()), comm=comm, overlap=True) as handle:
        steps_with(net, optimizer, comm.rank)
        handle.synchronize()
    return [p.detach().cpu() for p in net.parameters()]


def with_local_updates(comm) -> list[torch.Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    averager = tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback())
    with tw.local_updates(net, optimizer, averager, every=4, delay=1, comm=comm) as handle:
        steps_with(net, optimizer, comm.rank)
        handle.synchronize()
    return [p.detach().cpu() for p in net.parameters()]


def with_amp(comm) -> list[torch.Tensor]:
    net, scaler = model(), torch.amp.GradScaler(GPU.type, init_scale=2.0**10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(comm.rank)
    averager = tw.Mean(tw.TopK(0.1), tw.ErrorFeedback())
    with tw.compress_gradients(net, averager, comm=comm, scaler=scaler, bucket_bytes=100_000):
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast(GPU.type, torch.float16):
                loss = net(torch.randn(64, 256, generator=generator).to(GPU)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return [p.detach().cpu() for p in net.parameters()]


SPARSE = tw.chain(tw.TopK(0.05), tw.QSGD(bits=4))


def with_sparse_exchanges(comm) -> list[torch.Tensor]:
    return [
        p
        for exchange in ("all_gather", "sparse_reduce", "scatter_reduce")
        for p in train(comm, tw.Mean(SPARSE, tw.ErrorFeedback(), exchange=exchange))
    ]


@pytest.mark.parametrize(
    "worker", [with_ddp, with_shards, with_gossip, with_local_updates, with_amp, with_sparse_exchanges]
)
def test_two_workers_of_a_strategy_agree_on_one_gpu(worker):
    """They end with the same finite parameters, which differ from those that they began with."""
    first, second = spawn(2, worker, timeout_seconds=300)
    for a, b in zip(first, second, strict=True):
        # One step of gossip in flight mixes before the last step's own update; rounding differs by rank.
        assert torch.equal(a, b) if worker is not with_gossip else torch.allclose(a, b, atol=0.05)
        assert a.isfinite().all()
    assert not torch.equal(first[0], next(model().parameters()).detach().cpu())


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


def waited_for_on_another_stream(comm) -> torch.Tensor:
    """What rank 0 sends arrives in a tensor that the training's stream still fills, and another stream waits for it."""
    x, side = torch.zeros(1 << 20, device=GPU), torch.cuda.Stream(GPU)
    torch.cuda._sleep(10**8)
    x.fill_(1.0 + comm.rank)
    sending = comm.broadcast(x)
    with torch.cuda.stream(side):
        sending.wait()
        return x.cpu()


def test_an_operation_may_be_waited_for_on_another_stream():
    assert_same(spawn(2, waited_for_on_another_stream), [torch.ones(1 << 20)] * 2)


def after_an_error(comm, averager) -> list[torch.Tensor]:
    """Rank 1 loses a batch to an error, with some buckets of its backward pass sent, and goes on with the next one."""
    net, fails = model(), []

    def explode(grad: torch.Tensor) -> None:
        if fails:
            fails.clear()
            raise torch.OutOfMemoryError("on purpose")

    net[1].weight.register_hook(explode)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(comm.rank)
    with tw.compress_gradients(net, averager, comm=comm, bucket_bytes=100_000, max_nonfinite=3):
        for step in range(4):
            fails += [step] if (comm.rank, step) == (1, 1) else []
            optimizer.zero_grad()
            try:
                net(torch.randn(64, 256, generator=generator).to(GPU)).square().mean().backward()
            except torch.OutOfMemoryError:
                continue
            optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]


@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_a_round_that_an_error_broke_off(averager):
    first, second = LocalWorld(2).run(after_an_error, averager)
    assert_same(first, second)


def sparse_and_of_several_types(comm, device: torch.device) -> list[torch.Tensor]:
    """Of 20 coordinates one is kept, so that three workers own none; the dense tensors have types of their own."""
    x = torch.arange(1.0, 21.0).view(4, 5) * (comm.rank + 1)
    types = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    tensors = [("x", x.to(device)), *((str(dtype), torch.ones(3, dtype=dtype, device=device)) for dtype in types)]
    averager = tw.Mean(tw.TopK(0.01), tw.ErrorFeedback(), exchange="sparse_reduce")
    state = averager.init(tensors, comm)
    averager.step(state, tensors, comm).wait()
    averager.commit(state)
    return [t.cpu() for _, t in tensors]


def test_workers_that_own_nothing_and_results_of_several_types():
    expected = LocalWorld(4).run(sparse_and_of_several_types, torch.device("cpu"))
    for found, ours in zip(LocalWorld(4).run(sparse_and_of_several_types, GPU), expected, strict=True):
        assert_same(found, ours)


def test_hashes_are_those_of_a_copy_that_is_late():
    x = torch.randn(16384, 8192, device=GPU).t()
    expected = digests([x])
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        assert digests([x]) == expected


def gradients_of_two_streams(comm, averager, bucket_bytes: int, sleeps: bool) -> list[torch.Tensor]:
    """The second parameter's gradient is made on another stream, which is late if it `sleeps`."""
    net = nn.ParameterList([torch.full((64, 64), 0.5 + i) for i in range(2)]).to(GPU)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(GPU)
    side = torch.cuda.Stream(GPU)
    with tw.compress_gradients(net, averager, comm=comm, bucket_bytes=bucket_bytes):
        for _ in range(3):
            net.zero_grad()
            loss = (net[0] * x).sum()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                product = net[1] * x
                product.register_hook(lambda grad: torch.cuda._sleep(10**8) if sleeps else None)
                late = product.sum()
            torch.cuda.current_stream().wait_stream(side)
            (loss + late).backward()
            torch.cuda.synchronize()
    return [p.grad.cpu() for p in net]


@pytest.mark.parametrize("granularity, bucket_bytes", [("layer", 100_000), ("model", 1000)])
def test_gradients_of_two_streams(granularity, bucket_bytes):
    """In one bucket, and in two that are sent together."""
    averager = tw.Mean(tw.QSGD(bits=8), granularity=granularity)
    calm = LocalWorld(1).run(gradients_of_two_streams, averager, bucket_bytes, False)[0]
    assert_same(LocalWorld(1).run(gradients_of_two_streams, averager, bucket_bytes, True)[0], calm)
