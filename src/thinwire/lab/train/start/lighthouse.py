"""The Lighthouse of an elastic run, and a worker's communicator over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import torch

from ....algorithm import require
from ....comm import ElasticCommunicator, Lighthouse
from ....messages import log
from ..config import RunConfig
from ..device import choose_device
from ..shared_errors import same_error_on_all
from .connect import credentials_of, warn_if_open
from .environment import LOOPBACK


@contextmanager
def lighthouse_of(config: RunConfig, host: str, port: int = 0) -> Iterator[str]:
    """Context that yields the address of the run's Lighthouse, which it starts there unless the configuration has one.

    Raises:
        ValueError: the address is none, or cannot be used.
    """
    credentials = credentials_of(config)
    if config.lighthouse is not None:
        scheme = "http" if credentials is None else "https"
        found = urlsplit(config.lighthouse)
        example = f"{scheme}://node1:29510{' without credentials' * (scheme == 'http')}"
        with same_error_on_all():
            require(
                found.hostname is not None and found.scheme == scheme,
                f"lighthouse must be an address such as {example}, got {config.lighthouse!r}",
            )
        yield config.lighthouse
        return
    try:
        lighthouse = Lighthouse(config.min_workers, host, port, config.timeout, credentials)
    except OSError as error:
        raise ValueError(f"the Lighthouse cannot listen at {host}:{port}: {error.strerror or error}") from None
    others = "others on this machine" if host == LOOPBACK else "others"
    text = f"{others} join with --elastic --lighthouse {lighthouse.address} --first-worker {config.workers}"
    text += " --credentials FOLDER" * (credentials is not None)
    log.info(text)
    try:
        yield lighthouse.address
    finally:
        lighthouse.close()


@same_error_on_all()
def communicator(config: RunConfig, lighthouse: str, number: int, is_late: bool = False) -> ElasticCommunicator:
    """The communicator of one worker of a run.

    Args:
        config: of the run.
        lighthouse: address of the Lighthouse.
        number: of the worker.
        is_late: whether the worker replaces one that died.

    Raises:
        SharedError: there is no such device, or the credentials cannot be used, here or with that Lighthouse.
    """
    device = choose_device(config)
    credentials = credentials_of(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    warn_if_open(credentials, is_first=number == config.first_worker and not is_late)
    return ElasticCommunicator(
        lighthouse,
        number,
        config.min_workers,
        config.timeout,
        quorum_seconds=max(120.0, 2 * config.timeout),  # `plan.doctor.limits` says so too
        is_late=is_late,
        credentials=credentials,
        check_every=config.check_every,
        listens=config.listen,
        relay=config.relay,
    )
