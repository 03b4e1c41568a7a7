"""What a worker does in one round: the real averager runs on tensors without values, and its operations are noted.

A *program* lists the actions of one worker in one call of `Averager.step`, then those of `wait`:

    Work(part, numel)         encode or decode so many float32 elements
    Messages(sends, receives) one `exchange`, `all_to_all` or `all_gather`: bytes by peer
    Ring(num_bytes)           one `all_reduce`
    Wait(operation)           wait until that operation of the program is done

Tensors lie on PyTorch's meta device, so a model of any size costs no memory. A codec is replaced by a stand-in that has
its `nbytes` and makes payloads of that size. A payload of variable size counts with its upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..algorithm import require
from ..average import Averager, Choco, Mean, PowerGossip, PowerSGD
from ..average.base import NamedTensors
from ..codec import Codec
from ..comm import Communicator, Ledger
from ..comm.base import Start
from ..comm.channel import Channel
from ..schedule import Progress, resolve

_LATE = Progress(step=10**9, epoch=10**9)  # after every warm-up


@dataclass(frozen=True)
class Work:
    """Encoding or decoding of `numel` float32 elements."""

    part: str
    numel: int


@dataclass(frozen=True)
class Messages:
    """One operation of single messages, in the order in which they are sent; bytes by peer."""

    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Ring:
    """An all-reduce of `num_bytes`."""

    num_bytes: int


@dataclass(frozen=True)
class Wait:
    """Wait for the operation of this number, counted from 0 in the program."""

    operation: int


Action = Work | Messages | Ring | Wait


@dataclass(frozen=True)
class Program:
    """What one worker does in one call of `step`, and then of `wait`; and the ledger of both."""

    step: tuple[Action, ...]
    wait: tuple[Action, ...]
    ledger: Ledger
    sends_at_once: bool


def record(
    averager: Averager, shapes: Sequence[torch.Size], rank: int, size: int, workers_per_node: int = 1
) -> Program:
    """The program of worker `rank` of `size` for one call of `step` with tensors of these shapes.

    Raises:
        ValueError: an averager whose messages depend on values, such as a codec that needs an agreement.
    """
    actions: list[Action] = []
    comm = Recorder(rank, size, actions)
    averager = sized(averager, actions, workers_per_node)
    tensors: NamedTensors = [(f"t{i}", torch.empty(shape, device="meta")) for i, shape in enumerate(shapes)]
    state = averager.init(tensors, comm)
    actions.clear()
    before, comm.operations = comm.ledger.snapshot(), 0
    numel = sum(t.numel() for _, t in tensors)
    handle = averager.step(state, tensors, comm)
    begin = list(actions)
    handle.wait()
    rest = actions[len(begin) :]
    if not any(isinstance(action, Work) for action in actions) and _multiplies(averager):
        begin, rest = [Work("encode", numel), *begin], [*rest, Work("decode", numel)]
    return Program(_merged(begin), _merged(rest), comm.ledger.since(before), averager.sends_at_once(state))


def _merged(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The same actions, with neighbouring pieces of equal work as one."""
    merged: list[Action] = []
    for action in actions:
        last = merged[-1] if merged else None
        if isinstance(action, Work) and isinstance(last, Work) and last.part == action.part:
            merged[-1] = Work(action.part, last.numel + action.numel)
        else:
            merged.append(action)
    return tuple(merged)


def _multiplies(averager: Averager) -> bool:
    """Whether it compresses without a codec, by matrix products."""
    return isinstance(averager, PowerSGD | PowerGossip)


def sized(averager: Averager, actions: list[Action], workers_per_node: int) -> Averager:
    """The averager after all warm-ups, without memory, its codec replaced by one that knows sizes only."""
    late: Averager = resolve(averager, _LATE)
    if isinstance(late, Mean):
        exchange, nodes = late.exchange, None
        if exchange in ("auto", "hierarchical"):
            nodes = workers_per_node
        return replace(
            late,
            codec=SizedCodec(late.codec, actions),
            memory=None,
            clip=None,
            min_ndim=0 if late.codec.sends_floats else late.min_ndim,
            workers_per_node=nodes,
        )
    if isinstance(late, PowerSGD):
        return replace(late, memory=None)
    if isinstance(late, Choco):
        return replace(late, codec=SizedCodec(late.codec, actions))
    return late


@dataclass(frozen=True, repr=False)
class SizedCodec(Codec):
    """Has the sizes of another codec, and notes encoding and decoding in `actions` instead of doing them."""

    codec: Codec
    actions: list[Action] = field(compare=False)

    def __post_init__(self) -> None:
        require(
            not self.codec.needs_shape and self.codec.agreement is None and self.codec.adaptive_part is None,
            f"a plan cannot predict {self.codec}: what it sends depends on values or shapes",
        )

    def __repr__(self) -> str:
        return repr(self.codec)

    @property
    def unbiased(self) -> bool:
        return self.codec.unbiased

    @property
    def sum_dtype(self) -> torch.dtype | None:
        return self.codec.sum_dtype

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        numels = [s.numel() for s in segments]
        self._note("encode", sum(numels))
        return torch.empty(self.segments_nbytes(numels), dtype=torch.uint8, device="meta")

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        self._note("decode", sum(out.numel() for out in outs))

    def segments_nbytes(self, sizes: list[Any]) -> int:
        return self.codec.nbytes(sizes)

    def _note(self, part: str, numel: int) -> None:
        if not self.codec.sends_floats:  # others copy no more than the network library does
            self.actions.append(Work(part, numel))


class Recorder(Communicator):
    """Worker `rank` of `size`, alone: sends nothing and notes each operation in `actions`."""

    def __init__(self, rank: int, size: int, actions: list[Action]):
        super().__init__(rank, size)
        self.operations = 0
        self._actions = actions

    def close(self) -> None:
        self._closed = True

    def _issue(self, tensors: list[Tensor], start: Start) -> Callable[[], Any]:
        return start()

    def _note(self, operation: Messages | Ring) -> Callable[[], Any]:
        number = self.operations
        self.operations += 1
        self._actions.append(operation)
        return lambda: self._actions.append(Wait(number))

    def _start_all_reduce(self, tensor: Tensor) -> Callable[[], Any]:
        return self._note(Ring(tensor.numel() * tensor.element_size()))

    def _start_all_gather(self, gathered: list[Tensor]) -> Callable[[], Any]:
        own = gathered[self.rank]
        for part in gathered:
            if part is not own and not part.is_meta:  # configurations: all workers have the same
                part.copy_(own)
        return self._gather_by_exchange(gathered)

    def _start_gather_variable(self, tensor: Tensor, result: list[Tensor]) -> Callable[[], Any]:
        result += [tensor] + [torch.empty_like(tensor) for _ in range(self.size - 1)]
        num_bytes = 8 + tensor.numel() * tensor.element_size()
        messages = tuple((peer, num_bytes) for peer in self._others(result))
        return self._note(Messages(messages, messages))

    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], Any]:
        sizes = [tuple((peer, t.numel()) for peer, t in side.items()) for side in (sends, receives)]
        return self._note(Messages(sizes[0], sizes[1]))

    def _start_broadcast(self, tensor: Tensor, root: int) -> Callable[[], Any]:
        raise NotImplementedError("no averager broadcasts in a round, but for adaptive codecs")

    def _open_channel(self, peers: list[int]) -> Channel:
        raise NotImplementedError("asynchronous averaging has no rounds to record")
