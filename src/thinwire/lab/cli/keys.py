"""`thinwire keys`: who may take part in a run, and how its connections are encrypted."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .options import named, parsed

KEYS_USAGE = """\
usage: thinwire keys new FOLDER                 make a run's certificate authority, and this machine's keys
       thinwire keys token FOLDER HOST:PORT     let another machine join, which reaches this one at HOST:PORT
       thinwire keys join FOLDER TOKEN          on the other machine: get its keys ("-" reads the token from stdin)
       thinwire keys revoke FOLDER NAME         take the certificate of a machine back

With keys, every connection of a run is encrypted (TLS 1.3), and only machines whose certificate the run's authority has
signed take part: thinwire train RECIPE --credentials FOLDER. Each command explains its options with --help.
"""


@dataclass(frozen=True)
class NewKeys:
    """Make a folder with a run's certificate authority, and the keys of this machine."""

    run: str = "run"
    """Name of the run."""
    name: str | None = None
    """Name of this machine in the run; None takes that of the machine."""
    days: float = 30.0
    """Days that this machine's certificate lives."""


@dataclass(frozen=True)
class NewToken:
    """Print join tokens, and wait until as many machines have joined. Ctrl-C makes the rest of the tokens void."""

    workers: int = 1
    """Number of machines that may join; each gets a token of its own."""
    hours: float = 24.0
    """Hours that the tokens are good for."""
    days: float = 30.0
    """Days that the certificates live."""


@dataclass(frozen=True)
class JoinRun:
    """Make this machine's keys, and let the run's certificate authority sign them."""

    name: str | None = None
    """Name of this machine in the run; None takes that of the machine."""


@dataclass(frozen=True)
class RevokeKeys:
    """Take the certificate of a machine back."""


def keys_command(options: list[str]) -> None:
    """Make, hand out and revoke the keys of a run."""
    what, *options = options or ["--help"]
    if what in ("-h", "--help"):
        print(KEYS_USAGE, end="")
        return
    named(COMMANDS, what, "command", "thinwire keys --help")(options)


def _split(options: list[str], kind: type, usage: str, *names: str) -> tuple[list[str], object]:
    """The values that come first, and the options."""
    program = f"thinwire keys {usage}"
    values, rest = options[: len(names)], options[len(names) :]
    if {"-h", "--help"} & set(options):
        values, rest = [], ["--help"]
    elif len(values) < len(names) or any(value.startswith("--") for value in values):
        raise ValueError(f"expected: {program}")
    return values, parsed(kind, rest, program)


def _new(options: list[str]) -> None:
    (folder,), asked = _split(options, NewKeys, "new FOLDER", "FOLDER")
    assert isinstance(asked, NewKeys)
    from ...comm.tls import keys

    keys.new_run(folder, asked.run, asked.name or keys.own_name(), asked.days)
    print(f"{folder} has the keys of the run {asked.run!r}; keep it to yourself. Let another machine join it with:")
    print(f"  thinwire keys token {folder} HOST:PORT     # at which the other machine reaches this one")


def _token(options: list[str]) -> None:
    (folder, address), asked = _split(options, NewToken, "token FOLDER HOST:PORT", "FOLDER", "HOST:PORT")
    assert isinstance(asked, NewToken)
    from ...comm.tls import keys

    admission = keys.Admission(folder, address, asked.workers, asked.hours, asked.days)
    one = "machine" if asked.workers == 1 else f"of {asked.workers} machines"
    print(f"on the other {one}, within {asked.hours:g} hours, while this command waits:")
    for token in admission.tokens:
        print(f"  thinwire keys join {Path(folder).name} {token.text()}", flush=True)
    said = 0
    try:
        while True:
            is_open = admission.wait()
            for name in admission.joined[said:]:
                print(f"{name} has joined", flush=True)
            said = len(admission.joined)
            if not is_open:
                break
    finally:
        admission.close()
    if said < asked.workers:
        raise ValueError(f"{asked.workers - said} tokens have expired; make new ones with: thinwire keys token")
    print(f"train with: thinwire train RECIPE --elastic --workers 1 --credentials {folder}")


def _join(options: list[str]) -> None:
    (folder, text), asked = _split(options, JoinRun, "join FOLDER TOKEN", "FOLDER", "TOKEN")
    assert isinstance(asked, JoinRun)
    from ...comm.tls import keys

    token = keys.parsed_token(sys.stdin.readline() if text == "-" else text)
    keys.join(folder, token, asked.name or keys.own_name())
    print(f"{folder} has the keys of the run {token.run!r}; train, with a first worker that no other machine has:")
    print(f"  thinwire train RECIPE --elastic --workers 1 --first-worker 1 --credentials {folder}")


def _revoke(options: list[str]) -> None:
    (folder, name), _ = _split(options, RevokeKeys, "revoke FOLDER NAME", "FOLDER", "NAME")
    from ...comm.tls import keys

    path = keys.Issuer(folder).revoke(name)
    print(f"{name} is refused from now on by machines that have this list; copy it to the others' folders of keys:")
    print(f"  {path}")


COMMANDS = {"new": _new, "token": _token, "join": _join, "revoke": _revoke}
