"""Which package may import which, read from the imports themselves; and documented public names."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

import thinwire as tw

SOURCE = Path(tw.__file__).parent

# A package may import packages of a lower floor, and those named beside it.
FLOORS = {
    "algorithm": 0,
    "allocator": 0,
    "clock": 1,
    "suggestion": 0,
    "messages": 0,
    "entry_points": 1,
    "debug": 0,
    "streams": 0,
    "schedule": 1,
    "options": 1,
    "membership": 1,
    "kernels": 1,
    "codec": 2,
    "memory": 2,
    "topology": 2,
    "comm": 2,
    "average": 3,
    "strategy": 4,
    "plan": 5,
    "notation": 5,
    "sampler": 5,
    "attaching": 6,
    "testing": 6,
    "_public": 7,
    "integrations": 7,
    "lab.console": 10,
    "lab.fields": 10,
    "lab.files": 10,
    "lab.output": 10,
    "lab.variables": 10,
    "lab.overrides": 10,
    "lab.report": 11,
    "lab.train": 12,
    "lab.bench": 13,
    "lab.recipes": 13,
    "lab.sweep": 14,
    "lab.cli": 15,
    "__main__": 16,
}
LIBRARY = {name for name, floor in FLOORS.items() if floor < 10}
SAME_FLOOR = {("memory", "codec"), ("membership", "schedule"), ("options", "schedule")}
CORE_NEEDS = {"torch", "numpy", "thinwire"}


@cache
def modules() -> list[tuple[Path, str]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        package = package_of(path.relative_to(SOURCE).with_suffix("").parts)
        if package not in ("__init__", "lab.__init__"):
            found.append((path, package))
    return found


def package_of(parts: tuple[str, ...]) -> str:
    return ".".join(parts[:2]) if parts[0] == "lab" else parts[0]


@cache  # most tests read all files
def imports(path: Path) -> list[tuple[str, bool]]:
    """Absolute dotted names of everything that a file imports, and whether at its top level."""
    package = ("thinwire", *path.relative_to(SOURCE).parent.parts)
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found += [(f"{stem}.{alias.name}", id(node) in top) for alias in node.names]
    return found


def test_nothing_imports_upwards():
    wrong = []
    for path, package in modules():
        for name, _ in imports(path):
            parts = tuple(name.split("."))
            if parts[0] != "thinwire" or len(parts) < 2:
                continue
            imported = package_of(parts[1:])
            if imported not in FLOORS or imported == package:
                continue
            if FLOORS[imported] >= FLOORS[package] and (package, imported) not in SAME_FLOOR:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong, wrong


def test_the_packages_of_training_have_an_order():
    order = ("step", "results", "folder", "run", "start")
    for path in sorted((SOURCE / "lab" / "train").rglob("*.py")):
        here = path.relative_to(SOURCE / "lab" / "train").parts[0]
        above = order[order.index(here) + 1 :] if here in order else order if here != "__init__.py" else ()
        imported = {name.split(".")[3] for name, _ in imports(path) if name.startswith("thinwire.lab.train.")}
        assert not imported & set(above), f"{path.relative_to(SOURCE)} imports {imported & set(above)}"


def test_the_library_imports_nothing_of_the_lab():
    for path in [path for path, package in modules() if package in LIBRARY] + [SOURCE / "__init__.py"]:
        assert not [name for name, _ in imports(path) if name.startswith("thinwire.lab")], path


def test_every_package_has_its_floor():
    assert {package for _, package in modules()} <= FLOORS.keys()


def test_only_comm_and_the_launcher_import_torch_distributed():
    users = {
        str(path.relative_to(SOURCE))
        for path, _ in modules()
        if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name, _ in imports(path))
    }
    others = (
        "integrations/checkpoint.py",
        "lab/train/start/connect.py",
        "lab/train/start/spawn.py",
        "lab/bench/step.py",
        "lab/bench/workers.py",
        "lab/cli/doctor.py",  # the type of the store
    )
    allowed = {u for u in users if u.startswith("comm/") or u in others}
    assert users == allowed, users - allowed


def test_only_the_gradient_strategy_and_the_checks_of_models_know_ddp():
    users = {
        str(path.relative_to(SOURCE))
        for path, package in modules()
        if package in LIBRARY and any("DistributedDataParallel" in name for name, _ in imports(path))
    }
    assert users == {"strategy/gradients/compression.py", "strategy/model/ddp.py"}


def test_the_core_needs_torch_and_numpy_alone():
    import sys

    for path, package in modules():
        if package in LIBRARY and package != "integrations":  # each of these needs the package of its trainer
            for name, top in imports(path):
                needed = name.split(".")[0]
                # Optional parts (networkx, matplotlib) may be imported where they are used.
                needs = CORE_NEEDS | ({"triton"} if path.parent == SOURCE / "kernels" / "triton" else set())
                assert not top or needed in needs or needed in sys.stdlib_module_names, f"{path}: {name}"


PACKAGES = (tw.average, tw.codec, tw.comm, tw.memory, tw.schedule, tw.strategy, tw.topology)


def test_public_names_are_documented():
    public = {f"thinwire.{name}": getattr(tw, name) for name in tw.__all__}
    for package in PACKAGES:
        public |= {f"{package.__name__}.{name}": value for name, value in vars(package).items() if name[0] != "_"}
    for name, value in public.items():
        described = inspect.isclass(value) or inspect.isroutine(value)
        if not (described and value.__module__.startswith("thinwire")):
            continue
        assert inspect.getdoc(value), f"{name} has no docstring"
        if inspect.isclass(value):
            for attribute, member in vars(value).items():
                if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    assert inspect.getdoc(member), f"{name}.{attribute} has no docstring"
