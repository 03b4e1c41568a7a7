"""Saved state names its worker: nobody loads another's, also not by way of `torch.distributed.checkpoint`."""

from __future__ import annotations

import pytest
import torch
from helpers.gradients import batch, fingerprint, make_model, train
from helpers.spawn import spawn
from torch import nn

import thinwire as tw
from thinwire.strategy.identity import CHOICES

MEAN = tw.Mean(tw.TopK(0.1), tw.ErrorFeedback())


def trained(comm, averager=MEAN, model=None):
    model = make_model() if model is None else model
    handle = tw.compress_gradients(model, averager, comm=comm)
    if hasattr(model, "head"):
        train(model, comm.rank, steps=2)
    return handle


def test_state_is_keyed_by_rank_and_loads_again():
    def worker(comm):
        with trained(comm) as handle:
            saved = handle.state_dict()
        assert list(saved) == [f"rank{comm.rank}"] and saved[f"rank{comm.rank}"]["progress"]["step"] == 2
        with tw.compress_gradients(make_model(), MEAN, comm=comm) as handle:
            handle.load_state_dict(saved)
            assert handle.state_dict()[f"rank{comm.rank}"]["progress"]["step"] == 2
        return saved

    saved = tw.LocalWorld(2).run(worker)
    memories = [saved[rank][f"rank{rank}"]["memory"]["residual"]["head.weight"] for rank in (0, 1)]
    assert not torch.equal(*memories)


def test_another_workers_state_is_refused():
    def worker(comm):
        with trained(comm) as handle:
            theirs = {f"rank{1 - comm.rank}": handle.state_dict()[f"rank{comm.rank}"]}
            theirs[f"rank{1 - comm.rank}"]["identity"]["rank"] = 1 - comm.rank
            with pytest.raises(
                ValueError, match=f"rank {comm.rank} of 2 cannot load the state of rank {1 - comm.rank} of 2"
            ):
                handle.load_state_dict(theirs)

    tw.LocalWorld(2).run(worker)


@pytest.mark.parametrize(
    "saved, got", [("last.pt", "got str"), ({"step": 5, "thinwire": {}}, r"got the keys \['step', 'thinwire'\]")]
)
def test_what_is_no_state_is_refused(saved, got):
    def worker(comm):
        with (
            tw.compress_gradients(make_model(), MEAN, comm=comm) as handle,
            pytest.raises(ValueError, match=f"takes what state_dict.. returned, such as .'rank0': .*{got}"),
        ):
            handle.load_state_dict(saved)

    tw.LocalWorld(1).run(worker)


def test_another_number_of_workers_needs_the_states_of_all():
    def saving(comm):
        with trained(comm) as handle:
            return handle.state_dict()

    saved = tw.LocalWorld(3).run(saving)

    def pair(comm):
        with trained(comm) as handle:
            with pytest.raises(ValueError, match=f"rank {comm.rank} of 2 .* needs the states of all 3"):
                handle.load_state_dict({**saved[0], **saved[2]})
            handle.load_state_dict({key: state for one in saved for key, state in one.items()})
            return handle.state_dict()[f"rank{comm.rank}"]

    loaded = tw.LocalWorld(2).run(pair)
    assert [state["progress"]["step"] for state in loaded] == [2, 2]
    for name, before in saved[0]["rank0"]["memory"]["residual"].items():
        means = [before, saved[1]["rank1"]["memory"]["residual"][name], saved[2]["rank2"]["memory"]["residual"][name]]
        after = torch.stack([state["memory"]["residual"][name] for state in loaded]).mean(0)
        torch.testing.assert_close(after, torch.stack(means).mean(0))
        assert before.any()


@pytest.mark.parametrize(
    "averager, model, message",
    [
        (
            tw.Mean(tw.TopK(0.2), tw.ErrorFeedback()),
            None,
            r"its averager is .*TopK\(ratio=0.1\).* expected .*ratio=0.2",
        ),
        (MEAN, nn.Linear(8, 4), r"its tensors is left.weight \(32, 16\) torch.float32, expected weight \(4, 8\)"),
    ],
    ids=["averager", "tensors"],
)
def test_another_configurations_state_is_refused(averager, model, message):
    def worker(comm):
        with trained(comm) as handle:
            saved = handle.state_dict()
        with trained(comm, averager, model) as handle, pytest.raises(ValueError, match=message) as caught:
            handle.load_state_dict(saved)
        assert "\n" not in str(caught.value)

    tw.LocalWorld(1).run(worker)


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("", "outer=OuterSGD()", r"is OuterSGD\(lr=1.0, momentum=0.0, nesterov=False\), expected OuterSGD\(\)$"),
        ("outer=OuterSGD()", "outer=OuterSGD(lr=0.5)", r"is OuterSGD\(\), expected OuterSGD\(lr=0.5\)$"),
    ],
)
def test_another_outer_optimizers_state_is_refused(before, after, message):
    def worker(comm):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, f"Local(Mean(), every=4, {before})", comm=comm) as handle:
            saved = handle.state_dict()
        with (
            tw.attach(model, optimizer, f"Local(Mean(), every=4, {after})", comm=comm) as handle,
            pytest.raises(ValueError, match="another configuration: its outer optimizer " + message),
        ):
            handle.load_state_dict(saved)

    tw.LocalWorld(1).run(worker)


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Muon], ids=lambda kind: kind.__name__)
def test_a_run_of_the_default_goes_on_with_more_or_fewer_workers(before, after, optimizer):
    """One worker's default is another averager than that of several."""

    def run(comm, saved=None):
        model = nn.Linear(4, 2, bias=False)
        with tw.attach(model, optimizer(model.parameters(), lr=0.1), comm=comm) as handle:
            if saved is not None:
                handle.load_state_dict(saved)
            model(torch.ones(1, 4)).sum().backward()
            return handle.state_dict()

    saved = {key: state for one in tw.LocalWorld(before).run(run) for key, state in one.items()}
    loaded = tw.LocalWorld(after).run(lambda comm: run(comm, saved))
    assert [state[f"rank{rank}"]["progress"]["step"] for rank, state in enumerate(loaded)] == [2] * after
    for state in (saved, loaded[0]):
        assert state["rank0"]["identity"]["averager"] in CHOICES


def checkpointed_worker(comm, folder):
    import torch.distributed.checkpoint as dcp

    with trained(comm) as handle:
        saved = handle.state_dict()
        dcp.save({"averager": saved}, checkpoint_id=folder)
    with tw.compress_gradients(make_model(), MEAN, comm=comm) as handle:
        loaded = {"averager": handle.state_dict()}
        dcp.load(loaded, checkpoint_id=folder)
        handle.load_state_dict(loaded["averager"])
        now = handle.state_dict()
    own = f"rank{comm.rank}"
    same = all(
        torch.equal(now[own]["memory"]["residual"][name], m) for name, m in saved[own]["memory"]["residual"].items()
    )
    return same, now[own]["progress"]["step"], now[own]["memory"]["residual"]["head.weight"].abs().sum().item()


def test_distributed_checkpoint_gives_each_worker_its_own_memory_back(tmp_path):
    results = spawn(2, checkpointed_worker, str(tmp_path))
    assert [result[:2] for result in results] == [(True, 2)] * 2
    assert results[0][2] != results[1][2]


@pytest.mark.parametrize("averager", [MEAN, tw.Choco(tw.Ring(), tw.TopK(0.5), step_size=0.3)], ids=repr)
def test_local_updates_go_on_from_their_anchors_with_other_workers(averager):
    def attached(comm):
        model = make_model()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        return model, optimizer, tw.local_updates(model, optimizer, averager, every=2, comm=comm)

    def steps(comm, model, optimizer, start):
        for step in range(start, start + 2):
            x, y = batch(comm.rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def saving(comm):
        model, optimizer, handle = attached(comm)
        steps(comm, model, optimizer, 0)
        return handle.state_dict()

    saved = {key: state for one in tw.LocalWorld(4).run(saving) for key, state in one.items()}

    def resuming(comm):
        model, optimizer, handle = attached(comm)
        handle.load_state_dict(saved)
        anchors = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        steps(comm, model, optimizer, 2)
        handle.synchronize()
        return anchors, fingerprint(model)

    results = tw.LocalWorld(3).run(resuming)
    assert len({print_ for _, print_ in results}) == 1
    for name, anchor in results[0][0].items():
        mean = torch.stack([state["anchor"][name] for state in saved.values()]).mean(0)
        torch.testing.assert_close(anchor, mean)
