"""What thinwire takes from torchft: the Lighthouse, a Manager that heals nobody by itself, and process groups.

torchft is an optional package. All of its names that thinwire uses are in this file.

When to connect anew. torchft's Managers compare the Lighthouse's numbers of quorums. A Lighthouse that restarts counts from
the start again, so an old number can come back: some workers would keep connections that others have closed, or read addresses
that an earlier quorum left in the store. Here workers count for themselves (`Quorums`). Each sends its count where torchft
sends the step, and the Lighthouse tells all of them the largest. A worker that has lost its connections sends one more than
the others, so that all of them see it and connect anew. The largest count also names the place in the store. No count comes
twice there, because the store's owner takes part in all quorums that use it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .connect import own_address

HEARTBEAT_SECONDS = 3.0
"""The Lighthouse leaves out a worker after so long without a heartbeat. torchft sends one every 0.1 seconds."""
CONNECT_SECONDS = 5.0
"""How long workers of a new quorum wait for each other. The limit doubles with each failure in a row."""
_making_a_manager = threading.Lock()


class Lighthouse:
    """The place where workers agree on who takes part. One for a run; workers may come and go. If it ends,
    start it again at the same address.

    Args:
        min_workers: fewer do not form a quorum.
        host: the address at which workers reach it; None for this machine's.
        port: TCP port; 0 takes a free one.
        join_seconds: how long a quorum waits for live workers that have not asked for it, such as slow ones.

    Raises:
        ValueError: torchft is not installed.
    """

    def __init__(self, min_workers: int = 2, host: str | None = None, port: int = 0, join_seconds: float = 60.0):
        host = own_address()[1] if host is None else host
        self._server: Any = _module("torchft.coordination").LighthouseServer(
            bind=f"{host}:{port}",
            min_replicas=min_workers,
            join_timeout_ms=round(1000 * join_seconds),
            quorum_tick_ms=50,
            heartbeat_timeout_ms=round(1000 * HEARTBEAT_SECONDS),
        )
        # torchft gives the machine's name, which need not resolve.
        self.address = f"http://{host}:{self._server.address().rsplit(':', 1)[1]}"

    def close(self) -> None:
        """Stop it."""
        self._server.shutdown()


class torchft:  # noqa: N801  # reads as the package's name
    """The parts of torchft that need a subclass.

    Raises:
        ValueError: torchft is not installed.
    """

    def __init__(self) -> None:
        self._manager, self._groups = _module("torchft.manager"), _module("torchft.process_group")
        self._transport = _module("torchft.checkpointing.transport")

    def reconfigurable_group(
        self, timeout: timedelta, connected: Callable[[], None], on_gpus: Any | None = None
    ) -> Any:
        """A process group over Gloo that calls `connected` whenever it is connected anew.

        A quorum may name a worker that has just died. So the time to connect has a limit of its own, and the workers meet in
        the store first: Gloo would try to reach the dead one for the whole `timeout`.

        Args:
            timeout: how long an operation may take.
            connected: called without arguments.
            on_gpus: a second group that is connected and closed with it; see `nccl_group`. None for none.
        """
        groups = self._groups

        class Group(groups.ProcessGroupGloo):  # type: ignore[name-defined, misc]
            failures = 0

            def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *args: Any) -> None:
                limit = timedelta(seconds=CONNECT_SECONDS * 2**self.failures)
                self.failures = min(self.failures + 1, 3)
                self._timeout = limit
                self.abort(errored=False)
                _meet(groups.create_store_client, store_addr, rank, world_size, limit)
                super().configure(store_addr, replica_id, rank, world_size, *args)
                self._pg._get_backend(torch.device("cpu"))._set_default_timeout(timeout)  # of collective operations
                if on_gpus is not None:
                    on_gpus.configure(f"{store_addr}/gpus", replica_id, rank, world_size, *args)
                self.failures = 0
                connected()

            @property
            def parent(self) -> Any:
                return self._pg

            def errored(self) -> Exception | None:
                return None if on_gpus is None else on_gpus.errored()

        return Group(timeout=timeout)

    def nccl_group(self, timeout: timedelta) -> Any:
        """A process group over NCCL, for tensors on GPUs. Operations end on streams, and `errored` waits for them.

        An operation whose peers are silent for `timeout` ends, and so do all others; see torchft's `ProcessGroupNCCL`.
        """
        groups = self._groups
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(timeout.total_seconds()))
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # else PyTorch ends the process over a dead peer

        class Group(groups.ProcessGroupNCCL):  # type: ignore[name-defined, misc]
            def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Any:
                """Start sends and receives as one operation: they deadlock otherwise."""
                device = next(iter((*sends.values(), *receives.values()))).device
                with self._run_context():
                    self.parent._start_coalescing(device)
                    for peer, tensor in receives.items():
                        self.parent.recv([tensor], peer, 0)
                    for peer, tensor in sends.items():
                        self.parent.send([tensor], peer, 0)
                    return self._wrap_work(self.parent._end_coalescing(device), None)

            def errored(self) -> Exception | None:
                torch.cuda.synchronize()  # operations end on streams of their own
                error: Exception | None = super().errored()
                return error

        return Group(timeout)

    def manager(self, *, store: tuple[str, int], **options: Any) -> tuple[Any, Quorums]:
        """A Manager of one worker, which heals nobody, and what decides when it connects anew."""

        class Nothing(self._transport.CheckpointTransport):  # type: ignore[name-defined, misc]
            def metadata(self) -> str:
                return ""

            def send_checkpoint(self, dst_ranks: Any, step: int, state_dict: Any, timeout: Any) -> None:
                """Nothing to send: `ElasticCommunicator.heal` does."""

            def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: Any) -> dict[str, Any]:
                raise AssertionError("no quorum says that a worker is to be healed")

            def disallow_checkpoint(self) -> None:
                """Nothing to forbid."""

        with _listening_at(store[0], self._manager):
            manager = self._manager.Manager(
                load_state_dict=lambda state: None,
                state_dict=lambda: None,
                use_async_quorum=False,
                rank=0,
                world_size=1,
                store_addr=store[0],
                store_port=store[1],
                hostname=store[0],
                checkpoint_transport=Nothing(),
                **options,
            )
        quorums = manager._client = Quorums(manager._client)
        return manager, quorums


class Quorums:
    """Stands before torchft's client, and decides when the process group is connected anew; see the module's text.

    Args:
        client: torchft's `ManagerClient`.

    Attributes:
        is_partial: whether the last quorum lacks workers because the Lighthouse has restarted, and has not heard of all yet.
            Then its numbers begin again.
    """

    def __init__(self, client: Any):
        self._client = client
        self._count = 0
        self._workers: list[str] = []
        self._is_connected = False
        self._connection = self._number = 0
        self.is_partial = False

    def disconnected(self) -> None:
        """Connections are lost: let the next quorum connect all of its workers anew."""
        self._is_connected = False

    def _quorum(self, **request: Any) -> SimpleNamespace:
        """The next quorum, as `Manager` wants it: `quorum_id` changes when it shall connect anew, and nobody is healed."""
        count = self._count + (not self._is_connected)
        found = self._client._quorum(**request | {"step": count, "init_sync": False})
        self._count = found.max_step + 1
        is_same = found.replica_ids == self._workers
        if found.max_step != count or not is_same or not self._is_connected:
            self._connection = found.max_step
        has_restarted = found.quorum_id < self._number + (not is_same)
        self.is_partial = has_restarted and not set(self._workers) <= set(found.replica_ids)
        self._workers, self._number, self._is_connected = found.replica_ids, found.quorum_id, True
        return SimpleNamespace(
            quorum_id=self._connection,
            replica_ids=found.replica_ids,
            replica_rank=found.replica_rank,
            replica_world_size=found.replica_world_size,
            max_replica_rank=found.replica_rank,
            max_world_size=found.replica_world_size,
            store_address=found.store_address,
            max_step=request["step"],
            recover_src_manager_address="",
            recover_dst_replica_ranks=[],
            heal=False,
        )

    def should_commit(self, *args: Any, **options: Any) -> bool:
        """Torchft's vote within a replica, which is one worker here."""
        return bool(self._client.should_commit(*args, **options))


@contextmanager
def _listening_at(host: str, module: Any) -> Iterator[None]:
    """Context in which the Managers of torchft's module listen at one address; by themselves they listen on all interfaces."""
    with _making_a_manager:
        server = module.ManagerServer
        module.ManagerServer = lambda **options: server(**options | {"bind": f"{host}:0"})
        try:
            yield
        finally:
            module.ManagerServer = server


def _meet(connect: Any, store_address: str, rank: int, size: int, limit: timedelta) -> None:
    """Return when all workers of a quorum are here; raise an error if one is missing at the limit."""
    host, port = store_address.split("/")[0].rsplit(":", 1)
    with socket.create_connection((host.strip("[]"), int(port)), limit.total_seconds()):
        pass  # the store's owner lives
    store: dist.Store = connect(store_address, limit)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{peer}" for peer in range(size)], limit)


def _module(name: str) -> ModuleType:
    os.environ.setdefault("RUST_LOG", "error")
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(
            f"elastic runs need torchft, which cannot be imported ({error}); install the extra: "
            "pip install 'thinwire[elastic]'"
        ) from None
