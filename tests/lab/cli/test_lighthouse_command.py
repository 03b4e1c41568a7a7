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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bind", "nowhere"], "expected HOST:PORT, .*got 'nowhere'"),
        (["--bind", "127.0.0.1:0", "--min-workers", "0"], "min_workers must be an integer, 1 or more, got 0"),
        (["--credentials", "nowhere"], "nowhere has no certificate.pem; make keys with: thinwire keys new"),
    ],
)
def test_a_mistake_is_an_error_before_it_listens(options, message):
    with pytest.raises(ValueError, match=message):
        lighthouse_command(options)
