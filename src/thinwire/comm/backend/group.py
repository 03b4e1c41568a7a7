"""The collectives of `torch.distributed` on our connections.

PyTorch calls the methods of a process group by the names and arguments of its C++ class. In Python, only that class as a whole
can be replaced, and not the part of it that serves one kind of device. So tensors on a GPU go back to the C++ class, with NCCL
behind it where the group was made with "cuda:nccl".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..handle import Handle, nothing
from ..tcp import TcpCommunicator
from ..tls.credentials import Credentials
from .reductions import name_of, reduction_of
from .work import Limit, ThinwireWork, finished_after

CPU = torch.device("cpu")


def _in_main_memory(
    method: Callable[..., ThinwireWork],
) -> Any:  # of any type, for PyTorch's have more ways to call them
    """Tensors elsewhere go to the C++ class, under the same name."""

    @wraps(method)
    def dispatched(self: ThinwireGroup, *args: Any, **named: Any) -> Any:
        device = _device([*args, *named.values()])
        if device.type == "cpu":
            with torch.no_grad():
                return method(self, *args, **named)
        self._connect_device(device)
        return getattr(dist.ProcessGroup, method.__name__)(self, *args, **named)

    return torch.compiler.disable(dispatched)  # Dynamo would trace what a compiled model in DDP calls


class ThinwireGroup(dist.ProcessGroup):
    """A process group of `init_process_group("thinwire")`; all of its ranks make it together.

    Its connections are those of `communicator`, whose ledger counts the bytes. They are encrypted if THINWIRE_CREDENTIALS names
    this rank's folder; then the store should be an `OwnStore`. The variables THINWIRE_NO_LISTEN=1 and THINWIRE_RELAY=HOST:PORT
    are for ranks that can only dial out.

    Args:
        store: where its ranks meet.
        rank, size: this rank in the group, and the number of ranks.
        timeout: how long an operation may wait without getting a byte from a rank, and how long a line may be cut.

    Raises:
        ValueError: the extension was not built, or the credentials cannot be used.
        CommunicationError: a rank could not be reached.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)  # type: ignore[call-arg]  # a Python class gets no store; PyTorch's types lack this
        self._store, self._name, self._description = store, "", ""
        self._limit: Limit = None
        self.timeout = timeout
        self.communicator = TcpCommunicator.from_store(
            store,
            rank,
            size,
            timeout_seconds=timeout.total_seconds(),
            credentials=Credentials.from_environment(),
            listens=os.environ.get("THINWIRE_NO_LISTEN", "0") in ("", "0"),
            relay=os.environ.get("THINWIRE_RELAY") or None,
        )
        self._register_backend(CPU, dist.ProcessGroup.BackendType.CUSTOM, None)  # so that PyTorch lists the device

    # ---- to and from all ----

    @_in_main_memory
    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> ThinwireWork:
        """x <- x_0 op x_1 op ..., on every rank."""
        tensors = _listed(tensors)
        return self._work("all_reduce", opts, [self._reduced(x, opts) for x in tensors], tensors)

    allreduce_coalesced = allreduce

    @_in_main_memory
    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> ThinwireWork:
        """x <- x of the root."""
        tensors, start = _listed(tensors), partial(self.communicator.broadcast, root=_root(opts))
        handles = [self._in_place(x, start) for x in tensors]
        return self._work("broadcast", opts, handles, tensors)

    @_in_main_memory
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> ThinwireWork:
        """x <- x_0 op x_1 op ..., on the root."""
        handles = [self._reduced(x, opts, _root(opts)) for x in tensors]
        return self._work("reduce", opts, handles, tensors)

    @_in_main_memory
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ThinwireWork:
        """outputs[r] <- the input of rank r."""
        handles = [self._exchange([x] * self.size(), out) for x, out in zip(inputs, outputs, strict=True)]
        return self._work("all_gather", opts, handles, [y for out in outputs for y in out])

    @_in_main_memory
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ThinwireWork:
        """outputs[r][i] <- input i of rank r."""
        work: ThinwireWork = self.allgather([list(out) for out in zip(*outputs, strict=True)], inputs, opts)
        return work

    @_in_main_memory
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ThinwireWork:
        """output <- the inputs of all ranks, one behind the other."""
        return self._work("all_gather", opts, [self._gathered(output, input)], [output])

    @_in_main_memory
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ThinwireWork:
        """The same, for several at once."""
        handles = [self._gathered(output, x) for output, x in zip(outputs, inputs, strict=True)]
        return self._work("all_gather", opts, handles, outputs)

    @_in_main_memory
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> ThinwireWork:
        """output <- input[rank] of rank 0 op that of rank 1 op ..."""
        handles = [self._scattered(output, parts, opts) for output, parts in zip(outputs, inputs, strict=True)]
        return self._work("reduce_scatter", opts, handles, outputs)

    @_in_main_memory
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ThinwireWork:
        """The same, of a tensor that holds the parts one behind the other."""
        return self._work("reduce_scatter", opts, [self._scattered(output, self._parts(input, output), opts)], [output])

    @_in_main_memory
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ThinwireWork:
        """The same, for several at once."""
        pairs = zip(outputs, inputs, strict=True)
        handles = [self._scattered(output, self._parts(x, output), opts) for output, x in pairs]
        return self._work("reduce_scatter", opts, handles, outputs)

    @_in_main_memory
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ThinwireWork:
        """outputs[r] <- input[rank] of rank r."""
        return self._work("all_to_all", opts, [self._exchange(inputs, outputs)], outputs)

    @_in_main_memory
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> ThinwireWork:
        """The same, of tensors that hold the parts one behind the other, in rows; without sizes, in equal parts."""
        whole, finish = _landing(output)
        handle = self._exchange(_rows(input, input_splits, self.size()), _rows(whole, output_splits, self.size()))
        return self._work("all_to_all", opts, [finished_after([handle], finish)], [output])

    @_in_main_memory
    def barrier(self, opts: Any = None) -> ThinwireWork:
        """Done when every rank has called it."""
        return self._work("barrier", opts, [self.communicator.start_barrier()], [])

    # ---- to and from one ----

    @_in_main_memory
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ThinwireWork:
        """On the root: outputs[r] <- the input of rank r."""
        sends = _only(_root(opts), inputs[0], self.size())
        receives: Sequence[Tensor | None] = outputs[0] if self.rank() == _root(opts) else [None] * self.size()
        return self._work("gather", opts, [self._exchange(sends, receives)], [y for out in outputs for y in out])

    @_in_main_memory
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> ThinwireWork:
        """output <- input[rank] of the root."""
        sends: Sequence[Tensor | None] = inputs[0] if self.rank() == _root(opts) else [None] * self.size()
        receives = _only(_root(opts), outputs[0], self.size())
        return self._work("scatter", opts, [self._exchange(sends, receives)], outputs)

    @_in_main_memory
    def send(self, tensors: list[Tensor], peer: int, tag: int) -> ThinwireWork:
        """To a rank of the group."""
        handle = self.communicator.send(tensors[0].detach().contiguous(), peer, tag)
        return self._work("send", None, [handle], tensors)

    @_in_main_memory
    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> ThinwireWork:
        """From a rank of the group."""
        return self._receive(tensors, peer, tag)

    @_in_main_memory
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> ThinwireWork:
        """From the rank that sends first."""
        return self._receive(tensors, None, tag)

    # ---- its life ----

    def getBackendName(self) -> str:
        """For PyTorch's messages."""
        return "thinwire"

    def getGroupName(self) -> str:
        """By which PyTorch finds the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Called by PyTorch."""
        self._name = name

    def getGroupDesc(self) -> str:
        """What the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Called by PyTorch."""
        self._description = description

    def get_group_store(self) -> dist.Store:
        """Where the ranks met."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """How long to wait for a collective from now on."""
        self._limit = timeout

    def shutdown(self) -> None:
        """Close the connections, after all that was sent has arrived."""
        self.communicator.close()

    def abort(self) -> None:
        """Fail all collectives under way, and close the connections."""
        self.communicator.abort()

    # ---- shared by the collectives ----

    def _work(self, name: str, opts: Any, handles: list[Handle], results: list[Tensor]) -> ThinwireWork:
        given: Limit = getattr(opts, "timeout", None)
        # PyTorch's options hold a negative time where no limit was given.
        limit = given if given is not None and given > timedelta(0) else self._limit
        return ThinwireWork(name, finished_after(handles), results, limit)

    def _in_place(self, tensor: Tensor, start: Callable[[Tensor], Handle]) -> Handle:
        """Start an operation on the tensor, or on a contiguous copy, which comes back in the end."""
        whole, finish = _landing(tensor, copied=True)
        return finished_after([start(whole)], finish)

    def _reduced(self, tensor: Tensor, opts: Any, root: int | None = None) -> Handle:
        if tensor.is_sparse and root is None:
            return self._summed_sparse(tensor, opts)
        reduction = reduction_of(_operation(opts), tensor.dtype)
        return self._in_place(tensor, lambda x: self.communicator.reduce(x, reduction, root))

    def _summed_sparse(self, tensor: Tensor, opts: Any) -> Handle:
        """All ranks get all parts of all, and add them in rank order."""
        if (op := _operation(opts)) != dist.ReduceOp.SUM:
            raise ValueError(f"ReduceOp.{name_of(op)} is not defined for sparse tensors; sum them, or convert them")
        own, dims = tensor.detach().coalesce(), (tensor.sparse_dim(), *tensor.shape[tensor.sparse_dim() :])
        parts = [own.indices().contiguous().view(-1), own.values().contiguous().view(-1)]
        handles = [self.communicator.all_gather(part, variable=True) for part in parts]

        def finish() -> None:
            indices, values = (handle.wait() for handle in handles)
            terms = [
                torch.sparse_coo_tensor(i.view(dims[0], -1), v.view(-1, *dims[1:]), tensor.shape)
                for i, v in zip(indices, values, strict=True)
            ]
            with torch.no_grad():
                tensor.copy_(sum(terms[1:], terms[0]).coalesce())

        return Handle(finish)

    def _gathered(self, output: Tensor, tensor: Tensor) -> Handle:
        whole, finish = _landing(output)
        handle = self._exchange([tensor] * self.size(), self._parts(whole, tensor))
        return finished_after([handle], finish)

    def _parts(self, whole: Tensor, part: Tensor) -> list[Tensor]:
        """The parts of a tensor that holds one for each rank."""
        if whole.numel() != self.size() * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"rank {self.rank()}: expected {self.size()} times the {part.numel()} elements of {part.dtype}, got "
                f"{whole.numel()} of {whole.dtype}"
            )
        return list(whole.detach().contiguous().view(-1).tensor_split(self.size()))

    def _scattered(self, output: Tensor, parts: list[Tensor], opts: Any) -> Handle:
        whole, finish = _landing(output)
        reduction, parts = reduction_of(_operation(opts), output.dtype), [part.detach().contiguous() for part in parts]
        return finished_after([self.communicator.reduce_scatter(parts, whole, reduction)], finish)

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Handle:
        """Send a tensor to each rank, and receive one from each; the own one is copied."""
        rank, size = self.rank(), self.size()
        if len(sends) != size or len(receives) != size:
            raise ValueError(
                f"rank {rank}: expected a tensor for each of {size} ranks, got {len(sends)} to send and {len(receives)} to "
                "receive into"
            )
        own, into = sends[rank], receives[rank]
        if own is not None and into is not None:
            if own.numel() != into.numel():
                raise ValueError(
                    f"rank {rank}: expected as many elements from itself as it sends itself, {own.numel()}, got room for "
                    f"{into.numel()}; give tensors of equal sizes on both sides"
                )
            into.detach().copy_(own.detach().view_as(into))
        # Each rank begins with another peer, so that none is flooded.
        peers = [(rank + step) % size for step in range(1, size)]
        away = {peer: x.detach().contiguous() for peer in peers if (x := sends[peer]) is not None}
        landings = {peer: _landing(x) for peer in peers if (x := receives[peer]) is not None}
        handle = self.communicator.exchange(away, {peer: whole for peer, (whole, _) in landings.items()})
        return finished_after([handle], lambda: [finish() for _, finish in landings.values()])

    def _receive(self, tensors: list[Tensor], peer: int | None, tag: int) -> ThinwireWork:
        whole, finish = _landing(tensors[0])
        handle = self.communicator.receive(whole, peer, tag)

        def received() -> int:
            source: int = handle.wait()
            finish()
            return source

        return self._work("recv", None, [Handle(received)], tensors)

    def _connect_device(self, device: torch.device) -> None:
        """Make the backend for tensors that are not in main memory, at the first of them.

        Raises:
            ValueError: the process group was made without one.
        """
        if device.type in {known.type for known in self._device_types}:
            return
        parts = dict(part.split(":") for part in dist.get_backend_config(self).split(","))
        if device.type != "cuda" or parts.get("cuda") != "nccl":
            raise ValueError(
                f"rank {self.rank()}: thinwire sends from main memory, got a tensor on {device}. Initialise with "
                "'cpu:thinwire,cuda:nccl'."
            )
        options = dist.ProcessGroupNCCL.Options()
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", self._store), self.rank(), self.size(), options)
        self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)


# PyTorch before 2.13 knows some collectives by other names.
for _new, _old in (
    ("all_gather_single", "_allgather_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    ("all_to_all_single", "alltoall_base"),
):
    setattr(ThinwireGroup, _old, getattr(ThinwireGroup, _new))


def _device(args: Sequence[Any]) -> torch.device:
    """Of the first tensor among the arguments, which may be in lists; main memory without any."""
    for value in args:
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor | list | tuple):
            return _device(value)
    return CPU


def _landing(tensor: Tensor, copied: bool = False) -> tuple[Tensor, Callable[[], None]]:
    """Contiguous memory to receive a tensor into, with its contents if `copied`, and what brings it to the tensor."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_contiguous():  # the communicator refuses the latter
        return tensor, nothing
    whole = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if copied:
        whole.copy_(tensor)

    def finish() -> None:
        tensor.copy_(whole)

    return whole, finish


def _listed(tensors: list[Tensor] | Tensor) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _operation(opts: Any) -> Any:
    """From PyTorch's options, or as some scripts pass it, itself or not at all."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _root(opts: Any) -> int:
    """From PyTorch's options, or as some scripts pass it, itself or not at all."""
    return 0 if opts is None else int(getattr(opts, "rootRank", opts))


def _only(root: int, tensor: Tensor, size: int) -> list[Tensor | None]:
    return [tensor if rank == root else None for rank in range(size)]


def _rows(tensor: Tensor, splits: list[int], size: int) -> list[Tensor]:
    rows = tensor.detach().contiguous()
    if not splits and rows.shape[0] % size:
        raise ValueError(f"expected a tensor that {size} ranks can cut into equal parts, got shape {tuple(rows.shape)}")
    return list(rows.split(splits or [rows.shape[0] // size] * size))
