"""Plugin of pytest for checks without a GPU: a check passes if all that it launches compiles, whatever else it finds."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from helpers import fake_driver


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    num_kernels = len({function for function, _ in fake_driver.compiled})
    terminalreporter.write_line(f"compiled {num_kernels} kernels for {len(fake_driver.compiled)} sets of types")
