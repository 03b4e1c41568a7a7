"""Workers end with the fork server that started them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers.program import Program, below, wait_until

from thinwire.comm.parent_death import become_fork_server, end_with_parent
from thinwire.lab.bench.workers import in_workers

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux's prctl")


def serve(folder: str) -> None:
    """A fork server that ends before its child has asked to end with it."""
    become_fork_server()
    server = os.getpid()
    child = os.fork()
    if child:
        print(child, flush=True)
        os._exit(0)
    while os.getppid() == server:
        time.sleep(0.01)
    end_with_parent()
    Path(folder, "goes-on").touch()
    os._exit(0)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_a_worker_whose_fork_server_was_killed_while_it_started_ends_too(tmp_path):
    program = Program(serve, str(tmp_path), folder=tmp_path)
    assert program.wait(300) == 0, program.stderr
    child = int(program.stdout)
    wait_until(lambda: has_ended(child), "the child's end")
    assert not (tmp_path / "goes-on").exists()


def measured(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as while it waits for the store, in C++
    Path(folder, "begun").symlink_to(str(os.getpid()))
    time.sleep(30)


def measure(folder: str) -> None:
    in_workers(measured, folder, 1)


def test_the_workers_of_a_measurement_end_with_it(tmp_path):
    program = Program(measure, str(tmp_path), folder=tmp_path)
    program.wait_until((tmp_path / "begun").is_symlink, "the measurement")
    program.kill()
    wait_until(lambda: has_ended(int(os.readlink(tmp_path / "begun"))), "the worker's end", 10)


def test_ctrl_c_while_the_workers_of_a_measurement_import_is_silent_and_leaves_none(tmp_path):
    """The fork server showed where it was; and one that outlived this process started the worker, which waited for long."""
    program = Program(measure_until_ctrl_c, str(tmp_path), folder=tmp_path)

    def fork_server() -> list[int]:
        return [pid for pid in below(program.pid) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    program.wait_until(fork_server, "the fork server")
    time.sleep(0.3)  # its imports take longer
    server, *_ = fork_server()
    for pid in (program.pid, *below(program.pid)):  # as a terminal does
        os.kill(pid, signal.SIGINT)
    assert program.wait(60) == 130 and program.stderr == "", program.stderr
    wait_until(lambda: has_ended(server), "the fork server's end", 20)


def measure_until_ctrl_c(folder: str) -> None:
    try:
        measure(folder)
    except KeyboardInterrupt:
        sys.exit(130)


def test_ctrl_c_ends_a_measurement_at_once(tmp_path):
    program = Program(measure_until_ctrl_c, str(tmp_path), folder=tmp_path)
    program.wait_until((tmp_path / "begun").is_symlink, "the measurement")
    program.send_signal(signal.SIGINT)
    assert program.wait(60) == 130 and program.stderr == "", program.stderr


def test_a_worker_that_is_killed_during_a_measurement_is_one_line(tmp_path):
    """PyTorch's ProcessExitedException, with its traceback."""
    program = Program(measure, str(tmp_path), folder=tmp_path)
    program.wait_until((tmp_path / "begun").is_symlink, "the measurement")
    os.kill(int(os.readlink(tmp_path / "begun")), signal.SIGKILL)
    assert program.wait(60) == 1
    assert program.stderr == "thinwire: worker 0 was ended by SIGKILL, as the kernel does when memory runs out\n"
