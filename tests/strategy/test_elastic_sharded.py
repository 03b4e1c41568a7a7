"""Elastic rounds of sharded models: a worker of several processes, which comes and goes as one."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch
from helpers.elastic import serve
from helpers.keys import keys_of
from helpers.program import Program, wait_until
from helpers.sharded import fingerprint, sharded
from helpers.sharded_elastic import attach, process, step
from helpers.spawn import device_mesh, spawn
from torch import nn

import thinwire as tw
from thinwire.comm import ElasticCommunicator, Lighthouse
from thinwire.comm.elastic.state_bytes import packed, unpacked

LOCAL = "Local(Mean(chain(TopK(0.2), QSGD(bits=4)), ErrorFeedback()), every=2, outer=OuterSGD())"
STRATEGIES = [
    LOCAL,
    "Local(Mean(QSGD(bits=4)), every=4, fragments=2, delay=1, alpha=0.5, outer=OuterSGD())",
    "Gradients(Mean(chain(TopK(0.2), QSGD(bits=4)), ErrorFeedback()))",
    "Gossip(Mix(Ring()))",
]


def undisturbed_worker(comm, strategies):
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    mesh = device_mesh(2, 2)
    number, differing = comm.rank // 2, []
    for strategy in strategies:
        lighthouse = Lighthouse(2, "127.0.0.1") if comm.rank == 0 else None
        address = next(filter(None, comm.gather_objects(lighthouse and lighthouse.address)))
        found = []
        for options in ({"replicas": mesh["replicate"]}, {"comm": None}):
            if "comm" in options:
                options["comm"] = ElasticCommunicator(address, number, timeout_seconds=60, replica=mesh["shard"])
            model = sharded(mesh["shard"], seed=number)
            optimizer, handle = attach(model, strategy, **options)
            for taken in range(7):
                step(model, optimizer, comm.rank, taken)
            handle.settle()
            model.reshard()
            found.append(fingerprint(model))
            comm.barrier()
            handle.detach()
            if options.get("comm"):
                options["comm"].close()
        differing += [strategy] if found[0] != found[1] else []
        comm.barrier()
        if lighthouse is not None:
            lighthouse.close()
    return differing


def test_undisturbed_rounds_of_shards_are_those_of_a_fixed_number_of_workers_bit_for_bit():
    assert spawn(4, undisturbed_worker, STRATEGIES, timeout_seconds=600, comm_timeout_seconds=300) == [[]] * 4


def test_a_process_dies_its_worker_leaves_and_comes_back_as_one(tmp_path, monkeypatch):
    """The other worker loses no round. The one that comes back is healed, and both end with the same shards."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place = Program(serve, 0, 1, folder=tmp_path)
    wait_until(lambda: place.stdout.endswith("\n"), "a Lighthouse")
    address = f"http://127.0.0.1:{int(place.stdout)}"

    def start(number, name, dies_after=None):
        (tmp_path / name).mkdir()
        deaths = (None, dies_after)  # that of process 1
        arguments = [(address, number, rank, str(tmp_path / name), LOCAL, deaths[rank], 6) for rank in range(2)]
        return [Program(process, *one, folder=tmp_path) for one in arguments]

    others, (left, killed) = start(0, "stays"), start(1, "dies", 3)
    assert killed.wait(400) == -signal.SIGKILL and left.wait(400) == 1, left.stderr
    others[0].wait_until(lambda: '"size": 1,' in others[0].stdout.splitlines()[-1], "a round of the one that is left")
    others += start(1, "returns")
    for program in others:
        program.wait_for_line("done")
    rows = [[json.loads(line) for line in program.stdout.splitlines()[:-1]] for program in others]
    for mine in rows[:2]:
        assert [row["round"] for row in mine] == list(range(1, len(mine) + 1))  # each once
        assert mine[-1]["healings"] == 0
    assert [mine[-1]["healings"] for mine in rows[2:]] == [1, 1]
    last = [(mine[-1]["round"], mine[-1]["model"]) for mine in rows]
    assert last[0] == last[2] and last[1] == last[3] and last[0] != last[1]
    for program in (*others, place):
        program.kill()


def test_three_workers_over_tls_outlive_a_process_and_go_on_from_checkpoints_on_disks_of_their_own(
    tmp_path, monkeypatch
):
    """A process of worker 1 is killed, and the worker comes back. Then all are killed, and worker 2 loses its disk."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    keys = str(keys_of(tmp_path / "keys", "machine")[0].folder)

    def serve_at_least(workers):
        place = Program(serve, 0, workers, keys, folder=tmp_path)
        wait_until(lambda: place.stdout.endswith("\n"), "a Lighthouse")
        return place, f"https://127.0.0.1:{int(place.stdout)}"

    place, address = serve_at_least(2)

    def start(number, together, dies_after=None):
        (tmp_path / f"{number}").mkdir(exist_ok=True)
        (tmp_path / f"{number}/store").unlink(missing_ok=True)
        deaths = (None, dies_after)  # that of process 1
        folder = str(tmp_path / f"{number}")
        arguments = [(address, number, rank, folder, LOCAL, deaths[rank], together, 3, keys) for rank in range(2)]
        return [Program(process, *one, folder=tmp_path) for one in arguments]

    def rows_of(program):
        return [json.loads(line) for line in program.stdout.splitlines()[:-1]]

    stay, (left, killed) = [*start(0, 4), *start(2, 4)], start(1, 4, 3)
    assert killed.wait(300) == -signal.SIGKILL and left.wait(300) == 1
    workers = [*stay[:2], *start(1, 4), *stay[2:]]
    for program in workers:
        program.wait_for_line("done")
    first = [rows_of(program) for program in workers]
    assert [rows[-1]["healings"] for rows in first] == [0, 0, 1, 1, 0, 0]
    for rows in (*first[:2], *first[4:]):
        assert [row["round"] for row in rows] == list(range(1, len(rows) + 1))  # each once
    last = first[0][-1]["round"]
    for program in (*workers, place):
        program.kill()
    shutil.rmtree(tmp_path / "2")

    place, address = serve_at_least(3)  # so that none of them comes a round late
    workers = [program for number in range(3) for program in start(number, 2)]
    for program in workers:
        program.wait_for_line("done")
    then = [rows_of(program) for program in workers]
    assert [rows[0]["round"] for rows in then] == [last + 1] * 6
    assert [rows[-1]["healings"] for rows in then] == [0, 0, 0, 0, 1, 1]
    for found in (first, then):
        shards = [[rows[-1]["model"] for rows in found[rank::2]] for rank in range(2)]
        assert [len(set(shard)) for shard in shards] == [1, 1] and shards[0] != shards[1]
    for program in (*workers, place):
        program.kill()


def communicator_worker(comm):
    mesh = device_mesh(2)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    lighthouse = Lighthouse(1, "127.0.0.1")
    model = sharded(mesh)
    with pytest.raises(ValueError, match=r"the 2 processes of `replica` are one worker, and have the numbers \[0, 1\]"):
        ElasticCommunicator(lighthouse.address, comm.rank, 1, replica=mesh)
    own = ElasticCommunicator(lighthouse.address, 0, 1, replica=mesh)
    whole = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"replica=.* says that the model is sharded, and it is whole"):
        tw.compress_gradients(whole, tw.Mean(), comm=own)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, comm.rank, 0)
    state = optimizer.state_dict()
    read = unpacked(packed(state), mesh)
    for number, kept in state["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            mine, theirs = kept[name], read["state"][number][name]
            assert (
                mine.placements == theirs.placements and mine.shape == theirs.shape and mine.stride() == theirs.stride()
            )
            assert torch.equal(mine.to_local(), theirs.to_local()) and theirs.device_mesh == mesh
    optimizer.load_state_dict(read)
    step(model, optimizer, comm.rank, 1)
    with pytest.raises(ValueError, match="it has a shard, and this worker's model is whole"):
        unpacked(packed(state))
    comm.barrier()
    own.close(), lighthouse.close()


def test_the_shards_of_a_state_travel_and_a_model_that_does_not_suit_the_communicator_is_refused():
    spawn(2, communicator_worker)
