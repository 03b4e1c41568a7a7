"""A store of `torch.distributed`, where workers meet. It has no authentication, so it should listen at one address only."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def listening_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens at one address; PyTorch's own listens on all interfaces.

    Args:
        address: of this machine.
        port: TCP port; 0 takes a free one.
        timeout: how long to wait for a key.

    Raises:
        OSError: the port is taken, or this machine does not have the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
