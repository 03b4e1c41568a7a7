"""A worker's state as bytes for another worker: plain values and tensors, and nothing that could run when it is read.

    length of the description    8 bytes, little-endian
    description                  JSON; see below
    tensors                      their bytes, one after the other, each at a multiple of 16 bytes

A value of the description is None, a bool, a number or a text as JSON has it, or a list that begins with its kind:

    ["list", v, ...]  ["tuple", v, ...]  ["dict", [key, v], ...]  ["tensor", dtype, shape, place]
    ["shard", v, shape, stride, dim]

The last one is a DTensor: the tensor that this process holds, the shape and strides of the whole, and the dimension along
which it is cut, None for a replica. It is read on a mesh of the reader's own.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..buffers import as_bytes

LENGTH, ALIGNMENT = struct.Struct("<Q"), 16
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
    )
}
MAX_DEPTH = 100


def packed(state: Any) -> Tensor:
    """The bytes of a state, (n,) uint8.

    Raises:
        TypeError: it has something else than plain values and tensors.

    Example:
        >>> state = {"weights": torch.ones(2, 3), 0: {"betas": (0.9, float("inf"))}, "rounds": [1, None, "a"]}
        >>> unpacked(packed(state))[0], unpacked(packed(state))["rounds"], unpacked(packed(state))["weights"].shape
        ({'betas': (0.9, inf)}, [1, None, 'a'], torch.Size([2, 3]))
    """
    parts = _Parts()
    text = json.dumps(_described(state, parts, 0)).encode()
    begin = LENGTH.size + len(text)
    total = begin + parts.end + ALIGNMENT
    # Zeros between tensors: equal states must have equal bytes, because their hashes are compared.
    payload = torch.zeros(total, dtype=torch.uint8, device="cpu")
    payload[:begin] = torch.frombuffer(bytearray(LENGTH.pack(len(text)) + text), dtype=torch.uint8)
    tensors = payload[tensors_begin(payload) :]
    for place, part in parts.placed:
        tensors[place : place + part.numel()] = part
    return payload


def unpacked(payload: Tensor, mesh: dist.DeviceMesh | None = None) -> Any:
    """The state in `payload`, with tensors of its own.

    Args:
        payload: (n,) uint8.
        mesh: of the processes that hold the other shards of DTensors; None if the state has none.

    Raises:
        ValueError: it is not what `packed` returns.
    """
    payload = payload.contiguous()
    try:
        (length,) = LENGTH.unpack(payload[: LENGTH.size].numpy().tobytes())
        begin = LENGTH.size + length
        if begin > payload.numel():
            raise ValueError(f"its description has {length} bytes, and all of it {payload.numel()}")
        described = json.loads(payload[LENGTH.size : begin].numpy().tobytes())
        return _read(described, _Tensors(payload[_aligned(begin) :], mesh), 0)
    except (struct.error, TypeError, KeyError, IndexError, RuntimeError, RecursionError) as error:  # of PyTorch as well
        raise ValueError(f"the bytes are not those of a state: {error}") from None


def tensors_begin(payload: Tensor) -> int:
    """Where the tensors begin in what `packed` returns: their places do not depend on the values before."""
    (length,) = LENGTH.unpack(payload[: LENGTH.size].numpy().tobytes())
    return _aligned(LENGTH.size + int(length))


def _aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Parts:
    """The tensors of a state, as bytes, each with its place among them."""

    def __init__(self) -> None:
        self.placed, self.end = list[tuple[int, Tensor]](), 0

    def put(self, part: Tensor) -> int:
        """Add the bytes of a tensor; returns their place."""
        place, self.end = self.end, self.end + _aligned(part.numel())
        self.placed.append((place, part))
        return place


def _described(value: Any, parts: _Parts, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise TypeError(f"a state has at most {MAX_DEPTH} levels")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if (library := sys.modules.get("torch.distributed.tensor")) and isinstance(value, library.DTensor):
        return _described_shard(value, parts, depth)
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES or value.layout != torch.strided:
            raise TypeError(f"a state has no {value.layout} tensors of {value.dtype}")
        place = parts.put(as_bytes(value.detach().cpu().contiguous().view(-1)))
        return ["tensor", dtype, list(value.shape), place]
    if isinstance(value, Mapping):
        return ["dict", *([_described(k, parts, depth + 1), _described(v, parts, depth + 1)] for k, v in value.items())]
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", *(_described(one, parts, depth + 1) for one in value)]
    raise TypeError(f"a state has plain values and tensors, got {type(value).__name__}")


def _described_shard(value: Any, parts: _Parts, depth: int) -> Any:
    library = sys.modules["torch.distributed.tensor"]
    (placement,) = value.placements if value.device_mesh.ndim == 1 else (None,)
    if type(placement) not in (library.Shard, library.Replicate):
        raise TypeError(f"a state has DTensors cut along one dimension of one mesh, got {value.placements}")
    with torch.no_grad():
        described = _described(value.to_local(), parts, depth + 1)
    return ["shard", described, list(value.shape), list(value.stride()), getattr(placement, "dim", None)]


class _Tensors:
    """The tensors in a payload. Their bytes follow one another, so together they take no more memory than came."""

    def __init__(self, payload: Tensor, mesh: dist.DeviceMesh | None):
        self._payload, self._mesh, self._end = payload, mesh, 0

    def take(self, dtype: torch.dtype, shape: Any, place: Any) -> Tensor:
        if not all(type(size) is int and size >= 0 for size in (*shape, place)) or place != self._end:
            raise ValueError(f"it has a tensor of shape {str(shape)[:80]} at byte {place}, expected byte {self._end}")
        num_bytes = math.prod(shape) * dtype.itemsize
        if place + num_bytes > self._payload.numel():
            raise ValueError(
                f"it has a tensor of {num_bytes} bytes at byte {place}, and all have {self._payload.numel()}"
            )
        self._end += _aligned(num_bytes)
        return self._payload[place : place + num_bytes].clone().view(dtype).view(shape)

    def joined(self, part: Any, shape: Any, stride: Any, dim: Any) -> Tensor:
        """A DTensor with `part` as this process's shard."""
        if self._mesh is None or not isinstance(part, Tensor):
            raise ValueError("it has a shard, and this worker's model is whole")
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placement = Replicate() if dim is None else Shard(dim)
        shape, stride = torch.Size(shape), tuple(stride)
        return cast(
            Tensor, DTensor.from_local(part, self._mesh, [placement], run_check=False, shape=shape, stride=stride)
        )


def _read(described: Any, tensors: _Tensors, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"a state has at most {MAX_DEPTH} levels")
    if not isinstance(described, list):
        if isinstance(described, dict):
            raise ValueError("it has an object of no kind")
        return described
    kind, *values = described
    if kind == "tensor":
        dtype, shape, place = values
        return tensors.take(DTYPES[dtype], shape, place)
    if kind == "dict":
        return {_read(k, tensors, depth + 1): _read(v, tensors, depth + 1) for k, v in values}
    if kind == "shard":
        part, *cut = values
        return tensors.joined(_read(part, tensors, depth + 1), *cut)
    read = [_read(one, tensors, depth + 1) for one in values]
    if kind not in ("list", "tuple"):
        raise ValueError(f"it has a value of an unknown kind {str(kind)[:80]!r}")
    return tuple(read) if kind == "tuple" else read
