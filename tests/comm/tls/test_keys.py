"""Who gets a certificate of a run, and which are good."""

from __future__ import annotations

import os
import shutil
import ssl
import threading
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from helpers.keys import another, keys_of
from helpers.program import wait_until

import thinwire as tw
from thinwire.comm.tls import connections, keys
from thinwire.comm.tls.connections import Listener, Refused, connect_tls, read_frame, send_frame
from thinwire.comm.tls.credentials import name_in


def admission(folder, **options):
    return keys.Admission(folder, "127.0.0.1:0", **options)


def test_a_worker_joins_with_a_token_once(tmp_path):
    keys.new_run(tmp_path / "a", "homes", "first")
    admitted = admission(tmp_path / "a")
    (token,) = admitted.tokens
    keys.join(tmp_path / "b", keys.parsed_token(token.text()), "second")
    assert admitted.joined == ["second"] and not admitted.wait(10)
    joined = tw.Credentials(tmp_path / "b")
    assert (joined.name, joined.run, joined.address) == ("second", "homes", ("127.0.0.1", token.port))
    assert tw.Credentials(tmp_path / "a").address == joined.address
    assert (tmp_path / "b" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "b" / "authority-key.pem").exists()
    with pytest.raises(ValueError, match=r"refuses the token: it was used, or has expired"):
        keys.join(tmp_path / "c", token, "third")
    assert not (tmp_path / "c").exists()
    admitted.close()
    with pytest.raises(ValueError, match="does not answer .* must wait there with: thinwire keys token"):
        keys.join(tmp_path / "c", token, "third")


def test_who_was_revoked_before_stays_so(tmp_path):
    first, *others = keys_of(tmp_path, "first", "second", "third")
    for other in others:
        listed = keys.Issuer(first.folder).revoke(other.name)
    for other in others:
        shutil.copy(listed, other.folder)
        with pytest.raises(ValueError, match="its certificate was revoked"):
            tw.Credentials(other.folder)
    assert tw.Credentials(first.folder).name == "first"


def test_one_secret_signs_once_though_many_use_it_at_the_same_time(tmp_path):
    keys.new_run(tmp_path / "a", "run", "first")
    admitted = admission(tmp_path / "a")
    outcomes = []

    def join(number):
        try:
            keys.join(tmp_path / f"joiner-{number}", admitted.tokens[0], f"joiner-{number}")
            outcomes.append(number)
        except ValueError:
            pass

    threads = [threading.Thread(target=join, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    admitted.close()
    assert len(outcomes) == 1 and admitted.joined == [f"joiner-{outcomes[0]}"]
    assert sorted(path.stem for path in (tmp_path / "a" / "issued").iterdir()) == ["first", f"joiner-{outcomes[0]}"]


def test_an_expired_token_is_refused_by_both_sides(tmp_path, monkeypatch, caplog):
    keys.new_run(tmp_path / "a", "run", "first")
    admitted = admission(tmp_path / "a", hours=1e-6)
    expired = admitted.tokens[0]
    wait_until(lambda: time.time() > expired.until, "the token expires")
    with pytest.raises(ValueError, match="the token expired at .*, and the clock here shows .*; ask for"):
        keys.join(tmp_path / "b", expired, "second")
    with pytest.raises(ValueError, match="refuses the token: it was used, or has expired"):
        keys.join(tmp_path / "b", expired._replace(until=2**40), "second")  # its own clock is late
    admitted.close()
    assert any("its token has expired" in line for line in caplog.messages)


def test_what_is_sent_without_a_token_gets_no_answer(tmp_path, caplog):
    keys.new_run(tmp_path / "a", "run", "first")
    admitted = admission(tmp_path / "a")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, request = keys.new_request("intruder")
    for question in ([request, b"p" * 32], [request], [b"x" * (keys.MAX_TEXT + 1), b"p" * 32], []):
        with (
            connect_tls("127.0.0.1", admitted.tokens[0].port, context, 10) as connection,
            pytest.raises(OSError),
        ):
            send_frame(connection, *question)
            read_frame(connection)
    keys.join(tmp_path / "b", admitted.tokens[0], "second")
    admitted.close()
    assert admitted.joined == ["second"]


def test_a_name_is_taken_once_and_the_token_stays_good(tmp_path):
    keys.new_run(tmp_path / "a", "run", "first")
    admitted = admission(tmp_path / "a")
    with pytest.raises(ValueError, match="says: a worker named first has a certificate already; choose another --name"):
        keys.join(tmp_path / "b", admitted.tokens[0], "first")
    keys.join(tmp_path / "b", admitted.tokens[0], "second")
    admitted.close()
    for name in ("", "../up", "two words", "x" * 64):
        with pytest.raises(ValueError, match="a name has 1 to 63 letters"):
            keys.new_run(tmp_path / "c", "run", name)


def test_another_ca_that_answers_for_the_runs_is_found_out(tmp_path):
    """It has the secret even; the token's fingerprint is that of the true one."""
    keys.new_run(tmp_path / "true", "run", "first")
    keys.new_run(tmp_path / "false", "run", "first")
    true, false = admission(tmp_path / "true"), admission(tmp_path / "false")
    false._open.append(false.tokens[0]._replace(secret=true.tokens[0].secret))
    with pytest.raises(ValueError, match="is not the CA of the run run"):
        keys.join(tmp_path / "b", true.tokens[0]._replace(port=false.tokens[0].port), "second")
    assert not (tmp_path / "b").exists()
    true.close()
    false.close()


def test_an_answer_of_no_fields_is_no_certificate(tmp_path, monkeypatch):
    keys.new_run(tmp_path / "a", "run", "first")
    monkeypatch.setattr(keys.Admission, "_answer", lambda self, question: [])
    other = admission(tmp_path / "a")
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:\d+ says: "):
        keys.join(tmp_path / "b", other.tokens[0], "second")
    other.close()


def test_a_damaged_token_says_so():
    text = keys.Token("run", "host", 1, 64 * "0", 64 * "1", 2**31).text()
    for damaged in ("", "thinwire.", text[:-3], text.replace("0", "1", 1) + "A", "thinwire.{}"):
        with pytest.raises(ValueError, match="this is no join token, or a part of it is missing"):
            keys.parsed_token(damaged)


def test_keys_that_cannot_be_used_say_why(tmp_path, monkeypatch):
    ours, second = keys_of(tmp_path, "first", "second")
    with pytest.raises(ValueError, match=r"has no certificate.pem; make keys with: thinwire keys new"):
        tw.Credentials(tmp_path)
    with pytest.raises(ValueError, match=r"a b has no .*; make keys with: thinwire keys new 'a b'$"):
        tw.Credentials("a b")
    ours.key.chmod(0o640)
    with pytest.raises(ValueError, match=r"others may read .*key.pem; run: chmod 600"):
        tw.Credentials(ours.folder)
    ours.key.chmod(0o600)
    good = second.key.read_bytes()
    second.key.write_bytes(ours.key.read_bytes())
    wrong = "cannot be used: key.pem is not the key of the first certificate in certificate.pem; make new ones, or join"
    with pytest.raises(ValueError, match=wrong):
        tw.Credentials(second.folder)
    secret = serialization.BestAvailableEncryption(b"secret")
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret
    second.key.write_bytes(serialization.load_pem_private_key(good, None).private_bytes(*form))
    with pytest.raises(
        ValueError, match="key.pem has a pass phrase, which workers cannot enter; remove it: openssl pkey"
    ):
        tw.Credentials(second.folder)  # OpenSSL asked for it at the terminal
    second.key.write_bytes(good)
    with (
        monkeypatch.context() as patch,
        pytest.raises(ValueError, match="this user may not read .*key.pem; who starts"),
    ):
        patch.setattr(os, "access", lambda path, mode: path.name != "key.pem")
        tw.Credentials(second.folder)
    Path(second.folder, "address").write_text("nowhere\n")
    with pytest.raises(ValueError, match="second/address: expected HOST:PORT"):
        _ = tw.Credentials(second.folder).address
    (other,) = keys_of(tmp_path / "other", "first")
    second.authority.write_bytes(other.authority.read_bytes())
    with pytest.raises(ValueError, match="cannot be used: its certificate is of another run"):
        tw.Credentials(second.folder)
    with pytest.raises(ValueError, match="its certificate has expired; renew it: `thinwire keys renew` on the machine"):
        another(tmp_path / "first", tmp_path / "old", "old", days=-1e-3)
    keys.Issuer(tmp_path / "first").revoke("first")
    with pytest.raises(ValueError, match="its certificate was revoked"):
        tw.Credentials(tmp_path / "first")
    with pytest.raises(ValueError, match="no worker named 'first' has a certificate; these have: old, second"):
        keys.Issuer(tmp_path / "first").revoke("first")
    with pytest.raises(ValueError, match="the CA is in the folder that `thinwire keys new` made"):
        keys.Issuer(second.folder)
    with pytest.raises(ValueError, match="has files already"):
        keys.new_run(tmp_path / "first", "run", "again")


def test_a_certificate_is_renewed_for_the_same_key_and_both_can_be_revoked(tmp_path):
    """There was no way but another name, or a new folder."""
    keys.new_run(tmp_path / "a", "homes", "first")
    admitted = admission(tmp_path / "a", count=3)
    keys.join(tmp_path / "b", admitted.tokens[0], "second")
    before = tw.Credentials(tmp_path / "b")
    old, key = before.certificate.read_bytes(), before.key.read_bytes()
    with pytest.raises(ValueError, match="b has the keys of second, got the name third; choose another folder"):
        keys.join(tmp_path / "b", admitted.tokens[1], "third")
    with pytest.raises(ValueError, match="a worker named second has a certificate already"):
        keys.join(tmp_path / "c", admitted.tokens[1], "second")  # its key is another one
    admitted._days = 60.0
    keys.join(tmp_path / "b", admitted.tokens[1])
    after = tw.Credentials(tmp_path / "b")
    assert after.name == "second" and after.key.read_bytes() == key
    assert after.expires - before.expires == pytest.approx(30 * 86_400, abs=60)
    keys.new_run(tmp_path / "other", "homes", "first")
    elsewhere = admission(tmp_path / "other")
    with pytest.raises(ValueError, match="b has keys of another run; choose another folder"):
        keys.join(tmp_path / "b", elsewhere.tokens[0])
    elsewhere.close()
    admitted.close()
    listed = keys.Issuer(tmp_path / "a").revoke("second")
    (tmp_path / "b" / "revoked.pem").write_bytes(listed.read_bytes())
    for certificate in (old, after.certificate.read_bytes()):
        after.certificate.write_bytes(certificate)
        with pytest.raises(ValueError, match="its certificate was revoked"):
            tw.Credentials(tmp_path / "b")


def test_the_first_machine_renews_its_own_certificate_also_once_it_has_expired(tmp_path):
    keys.new_run(tmp_path / "a", "run", "first")
    expired = keys.Issuer(tmp_path / "a").sign(keys._request_again(tmp_path / "a"), days=-1e-3)
    (tmp_path / "a" / "certificate.pem").write_bytes(expired)
    with pytest.raises(ValueError, match="has expired; renew it: `thinwire keys renew`"):
        tw.Credentials(tmp_path / "a")
    keys.renew(tmp_path / "a", days=2)
    assert tw.Credentials(tmp_path / "a").expires == pytest.approx(time.time() + 2 * 86_400, abs=60)
    (joined,) = keys_of(tmp_path, "b")
    joined.key.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="the keys in .*b cannot be used: "):
        keys.renew(joined.folder)


@pytest.mark.parametrize("name", ["authority-key.pem", "authority.pem"])
@pytest.mark.parametrize("content", [b"", bytes(range(256)), None], ids=["empty", "foreign", "folder"])
def test_a_damaged_authority_is_named_with_its_folder(name, content, tmp_path):
    """It said that a PEM file could not be loaded, and not which; a folder in its place was a traceback."""
    keys.new_run(tmp_path, "run", "first")
    (tmp_path / name).unlink()
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    said = "cannot be used: .*; restore authority-key.pem and authority.pem, or make new keys"
    if content is None and name == "authority-key.pem":
        said = "has no authority-key.pem"
    with pytest.raises(ValueError, match=f"{tmp_path} {said}"):
        keys.renew(tmp_path)


def test_who_listens_with_a_certificate_that_expires_soon_says_so_once(tmp_path, caplog):
    keys.new_run(tmp_path / "first", "run", "first", days=1.0)
    listeners = [Listener("127.0.0.1", 0, tw.Credentials(tmp_path / "first"), echo) for _ in range(2)]
    wait_until(lambda: caplog.messages, "a line")
    time.sleep(2 * connections.LOOK_SECONDS)
    (line,) = caplog.messages
    assert "certificate.pem expires at 20" in line and "renew it: `thinwire keys renew`" in line
    for listener in listeners:
        listener.close()


def echo(question):
    return question


def test_a_revoked_certificate_ends_its_connections_and_gets_no_new_one(tmp_path):
    ours, good, bad = keys_of(tmp_path, "first", "good", "bad")
    listener = Listener("127.0.0.1", 0, ours, echo)

    def connect(credentials):
        return connect_tls("127.0.0.1", listener.port, credentials.context(server=False), 10)

    held = connect(bad)
    send_frame(held, b"hello")
    assert read_frame(held) == [b"hello"]
    keys.Issuer(tmp_path / "first").revoke("bad")
    with pytest.raises(OSError):
        for _ in range(200):  # the listener looks twice a second
            time.sleep(0.05)
            send_frame(held, b"hello")
            read_frame(held)
    with pytest.raises(Refused, match="refuses this worker: its certificate was revoked"):
        connect(bad)
    connection = connect(good)
    send_frame(connection, b"still here")
    assert read_frame(connection) == [b"still here"]
    listener.close()


def test_a_listener_shows_the_certificate_that_was_renewed(tmp_path):
    """It showed the old one as long as it ran, also after that had expired."""
    ours, theirs = keys_of(tmp_path, "first", "second")
    another(tmp_path / "first", tmp_path / "new", "third")
    listener = Listener("127.0.0.1", 0, ours, echo)
    for name in ("key.pem", "certificate.pem"):
        os.replace(tmp_path / "new" / name, tmp_path / "first" / name)

    def shown():
        with connect_tls("127.0.0.1", listener.port, theirs.context(server=False), 10) as connection:
            return name_in(connection.getpeercert())

    wait_until(lambda: shown() == "third", "the listener shows the new one")
    listener.close()


def test_callers_without_a_token_keep_no_joiner_out(tmp_path):
    """They shake hands, which needs no certificate here, and then say nothing."""
    keys_of(tmp_path, "first")
    open_to_all = admission(tmp_path / "first")
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    token, most = open_to_all.tokens[0], connections.MAX_HANDSHAKES
    silent = [connect_tls("127.0.0.1", token.port, nobody, 10) for _ in range(most + 5)]
    for one in silent[:5]:
        one.settimeout(connections.HANDSHAKE_SECONDS / 2)  # later they would be sent away anyhow
    assert [one.recv(1) for one in silent[:5]] == [b""] * 5
    keys.join(tmp_path / "second", token, "second")
    for one in silent:
        one.close()
    open_to_all.close()
