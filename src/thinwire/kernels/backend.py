"""Choose the backend that runs a kernel: C++ for tensors in main memory, Triton on GPUs, else the reference in PyTorch.

Each kernel has a reference in its family's file. A *backend* is a module of this package, such as `kernels.cpu`; when it is
imported, it adds its functions to the kernels that it has. All other kernels fall back to the reference.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# device type -> the backend that serves it; "cuda" is PyTorch's name for AMD's GPUs too
BACKENDS = {"cpu": "cpu", "cuda": "triton"}

_TITLES = {"cpu": "C++", "triton": "Triton"}
_REMEDIES = {
    "cpu": "install a C++17 compiler (Debian: apt install g++; macOS: xcode-select --install) and then thinwire again: "
    "pip install --force-reinstall --no-deps . in the folder of its sources",
    "triton": "install the extra gpu: pip install '.[gpu]' in the folder of thinwire's sources",
}

KERNELS: list[Kernel[..., Any]] = []  # all of them, so that a forced backend can reset what they chose
_forced: str | None = None


class Kernel(Generic[P, R]):
    """A kernel with its reference; `on[device.type]` is the fastest function for a type of device."""

    def __init__(self, reference: Callable[P, R]) -> None:
        family, name = reference.__module__.rpartition(".")[2], reference.__name__
        self.name = f"{family}.{name.removeprefix('_')}"
        self.reference = reference
        self.functions: dict[str, Callable[P, R]] = {}
        """The functions that run it, by backend."""
        # A dictionary that fills itself: a call of a kernel then costs one lookup.
        self.on = _Chosen(self)
        KERNELS.append(self)

    def runs_on(self, backend: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a backend's function of this kernel; it has the reference's parameters."""

        assert backend in BACKENDS.values(), backend

        def add(function: Callable[P, R]) -> Callable[P, R]:
            self.functions[backend] = function
            self.on.clear()
            return function

        return add


class _Chosen(dict[str, Callable[P, R]]):
    """The function of a kernel for each type of device. It is chosen when it is first asked for."""

    def __init__(self, kernel: Kernel[P, R]) -> None:
        super().__init__()
        self._kernel = kernel

    def __missing__(self, device_type: str) -> Callable[P, R]:
        backend = _forced or backend_for(device_type)
        self[device_type] = self._kernel.functions.get(backend, self._kernel.reference)
        return self[device_type]


def kernel(reference: Callable[P, R]) -> Kernel[P, R]:
    """Decorate a reference `_<name>` in a family's module."""
    return Kernel(reference)


def _load(backend: str) -> None:
    importlib.import_module(f"{__package__}.{backend}")


@cache
def backend_for(device_type: str) -> str:
    """The backend for a type of device, loaded, or "reference". Warns once if a backend is missing."""
    backend = BACKENDS.get(device_type, "reference")
    try:
        if backend != "reference":
            _load(backend)
    except ImportError as error:
        warnings.warn(
            f"thinwire: the {_TITLES[backend]} kernels cannot be loaded ({error}). Plain PyTorch serves instead: same "
            f"results, but many times slower. To get the fast kernels, {_REMEDIES[backend]}",
            RuntimeWarning,
            stacklevel=3,
        )
        return "reference"
    return backend


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use one backend inside a `with` block, in all threads; for tests and benchmarks.

    Args:
        name: "reference", "cpu" or "triton", which takes tensors on a GPU only.

    Raises:
        ValueError: if there is no such backend.
        ImportError: if its extension, or Triton, is not installed.

    Example:
        >>> from thinwire import kernels
        >>> with kernels.use_backend("reference"):
        ...     kernels.uniform(key=1, numel=1)
        tensor([0.4083])
    """
    if name not in (names := ["reference", *BACKENDS.values()]):
        raise ValueError(f"backend: expected one of {sorted(names)}, got {name!r}")
    if name != "reference":
        _load(name)
    before = _forced
    _force(name)
    try:
        yield
    finally:
        _force(before)


def _force(backend: str | None) -> None:
    global _forced
    _forced = backend
    # Kernels keep what they chose, so they must choose again.
    for each in KERNELS:
        each.on.clear()
