"""Keys of runs, for tests."""

from __future__ import annotations

import shutil
from pathlib import Path

from thinwire.comm import Credentials
from thinwire.comm.tls import keys


def keys_of(folder: Path, *names: str, run: str = "run", days: float = 30.0) -> list[Credentials]:
    """The credentials of some workers of a new run, whose CA is in the folder of the first one."""
    first = folder / names[0]
    keys.new_run(first, run, names[0])
    return [Credentials(first), *(another(first, folder / name, name, days) for name in names[1:])]


def another(authority: Path, folder: Path, name: str, days: float = 30.0) -> Credentials:
    """The credentials of one more worker, signed without a token."""
    folder.mkdir()
    key, request = keys.new_request(name)
    (folder / "certificate.pem").write_bytes(keys.Issuer(authority).sign(request, days))
    (folder / "key.pem").write_bytes(key)
    (folder / "key.pem").chmod(0o600)
    shutil.copy(authority / "authority.pem", folder)
    return Credentials(folder)
