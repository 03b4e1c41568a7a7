"""Programs that users bring: hooks of their own, layers that change, evaluation in inference mode, buffers that grow."""

from __future__ import annotations

import copy
import io
from contextlib import closing

import pytest
import torch
from helpers.gradients import fingerprint
from torch import nn

import thinwire as tw
from thinwire.comm import ElasticCommunicator, Lighthouse
from thinwire.strategy import Quorum

MEAN = tw.Gradients(tw.Mean())
GOSSIP = tw.Gossip(tw.Mix(tw.Ring()))
LOCAL = tw.Local(tw.Mean(), every=2, outer=tw.OuterSGD())
DELAYED = tw.Local(tw.Mean(tw.QSGD(bits=8), tw.ErrorFeedback()), every=2, outer=tw.OuterSGD(), delay=1)
OVERLAPPED = tw.Gossip(tw.PushSum(tw.Exponential()), overlap=True)
ASYNCHRONOUS = tw.Asynchronous()


def make() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(comm, model, optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(8.0).view(2, 4) + comm.rank).square().mean().backward()
    optimizer.step()


def normalise(p) -> None:
    p.grad.div_(p.grad.norm())


@pytest.mark.parametrize("bucket_bytes", [1, None])
def test_hooks_that_a_user_sets_later_change_what_is_sent(bucket_bytes):
    def own_gradients(rank: int) -> list[torch.Tensor]:
        model = make()
        model(torch.arange(8.0).view(2, 4) + rank).square().mean().backward()
        return [(p.grad / p.grad.norm()).double() for p in model.parameters()]

    def worker(comm):
        model = make()
        with tw.attach(model, None, tw.Gradients(tw.Mean(), bucket_bytes=bucket_bytes), comm=comm):
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(normalise)
            for _ in range(2):
                model.zero_grad()
                model(torch.arange(8.0).view(2, 4) + comm.rank).square().mean().backward()
        return [p.grad.double() for p in model.parameters()]

    means = [(a + b) / 2 for a, b in zip(own_gradients(0), own_gradients(1), strict=True)]
    for gradients in tw.LocalWorld(2).run(worker):
        torch.testing.assert_close(gradients, means, rtol=1e-6, atol=1e-7)  # float32


@pytest.mark.parametrize("is_first", [True, False])
def test_a_hook_that_takes_gradients_away_is_refused(is_first):
    def update_at_once(p):
        p.data.sub_(p.grad)
        p.grad = None

    def worker(comm):
        model = make()
        if is_first:
            model[2].bias.register_post_accumulate_grad_hook(update_at_once)
        with tw.attach(model, None, MEAN, comm=comm):
            if not is_first:
                model[2].bias.register_post_accumulate_grad_hook(update_at_once)
            model(torch.ones(1, 4)).sum().backward()

    with pytest.raises(ValueError, match=r"a hook took the gradient of '2\.bias' away"):
        tw.LocalWorld(2).run(worker)


def test_two_optimizers_train_a_model_in_parts_under_local_updates():
    def worker(comm):
        model = make()
        parts = [nn.Sequential(*model[:2]), model[2]]
        optimizers = [sgd(part) for part in parts]
        handles = [tw.attach(part, o, LOCAL, comm=comm) for part, o in zip(parts, optimizers, strict=True)]
        for _ in range(4):  # the last round follows the last step
            model.zero_grad()
            model(torch.arange(8.0).view(2, 4) + comm.rank).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        for handle in handles:
            handle.detach()
        return fingerprint(model)

    prints = tw.LocalWorld(2).run(worker)
    assert prints[0] == prints[1]


@pytest.mark.parametrize("strategy", [MEAN, GOSSIP, LOCAL, ASYNCHRONOUS])
def test_a_new_layer_that_a_new_optimizer_trains_alone_is_refused(strategy):
    def worker(comm):
        model = make()
        optimizer = sgd(model)
        with tw.attach(model, optimizer, strategy, comm=comm):
            step(comm, model, optimizer)
            model[0].requires_grad_(False)
            model[2] = nn.Linear(3, 2)
            step(comm, model, sgd(model[2]))

    with pytest.raises(ValueError, match=r"'2\.weight' was replaced after .* attached.*detach\(\)"):
        tw.LocalWorld(2).run(worker)


def test_layers_that_are_unfrozen_for_another_optimizer_are_refused():
    def worker(comm):
        model = make()
        model[0].requires_grad_(False)
        optimizer = sgd(model[2])
        with tw.attach(model, optimizer, GOSSIP, comm=comm):
            step(comm, model, optimizer)
            model[0].requires_grad_(True)
            step(comm, model, sgd(model[0]))

    with pytest.raises(ValueError, match=r"'0\.weight' was added or unfrozen after Gossip attached"):
        tw.LocalWorld(2).run(worker)


def add_a_temperature_later(strategy):
    def worker(comm):
        model = make()
        temperature = nn.Parameter(torch.zeros(()))
        optimizer = sgd(model)
        with tw.attach(model, optimizer, strategy, comm=comm):
            step(comm, model, optimizer)
            optimizer.add_param_group({"params": [temperature]})
            step(comm, model, optimizer)

    tw.LocalWorld(2).run(worker)


def test_parameters_that_an_optimizer_gets_later_are_seen():
    told = "1 of the 5 parameters of SGD are attached to no strategy"
    with pytest.warns(UserWarning, match=told):
        add_a_temperature_later(MEAN)
    for strategy in (LOCAL, GOSSIP):
        refused = pytest.raises(ValueError, match=r"'\(not of this model\)' is trained since later")
        with pytest.warns(UserWarning, match=told), refused:
            add_a_temperature_later(strategy)


def test_an_optimizer_inside_of_another_one_is_refused_by_both_names():
    class Wrapping(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()

    def worker(comm):
        model = make()
        optimizer = Wrapping(sgd(model))
        with tw.attach(model, optimizer, LOCAL, comm=comm):
            step(comm, model, optimizer)

    with pytest.raises(
        ValueError, match=r"another SGD steps on .* their own Wrapping.* one optimizer that wraps no other"
    ):
        tw.LocalWorld(2).run(worker)


def average_model(handle):
    with handle.average_model():
        pass


LOOKS = {
    "average_model": average_model,
    "state_dict": lambda handle: handle.state_dict(),
    "load_state_dict": lambda handle: handle.load_state_dict(handle.state_dict()),
    "synchronize": lambda handle: handle.synchronize(),
}
MADE_LATE = [
    *((LOCAL, look) for look in LOOKS),
    *((DELAYED, look) for look in LOOKS),
    *((OVERLAPPED, look) for look in LOOKS),
    *((ASYNCHRONOUS, look) for look in LOOKS),
    (tw.Local(tw.Mean(), every=2, outer=tw.OuterSGD(), delay=1, quorum=Quorum()), "synchronize"),
]


@pytest.mark.parametrize(("strategy", "look"), MADE_LATE, ids=str)
def test_training_goes_on_after_calls_in_inference_mode(strategy, look):
    def worker(comm):
        model = make()
        optimizer = sgd(model)
        with tw.attach(model, optimizer, strategy, comm=comm) as handle:
            step(comm, model, optimizer)
            for is_inference in (True, False, True):
                with torch.inference_mode(is_inference):
                    LOOKS[look](handle)
                for _ in range(3):
                    step(comm, model, optimizer)
            if isinstance(strategy, tw.Local):
                handle.synchronize()
        return fingerprint(model)

    prints = tw.LocalWorld(2).run(worker)
    assert not isinstance(strategy, tw.Local) or prints[0] == prints[1]


@pytest.mark.parametrize(
    "strategy",
    [tw.Gradients(tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback())), tw.Gradients(tw.PowerSGD()), LOCAL, OVERLAPPED],
    ids=str,
)
def test_attaching_and_detaching_in_inference_mode(strategy):
    def worker(comm):
        model = make()
        optimizer = sgd(model)
        with torch.inference_mode():
            handle = tw.attach(model, optimizer, strategy, comm=comm)
        for _ in range(3):
            step(comm, model, optimizer)
        with torch.inference_mode():
            handle.detach()
        step(comm, model, optimizer)

    tw.LocalWorld(2).run(worker)


@pytest.mark.parametrize("are_equal", [True, False])
@pytest.mark.parametrize("strategy", [MEAN, LOCAL], ids=str)
def test_buffers_may_grow_after_a_strategy_is_attached(strategy, are_equal):
    """As those of observers do in their first forward pass, in quantization-aware training."""

    def worker(comm):
        model = make()
        model.register_buffer("smallest", torch.tensor([]))
        model.register_buffer("largest", torch.tensor([float("-inf") if are_equal else comm.rank]))
        optimizer = sgd(model)
        with tw.attach(model, optimizer, strategy, comm=comm):
            for buffer in model.buffers():
                buffer.resize_(3).fill_(0)
            step(comm, model, optimizer)

    tw.LocalWorld(2).run(worker)


@pytest.mark.parametrize("strategy", [MEAN, GOSSIP, LOCAL])
def test_a_model_of_an_elastic_run_is_saved_whole(strategy):
    """The hook that begins a round was a local function, which cannot be pickled."""
    with closing(Lighthouse(1, "127.0.0.1")) as lighthouse, ElasticCommunicator(lighthouse.address, 0, 1) as comm:
        model = make()
        optimizer = sgd(model)
        with tw.attach(model, optimizer, strategy, comm=comm):
            step(comm, model, optimizer)
            file = io.BytesIO()
            torch.save((model, optimizer), file)
            loaded, optimizer_of_it = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            before = comm.counts.committed, comm.in_round
            step(comm, loaded, optimizer_of_it)
            assert (comm.counts.committed, comm.in_round) == before
            assert fingerprint(copy.deepcopy(loaded)) == fingerprint(loaded) != fingerprint(model)


def test_parameters_whose_contents_are_swapped_lose_no_average_without_a_word():
    """`model.to()` swaps them where that flag of PyTorch is set, and always those of tensor subclasses."""

    def worker(comm):
        model = make()
        with tw.attach(model, sgd(model), MEAN, comm=comm):
            torch.__future__.set_swap_module_params_on_conversion(True)
            comm.barrier()
            model.to(torch.float32)
            comm.barrier()
            torch.__future__.set_swap_module_params_on_conversion(False)
            with pytest.raises(ValueError, match=r"'0\.weight' was given other contents by torch\.utils\.swap_tensors"):
                step(comm, model, sgd(model))
        optimizer = sgd(model)
        with tw.attach(model, optimizer, MEAN, comm=comm):
            step(comm, model, optimizer)
        return fingerprint(model)

    try:
        first, second = tw.LocalWorld(2).run(worker)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert first == second
