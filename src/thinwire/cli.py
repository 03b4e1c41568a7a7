"""The command line: `thinwire train`, `demo`, `consensus`, `topology` and `bench`.

A mistake of the user's gets one line on stderr that says what was meant, and no traceback. Rooms are imported by the
commands that need them.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

USAGE = """\
usage: thinwire COMMAND ...

Train over a thin wire: workers agree while sending as few bytes as possible.

  train RECIPE    train a network, one process a worker
  train --list    show the recipes
  demo            dense against compressed: four runs, one table, one figure
  consensus       average alone: the error against the bits sent
  topology GRAPH  the facts of a graph, and a picture of it
  bench codecs    measure how fast codecs encode and decode
  bench step      measure a training step over the network at hand
  --version       show the version

Each explains its options with --help. To start with:

  thinwire train digits --workers 4 --averager "Mean(TopK(0.01), ErrorFeedback())"
"""

TRAIN_USAGE = """\
usage: thinwire train RECIPE [OPTIONS]
       thinwire train --list

Train a network, one process a worker, and leave the records in runs/. The same command works under torchrun:

  torchrun --nproc-per-node 4 --no-python thinwire train digits

`thinwire train RECIPE --help` shows the options and the recipe's values.

recipes:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 1 where a worker failed, 2 after a mistake of the user's, 130 after Ctrl-C."""
    command, *options = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        _named(COMMANDS, command, "command", "thinwire --help")(options)
        return 0
    except ValueError as error:
        return _fail(error, 2)
    except KeyboardInterrupt as interrupt:
        return _fail("; ".join(["stopped", *map(str, interrupt.args)]), 130)


def help_command(options: list[str]) -> None:
    """Say what commands there are."""
    print(USAGE, end="")


def version_command(options: list[str]) -> None:
    """Say which version this is."""
    from . import __version__

    print(f"thinwire {__version__}")


def train_command(options: list[str]) -> None:
    """Train a recipe and print its result."""
    from .recipes import recipes
    from .report import read_run, summary_table
    from .train.launch import torchrun_size

    known = recipes()
    recipe, *options = options or ["--help"]
    if recipe in ("-h", "--help", "--list"):
        print(TRAIN_USAGE * (recipe != "--list") + _listed(known), end="")
        return
    if recipe.startswith("-"):
        raise ValueError(f"the recipe comes first, as in: thinwire train {next(iter(known))} {recipe} ...")
    default = _named(known, recipe, "recipe", "thinwire train --list")()
    default = replace(default, workers=torchrun_size() or default.workers)
    config = _parsed(type(default), options, f"thinwire train {recipe}", default, known[recipe].__doc__)
    folder = _trained(config)
    if os.environ.get("RANK", "0") == "0":
        title = f"{config.recipe}, {config.workers} workers, seed {config.seed}"
        _print(summary_table([read_run(folder)], title))
        print(f"  {folder}")


@dataclass(frozen=True)
class Demo:
    """Train the digits recipe dense, with 4 bits, sparse, and sparse with 4 bits, and compare them."""

    output: Path = Path("demo")
    """Folder for the runs and the figure; runs that an earlier demo left there are replaced."""
    workers: int = 4
    """Number of worker processes."""
    seed: int = 0
    """The one seed of all four runs."""
    max_steps: int | None = None
    """Stop each run after this many steps; fewer => a faster, worse demo."""


def demo_command(options: list[str]) -> None:
    """Four runs, one table, one figure."""
    from .recipes.digits import DEMO, digits
    from .report import accuracy_against_bytes, read_run, summary_table

    demo = _parsed(Demo, options, "thinwire demo", Demo())
    shared = replace(digits(), workers=demo.workers, seed=demo.seed, max_steps=demo.max_steps, overwrite=True)
    runs = []
    for label, averager in DEMO.items():
        name = re.sub(r"\W+", "-", label)
        folder = _trained(replace(shared, averager=averager, output=demo.output, name=name))
        runs.append(read_run(folder, label))
    figure = demo.output / "accuracy-against-bytes.png"
    accuracy_against_bytes(runs, figure)
    _print(summary_table(runs, title=f"Handwritten digits, {demo.workers} workers, seed {demo.seed}"))
    print(f"  {figure}")


def bench_command(options: list[str]) -> None:
    """Run a benchmark, which prints its own table."""
    from . import bench

    benches = {"codecs": bench.CodecsBench, "step": bench.StepBench}
    name, *options = options or ["--help"]
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return
    _parsed(_named(benches, name, "benchmark", "thinwire --help"), options, f"thinwire bench {name}").run()


def consensus_command(options: list[str]) -> None:
    """Average alone, and measure the error against bits."""
    from .bench import ConsensusBench

    _parsed(ConsensusBench, options, "thinwire consensus").run()


@dataclass(frozen=True)
class TopologyFacts:
    """Print the facts of a topology, such as "Exponential()", and draw it."""

    workers: int = 16
    """Number of workers."""
    output: Path | None = None
    """Draw it to this file (.png, .svg or .pdf)."""


def topology_command(options: list[str]) -> None:
    """Print the facts of a topology and draw it."""
    from .bench.rows import as_parsed
    from .topology import Topology, describe, draw

    graph, *options = options or ["--help"]
    if graph in ("-h", "--help"):
        options = ["--help"]
    elif graph.startswith("-"):
        raise ValueError('the graph comes first, as in: thinwire topology "Exponential()" --workers 16')
    asked = _parsed(TopologyFacts, options, "thinwire topology GRAPH")
    topology = as_parsed(graph, Topology)
    facts = describe(topology, asked.workers)
    if asked.output is not None:
        try:
            facts.append(("drawing", str(draw(topology, asked.workers, asked.output))))
        except OSError as error:
            raise ValueError(f"cannot write {asked.output}: {error.strerror}; choose another file") from None
    for name, value in facts:
        print(f"  {name:18} {value}")


COMMANDS = {
    "train": train_command,
    "demo": demo_command,
    "consensus": consensus_command,
    "topology": topology_command,
    "bench": bench_command,
    "--help": help_command,
    "-h": help_command,
    "--version": version_command,
}


def _trained(config: Any) -> Path:
    from .train import WorkerError, train

    try:
        return train(config)
    except WorkerError as error:
        _fail(error, 1)
        sys.stdout.flush()
        os._exit(1)  # at once: under torchrun, threads that wait for other workers would hold up an ordinary exit


def _listed(known: dict[str, Any]) -> str:
    return "".join(f"  {name:<14}  {build.__doc__.splitlines()[0]}\n" for name, build in known.items())


def _print(table: Any) -> None:
    from rich.console import Console

    console = Console()
    Console(width=None if console.is_terminal else 120).print(table)


def _fail(message: object, code: int) -> int:
    # Under torchrun every worker finds the same mistake; one of them says so.
    if code != 2 or os.environ.get("RANK", "0") == "0":
        print(f"thinwire: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    return code


def _named(known: dict[str, Any], name: str, kind: str, where: str) -> Any:
    """What is known by that name; a misspelt name is an error that says what was meant."""
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}{_suggestion(name, known)}; see {where}")
    return known[name]


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else f", known are {', '.join(n for n in known if n[0] != '-')}"


def _parsed(kind: type, options: list[str], program: str, default: Any = None, description: str | None = None) -> Any:
    """Read options into a dataclass with tyro.

    Raises:
        ValueError: one line, instead of tyro's box.
    """
    import tyro

    def parse(options: list[str]) -> tuple[Any, list[str]]:
        keywords = {} if default is None else {"default": default}
        return tyro.cli(
            kind, args=options, prog=program, description=description, return_unknown_args=True, **keywords
        )

    if {"-h", "--help"} & set(options):
        parse(["--help"])
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), _wide_terminal():
            parsed, unknown = parse(options)
    except SystemExit:
        raise ValueError(f"{_first_sentence(complaint.getvalue())}; see {program} --help") from None
    if unknown:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            parse(["--help"])
        known = sorted(set(re.findall(r"--[\w.-]+", text.getvalue())))
        raise ValueError(f"unknown option {unknown[0]!r}{_suggestion(unknown[0], known)}; see {program} --help")
    return parsed


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    """So that tyro breaks no lines in its box."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


def _first_sentence(box: str) -> str:
    """The message in tyro's box, without its title, the frame and the advice below it; ASCII terminals have no frame."""
    lines = [line.strip("│╭╮╰╯─ ") for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()]
    _, message, *_ = [*filter(lambda line: line.strip("-"), lines), box, box]
    return re.sub(r"^Error parsing [A-Z]\w*: ", "", message).rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
