"""How a benchmark ends: after a mistake in its command with one line on stderr and exit code 2, as `thinwire` does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from lines import LabError


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's `main`, and exit with its code: with 2 if a value, a line or a file is wrong, with 130 after Ctrl-C."""
    try:
        sys.exit(main())
    except (ValueError, LabError) as error:
        fail(str(error))
    except OSError as error:
        if error.filename is None:  # not of a file that the user named, so a bug or the network
            raise
        fail(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)


def fail(message: str) -> NoReturn:
    """Print an error as one line on stderr, after the script's name, and exit with 2."""
    print(f"{Path(sys.argv[0]).stem}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(2)


def existing_folder(text: str) -> Path:
    """The type of an argument: a folder that exists."""
    path = Path(text)
    if not path.is_dir():
        # `argparse` would put its own words in the place of those of a ValueError.
        raise LabError(f"{text} is not a folder" if path.exists() else f"there is no folder {text}")
    return path
