"""The helper that forks the programs which a program starts gives them what a program started anew has."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.command import with_forked_programs


def signal_an_ended_program():
    program = subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True)
    with contextlib.suppress(ProcessLookupError):
        while True:  # until the fork server has asked for its end
            os.kill(program.pid, 0)
            time.sleep(0.01)
    os.killpg(program.pid, signal.SIGTERM)
    assert program.wait() == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(program.pid, signal.SIGTERM)


def test_a_program_takes_signals_until_its_end_was_asked_for():
    with_forked_programs([], signal_an_ended_program)
