"""Python programs in processes that start in milliseconds: forked from a server that has imported PyTorch and thinwire.

    thinwire("train", "digits", cwd=folder)          runs the command line and waits for its end
    with started(["-m", "thinwire", "train"], ...):  runs a program that a test can watch, signal and kill

What runs is the real program with its arguments, environment, working directory, streams, signals and exit code. What differs
from a shell's command: nothing is imported anew, and the Python programs that it starts (workers, the runs of a sweep, what
torchrun starts) are forked from it. So a few tests use real commands.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from .program import Program
from .spawn import CONTEXT

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def thinwire(
    *arguments: object, cwd: Path, timeout: float = 400, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `thinwire` with these arguments in `cwd`."""
    return python("-m", "thinwire", *arguments, cwd=cwd, timeout=timeout, **environment)


def python(*arguments: object, cwd: Path, timeout: float = 400, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `python` with these arguments (`-m MODULE ...`, `-c TEXT ...` or `FILE ...`) in `cwd`.

    Raises:
        subprocess.TimeoutExpired: the program was still at work after `timeout` seconds and was killed.
    """
    with started([*map(str, arguments)], cwd=cwd, **environment) as process:
        code = process.wait(timeout)
        return subprocess.CompletedProcess(arguments, code, process.stdout, process.stderr)


@contextlib.contextmanager
def started(arguments: Sequence[str], cwd: Path, **environment: str) -> Iterator[Program]:
    """A program in the background, in a session of its own. At the end it is killed, with what it started.

    Args:
        arguments: those of `python`: `-m MODULE ...`, `-c TEXT ...` or `FILE ...`.
        cwd: working directory.
        environment: variables in addition to those of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = Program(_main, list(arguments), str(cwd), folder=Path(folder), **environment)
        try:
            yield process
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def with_forked_programs(imports: Sequence[str], fn: Callable[..., object], *args: object) -> None:
    """Runs `fn(*args)` in a process where `subprocess` forks Python programs, which share these modules.

    Raises:
        AssertionError: with what the function raised.
    """
    errors, to_child = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_call, args=(to_child, imports, fn, args))
    process.start()
    to_child.close()
    with contextlib.suppress(EOFError):
        raise AssertionError(errors.recv())
    process.join()
    assert process.exitcode == 0, f"ended with exit code {process.exitcode}"


# ---- in the program's process ----


def _main(args: list[str], cwd: str) -> NoReturn:
    os.setsid()
    _fork_what_is_started()
    _become(args, cwd, dict(os.environ), [])


def _call(errors: Connection, imports: Sequence[str], fn: Callable[..., object], args: Sequence[object]) -> None:
    _fork_what_is_started()
    try:
        for name in imports:
            import_module(name)
        fn(*args)
    except BaseException:
        errors.send(traceback.format_exc())


def _fork_what_is_started() -> None:
    """From now on, Python programs and workers that this process starts are forked from it."""
    subprocess.Popen._execute_child = _fork_or_execute
    multiprocessing.get_context = _fork_context


def _fork_context(
    method: str | None = None, get: Callable[[str | None], BaseContext] = multiprocessing.get_context
) -> Any:
    return get("fork" if method == "forkserver" else method)


def _become(
    args: list[str], cwd: str | None, env: dict[str, str], streams: Sequence[int], mask: Iterable[int] = ()
) -> NoReturn:
    """Run the program as a new process would, and exit with its code.

    Args:
        args: those of `python`.
        cwd: working directory, or None for this one.
        env: all variables.
        streams: file descriptors for stdin, stdout and stderr; -1 leaves one as it is.
        mask: the signals to block.
    """
    for number, stream in enumerate(streams):
        if stream != -1:
            os.dup2(stream, number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = open(number, "wb", 0 if "-u" in args else -1, closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", write_through="-u" in args))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    os._exit(_run([arg for arg in args if arg != "-u"]))


def _run(args: list[str]) -> int:
    """Run `-m MODULE ...`, `-c TEXT ...` or `FILE ...`; returns the exit code."""
    kind = args[0] if args[0] in ("-m", "-c") else None
    sys.argv = args[1:] if kind else args
    sys.path.insert(0, os.getcwd() if kind else str(Path(args[0]).resolve().parent))
    warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # of a module that is imported already
    code = 0
    try:
        if kind == "-m":
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(args[1], "<string>", "exec"), main.__dict__)
        else:
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # waits for threads that are no daemons, as Python does
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _fork_or_execute(popen: subprocess.Popen, *arguments: Any) -> None:
    """`Popen._execute_child` that forks where the command is this Python; the rest of Popen is as it is."""
    given = inspect.signature(_EXECUTE).bind(popen, *arguments).arguments
    command = given["args"]
    if isinstance(command, str) or command[0] != sys.executable or command[1] == "-X":
        _EXECUTE(popen, *arguments)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    # Signals wait until the child has its own handlers: those of the parent would swallow them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    popen.pid = os.fork()
    if popen.pid == 0:
        if given["start_new_session"]:
            os.setsid()
        env = dict(os.environ if given["env"] is None else given["env"])
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        _become([os.fspath(word) for word in command[1:]], given["cwd"], env, streams, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    popen._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    popen._close_pipe_fds(*(given[name] for name in pipes))


_EXECUTE = subprocess.Popen._execute_child
