"""What thinwire takes from torchft: the Lighthouse, a Manager that heals nobody by itself, and process groups.

torchft is an optional package. All of its names that thinwire uses are in this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from types import ModuleType
from typing import Any

from .connect import own_address

HEARTBEAT_SECONDS = 3.0
"""The Lighthouse leaves out a worker after so long without a heartbeat. torchft sends one every 0.1 seconds."""


class Lighthouse:
    """The place where workers agree on who takes part. One for a run; workers may come and go, and it must stay.

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

    def reconfigurable_group(self, timeout: timedelta, connected: Callable[[], None]) -> Any:
        """A process group over Gloo that calls `connected` whenever it is connected anew."""

        class Group(self._groups.ProcessGroupGloo):  # type: ignore[name-defined, misc]
            def configure(self, *args: Any, **kwargs: Any) -> None:
                super().configure(*args, **kwargs)
                connected()

            @property
            def parent(self) -> Any:
                return self._pg

        return Group(timeout=timeout)

    def manager(self, *, store: tuple[str, int], **options: Any) -> Any:
        """A Manager of one worker. It agrees on quorums and counts rounds; its healing moves nothing."""

        class Nothing(self._transport.CheckpointTransport):  # type: ignore[name-defined, misc]
            def metadata(self) -> str:
                return ""

            def send_checkpoint(self, dst_ranks: Any, step: int, state_dict: Any, timeout: Any) -> None:
                """Nothing to send: `ElasticCommunicator.heal` does."""

            def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: Any) -> dict[str, Any]:
                return {"user": {"default": None}, "torchft": {"step": step, "batches_committed": 0}}

            def disallow_checkpoint(self) -> None:
                """Nothing to forbid."""

        return self._manager.Manager(
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


def _module(name: str) -> ModuleType:
    os.environ.setdefault("RUST_LOG", "error")
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(
            f"elastic runs need torchft, which cannot be imported ({error}); install the extra: "
            "pip install 'thinwire[elastic]'"
        ) from None
