"""On a GPU a strategy works on a stream of its own, and the training waits for it at the end of a round only.

There is no GPU here: tensors are in main memory, and streams and events only note who waits for whom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import thinwire as tw
from thinwire import kernels, streams
from thinwire.clock import Clock
from thinwire.comm import compare, issuer, process_group
from thinwire.comm.issuer import Issuer
from thinwire.kernels import flags
from thinwire.kernels.random import keys_on
from thinwire.lab.bench.parts import seconds_of
from thinwire.membership import _tensors
from thinwire.strategy.gradients.rounds import GradientRounds
from thinwire.streams import WorkStream, wait_for


class Event:
    def __init__(self, stream=None, log=None, enable_timing=False, blocking=False):
        self.stream, self.log, self.time, self.blocking = stream, log, 0.0, blocking

    def record(self, stream):
        stream.record_event(self)

    def synchronize(self):
        if self.log is not None:
            self.log.append(("host waits", threading.current_thread().name, self.stream.name))

    def query(self):
        return True

    def elapsed_time(self, end):
        return end.time - self.time


class Stream:
    def __init__(self, log, name):
        self.log, self.name, self.device = log, name, torch.device("cuda")

    def record_event(self, event=None):
        event = event or Event()
        event.stream, event.log = self, self.log
        return event

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.stream.name))


class FakeGpu:
    """Streams of a GPU that log; `capturing` says whether a CUDA graph is being captured."""

    def __init__(self, monkeypatch):
        self.log, self.capturing = [], False
        self.now = threading.local()
        self.training = Stream(self.log, "training")
        monkeypatch.setattr(streams, "has_streams", lambda device: True)
        for module in ("gradients.rounds", "gossip.rounds"):
            monkeypatch.setattr(f"thinwire.strategy.{module}.has_streams", lambda device: True)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: Stream(self.log, "work"))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.use)
        monkeypatch.setattr(torch.cuda, "device", lambda device: self.use(self.current))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    @property
    def current(self) -> Stream:
        return getattr(self.now, "stream", self.training)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.now.stream = self.current, stream
        try:
            yield
        finally:
            self.now.stream = before


@pytest.fixture
def gpu(monkeypatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


class Noting(tw.QSGD):
    """Notes the stream on which it encodes and decodes."""

    def encode_segments(self, *args):
        log = torch.cuda.current_stream().log
        log.append(("encodes on", torch.cuda.current_stream().name))
        return super().encode_segments(*args)

    def decode_sum_segments(self, *args):
        log = torch.cuda.current_stream().log
        log.append(("decodes on", torch.cuda.current_stream().name))
        # A message that arrives now must not be waited for by the stream, which is to encode other buckets.
        wait_for(Stream(log, "messages").record_event(), torch.device("cpu"))
        return super().decode_sum_segments(*args)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 4))


def test_backward_waits_for_the_work_at_its_end_only(gpu):
    def worker(comm):
        net = model()
        with tw.compress_gradients(net, tw.Mean(Noting(bits=4), exchange="all_gather"), comm=comm, bucket_bytes=300):
            gpu.log.clear()
            net(torch.ones(3, 20)).sum().backward()

    tw.LocalWorld(1).run(worker)
    waits = [entry for entry in gpu.log if entry[1] == "waits for"]
    num_buckets = gpu.log.count(("encodes on", "work"))
    assert num_buckets == 3
    assert gpu.log.count(("decodes on", "work")) == num_buckets
    assert waits == [("work", "waits for", "training")] * num_buckets + [("training", "waits for", "work")]
    assert gpu.log[-1] == ("training", "waits for", "work")
    host = [entry for entry in gpu.log if entry[0] == "host waits"]
    assert host == [("host waits", "thinwire-finish", "messages")] * num_buckets


def test_what_takes_the_place_of_a_frozen_gradient_is_kept_until_the_training_waits(gpu, monkeypatch):
    """The work uses memory of the training's stream, which would else be handed out again."""
    kept, alive, launch, join = [], [], GradientRounds.launch, WorkStream.join

    def launching(rounds, tensors, *args):
        kept.extend(StorageWeakRef(t.untyped_storage()) for name, t in tensors if name == "1.weight")
        return launch(rounds, tensors, *args)

    def joining(work):
        join(work)
        alive.extend(not memory.expired() for memory in kept)

    monkeypatch.setattr(GradientRounds, "launch", launching)
    monkeypatch.setattr(WorkStream, "join", joining)

    def worker(comm):
        net = model()
        with tw.compress_gradients(net, tw.Mean(tw.QSGD(bits=4)), comm=comm, bucket_bytes=300):
            net[1].weight.requires_grad_(False)
            net(torch.ones(3, 20)).sum().backward()
            return net[1].weight.grad is None

    assert tw.LocalWorld(1).run(worker) == [True]
    assert alive == [True]
    assert kept[0].expired()


@pytest.mark.parametrize("averager, bucket_bytes", [(tw.Mean(), 10_000), (tw.Mean(granularity="model"), 300)], ids=repr)
def test_work_waits_for_the_streams_of_all_gradients(gpu, averager, bucket_bytes):
    """Each gradient comes on a stream of its own, such as FSDP's. The last one launches the one bucket of all, or the last of
    several that are sent together."""
    layers = range(3)

    def worker(comm):
        net = model()
        for i in layers:  # hooks of before run first
            for p in net[i].parameters():
                p.register_post_accumulate_grad_hook(lambda p, i=i: setattr(gpu.now, "stream", sides[i]))
        with tw.compress_gradients(net, averager, comm=comm, bucket_bytes=bucket_bytes):
            gpu.log.clear()
            net(torch.ones(3, 20)).sum().backward()
            return list(gpu.log)

    sides = [Stream(gpu.log, f"side {i}") for i in layers]
    (log,) = tw.LocalWorld(1).run(worker)
    begins = log.index(("work", "waits for", "side 0"))
    assert sorted(log[:begins]) == [("side 0", "waits for", "side 1"), ("side 0", "waits for", "side 2")]


def test_a_round_in_flight_works_beside_the_training(gpu):
    def worker(comm):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        averager = tw.Mix(tw.Complete())
        with tw.gossip_parameters(net, optimizer, averager, comm=comm, overlap=True) as handle:
            for _ in range(2):
                net(torch.ones(3, 20)).sum().backward()
                gpu.log.clear()
                optimizer.step()
            before = list(gpu.log)
            handle.synchronize()
        return before

    (before,) = tw.LocalWorld(1).run(worker)
    # A step absorbs the round of the step before it, and then begins its own.
    waits = [entry for entry in before if entry[1] == "waits for"]
    assert waits[0] == ("training", "waits for", "work")
    assert ("work", "waits for", "training") in waits


FLYING = [
    "Mix()",
    "PushSum()",
    "Choco(Ring(), TopK(0.5))",
    "DeepSqueeze(Ring(), TopK(0.5))",
    "Moniqua()",
    "PowerGossip()",
]


@pytest.mark.parametrize("averager", FLYING)
def test_a_round_in_flight_changes_its_state_in_place(gpu, averager, monkeypatch):
    """What `init` has made lies in memory of the training's stream, which would else be handed out again while the work still
    reads it."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)

    def worker(comm):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with tw.gossip_parameters(net, optimizer, tw.parse(averager), comm=comm, overlap=True) as handle:
            (state, _), *_ = handle._averaged()
            made = [StorageWeakRef(t.untyped_storage()) for t in _tensors(state)]
            for _ in range(3):
                net(torch.ones(3, 20)).sum().backward()
                optimizer.step()
            return [memory.expired() for memory in made]

    (expired,) = tw.LocalWorld(1).run(worker)
    assert not any(expired)


def test_a_step_is_not_captured_in_a_graph(gpu):
    def worker(comm):
        net = model()
        with tw.compress_gradients(net, tw.Mean(tw.QSGD(bits=4)), comm=comm):
            gpu.capturing = True
            with pytest.raises(ValueError, match="CUDA graph"):
                net(torch.ones(3, 20)).sum().backward()
            gpu.capturing = False

    tw.LocalWorld(1).run(worker)
    gpu.capturing = True
    with pytest.raises(ValueError, match="uploads"):
        keys_on([1], torch.device("cpu"))


def test_waiting_outside_of_a_work_stream_orders_streams(gpu):
    work = WorkStream(torch.device("cpu"))
    event = Stream(gpu.log, "messages").record_event()
    with work.continued():
        wait_for(event, torch.device("cpu"))
    wait_for(event, torch.device("cpu"))
    thread = threading.current_thread().name
    assert gpu.log == [("host waits", thread, "messages"), ("training", "waits for", "messages")]


def test_the_clock_times_a_gpu_by_events(gpu):
    clock = Clock()
    clock.device = torch.device("cuda")
    ticks = iter([1000.0, 3500.0, 4000.0, 4500.0])
    original = Stream.record_event

    def timed(stream, event=None):
        event = original(stream, event)
        event.time = next(ticks)
        return event

    gpu.training.record_event = lambda event=None: timed(gpu.training, event)
    for _ in range(2):
        with clock("encode"):
            pass
    assert clock.seconds == {"encode": 3.0}


def test_a_thread_sleeps_while_it_waits_for_messages(gpu, monkeypatch):
    """Threads that spin would take the processor from those that start kernels."""
    ended = []
    monkeypatch.setattr(issuer, "wait_for", lambda event, device: ended.append(event))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    thread = Issuer()
    thread.issue(torch.device("cuda"), lambda: lambda: None, [])()
    thread.close()
    assert [event.blocking for event in ended] == [True]


@pytest.mark.parametrize("copied", [True, False])
def test_a_thread_sleeps_while_a_tensor_is_copied_into_pinned_memory(gpu, monkeypatch, copied):
    """Gloo sends from main memory; what it receives lands in pinned memory too, and nothing is waited for."""
    pinned, recorded = [], []
    comm = SimpleNamespace(_backends={"cpu": "gloo"}, _direct=set())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(Event, "record", lambda self, stream: recorded.append(stream.record_event(self)), raising=False)
    made = process_group.debug.empty_like

    def allocate(tensor, pin_memory, **options):
        pinned.append(pin_memory)
        return made(tensor, **options)

    monkeypatch.setattr(process_group.debug, "empty_like", allocate)
    staged = process_group.ProcessGroupCommunicator._sendable(comm, torch.ones(3), copied=copied)
    assert pinned == [True] and [event.blocking for event in recorded] == [True] * copied
    assert [entry[0] for entry in gpu.log] == ["host waits"] * copied
    assert not copied or staged.tolist() == [1.0] * 3


def test_a_gpu_sleeps_while_the_host_starts_what_is_timed(gpu, monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleeps"))
    monkeypatch.setattr(Event, "record", lambda self: log.append("event"), raising=False)
    seconds_of(lambda: log.append("acts"), torch.device("cuda"))
    assert log == ["sleeps", "event", "acts", "event"]


def test_a_message_between_threads_is_read_after_it_was_made(gpu, monkeypatch):
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: kept.append(stream.name))

    def worker(comm):
        with gpu.use(Stream(gpu.log, f"stream {comm.rank}")):
            return comm.all_gather(torch.full((2,), float(comm.rank))).wait()

    tw.LocalWorld(2).run(worker)
    assert sorted(gpu.log) == [("stream 0", "waits for", "stream 1"), ("stream 1", "waits for", "stream 0")]
    assert sorted(kept) == ["stream 0", "stream 1"]


def test_counters_of_faults_are_zero_before_another_stream_sees_them(gpu, monkeypatch):
    """They are made on the stream of whoever asks first, and there is one tensor, whoever else asks meanwhile."""
    waits, asked = [], threading.Barrier(4)
    gpu.training.synchronize = lambda: waits.append(device not in flags._COUNTERS)
    monkeypatch.setattr(flags, "has_streams", lambda device: True)
    monkeypatch.setattr(flags, "_COUNTERS", {})
    device = torch.device("cpu")

    def ask() -> int:
        asked.wait()
        return id(flags.fault_counters(device))

    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(ask) for _ in range(4)]
        assert len({task.result() for task in found}) == 1
    assert waits == [True]
    counters = flags.fault_counters(device)
    counters[0] = 1
    with pytest.raises(ValueError, match="corrupt"):
        flags.check_faults(device)
    assert len(waits) == 2 and not counters.any()


def test_threads_that_hash_a_tensor_see_the_copy_that_is_contiguous(gpu, monkeypatch):
    """They have streams of their own, and the copy is made on the caller's."""
    contiguous, log = torch.Tensor.contiguous, []
    gpu.training.synchronize = lambda: log.append("host waits")
    monkeypatch.setattr(compare, "has_streams", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: log.append("copies") or contiguous(self))
    monkeypatch.setattr(compare, "hashes", lambda chunks: log.append("hashes") or [b""] * len(chunks))
    compare.digests([torch.arange(6.0).view(2, 3).t()])
    assert log == ["copies", "host waits", "hashes"]


def test_a_basis_of_frequencies_is_kept_for_each_stream_that_reads_it(gpu, monkeypatch):
    """One that is forgotten, because there are many, is memory of the stream that made it."""
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: kept.append((*t.shape, stream.name)))
    codec, x = tw.chain(tw.codec.DCT(4), tw.TopK(0.5)), torch.randn(4, 6)
    for name in ("training", "work"):
        with gpu.use(Stream(gpu.log, name)):
            codec.decode(codec.encode(x), x.shape)
    assert set(kept) == {(n, n, name) for n in (4, 2) for name in ("training", "work")}


def test_one_thread_alone_loads_the_solvers(gpu, monkeypatch):
    """PyTorch raises a RuntimeError where a second thread asks for a decomposition while the first one loads them."""
    qr, inside, together = torch.linalg.qr, [], threading.Barrier(4)
    loading = threading.Event()
    monkeypatch.setattr(streams, "_loaded", set())

    def slow(x):
        if not loading.is_set():
            inside.append(x.shape)
            assert len(inside) == 1
            time.sleep(0.1)
            loading.set()
        return qr(x)

    monkeypatch.setattr(torch.linalg, "qr", slow)

    def ask() -> torch.Tensor:
        together.wait()
        return kernels.low_rank.orthonormal(torch.ones(17, 40))

    with ThreadPoolExecutor(4) as threads:
        bases = [task.result() for task in [threads.submit(ask) for _ in range(4)]]
    assert inside == [(1, 1)]
    assert all(torch.allclose(basis @ basis.T, torch.eye(17), atol=1e-6) for basis in bases)
