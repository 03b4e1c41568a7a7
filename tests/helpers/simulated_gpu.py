"""A GPU in main memory, for checks of streams without one: `pytest -p helpers.simulated_gpu`, which needs a C++ compiler.

`torch.device("cuda")` then works in PyTorch's CPU build. Operations run on the CPU at once, and raise an error if they use
memory without having waited for the stream that uses it; so does an allocation that may get memory which is still in use. What
is checked, and what is not, stands at the top of `simulated_gpu.cpp`. thinwire's kernels run as plain PyTorch, or with the
environment variable `TRITON_INTERPRET=1` in Triton's interpreter.

It must be imported before PyTorch. NCCL's messages have a stream of their own; they go over Gloo, and so do those that PyTorch
itself sends over Gloo on a GPU, which its CPU build does not.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARY = SOURCE.parents[2] / "build" / "simulated_gpu.so"


def build() -> None:
    """Compile the source, in about 20 seconds, if it or PyTorch has changed since."""
    torch = Path(find_spec("torch").origin).parent
    assert not (torch / "lib" / "libtorch_cuda.so").exists(), "a GPU is simulated in PyTorch's CPU build alone"
    changed = max(path.stat().st_mtime for path in (SOURCE, torch / "version.py"))
    LIBRARY.parent.mkdir(exist_ok=True)
    with LIBRARY.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one process alone
        if not LIBRARY.exists() or LIBRARY.stat().st_mtime <= changed:
            compile_for(torch)


def compile_for(torch: Path) -> None:
    folders = [f"-I{torch / folder}" for folder in ("include", "include/torch/csrc/api/include")]
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    made = LIBRARY.with_suffix(f".{os.getpid()}")
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *options, *folders, SOURCE, "-o", made, "-ltorch_cpu", "-lc10"], check=True)
    made.replace(LIBRARY)


assert "torch" not in sys.modules, "import helpers.simulated_gpu before torch"
build()
ctypes.CDLL(str(LIBRARY), ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.distributed_c10d as c10d  # noqa: E402

from thinwire.kernels import backend, flags  # noqa: E402

SIMULATED = torch.ops.simulated_gpu
GPU = torch.device("cuda", 0)
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = 1  # PyTorch's number of that type of device


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **place):
        return super().__new__(cls, **place) if place else super().__new__(cls, GPU, priority=priority)

    @property
    def cuda_stream(self):
        return self.stream_id

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False):
        return super().__new__(cls, GPU, enable_timing=enable_timing, blocking=blocking)

    def record(self, stream=None):
        self.recorded_at = time.monotonic()
        super().record(stream or current_stream())

    def wait(self, stream=None):
        super().wait(stream or current_stream())

    def elapsed_time(self, end):
        return 1000 * (end.recorded_at - self.recorded_at)


def stream_of(number: int) -> Stream:
    return Stream(stream_id=number, device_index=0, device_type=CUDA)


def current_stream(device: Any = None) -> Stream:
    return stream_of(SIMULATED.current_stream())


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    before = SIMULATED.current_stream()
    if stream is not None:
        SIMULATED.set_stream(stream.stream_id)
    try:
        yield
    finally:
        SIMULATED.set_stream(before)


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    yield


_captures = False


@contextmanager
def captured(graph: Any) -> Iterator[None]:
    global _captures
    _captures = True
    try:
        yield
    finally:
        _captures = False


def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize(storage, size)
    SIMULATED.resize_storage(torch.empty(0, dtype=torch.uint8, device=GPU).set_(storage), size)
    return storage


_resize = torch.UntypedStorage.resize_


def deep_copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if not tensor.is_cuda:
        return _deepcopy(tensor, memo)
    return memo.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))


_deepcopy = torch.Tensor.__deepcopy__


def through_main_memory(call: Callable[..., Any]) -> Callable[..., Any]:
    """A collective of PyTorch, which its CPU build refuses for tensors on a GPU."""

    def down(value: Any) -> Any:
        if isinstance(value, list):
            return [down(each) for each in value]
        return value.cpu() if isinstance(value, torch.Tensor) else value

    def up(value: Any, moved: Any) -> None:
        if isinstance(value, list):
            for each, other in zip(value, moved, strict=True):
                up(each, other)
        elif isinstance(value, torch.Tensor) and value.is_cuda:
            value.copy_(moved)

    def staged(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
        groups = [value for value in (*arguments, *options.values()) if isinstance(value, dist.ProcessGroup)]
        if "cuda:nccl" in str(dist.get_backend_config(groups[0] if groups else None)):
            return call(*arguments, **({"async_op": True} if async_op else {}), **options)
        moved, moved_options = [down(a) for a in arguments], {name: down(value) for name, value in options.items()}
        call(*moved, **moved_options)
        up(list(arguments), moved)
        for name, value in options.items():
            up(value, moved_options[name])
        return SimpleNamespace(wait=lambda: None) if async_op else None

    return staged


class AnyBackend(type):
    def __instancecheck__(cls, backend: object) -> bool:
        return isinstance(backend, torch._C._distributed_c10d.Backend)


class Nccl(metaclass=AnyBackend):
    """What `ProcessGroupNCCL(...)` returns: messages have a stream of their own, and travel over Gloo."""

    Options = SimpleNamespace

    def __new__(cls, store: dist.Store, rank: int, size: int, options: Any = None) -> Any:
        group, gloo = (dist.ProcessGroup(store, rank, size) for _ in range(2))
        backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size)
        gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        SIMULATED.add_nccl(group.boxed(), gloo.boxed())
        return group._get_backend(GPU)


def install() -> None:
    flags_of = flags.fault_counters

    def counters(device: torch.device) -> torch.Tensor:
        made = flags_of(device)
        if made.is_cuda:
            SIMULATED.without_order(made)
        return made

    flags.fault_counters = counters
    if IS_INTERPRETED:
        from helpers import interpreter

        interpreter.install()
    else:
        backend.BACKENDS["cuda"] = "reference"
    torch.UntypedStorage.resize_ = resized
    torch.Tensor.__deepcopy__ = deep_copied
    of_shards = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
    for name in ("_broadcast_coalesced", *filter(partial(hasattr, dist), of_shards)):  # PyTorch 2.13 has all of them
        setattr(dist, name, through_main_memory(getattr(dist, name)))
    dist._verify_params_across_processes = lambda *arguments: None
    c10d._NCCL_AVAILABLE, c10d.ProcessGroupNCCL = True, Nccl
    c10d.default_pg_nccl_timeout = c10d.default_pg_timeout
    torch._C._nccl_version, torch._C._nccl_version_suffix = lambda: 2 << 32, lambda: b""
    replaced = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": SimpleNamespace,
        "graph": captured,
        "stream": on_stream,
        "device": on_device,
        "current_stream": current_stream,
        "default_stream": lambda device=None: stream_of(0),
        "synchronize": lambda device=None: SIMULATED.synchronize(),
        "is_current_stream_capturing": lambda: _captures,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "manual_seed_all": SIMULATED.seed,
        "_lazy_init": lambda: None,
        "_sleep": lambda cycles: None,
        "get_device_properties": lambda device=None: SimpleNamespace(uuid="simulated", major=9, minor=0),
    }
    for name, value in replaced.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, value)
    torch._C._cuda_getCurrentRawStream = lambda index: SIMULATED.current_stream()


install()


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Also those whose error was caught, or was raised in a thread."""
    yield
    assert SIMULATED.races() == []
