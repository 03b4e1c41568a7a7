"""An error that one worker finds before it meets the others: they get it too, in place of waiting for that worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from ..comm import Communicator, ProcessGroupCommunicator
from ..comm.process_group import num_ranks
from ..messages import error_text
from .model.ddp import wrapped_ddp
from .strategy import Runtime

if TYPE_CHECKING:
    from .base import AveragerAttachment

A = TypeVar("A", bound="AveragerAttachment")

TELL_SECONDS = 60.0  # for the other workers to come, where they connect first


def attach_together(model: nn.Module, runtime: Runtime, make: Callable[[], A]) -> A:
    """Set what `make` returns to work, and return it. An error of `make` on one worker is raised on all of them, with its rank.

    A strategy of your own calls it in `_attached`; docs/guide/add-a-strategy.md has an example.

    Args:
        model: the model, which may be in DDP: its process group then says who the workers are.
        runtime: what `_attached` got.
        make: makes the attachment, and checks what one worker can check alone. Its `attach()` is called next.
    """
    ddp = wrapped_ddp(model)
    with told_to_others(runtime.comm, runtime.replicas if ddp is None else ddp.process_group):
        made = make()
    made.attach()
    return made


@contextmanager
def told_to_others(comm: Communicator | None, group: Any) -> Iterator[None]:
    """Context in whose place the other workers compare options: an error in it is raised there too, with this worker's rank.

    Workers of an elastic run go on without this one.

    Args:
        comm: connects the workers; None where they are about to connect.
        group: then, which workers; None for all.
    """
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # others may have failed too
            _tell(error_text(error), comm, group)
        raise


def _tell(text: str, comm: Communicator | None, group: Any) -> None:
    if comm is not None and not comm.is_elastic:
        comm.tell_failure(text)
    elif comm is None and num_ranks(group) > 1:
        with ProcessGroupCommunicator(group, TELL_SECONDS) as made:
            made.tell_failure(text)
