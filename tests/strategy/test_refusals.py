"""What strategies refuse, because workers would drift apart or nothing would be saved, and wrappers that they accept."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from helpers.spawn import spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thinwire as tw

SPARSE = tw.Mean(tw.TopK(0.5), tw.ErrorFeedback())


def in_process(worker):
    return tw.LocalWorld(1).run(worker)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_optimizer_that_steps_in_backward_is_refused():
    def worker(comm):
        model = nn.Linear(3, 2)
        with tw.compress_gradients(model, tw.Mean(), comm=comm):
            optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
            with pytest.raises(ValueError, match="SGD steps during the backward pass"):
                model(torch.ones(1, 3)).sum().backward()

    in_process(worker)


def test_a_backward_pass_inside_of_another_one_is_refused():
    def worker(comm):
        model = two_layers()
        with tw.compress_gradients(model, tw.Mean(), comm=comm):
            hidden = checkpoint(model[0], torch.ones(1, 3, requires_grad=True), use_reentrant=True)
            with pytest.raises(ValueError, match="inside of another one.*set use_reentrant=False"):
                model[1](hidden).sum().backward()

    in_process(worker)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_refuse_an_embedding_whose_forward_pass_rescales_rows(kind):
    def worker(comm):
        model = nn.Sequential(kind(5, 3, max_norm=1.0), nn.Linear(3, 2))
        with pytest.raises(ValueError, match="'0' has max_norm=1.0, by which a forward pass rescales"):
            tw.compress_gradients(model, tw.Mean(), comm=comm)
        model[0].requires_grad_(False)  # rows of a frozen one are rescaled wherever they are used
        tw.compress_gradients(model, tw.Mean(), comm=comm).detach()

    in_process(worker)


def test_the_remedy_for_max_norm_keeps_workers_equal():
    def worker(comm):
        torch.manual_seed(0)
        model = nn.Embedding(5, 3)
        with tw.compress_gradients(model, tw.Mean(), comm=comm):
            optimizer = sgd(model)
            for step in range(3):
                model(torch.tensor([comm.rank, step])).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                model.weight.data.renorm_(2, 0, 1.0)
        return model.weight.detach()

    first, second = tw.LocalWorld(2).run(worker)
    assert torch.equal(first, second) and first.norm(dim=1).max() <= 1 + 1e-6


def test_local_updates_refuse_another_optimizer():
    def worker(comm):
        model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        with pytest.raises(ValueError, match="no trainable parameter of the model"):
            tw.local_updates(model, sgd(other), tw.Mean(), 2, comm=comm)
        with pytest.raises(ValueError, match="2 of the optimizer's parameters are not the model's"):
            tw.local_updates(model, sgd(nn.ModuleList([model, other])), tw.Mean(), 2, comm=comm)
        with tw.local_updates(model, sgd(model), tw.Mean(), 2, comm=comm):
            later = sgd(model)
            model(torch.ones(1, 3)).sum().backward()
            with pytest.raises(ValueError, match="another SGD steps on parameters"):
                later.step()

    in_process(worker)


def zero_worker(comm):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # imports FSDP, which the other tests need not wait for

    model = nn.Linear(3, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for attach in (lambda: tw.local_updates(model, optimizer, tw.Mean(), 2, comm=comm),
                   lambda: tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm)):  # fmt: skip
        with pytest.raises(ValueError, match="ZeroRedundancyOptimizer sends every worker's share"):
            attach()


def test_a_zero_redundancy_optimizer_is_refused_where_models_differ():
    spawn(2, zero_worker)


class Parts(nn.Module):
    """Runs parts of a model, or uses its parameters itself, and never calls the model."""

    def __init__(self, net, calls):
        super().__init__()
        self.net, self.calls = net, calls

    def forward(self, x):
        if self.calls:
            return self.net[1](self.net[0](x))
        for part in self.net:
            x = nn.functional.linear(x, part.weight, part.bias)
        return x


def two_layers():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


WRAPS = {"itself": lambda net: net, "parts": lambda net: Parts(net, True), "parameters": lambda net: Parts(net, False)}


def inside_ddp_worker(comm, is_first, wrap):
    net = two_layers()
    ddp = DistributedDataParallel(WRAPS[wrap](net)) if is_first else None
    handle = tw.compress_gradients(net, SPARSE)
    ddp = ddp or DistributedDataParallel(WRAPS[wrap](net))
    with pytest.raises(ValueError, match="parameter '0.weight' is trained inside of DistributedDataParallel, which"):
        ddp(torch.ones(1, 3))
    with torch.no_grad():
        ddp(torch.ones(1, 3))
    net(torch.ones(1, 3)).sum().backward()
    handle.detach()
    ddp(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_plain_model_that_ddp_trains_is_refused_in_the_first_forward(is_first, wrap):
    spawn(2, inside_ddp_worker, is_first, wrap)


def local_in_ddp_worker(comm, is_first):
    net = two_layers()
    ddp = DistributedDataParallel(Parts(net, True)) if is_first else None
    handle = tw.local_updates(net, sgd(net), tw.Mean(), 2)
    ddp = ddp or DistributedDataParallel(Parts(net, True))
    with pytest.raises(ValueError, match="Local: parameter '0.weight' is trained inside"):
        ddp(torch.ones(1, 3))
    handle.detach()


@pytest.mark.parametrize("is_first", [True, False])
def test_local_updates_refuse_a_ddp_of_parts(is_first):
    spawn(2, local_in_ddp_worker, is_first)


def train(*models):
    for model in models:
        model(torch.ones(1, 3)).sum().backward()


def beside_ddp_worker(comm, is_first):
    generator, critic = two_layers(), two_layers()
    net = nn.Sequential(two_layers(), two_layers())
    net[0].requires_grad_(False)
    # Each of these DDPs averages no parameter that is attached: another model, a trained part on a frozen one, an average of
    # the weights, a copy made while attached, and a model that DDP is told to ignore.
    beside = Parts(nn.Sequential(net[0][0], nn.Linear(3, 2)), True)
    ignoring = Parts(nn.Sequential(generator[0], nn.Linear(3, 2)), True)
    ignored = [name for name, _ in ignoring.named_parameters() if name.startswith("net.0.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ignored)

    def wrapped():
        average = copy.deepcopy(generator)
        return [DistributedDataParallel(model) for model in (critic, beside, average, ignoring)]

    ddps = wrapped() if is_first else []
    handles = [tw.compress_gradients(generator, SPARSE), tw.compress_gradients(net[1], SPARSE)]
    ddps = ddps or wrapped()
    hooked = [len(ddp._forward_pre_hooks) for ddp in ddps]
    assert hooked == [0, 0, 0, 1]  # which share no parameter pay nothing
    for _ in range(2):
        train(*ddps, generator)
        critic.requires_grad_(False)  # the step of a GAN's generator
        train(nn.Sequential(nn.Linear(3, 3), generator[0], critic))
        critic.requires_grad_(True)
    for handle in handles:
        handle.detach()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_ddp_that_averages_nothing_attached_is_no_mistake(is_first):
    spawn(2, beside_ddp_worker, is_first)


def former_ddp_worker(comm):
    net = two_layers()
    ddp = DistributedDataParallel(Parts(net, True))
    train(ddp)
    with tw.compress_gradients(net, SPARSE):
        train(net)
    train(ddp)


def test_a_ddp_that_trained_before_may_lie_idle():
    spawn(2, former_ddp_worker)


def wrapped_part_worker(comm, attach):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = sgd(net)
    handle = attach(net, optimizer)
    net[0] = DistributedDataParallel(net[0])
    with pytest.raises(ValueError, match="parameter '0.weight' is trained inside of DistributedDataParallel"):
        net(torch.ones(1, 3))
    handle.detach()


def attach_gradients(net, optimizer):
    return tw.compress_gradients(net, SPARSE)


def attach_local(net, optimizer):
    return tw.local_updates(net, optimizer, tw.Mean(), 2)


@pytest.mark.parametrize("attach", [attach_gradients, attach_local])
def test_a_part_that_ddp_wraps_later_is_refused_in_the_first_forward(attach):
    spawn(2, wrapped_part_worker, attach)


def join_worker(comm):
    torch.manual_seed(0)
    net = nn.Linear(3, 2, bias=False)
    ddp = DistributedDataParallel(net)
    start = net.weight.detach().clone()
    with tw.compress_gradients(ddp, tw.Mean(tw.QSGD(bits=8))):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        with ddp.join():
            for _ in range(2 + 2 * comm.rank):
                optimizer.zero_grad()
                ddp(torch.ones(1, 3)).sum().backward()
                optimizer.step()
    return (start - net.weight).detach()


def test_workers_may_run_out_of_inputs_in_ddps_join():
    """Two steps of two workers, two of one alone: a worker without inputs counts as zero, so these are half as long."""
    for moved in spawn(2, join_worker):
        torch.testing.assert_close(moved, torch.full((2, 3), 3.0))


@pytest.mark.parametrize(
    "averager, write",
    [
        (tw.TopK(0.01), "write Mean(TopK(ratio=0.01), ErrorFeedback())"),
        (tw.QSGD(bits=4), "write Mean(QSGD(bits=4))"),
        (tw.ErrorFeedback(), "is a memory"),
        (tw.Ring(), "write Mix(Ring())"),
        ("Mean()", "'Mean()' is text; write an averager, such as Mean("),
    ],
    ids=repr,
)
def test_a_part_of_an_averager_is_told_what_to_write(averager, write):
    model = nn.Linear(1, 1)
    choco = f"write Choco(Ring(), {averager!r})" if isinstance(averager, tw.codec.Codec) else write
    for call, expected in (
        (lambda: tw.compress_gradients(model, averager), write),
        (lambda: tw.local_updates(model, sgd(model), averager, 2), write),
        (lambda: tw.gossip_parameters(model, sgd(model), averager), choco),
        (lambda: tw.gossip_asynchronously(model, sgd(model), averager), "averager must be Pairwise(...), got"),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            call()


def test_swapped_arguments_are_told_so():
    with pytest.raises(ValueError, match="averager must be an averager.*got Linear.*write the model first"):
        tw.compress_gradients(tw.Mean(), nn.Linear(1, 1))
    with pytest.raises(ValueError, match="got Sequential; write the model first$"):  # on one line
        tw.compress_gradients(tw.Mean(), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    model = nn.Linear(1, 1)
    comes = (
        r"got SGD; an optimizer comes right after the model, as in attach\(model, optimizer, strategy\)$"  # on one line
    )
    for call in (
        lambda: tw.compress_gradients(model, sgd(model)),
        lambda: tw.local_updates(model, tw.Mean(), sgd(model), every=2),
        lambda: tw.gossip_parameters(model, tw.Mix(tw.Ring()), sgd(model)),
    ):
        with pytest.raises(ValueError, match=comes):
            call()
    with pytest.raises(ValueError, match="got SGD; write the model first, and then the optimizer$"):
        tw.attach(sgd(model), model)
    with pytest.raises(
        ValueError, match=r"got Gradients\(Mean\(\)\); attach\(model, optimizer, Gradients\(Mean\(\)\)\)"
    ):
        tw.compress_gradients(model, tw.Gradients(tw.Mean()))
    for strategy in (tw.Gradients(tw.Mean()), "Gradients(Mean())"):  # is not passed over in favour of the default
        with pytest.raises(
            ValueError, match=r"is the optimizer or None, got '?Gradients\(Mean\(\)\)'?; write attach\("
        ):
            tw.attach(nn.Linear(1, 1), strategy)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"comm": "gloo"},
            "comm must be a communicator of thinwire, or None, got 'gloo'; give a process group as replicas=",
        ),
        ({"scaler": True}, "scaler must be a torch.amp.GradScaler, or None, got True"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"optimizer": []}, "optimizer must be one of torch.optim, or None, got []"),
        ({"fragments": None}, "Local: fragments must be a number, or lists of patterns, got None"),
        (
            {"state_every": ["exp_avg"]},
            "Local: state_every must be periods by name, such as {'exp_avg': 60}, got ['exp_avg']",
        ),
    ],
    ids=str,
)
def test_an_argument_of_another_type_is_refused(options, message):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=re.escape(message)):
        tw.local_updates(**{"model": model, "optimizer": sgd(model), "averager": tw.Mean(), "every": 2} | options)


def compiled_worker(comm):
    torch.manual_seed(0)
    net = nn.Linear(3, 2, bias=False)
    model = torch.compile(DistributedDataParallel(net), backend="eager")
    with tw.compress_gradients(model, tw.Mean(tw.QSGD(bits=8))) as handle:
        model(torch.full((1, 3), float(comm.rank))).sum().backward()
        assert [name for name, _ in handle.parameters] == ["weight"]
    return net.weight.grad


def test_compiled_ddp_works():
    for gradient in spawn(2, compiled_worker):
        torch.testing.assert_close(gradient, torch.full((2, 3), 0.5))
