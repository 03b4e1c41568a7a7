"""What gossip, asynchronous gossip and local updates share: live parameters, layouts, dtypes, own gradients, state."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import thinwire as tw

ATTACH = {
    "gossip": lambda model, optimizer, comm, **o: tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm, **o),
    "overlap": lambda model, optimizer, comm, **o: tw.gossip_parameters(
        model, optimizer, tw.Mix(), comm=comm, overlap=True, **o
    ),
    "asynchronous": lambda model, optimizer, comm, **o: tw.gossip_asynchronously(model, optimizer, comm=comm, **o),
    "local": lambda model, optimizer, comm, **o: tw.local_updates(model, optimizer, tw.Mean(), 1, comm=comm, **o),
    "local-gossip": lambda model, optimizer, comm, **o: tw.local_updates(model, optimizer, tw.Mix(), 1, comm=comm, **o),
}
CALLS = dict(zip(ATTACH, ["Gossip"] * 2 + ["Asynchronous"] + ["Local"] * 2, strict=True))
every_strategy = pytest.mark.parametrize("kind", ATTACH)


class Small(nn.Module):
    def __init__(self, rank=0, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.matrix = nn.Parameter(torch.randn(3, 4, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(4, generator=generator).to(dtype))


def sgd(model, lr=1.0):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def step(model, optimizer, value=0.0):
    for p in model.parameters():
        p.grad = torch.full_like(p, value) if p.requires_grad else None
    optimizer.step()


def run(size, worker):
    return tw.LocalWorld(size, timeout_seconds=60).run(worker)


def settle(handle, model, optimizer):
    """Average until workers agree, without updates: rounds, or pairs as often as it takes."""
    for _ in range(12):
        step(model, optimizer)
        if isinstance(handle, tw.strategy.AsynchronousGossip):
            handle.synchronize()
    handle.synchronize()


# ---- storage, dtypes and parameters that change after attaching ----

REPLACE = {
    "data": lambda model, rank: setattr(model.matrix, "data", torch.full((3, 4), float(rank))),
    "vector_to_parameters": lambda model, rank: nn.utils.vector_to_parameters(
        torch.full((16,), float(rank)), model.parameters()
    ),
    "swap_tensors": lambda model, rank: torch.utils.swap_tensors(
        model.matrix, nn.Parameter(torch.full((3, 4), float(rank)))
    ),
}


@pytest.mark.parametrize("how", REPLACE)
@pytest.mark.parametrize("kind", ["gossip", "overlap", "asynchronous"])
def test_replaced_storage_is_mixed_and_measured(kind, how):
    def worker(comm):
        model = Small()
        optimizer = sgd(model)
        handle = ATTACH[kind](model, optimizer, comm)
        step(model, optimizer)
        handle.synchronize()
        REPLACE[how](model, comm.rank)
        apart = handle.consensus_distance()
        settle(handle, model, optimizer)
        together = handle.consensus_distance()
        handle.detach()
        return apart, together, model.matrix.detach().clone()

    for apart, together, matrix in run(2, worker):
        assert apart > 1.0
        assert together < 1e-3
        assert torch.allclose(matrix, torch.full((3, 4), 0.5), atol=1e-3)


@every_strategy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_converted_model_is_an_error_that_names_the_parameter(kind, dtype):
    def worker(comm):
        model = Small()
        optimizer = sgd(model)
        handle = ATTACH[kind](model, optimizer, comm)
        model.to(dtype)
        message = rf"{CALLS[kind]}: rank \d: parameter 'matrix' was \(3, 4\) torch.float32 .* is now \(3, 4\) {dtype}"
        with pytest.raises(ValueError, match=message):
            step(model, optimizer)
        handle.detach()  # the remedy
        ATTACH[kind](model, optimizer, comm).detach()

    run(2, worker)


def unfreeze(model, optimizer):
    model.vector.requires_grad_(True)
    optimizer.add_param_group({"params": [model.vector]})


def add(model, optimizer):
    model.extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [model.extra]})


def replace(model, optimizer):
    model.matrix = nn.Parameter(torch.ones(3, 4))


@every_strategy
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unfreeze, "parameter 'vector' is trained since later"),
        (add, "parameter 'extra' is trained since later"),
        (replace, "parameter 'matrix' was replaced or removed"),
    ],
)
def test_parameters_that_come_later_are_an_error(kind, change, message):
    def worker(comm):
        model = Small()
        model.vector.requires_grad_(False)
        optimizer = sgd(model)
        handle = ATTACH[kind](model, optimizer, comm)
        step(model, optimizer)
        change(model, optimizer)
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        handle.detach()

    run(2, worker)


@pytest.mark.parametrize("kind", ["gossip", "asynchronous"])
def test_another_optimizer_over_the_parameters_is_an_error(kind):
    def worker(comm):
        model = Small()
        handle = ATTACH[kind](model, sgd(model), comm)
        with pytest.raises(ValueError, match="another SGD steps on parameters"):
            step(model, sgd(model))
        handle.detach()

    run(2, worker)


# ---- layouts and dtypes ----


class Layouts(nn.Module):
    """Parameters and buffers that are not contiguous or have no dimensions, and a buffer whose elements share memory."""

    def __init__(self, rank):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        images = torch.randn(2, 3, 4, 4, generator=generator)
        self.convolution = nn.Parameter(images.to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(torch.randn(5, 3, generator=generator).t())
        self.scale = nn.Parameter(torch.randn((), generator=generator))
        self.register_buffer("slices", torch.randn(4, 6, generator=generator)[:, ::2])
        self.register_buffer("expanded", torch.randn(1, generator=generator).expand(4))


@pytest.mark.parametrize("kind", [*ATTACH, "mean"])
def test_tensors_need_not_be_contiguous(kind):
    def worker(comm):
        model = Layouts(comm.rank)
        optimizer = sgd(model)
        attach = ATTACH.get(kind, lambda m, o, c: tw.gossip_parameters(m, o, tw.Mean(), comm=c))
        handle = attach(model, optimizer, comm)
        start = {name: t.clone() for name, t in model.state_dict().items()}
        step(model, optimizer, float(comm.rank))
        settle(handle, model, optimizer)
        if hasattr(handle, "average_model"):
            with handle.average_model():
                assert torch.allclose(model.expanded, start["expanded"])
        handle.detach()
        strides = [
            model.convolution.is_contiguous(memory_format=torch.channels_last),
            model.transposed.stride() == (1, 3),
        ]
        return start, {name: t.clone() for name, t in model.state_dict().items()}, all(strides)

    results = run(2, worker)
    for start, end, kept in results:
        assert kept
        for name, t in Layouts(0).state_dict().items():
            assert torch.equal(start[name], t), name
        for name in ("convolution", "transposed", "scale"):
            assert torch.allclose(end[name], start[name] - 0.5, atol=1e-3)


@every_strategy
def test_a_parameter_whose_elements_share_memory_is_refused_by_name(kind):
    def worker(comm):
        model = Small()
        model.wide = nn.Parameter(torch.ones(1, 4).expand(3, 4))
        with pytest.raises(ValueError, match=rf"{CALLS[kind]}: elements of parameter 'wide', .* share memory"):
            ATTACH[kind](model, sgd(model), comm)

    run(1, worker)


def test_gossip_refuses_parameters_that_share_memory_by_name():
    def worker(comm):
        model, memory = Small(), torch.ones(8)
        model.first, model.second = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])  # parts of one tensor are apart
        model.tied = nn.Parameter(torch.ones(3, 4))
        tw.gossip_parameters(model, sgd(model), tw.Mix(), comm=comm).detach()
        model.tied.data = model.matrix.data
        with pytest.raises(ValueError, match="Gossip: parameters 'matrix' and 'tied' share memory"):
            tw.gossip_parameters(model, sgd(model), tw.Mix(), comm=comm)
        for strategy in ("Local(Mean(), every=1)", "Asynchronous()"):  # which average copies
            optimizer = sgd(model)
            with tw.attach(model, optimizer, strategy, comm=comm) as handle:
                start = model.matrix.detach().clone()
                for gradient in (float(comm.rank), 0.0):
                    step(model, optimizer, gradient)
                handle.synchronize()
                assert torch.allclose(model.matrix, start - 1.0)  # the optimizer itself moves the memory twice

    run(2, worker)


EXACT = {
    "mix": lambda m, o, c: tw.gossip_parameters(m, o, tw.Mix(), comm=c),
    "mix-overlap": lambda m, o, c: tw.gossip_parameters(m, o, tw.Mix(), comm=c, overlap=True),
    "hierarchical": lambda m, o, c: tw.gossip_parameters(
        m, o, tw.PushSum(tw.topology.Hierarchical(tw.Ring(), workers_per_node=2)), comm=c
    ),
    "push-sum": lambda m, o, c: tw.gossip_parameters(m, o, tw.PushSum(tw.Exponential()), comm=c),
    "pairwise": lambda m, o, c: tw.gossip_asynchronously(m, o, comm=c),
}


@pytest.mark.parametrize("attach", EXACT.values(), ids=EXACT)
def test_float64_parameters_are_averaged_in_float64(attach):
    """The values differ from 1 by less than float32 can tell; their mean too."""

    def worker(comm):
        model = Small(dtype=torch.float64)
        optimizer = sgd(model)
        handle = attach(model, optimizer, comm)
        step(model, optimizer)
        handle.synchronize()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0 + comm.rank * 1e-12)
        settle(handle, model, optimizer)
        handle.detach()
        return model.matrix.detach() - 1.0

    for difference in run(2, worker):
        assert torch.allclose(difference, torch.full((3, 4), 0.5e-12, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("averager", [tw.Choco(step_size=0.5), tw.PowerGossip(), tw.Moniqua()], ids=repr)
def test_codecs_leave_float64_parameters_their_digits(averager):
    def worker(comm):
        model = Small(dtype=torch.float64)
        with torch.no_grad():
            model.matrix.fill_(1.0 + 1e-12)
        optimizer = sgd(model)
        handle = tw.gossip_parameters(model, optimizer, averager, comm=comm)
        for _ in range(3):
            step(model, optimizer)
        handle.detach()
        return model.matrix.detach() - 1.0

    for difference in run(2, worker):
        assert torch.allclose(difference, torch.full((3, 4), 1e-12, dtype=torch.float64), rtol=0, atol=1e-14)


def test_mean_refuses_to_round_float64_parameters():
    def worker(comm):
        model = Small(dtype=torch.float64)
        with pytest.raises(ValueError, match=r"Mean\(\) sends float32, and would round parameter 'matrix'"):
            tw.gossip_parameters(model, sgd(model), tw.Mean(), comm=comm)

    run(1, worker)


@every_strategy
def test_complex_parameters_keep_their_imaginary_part(kind):
    def worker(comm):
        model = nn.Module()
        model.phase = nn.Parameter(torch.full((3,), 1.0 + 2.0j))
        model.register_buffer("seen", torch.full((2,), complex(comm.rank, 1.0)))
        optimizer = sgd(model)
        handle = ATTACH[kind](model, optimizer, comm)
        assert torch.equal(model.seen, torch.full((2,), 1.0j))
        model.phase.grad = torch.full((3,), complex(0.0, 2.0 * comm.rank))
        optimizer.step()
        settle(handle, model, optimizer)
        handle.detach()
        return model.phase.detach()

    for phase in run(2, worker):
        assert torch.allclose(phase, torch.full((3,), 1.0 + 1.0j), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "averager",
    [tw.Mix(), tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback()), tw.PowerSGD(), tw.average.Dion()],
    ids=repr,
)
def test_an_averager_refuses_tensors_that_are_no_real_floats_by_name(averager, dtype):
    with pytest.raises(ValueError, match=f"tensor 'z' is {dtype}, and averagers take real floats"):
        run(2, lambda comm: averager.init([("z", torch.ones(2).to(dtype))], comm))


# ---- workers that differ, and models that do not suit ----


@every_strategy
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.register_parameter("extra", nn.Parameter(torch.ones(2))), "extra: .* on rank 1"),
        (lambda model: setattr(model, "matrix", nn.Parameter(torch.ones(5, 4))), r"matrix: .*\(5, 4\).* on rank 1"),
        (lambda model: model.register_buffer("count", torch.ones(3)), "count: .* on rank 1"),
        (lambda model: model.vector.requires_grad_(False), r"parameters: .* on rank 1"),
    ],
    ids=["number", "shape", "buffer", "frozen"],
)
def test_models_that_differ_are_an_error_on_all_workers(kind, change, message):
    def worker(comm):
        model = Small()
        if comm.rank == 1:
            change(model)
        with pytest.raises(ValueError, match=message):
            ATTACH[kind](model, sgd(model), comm)
        return True

    assert run(4, worker) == [True] * 4


@every_strategy
def test_a_part_in_ddp_is_refused(kind, tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
        with pytest.raises(ValueError, match=f"{CALLS[kind]}: part '0' of the model is wrapped in Distributed"):
            run(1, lambda comm: ATTACH[kind](model, sgd(model), comm))
        for strategy in ("Gossip(Mix())", "Local(Mean(), every=2)", "Gradients(Mean())"):
            with pytest.raises(
                ValueError, match="and a model in DistributedDataParallel, which has workers of its own"
            ):
                tw.attach(model[0], sgd(model), strategy, replicas=torch.distributed.group.WORLD)
        static = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
        with pytest.raises(ValueError, match=f"{CALLS[kind]}: DistributedDataParallel with static_graph fails in"):
            run(1, lambda comm: ATTACH[kind](static, sgd(static), comm))
    finally:
        torch.distributed.destroy_process_group()


# ---- gradients that are not finite ----


def train_with_one_bad_batch(comm, kind, zero, closure=False, **options):
    """Rank 1's third batch is NaN, or with `zero` it has no gradient."""
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ATTACH[kind](model, optimizer, comm, **options)
    for number in range(6):
        is_bad = comm.rank == 1 and number == 2

        def gradients(number=number, is_bad=is_bad):
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0 + comm.rank + number)
            if is_bad:
                model.vector.grad[0] = float("nan")
            if is_bad and zero:
                optimizer.zero_grad()
            return torch.ones(())

        if closure:
            optimizer.step(gradients)
        else:
            gradients()
            optimizer.step()
    handle.synchronize()
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    skipped = handle.num_skipped
    handle.detach()
    return values, skipped


@pytest.mark.filterwarnings("ignore:.*not finite")
@every_strategy
@pytest.mark.parametrize("closure", [False, True])
def test_one_nan_batch_is_a_zero_update_of_its_worker(kind, closure):
    results = run(4, lambda comm: train_with_one_bad_batch(comm, kind, False, closure))
    zero = run(4, lambda comm: train_with_one_bad_batch(comm, kind, True, closure))
    assert [skipped for _, skipped in results] == [0, 1, 0, 0]
    assert all(torch.isfinite(values).all() for values, _ in results)
    if kind == "asynchronous":  # no two runs are the same; the mean over workers is
        means = [torch.stack([values for values, _ in r]).double().mean(0) for r in (results, zero)]
        assert torch.allclose(*means, rtol=0, atol=1e-4)
    else:
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(results, zero, strict=True))


@every_strategy
def test_the_first_skipped_step_warns_and_many_in_a_row_are_an_error(kind):
    def worker(comm):
        model = Small()
        optimizer = sgd(model)
        handle = ATTACH[kind](model, optimizer, comm, max_nonfinite=3)
        for _ in range(2):
            step(model, optimizer, float("inf"))
        assert handle.num_skipped == 2
        with pytest.raises(
            FloatingPointError, match=r"3 steps in a row were not finite; first on rank 0, parameter 'matrix'"
        ):
            step(model, optimizer, float("inf"))
        handle.detach()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(1, worker)
    assert [str(w.message)[: len(CALLS[kind])] for w in caught] == [CALLS[kind]]


@every_strategy
@pytest.mark.parametrize("policy", ["raise", "apply"])
def test_other_policies(kind, policy):
    def worker(comm):
        model = Small()
        optimizer = sgd(model)
        handle = ATTACH[kind](model, optimizer, comm, on_nonfinite=policy)
        before = model.vector.detach().clone()
        if policy == "raise":
            with pytest.raises(FloatingPointError, match="a step was not finite; first on rank 0, parameter 'matrix'"):
                step(model, optimizer, float("nan"))
            assert torch.equal(model.vector, before)
        else:
            model.matrix.grad = torch.full((3, 4), float("nan"))
            optimizer.step()
            assert "local" in kind or not torch.isfinite(model.matrix).any()
        handle.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # local updates give up the changes of the period, and say so
        run(1, worker)


# ---- state, attachment and threads ----


@every_strategy
def test_state_is_its_workers_own(kind):
    def worker(comm):
        model = Small()
        optimizer = sgd(model)
        handle = ATTACH[kind](model, optimizer, comm)
        step(model, optimizer)
        handle.synchronize()
        states = comm.gather_objects(list(handle.state_dict()))
        saved = handle.state_dict()
        handle.load_state_dict(saved)
        theirs = {f"rank{1 - comm.rank}": {**saved[f"rank{comm.rank}"]}}
        theirs[f"rank{1 - comm.rank}"]["identity"] = {
            **theirs[f"rank{1 - comm.rank}"]["identity"],
            "rank": 1 - comm.rank,
        }
        with pytest.raises(
            ValueError, match=rf"rank {comm.rank} of 2 cannot load the state of rank {1 - comm.rank} of 2"
        ):
            handle.load_state_dict(theirs)
        more = {f"rank{comm.rank}": {**saved[f"rank{comm.rank}"]}}
        more[f"rank{comm.rank}"]["identity"] = {**more[f"rank{comm.rank}"]["identity"], "world_size": 4}
        with pytest.raises(ValueError, match="of 4; another number of workers needs the states of all 4"):
            handle.load_state_dict(more)
        handle.detach()
        return states

    assert run(2, worker)[0] == [["rank0"], ["rank1"]]


@every_strategy
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), AveragedModel])
def test_a_copy_of_a_model_that_keeps_its_strategy_takes_no_part(kind, copied):
    def worker(comm):
        model = Small()
        with ATTACH[kind](model, sgd(model), comm) as model.handle:
            own = copied(model)
            assert all(map(torch.equal, own.parameters(), model.parameters()))
            step(own, sgd(own))
            assert comm.ledger.num_steps == 0

    run(2, worker)


@every_strategy
def test_attaching_twice_is_an_error(kind):
    def worker(comm):
        model = Small()
        optimizer = sgd(model)
        with ATTACH[kind](model, optimizer, comm):
            other = "gossip" if kind == "local" else "local"
            with pytest.raises(ValueError, match=f"'matrix' is attached to {CALLS[kind]}"):
                ATTACH[other](model, optimizer, comm)
        ATTACH[kind](model, optimizer, comm).detach()

    run(2, worker)


def own_threads():
    return [thread.name for thread in threading.enumerate() if thread.name in ("thinwire-pairwise", "thinwire-round")]


@pytest.mark.parametrize("kind", ["overlap", "asynchronous"])
def test_an_error_in_training_leaves_no_thread_behind(kind):
    """Nobody detaches: the script drops model, optimizer and handle."""

    def worker(comm):
        model = Small()
        optimizer = sgd(model)
        handle = ATTACH[kind](model, optimizer, comm)
        step(model, optimizer)
        assert handle.num_skipped == 0
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run(2, worker)
    deadline = time.monotonic() + 400
    while own_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert own_threads() == []


def test_an_asynchronous_strategy_that_is_dropped_ends_its_thread():
    def worker(comm):
        model = Small()
        optimizer = sgd(model)
        handle = tw.gossip_asynchronously(model, optimizer, comm=comm)
        step(model, optimizer)
        comm.barrier()  # a worker whose peer has hung up cannot step
        thread = handle._exchange._thread
        del handle, optimizer, model
        gc.collect()
        thread.join(50)
        comm.barrier()
        return thread.is_alive()

    assert run(2, worker) == [False, False]


@every_strategy
def test_inside_the_mean_nothing_is_saved_loaded_or_detached(kind):
    """A state beside the mean as the model would not be this worker's."""

    def worker(comm):
        model = Small()
        optimizer = sgd(model)
        handle = ATTACH[kind](model, optimizer, comm)
        saved = handle.state_dict()
        with handle.average_model():
            for what, call in {
                "state_dict": handle.state_dict,
                "load_state_dict": lambda: handle.load_state_dict(saved),
            }.items():
                with pytest.raises(ValueError, match=rf"{CALLS[kind]}: {what}\(\) inside average_model\(\) needs"):
                    call()
        handle.load_state_dict(handle.state_dict())
        with handle.average_model(), pytest.raises(ValueError, match=r"\(\) inside average_model\(\) needs"):
            handle.detach()

    run(2, worker)


@pytest.mark.parametrize("kind", ["gossip", "overlap", "asynchronous"])
def test_another_optimizer_whose_parameters_nothing_averages_is_warned_of_once(kind):
    def worker(comm):
        model = Small()
        first, second = (torch.optim.SGD([p], lr=1.0) for p in (model.matrix, model.vector))
        handles = [ATTACH[kind](model, first, comm)]
        comm.barrier()
        for _ in range(2):
            step(model, first)
            step(model, second)
        handles.append(ATTACH[kind](model, second, comm))
        step(model, first)
        step(model, second)
        for handle in handles:
            handle.detach()
        step(model, second)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(2, worker)
    (said,) = (str(one.message) for one in caught)
    assert said.startswith(f"{CALLS[kind]}: another SGD steps on parameters that nothing averages, such as 'vector'")
