"""The examples of the integrations run. Doctest would import these large packages in every process of the tests."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from thinwire import integrations

MODULES = [module.name for module in pkgutil.iter_modules(integrations.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(f"thinwire.integrations.{name}")
    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted or not any(">>>" in (part.__doc__ or "") for part in vars(module).values())
