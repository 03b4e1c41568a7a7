"""Connects the workers of a run: chooses the network interface and the backend."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ....algorithm import able_to, require
from ....comm import CommunicationError, Communicator, Credentials, ProcessGroupCommunicator
from ....comm.addresses import address_text, listening_address, own_address, own_addresses_of
from ....comm.handle import reason_of
from ....comm.notice import said_if_late
from ....comm.sockets import keep_trying
from ....comm.store import ANSWER_SECONDS, answered, connected_store, gathering, listening_store
from ....comm.tcp import TcpCommunicator
from ....comm.tls.store import OwnStore
from ....comm.transport import connect, has_own_connections
from ....messages import MORE_PROCESSES, error_place, error_text, lacks_processes, log
from ..config import RunConfig
from ..device import choose_device
from ..run.interrupt import Interrupted
from ..shared_errors import SharedError, same_error_on_all
from .environment import LOOPBACK, Environment
from .presence import Presence

SECONDS = 120.0  # importing PyTorch on a busy machine takes long
RENDEZVOUS = timedelta(seconds=SECONDS)
ELSEWHERE = "192.0.2.1"  # no host has it (RFC 5737); the default route leads there
GLOO_LIMITS = 5  # of a group: so long does Gloo wait for each connection
TRY_SECONDS, PAUSE_SECONDS = 5.0, 0.2  # of each try to reach worker 0, by each of its addresses, and between two


@contextmanager
def connected(config: RunConfig, environment: Environment, store: dist.Store | None = None) -> Iterator[Communicator]:
    """Join the other workers: over connections of our own, or in PyTorch's default process group and a communicator beside it.

    Args:
        config: has device, backend and interface.
        environment: rank and size of this worker.
        store: the store for the rendezvous; by default a new one at the environment's address.

    Raises:
        ValueError: the interface or the backend cannot be used here.
    """
    choose_interface(config.interface, environment.one_node)
    credentials = credentials_of(config)
    warn_if_open(credentials, is_first=environment.rank == 0)
    device = choose_device(config)
    if device.type == "cuda":
        # NCCL takes the current GPU.
        torch.cuda.set_device(device)
    if config.transport == "mpi":
        dist.init_process_group("mpi", timeout=RENDEZVOUS)
        with connect("mpi", timeout_seconds=config.timeout, device=device) as comm:
            yield comm
        dist.destroy_process_group()
        return
    rank, size = environment.rank, environment.size
    presence = None
    if store is None:
        with said_if_late(awaited(environment, credentials)):
            store = fresh(meeting_store(environment, credentials), rank, size)
        presence = Presence(store, rank, size)
    with same_error_on_all():
        backend = choose_backend(config, device, environment, store, credentials)
    if backend == "tcp":
        with (
            blaming(presence),
            TcpCommunicator.from_store(
                store,
                rank,
                size,
                timeout_seconds=config.timeout,
                credentials=credentials,
                meeting_seconds=SECONDS,
                listens=config.listen,
                relay=config.relay,
            ) as own,
        ):
            yield own
        return
    with blaming(presence), ExitStack() as stack:
        try:
            with said_if_late(connecting(rank, SECONDS)) if presence else nullcontext():
                init_process_group(backend, store, rank, size, SECONDS)
            comm = stack.enter_context(ProcessGroupCommunicator(timeout_seconds=config.timeout, device=device))
        except CommunicationError:
            raise
        except RuntimeError as error:
            reach = "see whether all of them reach each other, and name the network interface that they share with --interface"
            remedy = MORE_PROCESSES if lacks_processes(error) else reach
            raise CommunicationError(f"the workers did not connect ({reason_of(error)}); {remedy}") from error
        yield comm
    dist.destroy_process_group()


@contextmanager
def blaming(presence: Presence | None) -> Iterator[None]:
    """Context in which an error of communication names the worker to blame, and any other is reported to the others."""
    if presence is None:  # a launcher of ours watches the workers
        yield
        return
    with presence:
        try:
            yield
        except (Interrupted, SharedError):
            raise
        except CommunicationError as error:
            raise presence.explained(error) from error
        except Exception as error:
            presence.report(" ".join(f"{error_text(error)}{error_place(error)}".split())[:500])
            raise


def credentials_of(config: RunConfig) -> Credentials | None:
    """The keys of this machine, if the run has any.

    Raises:
        ValueError: they cannot be used.
    """
    return None if config.credentials is None else Credentials(config.credentials)


def warn_if_open(credentials: Credentials | None, is_first: bool) -> None:
    """Say that messages leave this machine as they are, if they do."""
    host = own_address()[1]
    if is_first and credentials is None and not ipaddress.ip_address(host).is_loopback:
        log.warning(
            f"connections at {host} are not encrypted, and anyone who reaches them can take part; use a network of your "
            "own machines only, or --credentials (see thinwire keys)"
        )


def awaited(environment: Environment, credentials: Credentials | None) -> str:
    """What a worker waits for at the start of a run, in words."""
    others = {1: "its own store", 2: "worker 1"}.get(environment.size, f"the other {environment.size - 1} workers")
    whom = "worker 0" if environment.rank else others
    place = address_text(*_meeting_place(environment, credentials))
    return f"worker {environment.rank} waits for {whom} at {place}, for at most {SECONDS:g} seconds"


def connecting(rank: int, seconds: float) -> str:
    """What a worker does once it has met the others, in words."""
    limit = f"for at most {seconds:g} seconds"
    return (
        f"worker {rank} connects with the others, {limit}; a firewall may stand between them, which must open all ports"
    )


def init_process_group(backend: str, store: dist.Store, rank: int, size: int, seconds: float) -> None:
    """Make PyTorch's default process group; all workers have come to the store.

    Args:
        backend, store, rank, size: as of `torch.distributed.init_process_group`.
        seconds: within which the workers must connect; and how long an operation may take.

    Raises:
        RuntimeError: the workers did not connect.
    """
    limit = timedelta(seconds=seconds)
    # Gloo waits for a worker's address for one limit, and for its connection for several.
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit / GLOO_LIMITS)
    dist.distributed_c10d._set_pg_timeout(limit)


def _meeting_place(environment: Environment, credentials: Credentials | None) -> tuple[str, int]:
    """Where workers meet: the environment's address, unless it has none and the credentials have one."""
    host, port = environment.master_address, environment.master_port
    if host == LOOPBACK and not environment.one_node and credentials is not None and credentials.address is not None:
        return credentials.address
    return host, port


def meeting_store(
    environment: Environment, credentials: Credentials | None = None, seconds: float = SECONDS
) -> dist.Store:
    """The store at the environment's address, which rank 0 makes unless torchrun has one.

    With credentials it answers the run's workers only. Else it has no authentication, and listens at that address only. If
    rank 0 cannot listen there (its name means the loopback, several addresses, or one that is translated on the way), it
    listens on all interfaces, and says so.

    Raises:
        ValueError: the port is taken, or the address is for one link alone.
        CommunicationError: worker 0 does not answer, also not itself, or its name does not resolve.
    """
    rank, host, port = environment.rank, environment.master_address, environment.master_port
    limit = timedelta(seconds=seconds)
    own_address(meeting=host)  # refuses an address that the others could not dial
    if credentials is not None:
        return _encrypted_store(environment, credentials)
    # Else torchrun's agent listens at that address already.
    if rank == 0 and not torchrun_has_store():
        try:
            here = _own_addresses(host, seconds)
            if address := listening_address(host, here, environment.one_node):
                return listening_store(address, port, limit)
            why = f"{host} is {', '.join(here)} here" if here else f"{host}: {os.strerror(errno.EADDRNOTAVAIL)}"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(f"port {port} of {host} is taken; choose another with MASTER_PORT") from None
            why = f"{host}: {error.strerror or error}"
        log.warning(f"the store listens on all interfaces, because {why}")
    if rank > 0:
        _own_addresses(host, seconds)
        # Of several addresses, PyTorch's client would wait for a dead one until its limit.
        os.environ["MASTER_ADDR"] = _await_first(host, port, seconds)
    joining = dist.rendezvous("env://", rank, environment.size, timeout=limit)
    try:
        store: dist.Store = answered(partial(next, joining), seconds + ANSWER_SECONDS)[0]
    except (dist.DistError, CommunicationError) as error:
        raise CommunicationError(
            f"worker {rank} does not reach the store at {address_text(host, port)} ({reason_of(error)}); MASTER_ADDR and "
            "MASTER_PORT must lead to worker 0 from all workers, itself among them"
        ) from error
    return store


def torchrun_has_store() -> bool:
    """Whether workers meet at the store of torchrun's agent, which outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _own_addresses(host: str, seconds: float) -> list[str]:
    """This machine's addresses among those of the place where workers meet, once its name resolves; it may be a new one.

    Raises:
        CommunicationError: it does not.
    """
    with contextlib.suppress(OSError):
        return own_addresses_of(host)
    limit = f"within {seconds:g} seconds"
    log.warning(f"{host}, where workers meet, does not resolve on this machine; it is tried again {limit}")
    try:
        return keep_trying(lambda _: own_addresses_of(host), seconds, PAUSE_SECONDS)
    except OSError as error:
        raise CommunicationError(
            f"{host}, where workers meet, did not resolve on this machine {limit} ({error.strerror or error}); check "
            "MASTER_ADDR"
        ) from error


def _await_first(host: str, port: int, seconds: float) -> str:
    """Wait until worker 0 listens; returns its address. PyTorch's client would wait twice as long, and print the stack of C++.

    Raises:
        CommunicationError: it does not.
    """

    def reached(_: float) -> str:
        with socket.create_connection((host, port), TRY_SECONDS) as connection:
            return str(connection.getpeername()[0])

    try:
        return keep_trying(reached, seconds, PAUSE_SECONDS)
    except OSError as error:
        raise CommunicationError(
            f"worker 0 did not answer at {address_text(host, port)} within {seconds:g} seconds "
            f"({error.strerror or error}); see whether it runs, and check MASTER_ADDR and MASTER_PORT"
        ) from error


def _encrypted_store(environment: Environment, credentials: Credentials) -> dist.Store:
    with same_error_on_all():
        require(
            not torchrun_has_store(),
            "torchrun's own store answers everybody; with credentials, start each worker with RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT instead, or use --elastic without torchrun",
        )
    host, port = _meeting_place(environment, credentials)
    if host != environment.master_address:
        os.environ["MASTER_ADDR"] = host  # `own_address` takes the interface that reaches it
    if environment.rank > 0:
        return connected_store(host, port, RENDEZVOUS, credentials)
    with able_to(f"listen at {host}:{port}", "choose others with MASTER_ADDR and MASTER_PORT"):
        return listening_store(host, port, RENDEZVOUS, credentials)


def fresh(store: dist.Store, rank: int, size: int) -> dist.Store:
    """Return a part of the store that only this start of the workers uses.

    torchrun's store outlives the workers: after a restart it still has the addresses of the old ones. So rank 0 chooses a
    new prefix. Each worker writes a greeting with an identifier of its own; rank 0 answers each identifier with the prefix
    until all workers have confirmed it.

    Raises:
        CommunicationError: worker 0 does not answer.
    """
    return dist.PrefixStore(answered(partial(_prefix, store, rank, size), SECONDS + ANSWER_SECONDS), store)


def _prefix(store: dist.Store, rank: int, size: int) -> str:
    own = uuid.uuid4().hex
    store.set(f"greeting/{rank}", own)
    if rank == 0:
        _tell(store, own, set(range(1, size)))
        return own
    try:
        word: str = store.get(f"answer/{own}").decode()
    except RuntimeError as error:
        raise CommunicationError(
            f"worker 0 did not greet worker {rank} ({reason_of(error)}); see whether it runs, and whether MASTER_ADDR and "
            "MASTER_PORT are those of another run"
        ) from error
    store.set(f"heard/{word}/{rank}", "")
    return word


def _tell(store: dist.Store, word: str, waiting: set[int]) -> None:
    deadline = time.monotonic() + RENDEZVOUS.total_seconds()
    while waiting := {rank for rank in waiting if not store.check([f"heard/{word}/{rank}"])}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(waiting)} did not come within {RENDEZVOUS.total_seconds():.0f} seconds")
        for rank in waiting:
            if store.check([f"greeting/{rank}"]):
                store.set(f"answer/{store.get(f'greeting/{rank}').decode()}", word)
        time.sleep(0.02)


def choose_interface(name: str | None, one_node: bool) -> None:
    """Set the network interface of Gloo and NCCL.

    By default, these are the loopback if all workers are on one node; else, for Gloo, the one that reaches MASTER_ADDR.

    Raises:
        ValueError: there is no such interface.
    """
    known = [known for _, known in socket.if_nameindex()]
    require(
        name is None or name in known,
        f"{socket.gethostname()} has no network interface {name!r}; choose --interface among {', '.join(known)}",
    )
    if name is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=name)
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        loopback = next((known for known in known if known in ("lo", "lo0")), None)
        chosen = loopback if one_node else _reaching_interface()
        if chosen is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = chosen


def _reaching_interface() -> str | None:
    """The network interface that reaches the place where workers meet, else the one of the default route.

    By itself Gloo takes the address that the machine's own name stands for, which is the loopback on Debian.
    """
    import psutil

    found = (own_address(meeting=host)[1] for host in (None, ELSEWHERE))
    reaching = next((address for address in found if not ipaddress.ip_address(address).is_loopback), None)
    # By its name, Gloo takes an interface's first address, which is an IPv4 one if it has any. An IPv6 address that reaches the
    # place stands for it too: the others reach it in the same network.
    names = {
        one.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for place, one in enumerate(addresses)
        if place == 0 or ":" in one.address
    }
    return None if reaching is None else names.get(reaching)


def choose_backend(
    config: RunConfig,
    device: torch.device,
    environment: Environment,
    store: dist.Store,
    credentials: Credentials | None = None,
) -> str:
    """Choose the same on all workers: "tcp" for our own connections, NCCL (with Gloo for metrics), or only Gloo.

    Raises:
        ValueError: NCCL was asked for, and a worker has no GPU of its own; or our own connections, for tensors on a GPU.
        CommunicationError: a worker did not come.
    """
    name, on_cpu = config.transport, device.type == "cpu"
    if credentials is not None or config.dials_out:
        why = "no listener or a relay" if credentials is None else "credentials"
        require(on_cpu, f"with {why}, messages are sent from main memory; choose --device cpu")
        return "tcp"
    if name == "tcp":
        require(on_cpu, f"transport 'tcp' sends from main memory, got device {device}; choose --transport auto")
        return "tcp"
    gather = gathering(store, environment.rank, environment.size, SECONDS)
    found = gather([gpu_for_nccl(device), on_cpu and has_own_connections()])
    gpus = [gpu for gpu, _ in found]
    without = [rank for rank, gpu in enumerate(gpus) if gpu is None or gpus.count(gpu) > 1]
    require(
        name != "nccl" or not without,
        f"transport 'nccl' needs a GPU of its own for every worker, and rank {(without or [0])[0]} has none; choose "
        "--transport gloo, or fewer workers",
    )
    if name == "auto" and environment.size > 1 and all(can for _, can in found):
        return "tcp"
    return "gloo" if name == "gloo" or without else "cpu:gloo,cuda:nccl"


def gpu_for_nccl(device: torch.device) -> str | None:
    """Which GPU of all machines a worker has, if NCCL can use it; a launcher may show each worker its own alone."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def has_own_gpu(device: torch.device, local_size: int) -> bool:
    """Whether each of the workers on this machine has a GPU that NCCL can use, where they cannot ask each other."""
    return device.type == "cuda" and local_size <= torch.cuda.device_count() and dist.is_nccl_available()


def check_mpi() -> None:
    """Check that PyTorch has the MPI backend.

    Raises:
        ValueError: PyTorch was built without MPI.
    """
    require(
        dist.is_mpi_available(),
        "transport 'mpi' needs a PyTorch that was built with MPI, and this one was not; choose --transport gloo, which works "
        "under mpirun too",
    )


def loopback_store(port: int, credentials: Credentials | None = None) -> dist.TCPStore | OwnStore:
    """The store where the workers of this machine meet. It listens on the loopback only.

    Args:
        port: TCP port; 0 takes a free one.
        credentials: of this machine.

    Raises:
        ValueError: the port is taken, or this user may not listen there.
    """
    try:
        return listening_store(LOOPBACK, port, RENDEZVOUS, credentials)
    except OSError as error:
        reason = f"port {port} cannot be used: {error.strerror}"
        raise ValueError(f"{reason}; choose another, or leave --port out and a free one is taken") from None
