"""The command line in processes that start in milliseconds: forked from a server that has imported it.

What runs is `main` with real arguments, environment, working directory, streams and exit code. What differs from a
shell's `thinwire`: nothing is imported anew, and workers are forked from the command. So a few tests use real commands.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .spawn import CONTEXT


def thinwire(
    *arguments: object, cwd: Path, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `thinwire` with these arguments in `cwd`.

    Raises:
        subprocess.TimeoutExpired: the command was still at work after `timeout` seconds and was killed.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        process = CONTEXT.Process(target=_run, args=(words, str(cwd), env, folder))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout)
        out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, process.exitcode, out, err)


def _run(words: list[str], cwd: str, env: dict[str, str], folder: str) -> None:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    from thinwire.lab import cli
    from thinwire.lab.train import spawn

    spawn.worker_context = lambda preloaded: multiprocessing.get_context("fork")  # type: ignore[assignment]
    sys.exit(cli.main(words))
