"""`thinwire lighthouse`, in a process of its own."""

from __future__ import annotations

import pytest
from helpers.program import programs

from thinwire.comm.elastic.quorums import QuorumClient
from thinwire.lab.cli.lighthouse import lighthouse_command


def test_workers_find_it_at_the_address_that_it_prints(tmp_path):
    with programs(lighthouse_command, [(["--bind", "127.0.0.1:0", "--min-workers", "1"],)], tmp_path) as (program,):
        program.wait_until(lambda: program.stderr.endswith("\n"), "its address")
        QuorumClient(program.stderr.split()[-1], None, 20.0).heartbeat("a", 20.0)


def test_an_address_that_cannot_be_is_an_error():
    with pytest.raises(ValueError, match="expected HOST:PORT, .*got 'nowhere'"):
        lighthouse_command(["--bind", "nowhere"])
