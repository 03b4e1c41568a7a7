"""Which tests need the network lab of benchmarks/netlab.py: not every machine lets its user make one."""

from __future__ import annotations

import netlab
import pytest


def _why_no_lab() -> str | None:
    try:
        netlab.require_privileges()
        with netlab.Lab(1, "1gbit"):
            return None
    except netlab.LabError as error:
        return str(error)


WHY_NO_LAB = _why_no_lab()


def needs_lab(what: str) -> pytest.MarkDecorator:
    """Skips a test where there is no lab, and says that `what`, such as "two nodes are", is not tested there."""
    return pytest.mark.skipif(WHY_NO_LAB is not None, reason=f"NO NETWORK LAB HERE, {what} not tested: {WHY_NO_LAB}")
