"""What a worker shows to its peers, and whom it believes: its credentials, as the engine's TLS sessions take them."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ...messages import log
from ..tls.credentials import Credentials

if TYPE_CHECKING:
    from ._engine import Context, Session


class WorkerIdentity:
    """Makes sessions from credentials, of which the files may change while the run goes on.

    Args:
        credentials: this worker's.

    Raises:
        ValueError: OpenSSL 3 is not there, or a file cannot be used; the message names it.
    """

    def __init__(self, credentials: Credentials):
        self._credentials = credentials
        self._versions = self._credentials.versions()
        try:
            self._context = self._read()
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        self.name: str = self._context.name

    def session(self, connection: socket.socket, accepts: bool) -> Session:
        """A session on a connected socket, of which the handshake happens with the first bytes.

        Args:
            connection: stays open as long as the session is used.
            accepts: this worker listened.
        """
        from ._engine import Session

        return Session(self._context, connection.fileno(), accepts)

    def refresh(self) -> bool:
        """Read files that have changed; return whether there were any. Later sessions use them."""
        self._credentials.warn_of_expiry()
        versions = self._credentials.versions()
        if versions == self._versions:
            return False
        try:
            self._credentials = Credentials(self._credentials.folder)
            self._context = self._read()
        except (RuntimeError, ValueError) as error:
            log.warning("credentials have changed and cannot be used, so the old ones serve: %s", error)
            return False
        finally:
            # Also after a failure: files that cannot be used are reported once, and not at each look.
            self._versions = versions
        return True

    def _read(self) -> Context:
        from ._engine import Context

        own = self._credentials
        return Context(str(own.certificate), str(own.key), str(own.authority), str(own.revoked or ""))
