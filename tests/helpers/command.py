"""Python programs in processes that start in milliseconds: forked from a server that has imported PyTorch and thinwire.

    thinwire("train", "digits", cwd=folder)          runs the command line and waits for its end
    with started(["-m", "thinwire", "train"], ...):  runs a program that a test can watch, signal and kill

What runs is the real program with its arguments, environment, working directory, streams, signals and exit code. What differs
from a shell's command: nothing is imported anew, and the Python programs that it starts (workers, the runs of a sweep, what
torchrun starts) are forked from a fork server that is forked from it. So a few tests use real commands.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from thinwire.comm.parent_death import become_fork_server

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
    fork_what_is_started()
    _become(args, cwd, dict(os.environ))


def _call(errors: Connection, imports: Sequence[str], fn: Callable[..., object], args: Sequence[object]) -> None:
    fork_what_is_started()
    try:
        for name in imports:
            import_module(name)
        fn(*args)
    except BaseException:
        errors.send(traceback.format_exc())


def fork_what_is_started() -> None:
    """From now on, this process forks its fork server, which would import all modules anew, and starts Python programs there.

    It does not fork them itself: where a thread looks up a name at that moment, as PyTorch's store does for each new client,
    the child would wait for ever for the C library's lock.
    """
    multiprocessing.util.spawnv_passfds = fork_server_or_spawn
    subprocess.Popen._execute_child = _fork_or_execute
    subprocess.Popen._try_wait = _try_wait
    subprocess.Popen._internal_poll = _internal_poll
    os.killpg = _killpg


def fork_server_or_spawn(
    path: str, args: list[str], passed: list[int], spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds
) -> int:
    """`spawnv_passfds` that forks a fork server, and starts other programs."""
    if "multiprocessing.forkserver" not in args[-1]:
        return spawn(path, args, passed)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            _serve(args[-1], passed)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    return pid


def _serve(command: str, passed: list[int]) -> None:
    """The fork server: runs its command with these files alone, which ends in SystemExit."""
    # Pipes and sockets would seem open to their other ends. Their numbers stay taken, as objects may still close them.
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in {int(name) for name in os.listdir("/dev/fd")} - {0, 1, 2, nothing, *passed}:
        with contextlib.suppress(OSError):  # that of the list itself is closed
            os.fstat(file)
            os.dup2(nothing, file)
    multiprocessing.forkserver._forkserver._lock = threading.Lock()  # the parent's is held while it starts this server
    _reset_handlers()
    if "parent_death" in command:  # what importing this module does in a fork server
        become_fork_server()
    exec(command, {})


def _become(args: list[str], cwd: str, env: dict[str, str], streams: Sequence[int] = ()) -> NoReturn:
    """Run the program as a new process would, and exit with its code.

    Args:
        args: those of `python`.
        cwd: working directory.
        env: all variables.
        streams: file descriptors for stdin, stdout and stderr; without them, they stay.
    """
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = open(number, "wb", 0 if "-u" in args else -1, closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", write_through="-u" in args))
    _reset_handlers()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
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


def _reset_handlers() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _fork_or_execute(popen: subprocess.Popen, *arguments: Any, execute: Any = subprocess.Popen._execute_child) -> None:
    """`Popen._execute_child` that has the fork server fork where the command is this Python."""
    given = inspect.signature(execute).bind(popen, *arguments).arguments
    command = given["args"]
    if isinstance(command, str) or command[0] != sys.executable or command[1] == "-X":
        execute(popen, *arguments)
        return
    env = dict(os.environ if given["env"] is None else given["env"])
    streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
    streams = [number if stream == -1 else stream for number, stream in enumerate(streams)]
    words = [os.fspath(word) for word in command[1:]]
    files = streams + list(given["pass_fds"])
    child = _Child(words, given["cwd"] or os.getcwd(), env, files, given["start_new_session"])
    process = CONTEXT.Process(target=child.run)
    # The child has a main module of its own, and must not import this one's.
    with unittest.mock.patch.dict(sys.modules, __main__=ModuleType("__main__")):
        process.start()
    popen.forked, popen.pid, popen._child_created = process, process.pid, True
    _forked[process.pid] = popen
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    popen._close_pipe_fds(*(given[name] for name in pipes))


_forked: dict[int, subprocess.Popen] = {}


@dataclass
class _Child:
    """A Python program that `subprocess` starts; pickling it passes its files to the fork server's child.

    Attributes:
        files: descriptors of stdin, stdout and stderr, and of files that the program keeps open, under other numbers.
    """

    args: list[str]
    cwd: str
    env: dict[str, str]
    files: list[Any]
    new_session: bool

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"files": [DupFd(file) for file in self.files]}

    def run(self) -> NoReturn:
        if self.new_session:
            os.setsid()
        _become(self.args, self.cwd, self.env, [file.detach() for file in self.files[:3]])


def _try_wait(popen: subprocess.Popen, flags: int, wait: Any = subprocess.Popen._try_wait) -> tuple[int, int]:
    if not hasattr(popen, "forked"):
        return wait(popen, flags)
    code = popen.forked._popen.poll(flags)
    if code is None:
        return 0, 0
    return popen.pid, code << 8 if code >= 0 else -code


def _internal_poll(
    popen: subprocess.Popen, *args: Any, poll: Any = subprocess.Popen._internal_poll, **rest: Any
) -> Any:
    if not hasattr(popen, "forked"):
        return poll(popen, *args, **rest)
    if popen.returncode is None and popen._waitpid_lock.acquire(False):
        try:
            pid, status = _try_wait(popen, os.WNOHANG)
            if pid:
                popen._handle_exitstatus(status)
        finally:
            popen._waitpid_lock.release()
    return popen.returncode


def _killpg(group: int, number: int, kill: Callable[[int, int], None] = os.killpg) -> None:
    """`os.killpg` to which a program exists, as a process of this one would, until its end was asked for.

    The fork server asks at once; and a program that has just started may not lead its group yet.
    """
    try:
        kill(group, number)
    except ProcessLookupError:
        if group not in _forked or _forked[group].returncode is not None:
            raise
        with contextlib.suppress(ProcessLookupError):
            os.kill(group, number)
