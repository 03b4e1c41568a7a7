"""A fixed number of workers under attack: it goes on, and ends with the right bits."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.keys import keys_of
from helpers.listeners import Attacker
from helpers.program import programs, wait_until
from helpers.sharded import Net, sharded, train

import thinwire as tw
from thinwire.comm.store import connected_store, listening_store
from thinwire.comm.tcp import TcpCommunicator, is_available

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's list of sockets"),
    pytest.mark.skipif(not is_available(), reason="the extension was not built"),
]
SIZE, ROUNDS = 3, 50
SOON = timedelta(seconds=120)


STRATEGIES = {
    "DDP": "Gradients(Mean(TopK(0.3), ErrorFeedback()))",
    "shards": "Shards()",
    "gossip": "Gossip(Mix(Exponential()), overlap=True)",
    "local": "Local(Mean(), every=2, outer=OuterSGD())",
}


def store_of(rank: int, credentials: tw.Credentials, place: str) -> dist.Store:
    """Where the workers meet."""
    port = Path(place, "port")
    if rank == 0:
        store = listening_store("127.0.0.1", 0, SOON, credentials)
        port.write_text(f"{store.port}\n")
        return store
    wait_until(lambda: port.exists() and port.read_text().endswith("\n"), "a store")
    return connected_store("127.0.0.1", int(port.read_text()), SOON, credentials)


def join_group(rank: int, folder: str, place: str) -> None:
    """Make our connections the default process group."""
    import thinwire.comm.backend  # noqa: F401

    os.environ["THINWIRE_CREDENTIALS"] = folder
    store = store_of(rank, tw.Credentials(folder), place)
    dist.init_process_group("thinwire", store=store, rank=rank, world_size=SIZE, timeout=SOON)


def rounds(rank: int, folder: str, place: str, with_backend: bool) -> None:
    """Print a line before the rounds, and at the end a digest of all sums."""
    if with_backend:
        join_group(rank, folder, place)
        add = dist.all_reduce
    else:
        credentials = tw.Credentials(folder)
        store = store_of(rank, credentials, place)
        comm = TcpCommunicator.from_store(store, rank, SIZE, timeout_seconds=100.0, credentials=credentials)
        add = lambda x: comm.all_reduce(x).wait()  # noqa: E731
    print("connected", flush=True)
    wait_until(lambda: Path(place, "go").exists(), "the attack")
    total = hashlib.sha256()
    for number in range(ROUNDS):
        x = term(number, rank)
        add(x)
        total.update(x.numpy().tobytes())
    print(total.hexdigest(), flush=True)
    if with_backend:
        dist.destroy_process_group()
    else:
        comm.close()


def term(number: int, rank: int) -> torch.Tensor:
    return torch.randn(20_000, generator=torch.Generator().manual_seed(10 * number + rank))


@pytest.mark.parametrize("with_backend", [False, True])
def test_its_listeners_answer_no_others(with_backend, tmp_path):
    credentials = keys_of(tmp_path / "ours", "a", "b", "c")
    attacker = Attacker(keys_of(tmp_path / "theirs", "a")[0])
    expected = hashlib.sha256()
    for number in range(ROUNDS):
        first, second, third = (term(number, rank) for rank in range(SIZE))
        expected.update((first + second + third).numpy().tobytes())
    (tmp_path / "place").mkdir()
    arguments = [(rank, credentials[rank].folder, str(tmp_path / "place"), with_backend) for rank in range(SIZE)]
    with programs(rounds, arguments, tmp_path) as started:
        for program in started:
            program.wait_for_line("connected")
        attacker.attack(program.pid for program in started)
        (tmp_path / "place" / "go").touch()
        while any(program.returncode is None for program in started):
            attacker.attack(program.pid for program in started)
            time.sleep(0.05)  # the cores are the workers'
        assert [program.wait(400) for program in started] == [0] * SIZE, [program.stderr for program in started]
        assert {program.stdout.split()[-1] for program in started} == {expected.hexdigest()}
    assert len(attacker.ports) >= 1 + SIZE  # the store, and each worker's
    attacker.check()


def strategies(rank: int, folder: str, place: str) -> None:
    """Train with one strategy after the other; print its name when all are connected, then a digest of the mean model."""
    join_group(rank, folder, place)
    for name, strategy in STRATEGIES.items():
        torch.manual_seed(0)
        model = sharded(dist.init_device_mesh("cpu", (SIZE,))) if name == "shards" else Net()
        trained = torch.nn.parallel.DistributedDataParallel(model) if name == "DDP" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = tw.attach(trained, optimizer, strategy)
        train(trained, rank, steps=3, optimizer=optimizer)
        print(name, flush=True)
        wait_until(lambda name=name: Path(place, name).exists(), "the attack")
        train(trained, rank, steps=3, optimizer=optimizer)
        with handle.average_model() if name in ("gossip", "local") else contextlib.nullcontext():
            found = [p.full_tensor() if name == "shards" else p for p in model.parameters()]
            digest = hashlib.sha256(torch.cat([p.detach().flatten() for p in found]).numpy().tobytes())
        print(digest.hexdigest(), flush=True)
        handle.detach()
    dist.destroy_process_group()


def lives(folder: Path, credentials: list[tw.Credentials], attacker: Attacker | None) -> list[str]:
    """The digests of a run of all strategies."""
    (folder / "place").mkdir(parents=True)
    arguments = [(rank, credentials[rank].folder, str(folder / "place")) for rank in range(SIZE)]
    with programs(strategies, arguments, folder) as started:
        for name in STRATEGIES:
            for program in started:
                program.wait_for_line(name)
            if attacker:
                before = len(attacker.ports)
                attacker.attack(program.pid for program in started)
                assert len(attacker.ports) > before, f"nothing listens for {name}"
            (folder / "place" / name).touch()
        assert [program.wait(400) for program in started] == [0] * SIZE, [program.stderr for program in started]
        said = [program.stdout for program in started]
    assert len(set(said)) == 1
    return said[0].split()[1::2]


def test_no_listener_of_any_strategy_answers_others(tmp_path):
    """And all strategies end with the bits of a run that nobody has disturbed."""
    credentials = keys_of(tmp_path / "ours", "a", "b", "c")
    attacker = Attacker(keys_of(tmp_path / "theirs", "a")[0])
    under_attack = lives(tmp_path / "attacked", credentials, attacker)
    attacker.check()
    assert under_attack == lives(tmp_path / "undisturbed", credentials, None)
    assert len(under_attack) == len(STRATEGIES)
