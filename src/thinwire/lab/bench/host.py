"""Describes this host and this process, for `thinwire doctor`."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from ... import __version__
from ...comm.addresses import own_address
from ...comm.sockets import max_descriptors, tcp_info
from ...comm.tcp import is_available
from ...plan.doctor import Host, Interface
from ...plan.measure import connections
from .parts import seconds_of

SYSCTLS = Path("/proc/sys/net/ipv4")
MOST_FILES = 1 << 30  # what stands for no limit
MEETING_PORT = 29500  # of torchrun and of `thinwire train` under MPI and SLURM
SIDE, COPIED, REPETITIONS = 1024, 1 << 24, 5  # rows of a matrix whose product is timed, floats that are copied


def this_host(is_launched: bool, is_timed: bool = False) -> Host:
    """Describe this host; after the workers have met, also of its connections.

    Args:
        is_launched: whether a launcher started this process, which then has the ports.
        is_timed: whether to measure how fast it computes.
    """
    import psutil

    memory, compilers = psutil.virtual_memory(), (os.environ.get("CXX", "c++"), "g++", "clang++")
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = tuple(
        Interface(
            name,
            # A link-local IPv6 address may carry its interface, as in fe80::1%eth0.
            tuple(a.address.partition("%")[0] for a in addresses.get(name, ()) if a.family in families),
            state.mtu,
            state.isup,
        )
        for name, state in sorted(states.items())
    )
    extensions = {
        "thinwire.kernels._native": find_spec("thinwire.kernels._native"),
        "thinwire.comm.tcp._engine": is_available(),
    }
    return Host(
        name=socket.gethostname(),
        versions={
            "thinwire": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        interfaces=interfaces,
        address=own_address()[1],
        peers=tuple(sorted(set(_peers()))),
        listening=_listening(),
        taken=() if is_launched or _is_free(MEETING_PORT) else (MEETING_PORT,),
        congestion=_sysctl("tcp_congestion_control"),
        available=tuple(_sysctl("tcp_available_congestion_control").split()),
        allowed=tuple(_sysctl("tcp_allowed_congestion_control").split()),
        send_buffer_bytes=int(_sysctl("tcp_wmem", "0").split()[-1]),  # least, default and most
        receive_buffer_bytes=int(_sysctl("tcp_rmem", "0").split()[-1]),
        path_mtu=min(_path_mtus(), default=0),
        max_files=min(max_descriptors(), MOST_FILES),
        # psutil has no affinities on macOS.
        cores=len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0],
        memory_bytes=memory.total,
        free_bytes=memory.available,
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        compiler=next(filter(None, map(shutil.which, compilers)), None),
        missing=tuple(name for name, is_there in extensions.items() if not is_there),
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        speeds=_speeds() if is_timed else {},
    )


def _sysctl(name: str, default: str = "") -> str:
    """A setting of TCP, or the default where the system does not tell."""
    try:
        return (SYSCTLS / name).read_text().strip()
    except OSError:
        return default


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose old connections linger is free
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _listening() -> tuple[str, ...]:
    """Where programs listen; empty where the system does not tell a user."""
    import psutil

    try:
        found = psutil.net_connections("tcp")
    except (psutil.AccessDenied, PermissionError):
        return ()
    ends = {(c.laddr.port, c.laddr.ip) for c in found if c.status == psutil.CONN_LISTEN}
    return tuple(f"{address}:{port}" for port, address in sorted(ends))


def _peers() -> Iterator[str]:
    for connection in connections():
        with contextlib.suppress(OSError):  # it has hung up meanwhile
            # A socket for both families shows IPv4 addresses with this prefix.
            yield connection.getpeername()[0].removeprefix("::ffff:")


def _path_mtus() -> Iterator[int]:
    for connection in connections():
        with contextlib.suppress(OSError, struct.error):
            yield from tcp_info(connection, 60)  # tcpi_pmtu


def _speeds() -> dict[str, float]:
    """Multiplications and additions of matrix products, and bytes of a copy, each in a second."""
    x, y = torch.ones(SIDE, SIDE, device="cpu"), torch.ones(COPIED, device="cpu")
    product, copy = (min(seconds_of(call, x.device) for _ in range(REPETITIONS)) for call in (lambda: x @ x, y.clone))
    return {"flops": 2 * SIDE**3 / product, "copy_bytes_per_second": y.nbytes / copy}
