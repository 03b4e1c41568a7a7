"""`thinwire lighthouse`, in a process of its own."""

from __future__ import annotations

import pytest
from helpers.keys import keys_of
from helpers.program import programs

from thinwire.comm.elastic.quorums import QuorumClient
from thinwire.lab.cli.lighthouse import lighthouse_command


@pytest.mark.parametrize("has_keys", [False, True])
def test_workers_find_it_at_the_address_that_it_prints(tmp_path, has_keys):
    own, other = keys_of(tmp_path / "keys", "first", "second") if has_keys else (None, None)
    options = ["--bind", "127.0.0.1:0", "--min-workers", "1"] + ([f"--credentials={own.folder}"] if own else [])
    with programs(lighthouse_command, [(options,)], tmp_path) as (program,):
        program.wait_until(lambda: program.stderr.endswith("\n"), "its address")
        address = program.stderr.split()[-1]
        QuorumClient(address, other, 20.0).heartbeat("a", 20.0)
        assert address.startswith("https:" if has_keys else "http:")


def test_an_address_that_cannot_be_is_an_error():
    with pytest.raises(ValueError, match="expected HOST:PORT, .*got 'nowhere'"):
        lighthouse_command(["--bind", "nowhere"])
