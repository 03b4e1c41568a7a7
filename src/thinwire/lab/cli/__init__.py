"""usage: thinwire COMMAND ...

Train over slow networks: workers agree while sending as few bytes as possible.

  train RECIPE    train a network, one process a worker
  train --list    show the recipes
  sweep FILE      start many runs from one file, on this machine or a SLURM cluster
  report RUNS     make tables, figures and an HTML page from finished runs
  watch RUN       show what a run is doing, in the terminal or as a live page
  keys            make the keys of an encrypted run between machines, and let machines join it
  lighthouse      name the workers of each round of an elastic run
  relay           forward between machines of a run that can only dial out
  demo            compare dense and compressed training: four runs, one figure
  plan            predict a training step of each method on a network
  doctor          say what is wrong with hosts and lines, and what follows from them
  new-method NAME make a package with a method of your own, and a comparison with five baselines
  consensus       average without training: the error against the bits sent
  list [KIND]     show the names that strategies and averagers are written with, and what each is
  topology GRAPH  print the properties of a graph, and draw it
  bench codecs    measure how fast codecs encode and decode
  bench step      measure a training step over this network
  --version       show the version

Each command explains its options with --help. A first run:

  thinwire train digits --workers 4 --strategy "Gradients(Mean(TopK(0.01), ErrorFeedback()))"
"""

# One module for each command. Where `--help` shows more than the options of one dataclass, it prints the module's
# docstring. A user error prints one line on stderr and no traceback; so does a missing package. Each command imports
# the packages that it needs, after it has read its options, so that `--help` does not wait for PyTorch.

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from ...messages import install_for_warnings
from ...suggestion import named
from ..output import FULL, UNREAD, drop, output_is_read, prepare_output
from .bench import bench_command, consensus_command
from .demo import demo_command
from .doctor import doctor_command
from .extras import EXTRAS, advice, missing_packages
from .keys import keys_command
from .lighthouse import lighthouse_command
from .names import list_command
from .new_method import new_method_command
from .options import fail, show_help
from .plan import plan_command
from .relay import relay_command
from .report import report_command
from .sweep import sweep_command
from .topology import topology_command
from .train import train_command
from .watch import watch_command

OF_PATHS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)  # errors that a path of the user's causes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 1 if a disk is full, 2 after a user error, 130 after Ctrl-C, or 141 if nobody reads it.

    `train` has more exit codes.
    """
    command, *options = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    prepare_output()
    install_for_warnings()
    # Before PyTorch is imported: it logs each lost connection with a C++ stack, and the exception says the same.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        run = named(COMMANDS, command, "command", "thinwire --help")
        if missing := missing_packages(command):
            return fail(advice(command, missing), 2)
        run(options)
        # A reader that is gone shows here, and not only when Python ends.
        sys.stdout.flush()
        return 0
    except ValueError as error:
        return fail(error, 2)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:  # a bug, or an import of the user
            raise
        return fail(advice(command, [package]), 2)
    except KeyboardInterrupt as interrupt:
        return fail("; ".join(["stopped", *map(str, interrupt.args)]), 130)
    except OSError as error:
        if error.errno in OF_PATHS and error.filename is not None:
            return fail(f"cannot use {error.filename}: {error.strerror}; give another, or ask its owner", 2)
        if error.errno in FULL:
            try:
                sys.stdout.flush()
            except OSError:  # it is on that disk
                drop(1)
            return fail(f"cannot write {error.filename or 'the output'}: {error.strerror}; free some space", 1)
        if error.errno not in UNREAD or output_is_read():  # else a pipe or connection broke elsewhere
            raise
        return 141  # 128 and the number of SIGPIPE, as a shell reports it


def help_command(options: list[str]) -> None:
    """Print the list of commands."""
    show_help(__doc__)


def version_command(options: list[str]) -> None:
    """Print the version."""
    from ... import __version__

    print(f"thinwire {__version__}")


COMMANDS = {
    "train": train_command,
    "demo": demo_command,
    "sweep": sweep_command,
    "report": report_command,
    "watch": watch_command,
    "keys": keys_command,
    "lighthouse": lighthouse_command,
    "relay": relay_command,
    "plan": plan_command,
    "doctor": doctor_command,
    "new-method": new_method_command,
    "consensus": consensus_command,
    "list": list_command,
    "topology": topology_command,
    "bench": bench_command,
    "--help": help_command,
    "-h": help_command,
    "--version": version_command,
}


if __name__ == "__main__":
    sys.exit(main())
