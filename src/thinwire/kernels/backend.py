"""Choose the backend that runs a kernel: C++ for tensors in main memory, Triton on GPUs, else the reference in PyTorch.

Each kernel has a reference in its family's file. A *backend* is a package such as `kernels.cpu` that mirrors the
families and declares, in each module's `__all__`, the kernels that it has. A kernel that a backend does not declare
falls back to the reference.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")

Functions = Mapping[str, Callable[..., Any]]

# device type -> the package in `thinwire.kernels` that serves it; "cuda" is PyTorch's name for AMD's GPUs too
PACKAGES = {"cpu": "cpu", "cuda": "triton"}

_TITLES = {"cpu": "C++", "triton": "Triton"}
_REMEDIES = {
    "cpu": "install a C++17 compiler (Debian: apt install g++; macOS: xcode-select --install) and then thinwire again: "
    "pip install --force-reinstall --no-deps thinwire",
    "triton": "install the extra gpu: pip install 'thinwire[gpu]'",
}

_REFERENCES: dict[str, Callable[..., Any]] = {}
_forced: Functions | None = None


class Kernel(Generic[P, R]):
    """A kernel with its reference; `on(device)` gives the fastest function for a device."""

    def __init__(self, reference: Callable[P, R]) -> None:
        family, name = reference.__module__.rpartition(".")[2], reference.__name__
        self.name = f"{family}.{name.removeprefix('_')}"
        self.reference = reference
        _REFERENCES[self.name] = reference

    def on(self, device: torch.device) -> Callable[P, R]:
        """The function that runs this kernel for tensors on `device`."""
        functions = functions_for(device.type) if _forced is None else _forced
        # A backend's function has its reference's parameters; a test compares the signatures.
        return cast("Callable[P, R]", functions.get(self.name, self.reference))


def kernel(reference: Callable[P, R]) -> Kernel[P, R]:
    """Decorate a reference `_<name>` in a family's module; a backend's function of this kernel is called `<name>`."""
    return Kernel(reference)


def declared(package: ModuleType) -> Functions:
    """All kernels that a backend's package declares, by `family.name`."""
    functions = {
        f"{module.__name__.rpartition('.')[2]}.{name}": getattr(module, name)
        for module in package.FAMILIES
        for name in module.__all__
    }
    unknown = sorted(set(functions) - set(_REFERENCES))
    assert not unknown, f"{package.__name__} declares kernels that have no reference: {unknown}"
    return functions


def _load(package: str) -> Functions:
    return declared(importlib.import_module(f"{__package__}.{package}"))


@cache
def functions_for(device_type: str) -> Functions:
    """The kernels for a type of device; empty where the reference must serve. Warns once if a backend is missing."""
    if device_type not in PACKAGES:
        return {}
    package = PACKAGES[device_type]
    try:
        return _load(package)
    except ImportError as error:
        warnings.warn(
            f"thinwire: the {_TITLES[package]} kernels cannot be loaded ({error}). Plain PyTorch serves instead: same "
            f"results, but many times slower. To get the fast kernels, {_REMEDIES[package]}",
            RuntimeWarning,
            stacklevel=3,
        )
        return {}


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use one backend inside a `with` block, in all threads; for tests and benchmarks.

    Args:
        name: "reference", "cpu" or "triton". On tensors in main memory, "triton" asks for the environment variable
            `TRITON_INTERPRET=1`, set before the first import.

    Raises:
        ValueError: if there is no such backend.
        ImportError: if its extension, or Triton, is not installed.

    Example:
        >>> from thinwire import kernels
        >>> with kernels.use_backend("reference"):
        ...     kernels.uniform(key=1, numel=1)
        tensor([0.4083])
    """
    global _forced
    if name not in (names := ["reference", *PACKAGES.values()]):
        raise ValueError(f"backend: expected one of {sorted(names)}, got {name!r}")
    before, _forced = _forced, {} if name == "reference" else _load(name)
    try:
        yield
    finally:
        _forced = before
