"""Options of commands that the library has too have its defaults; a command reads its options before it imports the library."""

from __future__ import annotations

from inspect import signature

from helpers.cases import case

from thinwire.comm import ElasticCommunicator, Lighthouse
from thinwire.comm.tls.keys import Admission, new_run, renew
from thinwire.lab.cli.doctor import Doctor
from thinwire.lab.cli.keys import NewKeys, NewToken, RenewKeys
from thinwire.lab.cli.lighthouse import LighthouseOptions
from thinwire.lab.train import RunConfig
from thinwire.plan import Effort


def test_commands_have_the_defaults_of_the_library():
    for command, call, names in [
        (NewKeys, new_run, {"days": "days"}),
        (NewToken, Admission, {"workers": "count", "hours": "hours", "days": "days"}),
        (RenewKeys, renew, {"days": "days"}),
        (LighthouseOptions, Lighthouse, {"min_workers": "min_workers"}),
        (RunConfig, ElasticCommunicator, {"min_workers": "min_workers", "check_every": "check_every"}),
    ]:
        with case(command.__name__):
            library = signature(call).parameters
            assert {name: getattr(command, name) for name in names} == {
                name: library[other].default for name, other in names.items()
            }
    assert Doctor().effort == Effort()
