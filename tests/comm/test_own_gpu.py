"""Over NCCL a worker connects, and sends what is its own, on the GPU of its model or of its group; no GPU is needed here."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

import thinwire as tw
from thinwire.comm import Handle, ProcessGroupCommunicator, process_group
from thinwire.integrations.state import AllWorkersState
from thinwire.strategy import base
from thinwire.strategy.gradients import shard_compression
from thinwire.strategy.model import shards

CURRENT, OF_GROUP, OF_MODEL = (torch.device("cuda", i) for i in range(3))


@pytest.fixture
def connected(monkeypatch):
    """A process group that says it is one of NCCL; the list has the devices of what communicators send."""
    sent = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(process_group, "group_over", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CURRENT.index)
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: SimpleNamespace(device=torch.device(device)))
    monkeypatch.setattr(ProcessGroupCommunicator, "all_reduce", lambda self, t: sent.append(t.device) or Handle(list))
    yield sent
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("of_model", "of_group", "expected"),
    [
        (None, None, CURRENT),
        (torch.device("cpu"), None, CURRENT),
        (None, OF_GROUP, OF_GROUP),
        (torch.device("cpu"), OF_GROUP, OF_GROUP),
        (OF_MODEL, OF_GROUP, OF_MODEL),
        (torch.device("cuda"), None, CURRENT),
        (torch.device("cuda"), OF_GROUP, OF_GROUP),
    ],
)
def test_nccl_connects_on_the_workers_own_gpu(connected, of_model, of_group, expected):
    dist.group.WORLD.bound_device_id = of_group
    comm = ProcessGroupCommunicator(device=of_model)
    assert connected == [expected] and comm.device == expected


@pytest.mark.parametrize(("ranks", "splits"), [([0, 2], False), ([0, 1, 2, 3], True)])
def test_a_subgroup_is_not_split_off_the_default_group(monkeypatch, ranks, splits):
    """A split needs all ranks of the default group, which is bound to a device; those outside of a subgroup make none."""
    asked = []
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    try:
        monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", asked.append)
        dist.group.WORLD.bound_device_id = OF_GROUP
        process_group.group_over(ranks, dist.group.WORLD, 10.0)
        assert bool(asked) == splits and dist.group.WORLD.bound_device_id == OF_GROUP
    finally:
        dist.destroy_process_group()


def test_mpi_has_no_store_where_a_subgroup_could_meet(monkeypatch):
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    try:
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
        with pytest.raises(ValueError, match=r"over fake all ranks are connected, and no subgroup, got \[0, 2\]"):
            process_group.group_over([0, 2], dist.group.WORLD, 10.0)
    finally:
        dist.destroy_process_group()


def test_what_loads_a_state_takes_it_into_main_memory():
    """A state was saved on the GPU of another worker, where a tensor would come back, with a context of its own."""
    calls = []
    for path in Path(tw.__file__).parent.rglob("*.py"):
        found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        calls += [call for call in found if ast.unparse(call.func) == "torch.load"]
    assert len(calls) > 3
    for call in calls:
        arguments = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert arguments.get("map_location") == "'cpu'" or "mmap" in arguments, ast.unparse(call)


@pytest.mark.parametrize(
    "attach",
    [
        lambda model, optimizer: tw.compress_gradients(model, tw.Mean()),
        lambda model, optimizer: tw.gossip_parameters(model, optimizer, tw.Mix(tw.Complete())),
        lambda model, optimizer: tw.local_updates(model, optimizer, tw.Mean(), every=2),
    ],
    ids=["gradients", "gossip", "local updates"],
)
def test_a_strategy_connects_on_its_models_device(attach, monkeypatch):
    asked = []

    def connect(group, device):
        asked.append(device)
        raise ConnectionError

    monkeypatch.setattr(base, "ProcessGroupCommunicator", connect)
    model = nn.Linear(2, 2)
    with pytest.raises(ConnectionError):
        attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert asked == [model.weight.device]


@pytest.mark.parametrize(
    ("module", "connects"),
    [
        (
            shard_compression,
            lambda device: shard_compression.ShardCompression.connected(mock.Mock(_comm=None), None, device),
        ),
        (
            shards,
            lambda device: shards.Replica._connected_over(
                mock.Mock(_tensors=[("p", torch.ones(1, device=device))]), mock.Mock(ndim=1, size=lambda dim: 2)
            ),
        ),
    ],
    ids=["shards", "replicas of shards"],
)
def test_sharded_models_connect_on_their_device(module, connects, monkeypatch):
    asked = []

    def connect(group, device=None):
        asked.append(device)
        raise ConnectionError

    monkeypatch.setattr(module, "ProcessGroupCommunicator", connect)
    with pytest.raises(ConnectionError):
        connects(torch.device("meta"))
    assert asked == [torch.device("meta")]


class OnGpus(SimpleNamespace):
    """One of two workers whose group sends from GPUs only; "meta" takes their place."""

    size, device, layout = 2, torch.device("meta"), None

    def all_gather(self, tensor):
        assert tensor.device == self.device
        return Handle(lambda: [torch.tensor([self.payload.numel()], device="cpu")] * 2)

    def exchange(self, sends, receives):
        assert all(t.device == self.device for t in (*sends.values(), *receives.values()))
        assert all(t.numel() == self.payload.numel() for t in receives.values())
        return Handle(lambda: {peer: self.payload for peer in receives})


@pytest.mark.parametrize("rank", [0, 1])
def test_the_state_of_all_workers_travels_on_the_communicators_device(rank):
    from thinwire.integrations.state import _pack

    comm = OnGpus(rank=rank, payload=_pack({"rank1": {"memory": torch.ones(3)}}))
    with torch.device("meta"):
        own = {f"rank{rank}": {}}
        strategy = SimpleNamespace(
            comm=comm, models_differ=False, is_detached=False, parameters=[], state_dict=lambda: own
        )
        state = AllWorkersState(strategy, torch.nn.Linear(1, 1), []).state_dict()
    assert state.keys() == ({"rank0", "rank1"} if rank == 0 else {"rank1"})
    if rank == 0:
        assert torch.equal(state["rank1"]["memory"], torch.ones(3))
