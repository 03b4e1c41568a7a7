"""What `compress_gradients` accepts, and what it refuses instead of training wrongly without a word."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import time
import warnings
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from helpers.gradients import fingerprint, make_model, train
from helpers.program import wait_until
from helpers.spawn import spawn
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.swa_utils import AveragedModel

import thinwire as tw
from thinwire.comm import CommunicationError
from thinwire.comm.local_world import LocalCommunicator, Mail
from thinwire.strategy import attached

SPARSE = tw.Mean(tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), tw.ErrorFeedback())


ONE_EACH = (
    "Gradients(Mean())",
    "Gossip(Mix())",
    "Local(Mean(), every=2)",
    "Asynchronous()",
)


def alone(fn):
    return tw.LocalWorld(1).run(fn)[0]


def test_a_parameter_takes_part_in_one_strategy_only():
    def worker(comm):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        handle = tw.compress_gradients(model, SPARSE, comm=comm)
        with pytest.raises(ValueError, match=r"'0\.weight' is attached to Gradients\(Mean\(chain"):
            tw.compress_gradients(model, tw.Mean(), comm=comm)
        with pytest.raises(ValueError, match="'weight' is attached to Gradients"):
            tw.compress_gradients(model[0], SPARSE, comm=comm)
        handle.detach()
        handle.detach()  # again: nothing happens
        with tw.compress_gradients(model[0], SPARSE, comm=comm), pytest.raises(ValueError, match=r"'0\.weight'"):
            tw.compress_gradients(model, SPARSE, comm=comm)
        tw.compress_gradients(model, SPARSE, comm=comm).detach()

    alone(worker)


def test_a_failed_attempt_leaves_nothing_attached():
    def worker(comm):
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="workers disagree"):
            tw.compress_gradients(model, SPARSE, comm=comm, bucket_bytes=100 + comm.rank)
        tw.compress_gradients(model, SPARSE, comm=comm).detach()

    tw.LocalWorld(2).run(worker)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda rank: nn.Linear(2, 2 + rank), r"weight: '\(2, 2\) torch.float32' on rank 0; '\(3, 2\)"),
        (lambda rank: nn.Sequential(*[nn.Linear(2, 2)] * (1 + rank)), None),
        (lambda rank: nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)]), r"1\.weight: \(absent\) on rank 0"),
        (lambda rank: nn.BatchNorm1d(2, dtype=(torch.float32, torch.float64)[rank]), "float64"),
    ],
    ids=["shapes", "tied", "number", "dtypes"],
)
def test_workers_compare_before_they_make_models_equal(build, message):
    def worker(comm):
        model = build(comm.rank)
        if message is None:
            tw.compress_gradients(model, SPARSE, comm=comm).detach()
            return
        with pytest.raises(ValueError, match=f"(?s)workers disagree.*{message}"):
            tw.compress_gradients(model, SPARSE, comm=comm)

    tw.LocalWorld(2).run(worker)


def unfreeze(model):
    model[0].requires_grad_(True)


def add(model):
    model.append(nn.Linear(2, 2))


def replace(model):
    model[1].weight = nn.Parameter(torch.ones(2, 2))


def convert(model):
    model.double()


CHANGES = [(unfreeze, r"'0\.weight' was added"), (add, r"'2\.weight' was added"), (replace, r"'1\.weight' was added")]
CHANGES += [(convert, r"'1\.weight' is \(2, 2\) torch.float64 on cpu now and was \(2, 2\) torch.float32")]


@pytest.mark.parametrize("change, message", CHANGES, ids=[change.__name__ for change, _ in CHANGES])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
def test_parameters_that_change_later_are_an_error(change, message, wrapped):
    spawn(1, changing_worker, change, message, wrapped)


def changing_worker(comm, change, message, wrapped):
    module = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    model = DistributedDataParallel(module) if wrapped else module
    with tw.compress_gradients(model, SPARSE):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        change(module)
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        dtype = module[1].weight.dtype
        if not wrapped or change not in (convert, replace):  # DDP launches no bucket of a parameter that it lost
            with pytest.raises(ValueError, match=message):
                model(torch.ones(1, 2, dtype=dtype)).sum().backward()


def test_an_optimizer_of_other_parameters_is_looked_at_once_and_not_while_another_thread_attaches(monkeypatch):
    def worker(comm):
        looks = []
        with tw.compress_gradients(nn.Linear(2, 2), SPARSE, comm=comm) as handle:
            monkeypatch.setattr(handle, "require_in_place", looks.append)
            other = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            for _ in range(3):
                other(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        return looks == [{id(p) for p in other.parameters()}]

    assert alone(worker)
    found = []
    asking = threading.Thread(target=lambda: found.append(attached.AVERAGED.all()))
    with attached._LOCK:  # as where parameters are entered
        asking.start()
        asking.join(0.2)
        assert found == []
    asking.join()
    assert len(found) == 1


def test_values_that_move_to_new_storage_are_averaged_as_before():
    def worker(comm):
        model = make_model()
        with tw.compress_gradients(model, SPARSE, comm=comm, seed=3):
            for p in model.parameters():
                p.data = p.data.clone()
            train(model, comm.rank)
        return fingerprint(model)

    def untouched(comm):
        model = make_model()
        with tw.compress_gradients(model, SPARSE, comm=comm, seed=3):
            train(model, comm.rank)
        return fingerprint(model)

    assert tw.LocalWorld(2).run(worker) == tw.LocalWorld(2).run(untouched)


class Layouts(nn.Module):
    """A channels-last and a transposed parameter, an expanded and a transposed buffer."""

    def __init__(self, rank):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.empty(3, 4).t())
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        self.register_buffer("expanded", torch.full((1,), float(rank)).expand(5))
        self.register_buffer("transposed", torch.arange(6).view(2, 3).t() + rank)

    def forward(self, x):
        return (self.conv(x).mean((2, 3)) @ self.matrix).sum()


@pytest.mark.parametrize("averager", [SPARSE, tw.Mean(), tw.PowerSGD(rank=1), tw.dgc(ratio=0.1)], ids=repr)
def test_any_memory_layout_trains_like_the_contiguous_one(averager):
    def worker(comm, contiguous):
        model = Layouts(comm.rank)
        if contiguous:
            model = model.to(memory_format=torch.contiguous_format)
            model.matrix = nn.Parameter(model.matrix.detach().contiguous())
        with tw.compress_gradients(model, averager, comm=comm) as handle:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            generator = torch.Generator().manual_seed(comm.rank)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(2, 3, 5, 5, generator=generator)).backward()
                optimizer.step()
            with handle.average_model():
                pass
        assert model.expanded.tolist() == [0.0] * 5 and model.transposed[0, 0] == 0
        return [p.detach().contiguous() for p in model.parameters()]

    results = [run for contiguous in (False, True) for run in tw.LocalWorld(2).run(worker, contiguous)]
    for name, *values in zip([n for n, _ in Layouts(0).named_parameters()], *results, strict=True):
        assert all(torch.equal(values[0], v) for v in values[:2]), name
        assert all(torch.allclose(values[0], v, rtol=1e-5, atol=1e-6) for v in values), (
            name
        )  # convolutions add otherwise


def test_complex_parameters_are_averaged_as_pairs_of_reals():
    def worker(comm):
        w = nn.ParameterDict({"w": torch.zeros(2, 3, dtype=torch.complex64)})
        with tw.compress_gradients(w, tw.Mean(), comm=comm):
            (w["w"] * (1 + 2j * comm.rank)).sum().real.backward()
            return w["w"].grad

    assert all(torch.equal(g, torch.full((2, 3), 1 - 1j, dtype=torch.complex64)) for g in tw.LocalWorld(2).run(worker))


def test_conjugate_gradients_are_averaged():
    """Autograd leaves the gradient of `w.conj()` as a conjugate view."""

    def worker(comm):
        w = nn.ParameterDict({"w": torch.zeros(2, 3, dtype=torch.complex64)})
        with tw.compress_gradients(w, tw.Mean(), comm=comm):
            w["w"].conj().backward(torch.full((2, 3), 1 + 2j * comm.rank))
            return w["w"].grad

    assert all(torch.equal(g, torch.full((2, 3), 1 - 1j, dtype=torch.complex64)) for g in tw.LocalWorld(2).run(worker))


@pytest.mark.parametrize("strategy", [tw.Gradients(tw.Mean()), tw.Local(tw.Mean(), every=1)])
def test_negative_gradients_are_averaged(strategy):
    """Autograd leaves the gradient of the imaginary part of `z.conj()` as a negative view, where it has one element."""

    def worker(comm):
        z = nn.ParameterDict({"real": torch.zeros(1), "imaginary": torch.zeros(1)})
        optimizer = torch.optim.SGD(z.parameters(), lr=1.0)
        with tw.attach(z, optimizer, strategy, comm=comm):
            torch.complex(z["real"], z["imaginary"]).conj().backward(torch.tensor([2 + 4j * comm.rank]))
            optimizer.step()
        return z["real"].item(), z["imaginary"].item()

    assert tw.LocalWorld(2).run(worker) == [(-2.0, 2.0)] * 2


@pytest.mark.parametrize(
    "attach",
    [
        lambda model, optimizer, comm: tw.compress_gradients(model, tw.Mean(), comm=comm),
        lambda model, optimizer, comm: tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm),
        lambda model, optimizer, comm: tw.local_updates(model, optimizer, tw.Mean(), 2, comm=comm),
    ],
)
def test_conjugate_views_as_parameters_are_refused_by_name(attach):
    def worker(comm):
        model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 3, dtype=torch.complex64).conj())})
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)

    with pytest.raises(ValueError, match="'w' is a conjugate view"):
        tw.LocalWorld(1).run(worker)


def test_models_that_cannot_train_are_refused_by_name():
    def worker(comm):
        with pytest.raises(ValueError, match="'weight' is on the meta device.*to_empty"):
            tw.compress_gradients(nn.Linear(2, 2, device="meta"), SPARSE, comm=comm)
        with pytest.raises(ValueError, match="'weight' has no shape yet"):
            tw.compress_gradients(nn.LazyLinear(2), SPARSE, comm=comm)
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(torch.ones(1, 2).expand(2, 2))
        with pytest.raises(ValueError, match=r"elements of parameter 'weight', shape \(2, 2\).*share memory"):
            tw.compress_gradients(model, SPARSE, comm=comm)
        model = nn.Linear(2, 2)
        model.register_buffer("graph", torch.eye(2).to_sparse())
        with pytest.raises(ValueError, match=r"'graph' is sparse \(torch.sparse_coo\).*plain attribute"):
            tw.compress_gradients(model, SPARSE, comm=comm)

    alone(worker)


def test_a_model_on_two_devices_is_refused_by_name():
    def worker(comm):
        with FakeTensorMode():  # has tensors of devices that the machine lacks
            model = nn.ParameterDict(
                {f"on_{kind}": nn.Parameter(torch.empty(2, device=kind)) for kind in ("cpu", "cuda")}
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for attach in (
            lambda: tw.compress_gradients(model, SPARSE, comm=comm),
            lambda: tw.local_updates(model, optimizer, tw.Mean(), 2, comm=comm),
        ):
            with pytest.raises(ValueError, match=r"'on_cpu' is on cpu and 'on_cuda' on cuda:0; put them on one device"):
                attach()

    alone(worker)


def part_in_ddp_worker(comm):
    part = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="part '0' of the model is wrapped in DistributedDataParallel"):
        tw.compress_gradients(part, SPARSE)


def test_parts_in_ddp_are_refused():
    spawn(2, part_in_ddp_worker)


def sparse_worker(comm):
    embedding = DistributedDataParallel(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)))
    with (
        tw.compress_gradients(embedding, SPARSE),
        pytest.raises(ValueError, match=r"gradient of '0\.weight' is sparse"),
    ):
        embedding(torch.tensor([1])).sum().backward()


def test_a_sparse_embedding_under_ddp_is_named():
    spawn(1, sparse_worker)


def ddp_bucket_bytes_worker(comm):
    with pytest.raises(ValueError, match="bucket_bytes=17 is for plain modules.*bucket_cap_mb"):
        tw.compress_gradients(DistributedDataParallel(nn.Linear(2, 2)), SPARSE, bucket_bytes=17)


def test_the_size_of_ddps_buckets_is_ddps():
    spawn(1, ddp_bucket_bytes_worker)


def attached_again_worker(comm):
    def gradient(ddp, averager):
        ddp.zero_grad()
        with tw.compress_gradients(ddp, averager) as handle:
            ddp(torch.full((1, 2), float(comm.rank))).sum().backward()
            assert handle.ledger.dense_numel == 6
        return [p.grad.clone() for p in ddp.parameters()]

    ddp = DistributedDataParallel(nn.Linear(2, 2))
    gradient(ddp, SPARSE)
    again, new = gradient(ddp, tw.Mean()), gradient(DistributedDataParallel(ddp.module), tw.Mean())
    assert all(torch.equal(p, q) for p, q in zip(again, new, strict=True))
    assert again[0].tolist() == [[0.5, 0.5]] * 2
    with tw.compress_gradients(ddp, SPARSE), pytest.raises(ValueError, match="takes part in"):
        tw.compress_gradients(ddp, SPARSE)
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, fp16_compress_hook)
    mixed = DistributedDataParallel(nn.Linear(2, 2), mixed_precision=_MixedPrecision(torch.bfloat16))
    for one in (hooked, mixed):
        with pytest.raises(
            ValueError, match="has a communication hook already, yours or that of its mixed_precision; wrap"
        ):
            tw.compress_gradients(one, SPARSE)


def test_a_ddp_takes_another_strategy_after_one_was_detached_but_no_hook_beside_ones_own():
    spawn(2, attached_again_worker)


def copied_worker(comm):
    def step(ddp):
        ddp.zero_grad()
        ddp(torch.full((1, 2), float(comm.rank))).sum().backward()
        return next(ddp.parameters()).grad.tolist()

    model = nn.Linear(2, 2)
    attached, hooked = DistributedDataParallel(nn.Linear(2, 2)), DistributedDataParallel(model)
    handle = tw.compress_gradients(attached, tw.Mean())
    state, hook = tw.strategy.gradient_hook(model, tw.Mean())
    hooked.register_comm_hook(state, hook)
    for ddp, strategy in ((attached, handle), (hooked, state)):
        mean = step(ddp)
        sent = strategy.ledger.bytes_sent
        for one in (AveragedModel(ddp), copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
            assert step(one) == mean == [[0.5, 0.5]] * 2 and strategy.ledger.bytes_sent == sent
        strategy.detach()
    with tw.compress_gradients(copy.deepcopy(attached), tw.Mean()):
        pass


def test_a_copy_of_an_attached_ddp_is_a_plain_ddp():
    spawn(2, copied_worker)


def dropped_worker(comm):
    def train_once(is_detached):
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        handle = tw.compress_gradients(ddp, SPARSE)
        with handle.no_sync():
            ddp(torch.ones(1, 2)).sum().backward()
        if is_detached:
            handle.detach()
        return [weakref.ref(dropped) for dropped in (ddp, ddp.module, handle)]

    dropped = [*train_once(True), *train_once(False)]
    gc.collect()
    assert [reference() for reference in dropped] == [None] * 6


def test_a_ddp_that_nobody_uses_is_garbage_with_its_strategy():
    spawn(1, dropped_worker)


def test_a_plain_model_that_nobody_uses_is_garbage_with_its_strategy():
    def worker(comm):
        model, kept = nn.Linear(2, 2), nn.Linear(2, 2)
        tw.compress_gradients(nn.ModuleList([kept]), tw.Mean(), comm=comm)
        handle = tw.compress_gradients(model, SPARSE, comm=comm)
        model(torch.ones(1, 2)).sum().backward()
        dropped, bias = [weakref.ref(one) for one in (model, handle)], model.bias
        del model, handle
        # The thread that has finished the backward pass may hold it for a moment.
        wait_until(lambda: gc.collect() >= 0 and [one() for one in dropped] == [None, None], "garbage", seconds=30)
        with pytest.raises(ValueError, match="neither the strategy nor the first parameter"):
            bias.sum().backward()
        kept(torch.full((1, 2), float(comm.rank))).sum().backward()  # nobody has the handle or the list
        return kept.weight.grad.tolist()

    assert tw.LocalWorld(2).run(worker) == [[[0.5, 0.5]] * 2] * 2


def again(kind: str, fails: bool) -> None:
    """Two worlds train the same models, as a cell of a notebook that runs again; the first leaves its strategy attached."""
    models = [nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def worker(comm, steps: int):
        model, optimizer = models[comm.rank], optimizers[comm.rank]
        handle = tw.attach(model, optimizer, kind, comm=comm)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.full((1, 2), float(comm.rank))).sum().backward()
            optimizer.step()
        if steps == 3 and fails:
            raise KeyboardInterrupt
        comm.barrier()  # a worker whose peer has hung up cannot step
        if steps == 4:
            handle.detach()
        return handle.ledger.bytes_sent

    first = contextlib.suppress(KeyboardInterrupt, CommunicationError) if fails else contextlib.nullcontext()
    with first:
        tw.LocalWorld(2).run(worker, 3)
    assert min(tw.LocalWorld(2).run(worker, 4)) > 0


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", [*ONE_EACH, "Local(Mean(), every=2, delay=1)", "Gossip(PushSum(), overlap=True)"])
def test_a_strategy_whose_communicator_was_closed_gives_way_to_another(kind, fails):
    again(kind, fails)


def test_an_attached_model_is_sent_to_another_process_without_a_warning():
    def worker(comm):
        model = nn.Linear(2, 2)
        with tw.compress_gradients(model, tw.Mean(), comm=comm):
            ForkingPickler.dumps(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone(worker)


def hook_worker(comm):
    model = nn.Linear(2, 2)
    state, _ = tw.strategy.gradient_hook(model, SPARSE)
    with pytest.raises(ValueError, match="not connected yet"):
        _ = state.ledger
    with pytest.warns(RuntimeWarning, match="never got a bucket"):
        state.detach()
    state, hook = tw.strategy.gradient_hook(model, SPARSE)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, hook)
    ddp(torch.ones(1, 2)).sum().backward()
    assert isinstance(state, tw.strategy.GradientCompression) and state.ledger.dense_numel == 6
    state.detach()


def test_a_hook_without_a_bucket_warns_and_its_state_has_a_ledger():
    spawn(1, hook_worker)


# ---- an error of one worker alone ----


def one_has_no_values(comm, strategy: str, own: bool) -> str:
    model = nn.Linear(2, 2, device="meta" if comm.rank else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError) as found:
        tw.attach(model, optimizer, strategy, comm=None if own else comm)
    if not own:  # it is as good as before
        assert comm.all_reduce(torch.ones(1)).wait() == comm.size
    return str(found.value)


@pytest.mark.parametrize("strategy", ONE_EACH)
@pytest.mark.parametrize("own", [True, False])
def test_an_error_of_one_worker_is_told_to_the_others(strategy, own):
    """Whether they are connected already or about to be."""
    first, second = spawn(2, one_has_no_values, strategy, own)
    name = strategy.partition("(")[0]
    assert second.startswith(f"{name}: 'weight' is on the meta device")
    assert first == f"rank 1 failed: {second}"


def one_does_not_know_a_name(comm, own: bool) -> str:
    model = nn.Linear(2, 2)
    codec = "Unregistered" if comm.rank else "Cast"
    with pytest.raises(ValueError) as found:
        tw.attach(model, None, f"Gradients(Mean({codec}()))", comm=None if own else comm)
    return str(found.value)


@pytest.mark.parametrize("own", [True, False])
def test_a_name_that_one_worker_does_not_know_is_told_to_the_others(own):
    """They waited for it until the time limit of their process group."""
    first, second = spawn(2, one_does_not_know_a_name, own)
    assert second.startswith("unknown name 'Unregistered'") and first == f"rank 1 failed: {second}"


@pytest.mark.parametrize("strategy", ONE_EACH)
def test_a_missing_process_group_is_said(strategy):
    """`Asynchronous` said that it was not connected yet."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"Call dist\.init_process_group\(\) first"):
        tw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)


def one_attaches_twice(comm) -> str:
    model = nn.Linear(2, 2)
    if comm.rank:
        comm.kept = tw.compress_gradients(model, tw.Mean(), comm=LocalCommunicator(0, 1, Mail(1.0)))
    with pytest.raises(ValueError) as found:
        tw.compress_gradients(model, tw.Mean(), comm=comm)
    return str(found.value)


def test_a_parameter_that_one_worker_has_attached_before_is_told_to_the_others():
    first, second = tw.LocalWorld(2, timeout_seconds=60).run(one_attaches_twice)
    assert "'weight' is attached to Gradients(Mean()) already" in second and first == f"rank 1 failed: {second}"


def one_in_ddp_has_an_option_of_plain_modules(comm) -> str:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError) as found:
        tw.compress_gradients(ddp, tw.Mean(), bucket_bytes=1000 if comm.rank else None)
    return str(found.value)


def test_an_error_of_one_worker_in_ddp_is_told_to_the_others():
    first, second = spawn(2, one_in_ddp_has_an_option_of_plain_modules)
    assert second.startswith("Gradients: bucket_bytes=1000 is for plain") and first == f"rank 1 failed: {second}"


def one_measures(comm) -> None:
    with pytest.raises(ValueError, match="has layout: False on rank 0; True on rank 1"):
        tw.attach(nn.Linear(2, 2), None, tw.Gradients(tw.Mean()), layout="measured" if comm.rank else None)


def test_a_layout_of_one_worker_alone_is_told():
    spawn(2, one_measures)


def fails_to_detach(comm) -> float:
    """Seconds until rank 1 hears of it, in its next step."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tw.attach(model, optimizer, "Local(Mean(), every=1)")
    with handle.average_model(comm):
        if comm.rank == 0:
            with pytest.raises(ValueError, match="inside average_model"):
                handle.detach()
        comm.barrier()
    began = time.monotonic()
    if comm.rank:
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(tw.comm.CommunicationError):
            optimizer.step()
    seconds = time.monotonic() - began
    comm.barrier()  # rank 0 lives on
    return seconds


def test_other_workers_learn_at_once_that_one_has_failed_to_detach():
    assert spawn(2, fails_to_detach)[1] < 30  # half of the time limit
