"""The conformance suite of communicators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..comm import Communicator


def check_communicator(run: Callable[[Callable[[Communicator], Any]], Any]) -> None:
    """Check that a communicator fulfils the contract of `thinwire.comm.base`: the result of each operation on each worker.

    Args:
        run: runs a function of the communicator on every worker, such as `LocalWorld(3).run`.

    Raises:
        AssertionError: an operation has a wrong result.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import check_communicator
        >>> check_communicator(tw.LocalWorld(3).run)
    """
    for operation in (_all_reduce, _all_gather, _all_to_all, _broadcast, _exchange):
        run(operation)


def _all_reduce(comm: Communicator) -> None:
    total = comm.all_reduce(torch.full((5,), float(comm.rank + 1), device="cpu")).wait()
    assert torch.equal(total, torch.full((5,), comm.size * (comm.size + 1) / 2, device="cpu")), (
        f"all_reduce gave {total}"
    )


def _all_gather(comm: Communicator) -> None:
    parts = comm.all_gather(torch.full((4,), comm.rank, dtype=torch.uint8, device="cpu")).wait()
    assert [part.tolist() for part in parts] == [[rank] * 4 for rank in range(comm.size)], f"all_gather gave {parts}"
    own = torch.full((comm.rank + 1,), comm.rank, dtype=torch.uint8, device="cpu")
    parts = comm.all_gather(own, variable=True).wait()
    assert [part.tolist() for part in parts] == [[r] * (r + 1) for r in range(comm.size)], f"all_gather gave {parts}"


def _all_to_all(comm: Communicator) -> None:
    messages = [torch.tensor([comm.rank, peer], dtype=torch.uint8, device="cpu") for peer in range(comm.size)]
    received = comm.all_to_all(messages, [2] * comm.size).wait()
    assert [m.tolist() for m in received] == [[r, comm.rank] for r in range(comm.size)], f"all_to_all gave {received}"


def _broadcast(comm: Communicator) -> None:
    value = comm.broadcast(torch.full((3,), float(comm.rank + 7), device="cpu")).wait()
    assert value.tolist() == [7.0] * 3, f"broadcast gave {value}"


def _exchange(comm: Communicator) -> None:
    if comm.size == 1:
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = comm.exchange(
        {after: torch.tensor([comm.rank], device="cpu")}, {before: torch.tensor([-1], device="cpu")}
    ).wait()
    assert {peer: t.item() for peer, t in received.items()} == {before: before}, f"exchange gave {received}"
