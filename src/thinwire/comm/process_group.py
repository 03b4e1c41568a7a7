"""Workers as processes, over `torch.distributed`: Gloo, NCCL, MPI.

One thread starts all operations, in call order, on a process group of its own, and does not wait for one to end before
it starts the next. Between two workers, the backends match messages in the order in which they were started, or by their tags.

Gloo   `all_reduce` takes the few steps of `sums.py`. `all_gather` is an exchange with everyone. All receives are posted before
       the first send: a message whose receive is posted late waits for a round trip, which costs Gloo's own all_gather and
       batch_isend_irecv up to half the line. CUDA tensors go through main memory (several workers may share a GPU, which
       NCCL's may not), and `wait()` waits.
NCCL   Sends and receives are grouped, for they deadlock otherwise. Parts of nearly one size use its own all-gather, which
       crosses the links between nodes less often, in slots of one size. `wait()` orders streams and returns before the
       data is there, so that a dead peer is noticed by NCCL's watchdog, which ends the process at the timeout.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .addresses import own_address
from .background import Later
from .base import Communicator, Start
from .buffers import all_staged, staged_tensor, wait_and_copy
from .channel import Channel
from .dense import gather_shards
from .exit import until_exit
from .gloo import GlooPeers, wait_for_all
from .handle import CommunicationError, Wait, nothing, reason_of
from .issuer import Issuer
from .ledger import Ledger
from .numbered import Numbers
from .sums import Route, Sums

Group = dist.ProcessGroup | dist.DeviceMesh
"""Which workers to connect: a process group, or one dimension of a device mesh, such as `mesh["replicate"]`."""

GRACE_SECONDS = 2.0  # after an error, for what is being started
SLOT_MULTIPLE = 16  # bytes, so that messages in slots are aligned
MOST_PADDING = 8  # slots of one size pad messages by up to an eighth; beyond that each worker sends its own size


class ProcessGroupCommunicator(Communicator):
    """A communicator over the ranks of a process group.

    Args:
        group: whose ranks to connect, or a device mesh of one dimension; None for all. It is not used itself: a new group of
            the same backend is made over the same ranks, so every worker of `group` must construct its communicators in the
            same order.
        timeout_seconds: how long an operation may take before it fails; None for as long as in `group`; one that
            was made without a limit, such as a mesh's, has that of `init_process_group(timeout=...)`.
        device: of the tensors that will be sent. NCCL connects on it if it is a GPU, else on the group's
            (`init_process_group(device_id=...)`), else on the current one.

    Raises:
        ValueError: when torch.distributed is not initialised, this process is not in `group`, or a mesh has several
            dimensions.
        CommunicationError, RuntimeError: the ranks did not connect in time; see `group_over`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with ProcessGroupCommunicator() as comm:
        ...     comm.all_reduce(torch.ones(2)).wait()
        tensor([1., 1.])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self, group: Group | None = None, timeout_seconds: float | None = None, device: torch.device | None = None
    ):
        if not dist.is_initialized():
            raise ValueError("ProcessGroupCommunicator needs torch.distributed. Call dist.init_process_group() first.")
        group = dist.group.WORLD if group is None else _process_group(group)
        assert group is not None, "torch.distributed is initialised"
        if dist.get_rank(group) < 0:
            raise ValueError(f"global rank {dist.get_rank()} is not in the group. Construct it on the group's ranks.")
        timeout_seconds = _limit_of(group) if timeout_seconds is None else timeout_seconds
        self._join(dist.get_process_group_ranks(group), group, timeout_seconds, device)

    def _join(
        self, ranks: list[int], like: dist.ProcessGroup, timeout_seconds: float, device: torch.device | None
    ) -> None:
        super().__init__(ranks.index(dist.get_rank()), len(ranks))
        self.global_ranks = ranks
        self._group = group_over(ranks, like, timeout_seconds)
        self._backends = _backends_of(like)
        self._timeout_seconds = timeout_seconds
        self._gpu: torch.device | None = None
        self._issuer = Issuer()
        self._later = Later()
        self._sums: Sums | None = None
        if self._backends.get("cuda") == "nccl" and torch.cuda.is_available():
            self._gpu = _gpu(device, like)
            if "cpu" not in self._backends:
                self.device = self._gpu
            # NCCL connects in a group's first operation, in which all ranks must take part.
            self.all_reduce(torch.zeros(1, dtype=torch.float32, device=self._gpu)).wait()
        if self._backends.get("cpu") == "gloo":
            self._sums = self._sums_over_gloo()
        self.ledger = Ledger(self.size)  # what connecting took is no traffic of the run

    def _sums_over_gloo(self) -> Sums:
        host = f"rank {self.rank}"
        with contextlib.suppress(ValueError):  # its address is for one link alone
            host = own_address()[1]
        # Of one size, for an all-gather in one step.
        digest = int.from_bytes(hashlib.sha256(host.encode()).digest()[:7], "big")
        try:
            hosts = torch.cat(self.all_gather(torch.tensor([digest], device="cpu")).wait()).tolist()
        except RuntimeError:
            self.abandon()
            raise
        self.route = Route(self.rank, hosts)
        return Sums(self.route, self._gloo.post, Numbers(self.size), self._later)

    def reordered(self, order: Sequence[int]) -> ProcessGroupCommunicator:
        comm = ProcessGroupCommunicator.__new__(ProcessGroupCommunicator)
        comm._join([self.global_ranks[rank] for rank in order], self._group, self._timeout_seconds, self._gpu)
        return comm

    def _close(self) -> None:
        self._issuer.close()
        self._issuer.join()
        self._later.end()  # the issuing thread gives it work
        self._sums = None  # it refers to this object, which would keep connections open until garbage is collected
        with contextlib.suppress(ValueError):  # it went with the default group, which was destroyed before
            if dist.is_initialized():
                dist.destroy_process_group(self._group)
        # Its destructor waits for its threads. A fork, such as a data loader's worker, has none of them; there it must not run
        # when garbage is collected in which this object is.
        del self._group

    def _abandon(self) -> None:
        self._issuer.close()
        is_over_nccl = "nccl" in self._backends.values()
        if not is_over_nccl and self._issuer.join(GRACE_SECONDS):
            self._later.end(GRACE_SECONDS)
        # Also where nothing is under way, so that others do not wait for this worker in their next operation.
        self._hang_up()
        # The threads may wait for others. Over NCCL the end of the group would too, so it is left to that of the process.
        if not is_over_nccl:
            self._close()

    # ---- issuing ----

    def _issue(self, tensors: list[Tensor], start: Start) -> Wait:
        device = self._device_of(tensors)
        goes_through_memory = self._backends[device.type] == "gloo"
        return partial(self._complete, self._issuer.issue(device, start, None if goes_through_memory else tensors))

    def _complete(self, wait: Wait) -> None:
        try:
            with until_exit(self._hang_up):
                wait()
        except RuntimeError:
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        # Another thread may have closed this communicator.
        if self._backends.get("cpu") == "gloo" and hasattr(self, "_group"):
            self._gloo.hang_up()

    @property
    def _gloo(self) -> GlooPeers:
        return GlooPeers(self._group._get_backend(torch.device("cpu")))

    def _device_of(self, tensors: list[Tensor]) -> torch.device:
        """The one device of all tensors, for which there must be a backend."""
        devices = {tensor.device for tensor in tensors} or {self.device}
        if len(devices) > 1 or not {device.type for device in devices} <= self._backends.keys():
            raise ValueError(
                f"rank {self.rank}: tensors on {', '.join(sorted(map(str, devices)))} cannot be sent together over "
                f"{self._backends}. Keep them on one device, and initialise with a backend for it: 'cpu:gloo,cuda:nccl'."
            )
        return devices.pop()

    # ---- primitives ----

    def _start_all_reduce(self, tensor: Tensor) -> Wait:
        if tensor.numel() == 0:
            return nothing
        sent = self._sendable(tensor)
        if self._sums is not None and self._backends[tensor.device.type] == "gloo":
            return partial(wait_and_copy, self._sums.start(sent), [(tensor, sent)])
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        return partial(wait_and_copy, partial(wait_for_all, [("", work)]), [(tensor, sent)])

    def _slot_bytes(self, device: torch.device, sizes: list[int]) -> int | None:
        slot = -(-max(sizes) // SLOT_MULTIPLE) * SLOT_MULTIPLE
        padding = self.size * slot - sum(sizes)
        few = padding < self.size * SLOT_MULTIPLE + sum(sizes) // MOST_PADDING
        return slot if slot and few and self._backends.get(device.type) == "nccl" else None

    def _start_slots(self, own: Tensor, slots: Tensor) -> Wait:
        slot = slots[self.rank]
        slot[: own.numel()].copy_(own)
        slot[own.numel() :].zero_()
        work = gather_shards(slots.view(-1), slot, group=self._group, async_op=True)
        return partial(wait_for_all, [("", work)])

    def _start_broadcast(self, tensor: Tensor, root: int) -> Wait:
        if tensor.numel() == 0:
            return nothing
        is_root = self.rank == root
        sent = self._sendable(tensor, copied=is_root)
        work = dist.broadcast(sent, self.global_ranks[root], group=self._group, async_op=True)
        wait = partial(wait_for_all, [(f"from rank {root}", work)])
        return wait if is_root else partial(wait_and_copy, wait, [(tensor, sent)])

    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        if any(self._backends[t.device.type] == "nccl" for t in (*sends.values(), *receives.values())):
            return self._start_grouped(sends, receives)
        landing = {peer: self._sendable(tensor, copied=False) for peer, tensor in receives.items()}
        works = [(f"from rank {peer}", self._begin(dist.irecv, tensor, peer)) for peer, tensor in landing.items()]
        by_gloo = any(self._backends[tensor.device.type] == "gloo" for tensor in sends.values())
        staged = all_staged(sends) if by_gloo else sends
        works += [(f"to rank {peer}", self._begin(dist.isend, tensor, peer)) for peer, tensor in staged.items()]
        copies = [(receives[peer], tensor) for peer, tensor in landing.items()]
        return partial(wait_and_copy, partial(wait_for_all, works), copies)

    def _sendable(self, tensor: Tensor, copied: bool = True) -> Tensor:
        """The tensor where the backend can send it from: for Gloo, in main memory; with its contents if `copied`."""
        return staged_tensor(tensor, copied) if self._backends[tensor.device.type] == "gloo" else tensor

    def _open_channel(self, peers: list[int], max_bytes: int) -> Channel:
        from .tcp.channel import TcpChannel  # which meets over communicators like this one
        from .tcp.connections import Place
        from .tcp.endpoint import Meeting

        meeting = Meeting(self.rank, self.size, self.gather_objects, Place(*own_address()), self._timeout_seconds)
        return TcpChannel(meeting, peers, self._record_channel, max_bytes)

    def _begin(self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> dist.Work:
        try:
            work = operation(tensor, self.global_ranks[peer], group=self._group)
        except RuntimeError as error:
            raise CommunicationError(f"{operation.__name__} with rank {peer}: {reason_of(error)}") from error
        assert work is not None, "this process is in the group"
        return work

    def _start_grouped(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        operations = [dist.P2POp(dist.irecv, t, self.global_ranks[p], self._group) for p, t in receives.items()]
        operations += [dist.P2POp(dist.isend, t, self.global_ranks[p], self._group) for p, t in sends.items()]
        return partial(wait_for_all, [("", work) for work in dist.batch_isend_irecv(operations)])


def _gpu(device: torch.device | None, group: dist.ProcessGroup) -> torch.device:
    """This worker's GPU: the first of the given device and the group's that names one, else the current GPU.

    "cuda" without an index names none: in each thread it is the GPU that is current there.
    """
    for known in (device, group.bound_device_id):
        if known is not None and known.type == "cuda" and known.index is not None:
            return known
    return torch.device("cuda", torch.cuda.current_device())


def _limit_of(group: dist.ProcessGroup) -> float:
    """Seconds after which an operation of a group fails; 300 if a backend does not say it."""
    limits = [getattr(group, "timeout", timedelta(seconds=300))]  # our own backend has one
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):
            limits.append(group._get_backend(device).options._timeout)
    seconds = limits[-1].total_seconds()
    is_default = limits[-1] in (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout)
    world = dist.group.WORLD
    # A group without a limit of its own has PyTorch's default, as those of a mesh, and not that of `init_process_group`.
    return min(seconds, _limit_of(world)) if is_default and world is not None and group is not world else seconds


def num_ranks(group: Group | None = None) -> int:
    """How many ranks a process group or a mesh has, None for all; 0 if torch.distributed is not initialised."""
    if not dist.is_initialized():
        return 0
    return dist.get_world_size(None if group is None else _process_group(group))


def _process_group(group: Group) -> dist.ProcessGroup:
    if not isinstance(group, dist.DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"expected a device mesh of one dimension, got dimensions {group.mesh_dim_names} of sizes {tuple(group.shape)}. "
            "Choose one of them, such as mesh['replicate']."
        )
    return group.get_group()


def group_over(ranks: list[int], like: dist.ProcessGroup, timeout_seconds: float) -> dist.ProcessGroup:
    """A new group of workers in this order. They all call it, and no others; the caller destroys the group.

    PyTorch's `new_group`, where only members call it, names a group by the number of groups that the process has. Members
    would disagree where these numbers differ, and names come again after a group was destroyed. So here the name has the
    number of groups that were made over these ranks, which each member counts in the store.

    Args:
        ranks: global ranks.
        like: a group of the same backend.
        timeout_seconds: of its operations.

    Raises:
        ValueError: the backend has no store, as MPI, and these are not all ranks.
        CommunicationError: the members of a subgroup did not connect in time.
        RuntimeError: PyTorch's, where these are all ranks.
    """
    world, limit = dist.group.WORLD, timedelta(seconds=timeout_seconds)
    assert world is not None, "torch.distributed is initialised"
    # One backend for all devices goes by its own name: PyTorch warns when a group of a compound name is destroyed.
    names = set(_backends_of(like).values())
    backend = names.pop() if len(names) == 1 else dist.get_backend_config(like)
    if ranks == list(range(world.size())):
        with _MAKING_GROUP:
            group: dist.ProcessGroup = dist.new_group(ranks, limit, backend)
        return group
    store, members = c10d._get_default_store(), hashlib.sha256(repr(ranks).encode()).hexdigest()
    if store is None:
        raise ValueError(
            f"over {backend} all ranks are connected, and no subgroup, got {ranks}. Choose another backend."
        )
    try:
        number = store.add(f"thinwire/{members}/{world.rank()}", 1)
        with _MAKING_GROUP, _without_device(world):
            name: Any = f"{members}-{number}"
            group, _ = c10d._new_process_group_helper(
                *(len(ranks), ranks.index(world.rank()), ranks, dist.Backend(backend), store, name), timeout=limit
            )
    except RuntimeError as error:
        raise CommunicationError(
            f"global rank {world.rank()}: ranks {ranks} did not connect ({reason_of(error)}). Construct a communicator on "
            "all of them, in the same order."
        ) from error
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def _backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """By type of device."""
    config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return dict(part.split(":") for part in config.split(","))


_MAKING_GROUP = threading.Lock()  # of the process, because the device of the default group is


@contextlib.contextmanager
def _without_device(world: dist.ProcessGroup) -> Iterator[None]:
    """Context in which the default group has no device, so that PyTorch splits no communicator of NCCL off that group's.

    All ranks of the default group would have to take part in a split, and those outside of a subgroup do not.
    """
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device
