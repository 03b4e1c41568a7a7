"""The layout of workers on measured lines: their order, their sites, and who does which part of the work."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Communicator
from .ledger import Ledger


@dataclass(frozen=True)
class Layout:
    """How ranks lie on the lines. All workers hold the same, and compare it when they attach.

    Args:
        order: rank r is what was rank `order[r]` before.
        workers_per_node: how many consecutive ranks stand in one site, each led by its first.
        shares: which part of a `scatter_reduce` each rank owns; empty for equal parts.

    Raises:
        ValueError: an order that is no permutation, sites that do not divide it, or shares that do not add up to 1.

    Example:
        >>> Layout((0, 2, 1)).workers_per_node
        1
    """

    order: tuple[int, ...]
    workers_per_node: int = 1
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.order)
        if sorted(self.order) != list(range(size)):
            raise ValueError(f"Layout: order must have each rank below {size} once, got {self.order}.")
        if self.workers_per_node < 1 or size % self.workers_per_node:
            raise ValueError(f"Layout: workers_per_node={self.workers_per_node} must divide the {size} workers.")
        # Floats add up to 1 only nearly.
        if self.shares and (len(self.shares) != size or min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-6):
            raise ValueError(f"Layout: shares must be {size} numbers that add up to 1, got {self.shares}.")


def laid_out(comm: Communicator, layout: Layout) -> Communicator:
    """The same workers with the ranks of a layout, which `comm.layout` then has. All of them call it.

    If the order changes, it is a new communicator of the same kind, and `comm` is closed. Its ledger is empty.

    Raises:
        ValueError: on all workers, if their layouts differ; a layout of another number of workers; or a communicator whose
            ranks cannot change.
    """
    comm.check_agreement({"layout": layout})
    if len(layout.order) != comm.size:
        raise ValueError(f"rank {comm.rank}: a layout of {len(layout.order)} workers does not suit {comm.size}.")
    if layout.order != tuple(range(comm.size)):
        new = comm.reordered(layout.order)
        comm.close()
        comm = new
    comm.ledger, comm.layout = Ledger(comm.size), layout
    return comm
