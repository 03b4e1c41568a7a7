"""How workers compare configurations and tensors: digests first, the whole only if digests differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..streams import current_stream, has_streams
from .buffers import as_bytes
from .handle import CommunicationError

if TYPE_CHECKING:
    from .base import Communicator

ABSENT = "(absent)"
FAILURE = "failure"
"""The one key of a worker that has failed; it says why."""
MAX_CHARS = 160
CHUNK_BYTES, HASHING_THREADS = 1 << 22, 4


def fingerprint(described: dict[str, Any]) -> bytes:
    """SHA-256 of a dictionary of JSON values, 32 bytes, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


def differing(comm: Communicator, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of these tensors whose values are not the same bits on all workers. Blocks.

    All workers call it, with tensors of the same shapes and dtypes, and get the same ones. Layouts in memory may differ. It
    costs 32 bytes a message where none differs, and about 70 bytes a tensor more where one does.
    """
    tensors = list(tensors)
    if comm.size == 1:
        return []
    found = comm.gather_if_different({"bits": digests(tensors)})
    of_all = zip(*(one["bits"] for one in found), strict=True)
    return [t for t, bits in zip(tensors, of_all, strict=True) if len(set(bits)) > 1]


def differing_by_name(comm: Communicator, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `differing`, of tensors that have names."""
    found = {id(t) for t in differing(comm, tensors.values())}
    return {name: t for name, t in tensors.items() if id(t) in found}


def digests(tensors: Iterable[Tensor]) -> list[str]:
    """A hash of the bits of all values of each tensor; tensors on the meta device have none.

    Example:
        >>> import torch
        >>> x = torch.arange(6.0).view(2, 3)
        >>> len(set(digests([x, x.t().contiguous().t(), -x])))
        2
    """
    chunks: list[Sequence[Tensor]] = []
    for t in tensors:
        chunks.append(() if t.is_meta else as_bytes(t.detach().contiguous()).split(CHUNK_BYTES))
        if has_streams(t.device):  # the threads that hash have streams of their own
            current_stream(t.device).synchronize()
    hashed = iter(hashes([chunk for of_tensor in chunks for chunk in of_tensor]))
    return [hashlib.sha256(b"".join(islice(hashed, len(of_tensor)))).hexdigest() for of_tensor in chunks]


def hashes(chunks: Iterable[Tensor]) -> list[bytes]:
    """SHA-256 of each of some flat tensors of uint8."""
    # `hashlib` releases the GIL, so that threads hash at the same time. After `numpy()`, PyTorch would refuse to resize the
    # tensor, as observers of quantization do with their buffers.
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return list(pool.map(lambda chunk: hashlib.sha256(np.from_dlpack(chunk.cpu()).data).digest(), chunks))


def raise_disagreement(described: list[dict[str, str]]) -> None:
    """Raises the ValueError that tells the workers' dictionaries apart; `described[r]` is that of rank r."""
    for rank, one in enumerate(described):
        if one.keys() == {FAILURE}:
            raise ValueError(f"rank {rank} failed: {one[FAILURE]}")
    keys = dict.fromkeys(key for one in described for key in one)
    differing = {key: [one.get(key, ABSENT) for one in described] for key in keys}
    differing = {key: values for key, values in differing.items() if len(set(values)) > 1}
    lines = [f"  {key}: {describe(values)}" for key, values in differing.items()]
    raise ValueError(
        f"workers disagree on {len(differing)} of {len(keys)} settings:\n"
        + "\n".join(lines)
        + "\nGive every worker the same configuration and checkpoint, and the same tensors in the same order."
    )


def describe(values: list[str]) -> str:
    """Which ranks hold which value, a value per group of ranks.

    Example:
        >>> describe(["TopK(ratio=0.1)", "TopK(ratio=0.2)", "TopK(ratio=0.1)"])
        'TopK(ratio=0.1) on ranks 0, 2; TopK(ratio=0.2) on rank 1'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    start = next((i for i, chars in enumerate(zip(*ranks, strict=False)) if len(set(chars)) > 1), 0)
    return "; ".join(f"{excerpt(value, start)} on {name_ranks(held)}" for value, held in ranks.items())


def excerpt(value: str, start: int) -> str:
    """At most MAX_CHARS of a value, from shortly before the place where values begin to differ."""
    if len(value) <= MAX_CHARS:
        return value
    # A quarter of the excerpt is what values have in common, so that a reader finds the place.
    begin = max(0, start - MAX_CHARS // 4)
    end = begin + MAX_CHARS
    return ("..." if begin else "") + value[begin:end] + ("..." if end < len(value) else "")


def name_ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def parsed(text: bytes, rank: int) -> Any:
    """What a worker sent as JSON.

    Raises:
        CommunicationError: it is none.
    """
    try:
        # Text that nests deeply, such as many "[", exhausts Python's stack.
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommunicationError(f"rank {rank} sent {len(text)} bytes that are no JSON: {error}") from error
