"""Workers end with the fork server that started them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.program import Program, wait_until

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
