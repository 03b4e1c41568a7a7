"""The table of docs/works-with.md, row by row: what works leaves equal replicas, and what does not is refused by one line."""

from __future__ import annotations

import copy
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.gradients import fingerprint
from helpers.spawn import spawn
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import thinwire as tw

PAGE = Path(__file__).parents[2] / "docs" / "works-with.md"
BITS = tw.Mean(tw.QSGD(bits=8))


def data(comm, num=6):
    generator = torch.Generator().manual_seed(comm.rank)
    return [(torch.randn(4, 8, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(num)]


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def steps(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def zero_redundancy(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # imports FSDP, which the other tests need not wait for

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)


def with_ddp(**options):
    """Trains a model in DDP that was made with these options."""

    def run(comm):
        model = DistributedDataParallel(make(), **options)
        with tw.compress_gradients(model, BITS):
            steps(model, sgd(model), data(comm))
        return fingerprint(model)

    return run


def uneven_inputs(comm):
    model = DistributedDataParallel(make())
    with tw.compress_gradients(model, BITS), model.join():
        steps(model, sgd(model), data(comm, 3 + comm.rank))
    return fingerprint(model)


def local_in_ddp(comm):
    model = DistributedDataParallel(make())
    optimizer = sgd(model)
    with tw.local_updates(model, optimizer, BITS, every=3):  # the last round follows the last step
        steps(model, optimizer, data(comm))
    return fingerprint(model)


def lora(comm):
    model = make()
    model[0].requires_grad_(False)
    frozen = fingerprint(model[0])
    factors = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 2, bias=False))
    model.append(factors)
    del model[2]
    with tw.compress_gradients(model, BITS, comm=comm):
        steps(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), data(comm))
    assert fingerprint(model[0]) == frozen
    return fingerprint(model)


def ema(comm):
    model = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = sgd(model)
    with tw.compress_gradients(model, BITS, comm=comm):
        for batch in data(comm):
            steps(model, optimizer, [batch])
            average.update_parameters(model)
    return fingerprint(model) + fingerprint(average)


def zero_gradients(comm):
    model = DistributedDataParallel(make())
    with tw.compress_gradients(model, BITS):
        steps(model, zero_redundancy(model), data(comm))
    return fingerprint(model)


def zero_local(comm):
    model = make()
    tw.local_updates(model, zero_redundancy(model), BITS, every=2)


def rescaled(comm):
    tw.compress_gradients(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2)), BITS, comm=comm)


def compiled(comm):
    model = torch.compile(make(), backend="eager")
    with tw.compress_gradients(model, BITS, comm=comm):
        steps(model, sgd(model), data(comm))
    return fingerprint(model)


def gan(comm):
    generator, critic = make(1), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    ours, theirs = sgd(generator), sgd(critic)
    with tw.compress_gradients(generator, BITS, comm=comm), tw.compress_gradients(critic, BITS, comm=comm):
        for x, y in data(comm):
            theirs.zero_grad()
            (critic(generator(x).detach()).mean() - critic(y).mean()).backward()
            theirs.step()
            ours.zero_grad()
            critic.requires_grad_(False)
            (-critic(generator(x)).mean()).backward()
            critic.requires_grad_(True)
            ours.step()
    return fingerprint(generator) + fingerprint(critic)


def checkpointed(comm):
    model = make()
    optimizer = sgd(model)
    with tw.compress_gradients(model, BITS, comm=comm):
        for x, y in data(comm):
            optimizer.zero_grad()
            nn.functional.mse_loss(model[2](checkpoint(model[:2], x, use_reentrant=False)), y).backward()
            optimizer.step()
    return fingerprint(model)


def lbfgs(comm):
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with tw.compress_gradients(model, BITS, comm=comm):
        for x, y in data(comm, 2):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                return torch.tensor(comm.gather_objects(loss.item())).mean()  # else workers stop at different times

            optimizer.step(closure)
    return fingerprint(model)


def muon(comm):
    model = make()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    with tw.compress_gradients(model, BITS, comm=comm):
        steps(model, torch.optim.Muon(matrices, lr=0.02), data(comm))
    return fingerprint(model)


def loader_workers(comm):
    multiprocessing.current_process()._config["daemon"] = False  # the tests' processes are, and such have no children
    torch.manual_seed(0)
    examples = TensorDataset(torch.randn(32, 8), torch.randn(32, 2))
    loader = DataLoader(
        examples, batch_size=4, sampler=DistributedSampler(examples, comm.size, comm.rank), num_workers=1
    )  # processes that are forked beside our threads
    model = make()
    with tw.compress_gradients(model, BITS, comm=comm):
        steps(model, sgd(model), loader)
    return fingerprint(model)


def profiled(comm):
    model = make()
    averager = tw.Mean(tw.TopK(0.1), tw.ErrorFeedback())
    options = _ExperimentalConfig(profile_all_threads=True)
    with (
        tw.compress_gradients(model, averager, comm=comm),
        profile(activities=[ProfilerActivity.CPU], experimental_config=options) as seen,
    ):
        steps(model, sgd(model), data(comm, 2))
    threads = {event.name: event.thread for event in seen.events() if event.name.startswith("thinwire::")}
    page = (PAGE.parent / "timeline.md").read_text(encoding="utf-8")
    assert sorted(threads) == sorted(re.findall(r"^\| `(thinwire::\w+)` \|", page, re.MULTILINE))
    training = {threads[f"thinwire::{name}"] for name in ("compensate", "encode", "exchange", "blocked")}
    assert training.isdisjoint({threads["thinwire::wait"], threads["thinwire::decode"]})
    return fingerprint(model)


def scaled(comm):
    model, scaler = make(), torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = sgd(model)
    with tw.compress_gradients(model, BITS, comm=comm, scaler=scaler):
        for x, y in data(comm):
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    return fingerprint(model)


def accumulated(comm):
    model = make()
    optimizer = sgd(model)
    with tw.compress_gradients(model, BITS, comm=comm) as handle:
        for (x, y), (u, v) in zip(data(comm), data(comm), strict=True):
            optimizer.zero_grad()
            with handle.no_sync():
                nn.functional.mse_loss(model(x), y).backward()
            nn.functional.mse_loss(model(u), v).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return fingerprint(model)


def hooked(comm):
    def clip(p):
        p.grad.clamp_(-0.1, 0.1)

    model = make()
    with tw.compress_gradients(model, BITS, comm=comm):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(clip)
        steps(model, sgd(model), data(comm))
    return fingerprint(model)


def copied(comm):
    model = make()
    with tw.compress_gradients(model, BITS, comm=comm):
        steps(model, sgd(model), data(comm, 2))
        teacher = copy.deepcopy(model)
        steps(model, sgd(model), data(comm, 2))
    return fingerprint(model) + fingerprint(teacher)


WORKS: dict[str, Callable] = {
    "DDP with `find_unused_parameters`": with_ddp(find_unused_parameters=True),
    "DDP with `static_graph`, averaged gradients": with_ddp(static_graph=True),
    "DDP with `gradient_as_bucket_view`": with_ddp(gradient_as_bucket_view=True),
    "DDP with small buckets": with_ddp(bucket_cap_mb=1e-4),
    "DDP, local updates and gossip": local_in_ddp,
    "uneven inputs, `ddp.join()`": uneven_inputs,
    "LoRA and other frozen layers": lora,
    "a moving average of the weights, `AveragedModel`": ema,
    "a frozen copy of the model, `copy.deepcopy`": copied,
    "`ZeroRedundancyOptimizer`, averaged gradients": zero_gradients,
    "`torch.compile`": compiled,
    "a GAN: two models, two handles": gan,
    "activation checkpointing": checkpointed,
    "LBFGS, with the mean of the loss": lbfgs,
    "Muon": muon,
    "a `DataLoader` with workers": loader_workers,
    "the profiler": profiled,
    "`GradScaler`": scaled,
    "accumulation, `no_sync`, clipping": accumulated,
    "hooks of yours on gradients": hooked,
}
IN_TRAINERS = {  # their packages take seconds to import: tests/integrations/test_trainers.py runs them
    "`fabric.setup` of Lightning": "fabric_worker",
    "metrics over all workers, of torchmetrics": "metrics_worker",
}
REFUSED: dict[str, tuple[Callable, str]] = {
    "an embedding with `max_norm`, averaged gradients": (rescaled, "max_norm=1.0"),
    "`ZeroRedundancyOptimizer`, local updates": (zero_local, "ZeroRedundancyOptimizer"),
}


def all_rows(comm):
    torch.set_num_threads(1)
    found = {}
    for row, run in WORKS.items():
        try:
            found[row] = run(comm)
        except Exception as error:
            raise AssertionError(f"{row}: {type(error).__name__}: {error}") from error
    for row, (run, _) in REFUSED.items():
        with pytest.raises(ValueError) as refusal:
            run(comm)
        found[row] = str(refusal.value)
    return found


def test_what_works_leaves_equal_replicas_and_the_rest_is_refused():
    first, second = spawn(2, all_rows)
    for row in WORKS:
        assert first[row] == second[row], row
    for row, (_, text) in REFUSED.items():
        assert text in first[row] and "\n" not in first[row], row


def test_the_page_has_these_rows():
    rows = re.findall(r"^\| (.+?) \| (yes|refused)", PAGE.read_text(), re.MULTILINE)
    assert rows == [*((row, "yes") for row in (*WORKS, *IN_TRAINERS)), *((row, "refused") for row in REFUSED)]
    trainers = (PAGE.parents[1] / "tests" / "integrations" / "test_trainers.py").read_text()
    assert all(f"spawn(2, {worker})" in trainers for worker in IN_TRAINERS.values())


@pytest.mark.parametrize("strategy", ["Gradients(Mean())", "Local(Mean(), every=2)"])
def test_a_compiled_step_does_not_trace_the_averaging(strategy):
    def num_graphs(comm, attach):
        graphs, model = [], nn.Linear(3, 2)
        optimizer = sgd(model)
        if attach:
            tw.attach(model, optimizer, strategy, comm=comm)

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        step = torch.compile(optimizer.step, backend=backend)
        for _ in range(4):
            model(torch.ones(1, 3)).sum().backward()
            step()
        torch.compiler.reset()
        return len(graphs)

    without, with_strategy = (tw.LocalWorld(1).run(num_graphs, attach)[0] for attach in (False, True))
    assert with_strategy == without
