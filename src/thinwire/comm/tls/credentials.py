"""A worker's identity, and the authority that it trusts: a folder of keys signed by the run's own certificate authority (CA).

    certificate.pem   this worker's certificate, and key.pem, its private key
    authority.pem     the certificate of the run's CA: workers that it has signed belong to the run
    revoked.pem       certificates that the CA has taken back (a CRL); absent while there are none
    address           "host:port" at which the run's workers meet; absent on a run of one machine

`thinwire keys` makes these files; see `keys.py`. Reading them needs Python's `ssl` alone. Both sides of a connection show
their certificates, in TLS 1.3 only. Names of hosts play no part: a worker is who its certificate says, wherever it is.
"""

from __future__ import annotations

import os
import shlex
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...algorithm import require
from ...messages import log
from ..addresses import parse_address

CERTIFICATE, KEY, AUTHORITY = "certificate.pem", "key.pem", "authority.pem"
REVOKED, ADDRESS, VARIABLE = "revoked.pem", "address", "THINWIRE_CREDENTIALS"
RENEW = "renew it: `thinwire keys renew` on the machine of the run's authority, `thinwire keys join` with a new token elsewhere"
WRONG = {
    9: "its certificate is not valid yet; set the clocks of this machine and of the one that signed it",
    10: f"its certificate has expired; {RENEW}",
    23: "its certificate was revoked",
    **dict.fromkeys((7, 18, 19, 20, 21), "its certificate is of another run"),
}
"""What OpenSSL's numbers (X509_V_ERR_*) mean here."""
WARN_SECONDS = 3 * 86_400.0
"""Before a certificate expires: a weekend."""

_warned: set[tuple[str | os.PathLike[str], float]] = set()


@dataclass(frozen=True)
class Credentials:
    """The keys with which a worker proves that it belongs to a run, and checks that others do.

    Args:
        folder: that `thinwire keys new` or `thinwire keys join` has made.

    Attributes:
        name: of this worker, from its certificate.
        run: name of the run, from the same.
        expires: when the certificate does, in seconds since 1970.

    Raises:
        ValueError: a file is missing or damaged, others may read the key, or the certificate has expired, was revoked, or is
            of another run.

    Example:
        >>> Credentials("nowhere")
        Traceback (most recent call last):
        ValueError: nowhere has no certificate.pem; make keys with: thinwire keys new nowhere
    """

    folder: str | os.PathLike[str]
    name: str = field(init=False, compare=False)
    run: str = field(init=False, compare=False)
    expires: float = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", os.fspath(self.folder))
        for path in (self.certificate, self.key, self.authority):
            remedy = f"thinwire keys new {shlex.quote(os.fspath(self.folder))}"
            require(path.is_file(), f"{self.folder} has no {path.name}; make keys with: {remedy}")
            require(os.access(path, os.R_OK), f"this user may not read {path}; who starts the run must own it")
        mode = self.key.stat().st_mode
        remedy = f"chmod 600 {shlex.quote(str(self.key))}"
        require(os.name != "posix" or mode & 0o077 == 0, f"others may read {self.key}; run: {remedy}")
        shown = self._shown()
        object.__setattr__(self, "name", name_in(shown))
        object.__setattr__(self, "run", dict(pair for part in shown["issuer"] for pair in part).get("commonName", ""))
        object.__setattr__(self, "expires", ssl.cert_time_to_seconds(shown["notAfter"]))

    @classmethod
    def from_environment(cls) -> Credentials | None:
        """The credentials in the folder of the variable THINWIRE_CREDENTIALS; None if it is not set.

        Raises:
            ValueError: as above.
        """
        folder = os.environ.get(VARIABLE)
        return cls(folder) if folder else None

    @property
    def certificate(self) -> Path:
        """This worker's certificate, PEM."""
        return Path(self.folder) / CERTIFICATE

    @property
    def key(self) -> Path:
        """The private key of the certificate, PEM."""
        return Path(self.folder) / KEY

    @property
    def authority(self) -> Path:
        """The certificate of the run's CA, PEM."""
        return Path(self.folder) / AUTHORITY

    @property
    def revoked(self) -> Path | None:
        """The list of certificates that were revoked, PEM; None while there are none."""
        path = Path(self.folder) / REVOKED
        return path if path.is_file() else None

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port at which the run's workers meet; None if no token has named them.

        Raises:
            ValueError: the file is damaged.
        """
        path = Path(self.folder) / ADDRESS
        if not path.is_file():
            return None
        try:
            return parse_address(path.read_text().strip())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def versions(self) -> list[tuple[Path, int, int]]:
        """When each file was written, and its size: listeners and connections notice so that there are new keys."""
        paths = [self.certificate, self.key, self.authority, self.revoked]
        found = [(path, path.stat()) for path in paths if path is not None and path.exists()]
        return [(path, status.st_mtime_ns, status.st_size) for path, status in found]

    def warn_of_expiry(self) -> None:
        """Log, once in this process, that the certificate expires within three days."""
        if self.expires - time.time() < WARN_SECONDS and (self.folder, self.expires) not in _warned:
            _warned.add((self.folder, self.expires))
            when = local_time(self.expires)
            log.warning("%s expires at %s, and then broken connections stay broken; %s", self.certificate, when, RENEW)

    def context(self, server: bool) -> ssl.SSLContext:
        """The settings of one side of a connection: TLS 1.3, and the other side must show a certificate of the run.

        Args:
            server: the side that listens.

        Raises:
            ValueError: a file is damaged, or the key belongs to another certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # no session is resumed without its certificate
        try:
            context.load_cert_chain(self.certificate, self.key, password=self._refuse_pass_phrase)
            context.load_verify_locations(self.authority)
            if (revoked := self.revoked) is not None:
                context.load_verify_locations(revoked)
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        except (ssl.SSLError, OSError) as error:
            other = f"{KEY} is not the key of the first certificate in {CERTIFICATE}"
            reason = other if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH" else error
            raise ValueError(
                f"the keys in {self.folder} cannot be used: {reason}; make new ones, or join again"
            ) from None
        return context

    def _refuse_pass_phrase(self) -> str:
        """OpenSSL would ask for it at the terminal, in each worker and for each connection."""
        remedy = f"openssl pkey -in {KEY} -out new.pem && mv new.pem {KEY}"
        raise ValueError(f"{self.key} has a pass phrase, which workers cannot enter; remove it: {remedy}")

    def _shown(self) -> dict[str, Any]:
        """This worker's certificate, as a worker of the run reads it in a handshake, which happens here in memory."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self.context(True).wrap_bio(to_server, to_client, server_side=True)
        client = self.context(False).wrap_bio(to_client, to_server)
        # In a handshake of TLS 1.3, each side waits for the other once.
        for side in (client, server, client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                reason = WRONG.get(error.verify_code, error.verify_message)
                raise ValueError(f"{self.certificate} cannot be used: {reason}") from None
        return server.getpeercert() or {}


def local_time(seconds: float) -> str:
    """A time in seconds since 1970, as the clock of this place shows it."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def name_in(shown: dict[str, Any]) -> str:
    """The name of the worker in a certificate, as `getpeercert` gives it."""
    return str(dict(pair for part in shown.get("subject", ()) for pair in part).get("commonName", ""))
