"""The command line: `thinwire train`, `sweep`, `report`, `demo`, `consensus`, `topology` and `bench`.

A mistake of the user's gets one line on stderr that says what was meant, and no traceback; so does a package that is not
installed. Packages are imported by the commands that need them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .bench import bench_command, consensus_command
from .demo import demo_command
from .extras import EXTRAS, advice, missing_packages
from .options import fail, named
from .report import report_command
from .sweep import sweep_command
from .topology import topology_command
from .train import train_command

USAGE = """\
usage: thinwire COMMAND ...

Train over slow networks: workers agree while sending as few bytes as possible.

  train RECIPE    train a network, one process a worker
  train --list    show the recipes
  sweep FILE      many runs from one file, here or on a SLURM cluster
  report RUNS     tables, figures and a page of finished runs
  demo            dense against compressed: four runs, one table, one figure
  consensus       average alone: the error against the bits sent
  topology GRAPH  the facts of a graph, and a picture of it
  bench codecs    measure how fast codecs encode and decode
  bench step      measure a training step over the network at hand
  --version       show the version

Each explains its options with --help. To start with:

  thinwire train digits --workers 4 --averager "Mean(TopK(0.01), ErrorFeedback())"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 2 after a mistake of the user's, 130 after Ctrl-C; `train` has codes of its own."""
    command, *options = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        run = named(COMMANDS, command, "command", "thinwire --help")
        if missing := missing_packages(command):
            return fail(advice(command, missing), 2)
        run(options)
        return 0
    except ValueError as error:
        return fail(error, 2)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        return fail(advice(command, [package]), 2)
    except KeyboardInterrupt as interrupt:
        return fail("; ".join(["stopped", *map(str, interrupt.args)]), 130)


def help_command(options: list[str]) -> None:
    """Say what commands there are."""
    print(USAGE, end="")


def version_command(options: list[str]) -> None:
    """Say which version this is."""
    from ... import __version__

    print(f"thinwire {__version__}")


COMMANDS = {
    "train": train_command,
    "demo": demo_command,
    "sweep": sweep_command,
    "report": report_command,
    "consensus": consensus_command,
    "topology": topology_command,
    "bench": bench_command,
    "--help": help_command,
    "-h": help_command,
    "--version": version_command,
}


if __name__ == "__main__":
    sys.exit(main())
