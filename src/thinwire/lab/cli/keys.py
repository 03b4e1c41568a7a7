"""usage: thinwire keys new FOLDER                 make a run's certificate authority, and this machine's keys
       thinwire keys token FOLDER HOST:PORT     let another machine join, which reaches this one at HOST:PORT
       thinwire keys join FOLDER TOKEN          on the other machine: get its keys, or renew them (TOKEN "-": from stdin)
       thinwire keys renew FOLDER               on the machine of the authority: a later certificate for this machine
       thinwire keys revoke FOLDER NAME         take the certificate of a machine back

With keys, every connection of a run is encrypted (TLS 1.3), and only machines whose certificate the run's authority has
signed take part: thinwire train RECIPE --credentials FOLDER. Each command explains its options with --help.
"""

# Who may take part in a run, and how its connections are encrypted.

from __future__ import annotations

import shlex
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...suggestion import named
from .options import parsed, show_help, shown_as


@dataclass(frozen=True)
class NewKeys:
    """Make a folder with a run's certificate authority, and the keys of this machine."""

    folder: Annotated[str, shown_as("FOLDER")]
    """A new folder for the keys."""
    run: str = "run"
    """Name of the run."""
    name: str | None = None
    """Name of this machine in the run; None takes that of the machine."""
    days: float = 30.0
    """Days that this machine's certificate lives."""

    def execute(self) -> None:
        """Make the folder, and say what comes next."""
        from ...comm.tls import keys

        keys.new_run(self.folder, self.run, self.name or keys.own_name(), self.days)
        print(
            f"{self.folder} has the keys of the run {self.run!r}; keep it to yourself. Let another machine join it with:"
        )
        print(
            f"  thinwire keys token {shlex.quote(self.folder)} HOST:PORT     # at which the other machine reaches this one"
        )


@dataclass(frozen=True)
class NewToken:
    """Print join tokens, and wait until as many machines have joined. Ctrl-C makes the rest of the tokens void."""

    folder: Annotated[str, shown_as("FOLDER")]
    """The folder that `thinwire keys new` made."""
    address: Annotated[str, shown_as("HOST:PORT")]
    """At which the other machines reach this one."""
    workers: int = 1
    """Number of machines that may join; each gets a token of its own."""
    hours: float = 24.0
    """Hours that the tokens are good for."""
    days: float = 30.0
    """Days that the certificates live."""

    def execute(self) -> None:
        """Let other machines join until all tokens are used or have expired."""
        from ...comm.tls import keys

        with closing(keys.Admission(self.folder, self.address, self.workers, self.hours, self.days)) as admission:
            one = "machine" if self.workers == 1 else f"of {self.workers} machines"
            print(f"on the other {one}, within {self.hours:g} hours, while this command waits:")
            folder = shlex.quote(Path(self.folder).resolve().name)
            for token in admission.tokens:
                # Flushed, for the next line comes only when a machine has joined.
                print(f"  thinwire keys join {folder} {token.text()}", flush=True)
            said, is_open = 0, True
            while is_open:
                is_open = admission.wait()
                for name in admission.joined[said:]:
                    print(f"{name} has joined", flush=True)
                said = len(admission.joined)
        if said < self.workers:
            unused = f"{self.workers - said} of {self.workers}"
            raise ValueError(f"tokens that expired unused: {unused}; make new ones with: thinwire keys token")
        print(f"train with: thinwire train RECIPE --elastic --workers 1 --credentials {shlex.quote(self.folder)}")


@dataclass(frozen=True)
class JoinRun:
    """Make this machine's keys, and let the run's certificate authority sign them; or renew the certificate of those it has."""

    folder: Annotated[str, shown_as("FOLDER")]
    """A new folder for the keys, or the one whose certificate is to be renewed."""
    token: Annotated[str, shown_as("TOKEN")]
    """What `thinwire keys token` printed on the other machine; "-" reads it from stdin."""
    name: str | None = None
    """Name of this machine in the run; None takes that of the machine, or the one in the folder."""

    def execute(self) -> None:
        """Join, and say what comes next."""
        from ...comm.tls import keys

        token = keys.parsed_token(sys.stdin.readline() if self.token == "-" else self.token)
        keys.join(self.folder, token, self.name)
        print(
            f"{self.folder} has the keys of the run {token.run!r}; train, with a first worker that no other machine has:"
        )
        print(
            f"  thinwire train RECIPE --elastic --workers 1 --first-worker 1 --credentials {shlex.quote(self.folder)}"
        )


@dataclass(frozen=True)
class RenewKeys:
    """Make a later certificate for this machine, which has the run's certificate authority. Others join again."""

    folder: Annotated[str, shown_as("FOLDER")]
    """The folder that `thinwire keys new` made."""
    days: float = 30.0
    """Days that the certificate lives."""

    def execute(self) -> None:
        """Renew, and say what became of it."""
        from ...comm.tls import keys
        from ...comm.tls.credentials import Credentials, local_time

        keys.renew(self.folder, self.days)
        print(f"the certificate in {self.folder} expires at {local_time(Credentials(self.folder).expires)}")


@dataclass(frozen=True)
class RevokeKeys:
    """Take the certificate of a machine back."""

    folder: Annotated[str, shown_as("FOLDER")]
    """The folder that `thinwire keys new` made."""
    name: Annotated[str, shown_as("NAME")]
    """Name of the machine in the run."""

    def execute(self) -> None:
        """Write the new list, and say where it belongs."""
        from ...comm.tls import keys

        path = keys.Issuer(self.folder).revoke(self.name)
        print(
            f"{self.name} is refused from now on by machines that have this list; copy it to the others' folders of keys:"
        )
        print(f"  {path}")


COMMANDS = {"new": NewKeys, "token": NewToken, "join": JoinRun, "renew": RenewKeys, "revoke": RevokeKeys}


def keys_command(options: list[str]) -> None:
    """Make, hand out and revoke the keys of a run."""
    what, *options = options or ["--help"]
    if what in ("-h", "--help"):
        show_help(__doc__)
        return
    parsed(named(COMMANDS, what, "command", "thinwire keys --help"), options, f"thinwire keys {what}").execute()
