"""Makes the keys of a run: its own certificate authority (CA), join tokens, and the list of revoked certificates.

`new_run` makes a folder with a CA and a first worker. Another worker gets its certificate with a *join token*: the run's
name, an address, the SHA-256 of the CA's certificate, a secret that is good for one worker, and when it ends. The token
travels by hand; its holder can join the run once. Then, over TLS:

    worker -> CA    its name, a request for a certificate (CSR), and HMAC-SHA-256 of both, keyed by the secret
    CA -> worker    its certificate, the CA's certificate, and the list of revoked ones

The CA takes a secret away before it signs, so that none is used twice. The worker compares the CA's certificate with the
token, and its own with the CA's key; so nobody on the way can be the CA. Private keys stay on the machine that made them.

Needs the package `cryptography` (extra `secure`); runs themselves do not.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ...algorithm import able_to, require
from ..addresses import address_text, parse_address
from .connections import Listener, Refused, connect_tls, read_frame, send_frame
from .credentials import ADDRESS, AUTHORITY, CERTIFICATE, KEY, REVOKED, Credentials, local_time

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY_KEY, ISSUED = "authority-key.pem", "issued"
BACK = timedelta(minutes=5)
"""Certificates begin so long before they are made, because clocks differ."""
AUTHORITY_LIFE = timedelta(days=3650)
SECRET_BYTES, SUM_BYTES = 32, 4
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
PREFIX = "thinwire."
Loaded = TypeVar("Loaded")
MAX_TEXT = 1 << 14
"""Characters of a request for a certificate."""


class Token(NamedTuple):
    """What lets one worker join a run.

    Args:
        run: its name.
        host, port: where the CA answers.
        authority: SHA-256 of the CA's certificate, hexadecimal.
        secret: hexadecimal.
        until: seconds since 1970.
    """

    run: str
    host: str
    port: int
    authority: str
    secret: str
    until: int

    def text(self) -> str:
        """The token as one word, to be sent to the worker by hand.

        Example:
            >>> token = Token("home", "example.org", 29500, 64 * "0", 64 * "1", 1_800_000_000)
            >>> parsed_token(token.text()) == token
            True
        """
        data = json.dumps(self, separators=(",", ":")).encode()
        return PREFIX + base64.urlsafe_b64encode(hashlib.sha256(data).digest()[:SUM_BYTES] + data).decode().rstrip("=")


def parsed_token(text: str) -> Token:
    """The token of a text.

    Raises:
        ValueError: the text is no token, or a damaged one.
    """
    try:
        word = text.strip().removeprefix(PREFIX)
        data = base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))
        if hashlib.sha256(data[SUM_BYTES:]).digest()[:SUM_BYTES] != data[:SUM_BYTES]:
            raise ValueError
        return Token(*json.loads(data[SUM_BYTES:]))
    except (ValueError, TypeError):
        raise ValueError(
            f"this is no join token, or a part of it is missing; copy the whole word that begins with {PREFIX}"
        ) from None


# ---- the run's CA ----


def new_run(folder: str | os.PathLike[str], run: str, name: str, days: float = 30.0) -> None:
    """Make a folder with a new CA, and the keys of the first worker.

    Args:
        folder: which does not exist, or is empty.
        run: name of the run.
        name: of the worker.
        days: that its certificate lives.

    Raises:
        ValueError: the folder has files, a name has other characters than letters, digits, ".", "_" and "-", or there are no
            such days.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    for what in (run, name):
        _check_name(what)
    _check_days(days)
    place = _new_folder(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    subject, public = _subject(run), key.public_key()
    usage = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    made = (
        _dated(AUTHORITY_LIFE)
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        # It signs workers, and no other CA.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(place / AUTHORITY_KEY, _private(key), secret=True)
    _write(place / AUTHORITY, made.public_bytes(serialization.Encoding.PEM))
    own, request = new_request(name)
    _write(place / KEY, own, secret=True)
    _write(place / CERTIFICATE, Issuer(place).sign(request, days))
    Credentials(place)  # it can be used


def renew(folder: str | os.PathLike[str], days: float = 30.0) -> None:
    """Sign a new certificate for the first worker, in the folder of the CA.

    Args:
        folder: that `new_run` has made.
        days: that the certificate lives.

    Raises:
        ValueError: the folder has no CA, or there are no such days.
    """
    _check_days(days)
    _write(Path(folder) / CERTIFICATE, Issuer(folder).sign(_request_again(Path(folder)), days))
    Credentials(folder)


class Issuer:
    """The CA in a folder: signs requests of workers, and revokes certificates.

    Args:
        folder: that `new_run` has made.

    Raises:
        ValueError: the folder has no CA, or a damaged one.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        self._folder = Path(folder)
        path = self._folder / AUTHORITY_KEY
        require(
            path.is_file(),
            f"{folder} has no {AUTHORITY_KEY}: the CA is in the folder that `thinwire keys new` made, on the machine of the "
            "run's first worker",
        )
        try:
            self._key: Any = serialization.load_pem_private_key(_read(path), None)
            self.certificate = _read(self._folder / AUTHORITY)
            self._own = x509.load_pem_x509_certificate(self.certificate)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the CA in {folder} cannot be used: {error}; restore {AUTHORITY_KEY} and {AUTHORITY}, or make new keys"
            ) from None
        self._lock = threading.Lock()

    def sign(self, request: bytes, days: float) -> bytes:
        """The certificate for a request.

        Args:
            request: CSR, PEM.
            days: that the certificate lives.

        Raises:
            ValueError: the request is damaged, or a worker of this name has a certificate for another key.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        csr = x509.load_pem_x509_csr(request)
        require(csr.is_signature_valid, "the request for a certificate is not signed by its own key")
        name = str(csr.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        _check_name(name)
        with self._lock:
            path = self._folder / ISSUED / f"{name}.pem"
            issued = _issued(path) if path.exists() else []
            require(
                all(csr.public_key() == old.public_key() for old in issued),
                f"a worker named {name} has a certificate already; choose another --name, or revoke it",
            )
            made = (
                _dated(timedelta(days=days))
                .subject_name(_subject(name))  # and nothing else that the request asks for
                .issuer_name(self._own.subject)
                .public_key(csr.public_key())
                .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
                .add_extension(
                    x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
                )
                .add_extension(x509.SubjectKeyIdentifier.from_public_key(csr.public_key()), critical=False)
                .add_extension(
                    x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
                    critical=False,
                )
                .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
                .sign(self._key, hashes.SHA256())
            )
            *before, pem = (one.public_bytes(serialization.Encoding.PEM) for one in (*issued, made))
            with able_to(f"make the folder {path.parent}", "let yourself write there"):
                path.parent.mkdir(exist_ok=True)
            _write(path, b"".join((*before, pem)))
            return pem

    def revoke(self, name: str) -> Path:
        """Take a worker's certificate back; returns the file with the list of all that were revoked.

        Raises:
            ValueError: no worker of this name has a certificate, or a file cannot be read.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        folder, listed = self._folder / ISSUED, self._folder / REVOKED
        with able_to(f"read {folder}", "let yourself read it, or restore it: it has each worker's certificate"):
            # `glob` would find nothing in a folder that it may not read.
            names = sorted(path.stem for path in folder.iterdir() if path.suffix == ".pem")
        require(name in names, f"no worker named {name!r} has a certificate; these have: {', '.join(names) or 'none'}")
        path = folder / f"{name}.pem"
        now = datetime.now(timezone.utc)
        crl = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._own.subject)
            .last_update(now - BACK)
            # Once a list has expired, OpenSSL refuses all certificates, so it lives as long as the CA.
            .next_update(now + AUTHORITY_LIFE)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if listed.exists():
            for entry in _loaded(x509.load_pem_x509_crl, listed):
                crl = crl.add_revoked_certificate(entry)
        for certificate in _issued(path):
            taken = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number).revocation_date(now)
            crl = crl.add_revoked_certificate(taken.build())
        made = crl.sign(self._key, hashes.SHA256())
        _write(listed, made.public_bytes(serialization.Encoding.PEM))
        # The name is free again.
        path.unlink()
        return listed


class Admission:
    """Lets workers with a join token into the run, each token once.

    Args:
        folder: of the CA.
        address: "host:port" at which workers reach this machine; port 0 takes a free one.
        count: number of tokens.
        hours: that they are good for.
        days: that the certificates live.

    Attributes:
        tokens: for the workers.
        joined: names of the workers that have joined.

    Raises:
        ValueError: the folder has no CA, the address cannot be used, or there are no such tokens or days.
    """

    def __init__(
        self, folder: str | os.PathLike[str], address: str, count: int = 1, hours: float = 24.0, days: float = 30.0
    ):
        most = 24 * AUTHORITY_LIFE.days
        require(
            count >= 1 and 0 < hours <= most,
            f"tokens are 1 or more for at most {most} hours, got {count} for {hours:g}",
        )
        _check_days(days)
        self._issuer, self._days, self._folder = Issuer(folder), days, Path(folder)
        credentials = Credentials(folder)
        host, port = parse_address(address)
        self.joined: list[str] = []
        self._lock, self._changed = threading.Lock(), threading.Event()
        self._open: list[Token] = []
        with able_to(f"listen at {address}", "choose another"):
            self._listener = Listener(host, port, credentials, self._answer, asks_all=True)
        run, port, authority = credentials.run, self._listener.port, _fingerprint(self._issuer.certificate)
        until = int(time.time() + 3600 * hours)
        self.tokens = [Token(run, host, port, authority, secrets.token_hex(SECRET_BYTES), until) for _ in range(count)]
        self._open += self.tokens
        _write(self._folder / ADDRESS, f"{address_text(host, port)}\n".encode())

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the next worker to join, or until the tokens have expired; returns whether any token is left."""
        self._changed.wait(seconds if seconds is not None else max(0.0, self.tokens[0].until - time.time()))
        self._changed.clear()
        return bool(self._open) and time.time() < self.tokens[0].until

    def close(self) -> None:
        """Let nobody in any more: tokens that are left are void."""
        self._listener.close(seconds=5.0)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        try:
            request, proof = question
            require(len(request) <= MAX_TEXT, "a request for a certificate is shorter")
            with self._lock:  # a token is taken away before anything is signed with it
                token = next((t for t in self._open if hmac.compare_digest(_proof(t, request), proof)), None)
                if token is not None:
                    self._open.remove(token)
        except ValueError as error:
            raise Refused(f"it asks for a certificate in a wrong way: {error}") from None
        if token is None:
            raise Refused("it has no token of this run, or one that was used")
        if time.time() > token.until:
            raise Refused("its token has expired")
        try:
            certificate = self._issuer.sign(request, self._days)
        except ValueError as error:  # such as a name that is taken: another may be tried
            with self._lock:
                self._open.append(token)
            return [b"refused", str(error).encode()]
        crl = self._folder / REVOKED
        self.joined.append(_name_of(certificate))
        self._changed.set()
        return [b"signed", certificate, self._issuer.certificate, crl.read_bytes() if crl.exists() else b""]


# ---- the worker that joins ----


def join(folder: str | os.PathLike[str], token: Token, name: str | None = None, seconds: float = 30.0) -> None:
    """Make this worker's key, let the CA sign it, and write a folder of keys. Or renew the certificate of a folder.

    Args:
        folder: which does not exist, or is empty; or which has keys of the run.
        token: from the CA's machine.
        name: of this worker; no other worker of the run has it. None takes that of the machine, or the one that it has.
        seconds: to wait for the CA.

    Raises:
        ValueError: the token has expired or was used, the name is taken, who answers is not the run's CA, or the folder has
            keys of another run or name.
    """
    now = time.time()
    expired = f"the token expired at {local_time(token.until)}, and the clock here shows {local_time(now)}"
    require(now < token.until, f"{expired}; ask for a new one: thinwire keys token")
    place, key = Path(folder), None
    if (place / KEY).exists():
        with able_to(f"read {place / AUTHORITY}", "choose another folder"):
            authority = (place / AUTHORITY).read_bytes()
        require(_fingerprint(authority) == token.authority, f"{place} has keys of another run; choose another folder")
        request = _request_again(place, name)
    else:
        name = name or own_name()
        _check_name(name)
        place = _new_folder(folder)  # before the token is used
        key, request = new_request(name)
    try:
        certificate, authority, revoked = _signed(token, request, seconds)
    except BaseException:
        if key is not None:
            place.rmdir()
        raise
    if key is not None:
        _write(place / KEY, key, secret=True)
    for file, content in ((CERTIFICATE, certificate), (AUTHORITY, authority), (REVOKED, revoked)):
        if content:
            _write(place / file, content)
    _write(place / ADDRESS, f"{address_text(token.host, token.port)}\n".encode())
    Credentials(place)


def _signed(token: Token, request: bytes, seconds: float) -> tuple[bytes, bytes, bytes]:
    """This worker's certificate, that of the CA, and the list of those revoked, from the machine that gave the token."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it shows below what it has signed with
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    where = address_text(token.host, token.port)
    try:
        with connect_tls(token.host, token.port, context, seconds) as connection:
            send_frame(connection, request, _proof(token, request))
            answer = read_frame(connection)
    except ConnectionResetError:
        raise ValueError(f"{where} refuses the token: it was used, or has expired; ask for a new one") from None
    except OSError as error:
        raise ValueError(
            f"{where} does not answer ({error}); the machine that gave the token must wait there with: thinwire keys token"
        ) from None
    said = b" ".join(answer[1:]).decode(errors="replace")[:300]
    require(len(answer) == 4 and answer[0] == b"signed", f"{where} says: {said}")
    _, certificate, authority, revoked = answer
    _check_answer(certificate, authority, revoked, request, token)
    return certificate, authority, revoked


def _check_answer(certificate: bytes, authority: bytes, revoked: bytes, request: bytes, token: Token) -> None:
    """Raise a ValueError unless the run's CA has signed this request."""
    from cryptography import x509

    wrong = f"who answers at {address_text(token.host, token.port)} is not the CA of the run {token.run}"
    require(_fingerprint(authority) == token.authority, wrong)
    own = x509.load_pem_x509_certificate(authority)
    try:
        made, asked = x509.load_pem_x509_certificate(certificate), x509.load_pem_x509_csr(request)
        made.verify_directly_issued_by(own)
        is_ours = made.public_key() == asked.public_key() and made.subject == asked.subject
        signer: Any = own.public_key()  # on an elliptic curve, for its certificate is that of the token
        is_ours &= not revoked or x509.load_pem_x509_crl(revoked).is_signature_valid(signer)
    except Exception as error:
        raise ValueError(f"{wrong}: {error}") from None
    require(is_ours, wrong)


def new_request(name: str) -> tuple[bytes, bytes]:
    """A new private key, and a request to sign it for a worker of this name; both PEM."""
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    return _private(key), _request(key, name)


def _request_again(place: Path, name: str | None = None) -> bytes:
    """A request to sign the key in a folder once more, PEM."""
    from cryptography.hazmat.primitives import serialization

    try:
        own = _name_of(_read(place / CERTIFICATE))
        key: Any = serialization.load_pem_private_key(_read(place / KEY), None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the keys in {place} cannot be used: {error}; choose another folder") from None
    require(name in (None, own), f"{place} has the keys of {own}, got the name {name}; choose another folder")
    return _request(key, own)


def _request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    request = x509.CertificateSigningRequestBuilder().subject_name(_subject(name)).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


# ---- parts of the above ----


def own_name() -> str:
    """A worker's default name: that of the machine."""
    return (re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().partition(".")[0]).strip("-") or "worker")[:63]


def _check_name(name: str) -> None:
    require(
        NAME.fullmatch(name) is not None,
        f"a name has 1 to 63 letters, digits, '.', '_' and '-', the first one a letter or digit; got {name[:80]!r}",
    )


def _check_days(days: float) -> None:
    most = AUTHORITY_LIFE.days
    require(0 < days <= most, f"a certificate lives more than 0 and at most {most} days, got {days:g}")


def _proof(token: Token, request: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(token.secret), b"join" + request, "sha256")


def _fingerprint(certificate: bytes) -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    try:
        return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()
    except ValueError:
        return ""


def _issued(path: Path) -> list[x509.Certificate]:
    """The certificates of a worker, in its file."""
    from cryptography import x509

    return _loaded(x509.load_pem_x509_certificates, path)


def _loaded(load: Callable[[bytes], Loaded], path: Path) -> Loaded:
    content = _read(path)
    try:
        return load(content)
    except ValueError:
        raise ValueError(f"{path} is damaged; restore it, or make new keys for the run") from None


def _name_of(certificate: bytes) -> str:
    from cryptography import x509

    return str(x509.load_pem_x509_certificate(certificate).subject.rfc4514_string()).removeprefix("CN=")


def _dated(life: timedelta) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(timezone.utc)
    builder = x509.CertificateBuilder().serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - BACK).not_valid_after(now + life)


def _subject(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _new_folder(folder: str | os.PathLike[str]) -> Path:
    """A folder for keys, which nobody else may read."""
    place = Path(folder)
    with able_to(f"make the folder {place}", "choose another folder"):
        place.mkdir(parents=True, exist_ok=True)
        is_empty = not any(place.iterdir())
    require(is_empty, f"{place} has files already; choose another folder")
    with able_to(f"close {place} to others", "choose a folder of your own"):
        os.chmod(place, 0o700)
    return place


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    """Write a file at once, so that nobody reads half of it; nobody else may read a secret one."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with able_to(f"write {path}", "make room for it, and let yourself write there"):
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
            file.write(content)
        os.replace(new, path)
