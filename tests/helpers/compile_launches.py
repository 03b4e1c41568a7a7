"""Plugin of pytest for checks without a GPU: a check passes if all that it launches compiles, whatever else it finds."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from helpers import simulated_gpu  # isort: skip  # noqa: F401  before PyTorch, which Triton imports
import triton

from helpers import fake_driver

compiled_elsewhere: set[tuple[str, str]] = set()
"""By the processes of pytest-xdist: kernels by name, and types."""


def pytest_configure() -> None:
    """Not at import, which the search for doctests does too."""
    fake_driver.install()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, bool]:
    try:
        yield
    except (Exception, pytest.fail.Exception):
        pass  # kernels wrote nothing, so it says nothing
    problems = fake_driver.problems()
    assert not problems, "\n".join(problems)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (report := getattr(session.config, "workeroutput", None)) is not None:
        report["compiled"] = sorted(_compiled())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    compiled_elsewhere.update(map(tuple, getattr(node, "workeroutput", {}).get("compiled", ())))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    types = compiled_elsewhere | _compiled()
    num_kernels = len({function for function, _ in types})
    line = f"compiled {num_kernels} kernels for {len(types)} sets of types with Triton {triton.__version__}"
    terminalreporter.write_line(line)


def _compiled() -> set[tuple[str, str]]:
    return {(f"{function.__module__}.{function.__name__}", key) for function, key in fake_driver.compiled}
