"""`thinwire keys`, and a run of two machines with the keys that it makes."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.command import started, thinwire
from helpers.keys import keys_of

from thinwire.comm.tls import keys
from thinwire.lab.cli import main


def test_the_keys_of_two_machines_and_a_run_of_both(tmp_path):
    """Each command says what to do next; the run ends as one of two workers without keys."""
    made = thinwire("keys", "new", "first", "--name", "one", cwd=tmp_path)
    assert made.returncode == 0 and "thinwire keys token first HOST:PORT" in made.stdout, made.stderr
    with started(["-m", "thinwire", "keys", "token", "first", "127.0.0.1:0"], cwd=tmp_path) as admission:
        admission.wait_until(lambda: " thinwire." in admission.stdout, "a token")
        (command,) = (line for line in admission.stdout.splitlines() if "thinwire keys join" in line)
        joined = thinwire("keys", "join", "second", command.split()[4], "--name", "two", cwd=tmp_path)
        assert joined.returncode == 0 and "--credentials second" in joined.stdout, joined.stderr
        assert admission.wait(60) == 0
        assert "two has joined" in admission.stdout and "--credentials first" in admission.stdout
    run = ["-m", "thinwire", "train", "digits", "--max-steps", "8", "--log-every", "4", "--device", "cpu"]
    environment = {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    first, second = ([*run, "--name", "a", "--credentials", folder] for folder in ("first", "second"))
    with (
        started(first, cwd=tmp_path, RANK="0", **environment) as one,
        started(second, cwd=tmp_path, RANK="1", **environment) as two,
    ):
        assert [one.wait(200), two.wait(200)] == [0, 0], (one.stderr, two.stderr)
        assert one.stderr == ""
    plain = thinwire(*run[2:], "--workers", 2, "--name", "b", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    rows = [
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in "ab"
    ]
    for encrypted, open_ in zip(*rows, strict=True):
        for name in ("step", "loss", "accuracy", "test_accuracy"):
            assert encrypted.get(name) == open_.get(name), name


def test_the_next_commands_name_any_folder_as_a_shell_reads_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "new", "my keys"]) == 0
    assert "thinwire keys token 'my keys' HOST:PORT" in capsys.readouterr().out
    monkeypatch.chdir("my keys")
    assert main(["keys", "token", ".", "127.0.0.1:0", "--hours", "1e-6"]) == 2
    assert "thinwire keys join 'my keys' thinwire." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("keys new", "thinwire keys new needs FOLDER ("),
        ("keys new third --days 0", "a certificate lives more than 0 and at most 3650 days, got 0"),
        ("keys token first 127.0.0.1:0 --days 1e9", "a certificate lives more than 0 and at most 3650 days, got 1e+09"),
        ("keys token first 127.0.0.1:0 --hours inf", "tokens are 1 or more for at most 87600 hours, got 1 for inf"),
        ("keys token first 127.0.0.1:0 --hours 1e8", "tokens are 1 or more for at most 87600 hours, got 1 for 1e+08"),
        ("keys token first", "thinwire keys token needs HOST:PORT ("),
        ("keys token first nowhere", "expected HOST:PORT, such as worker.example.org:29500, got 'nowhere'"),
        ("keys token second 127.0.0.1:0", "second has no authority-key.pem: the CA is in the folder"),
        ("keys join third thinwire.abc", "this is no join token, or a part of it is missing"),
        ("keys new first/key.pem", "cannot make the folder first/key.pem: File exists; choose another folder"),
        ("keys new first/key.pem/third", "cannot make the folder first/key.pem/third: Not a directory; choose another"),
        ("keys join first/key.pem/third TOKEN", "cannot make the folder first/key.pem/third: Not a directory; choose"),
        ("keys join first TOKEN", "first has keys of another run; choose another folder"),
        ("keys renew second", "second has no authority-key.pem: the CA is in the folder"),
        ("keys revoke first nobody", "no worker named 'nobody' has a certificate; these have: first, second"),
        ("keys old", "unknown command 'old'"),
        ("train digits --credentials nowhere", "nowhere has no certificate.pem; make keys with: thinwire keys new"),
        ("train digits --credentials first --transport gloo", "transport 'gloo' does not encrypt; leave it out, or"),
        ("train digits --credentials other", "other/certificate.pem cannot be used: its certificate is of another run"),
    ],
)
def test_mistakes_are_one_line(command, line, tmp_path, monkeypatch, capsys):
    keys_of(tmp_path, "first", "second")
    shutil.copytree(tmp_path / "second", tmp_path / "other")
    (another,) = keys_of(tmp_path / "run", "first")
    shutil.copy(another.authority, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    token = keys.Token("run", "127.0.0.1", 1, 64 * "0", 64 * "1", 2**40).text()
    assert main([token if word == "TOKEN" else word for word in command.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("thinwire: ") and line in said and said.count("\n") == 1, said
    assert not (tmp_path / "third").exists()


def test_no_machine_is_called_unknown_or_revoked_because_a_file_is_damaged(tmp_path, capsys):
    """Else nobody would look at the folder, and the machine would stay in the run."""
    keys_of(tmp_path, "first", "second")
    folder = tmp_path / "first"
    certificate = folder / "issued" / "second.pem"
    kept = certificate.read_bytes()

    def refused(line):
        assert main(["keys", "revoke", str(folder), "second"]) == 2
        said = capsys.readouterr().err
        assert line in said and said.count("\n") == 1, said

    for content in (b"", b"junk"):
        certificate.write_bytes(content)
        refused(f"{certificate} is damaged; restore it, or make new keys")
        with pytest.raises(ValueError, match="second.pem is damaged"):
            keys.Issuer(folder).sign(keys._request_again(tmp_path / "second"), days=1)
    certificate.write_bytes(kept)
    (folder / "revoked.pem").write_text("junk")
    refused("revoked.pem is damaged; restore it")
    (folder / "revoked.pem").unlink()
    (folder / "issued").rename(folder / "away")
    refused("issued: No such file or directory; let yourself read it, or restore it")
    (folder / "issued").write_text("")
    refused("issued: Not a directory; let yourself read it")
    (folder / "issued").unlink()
    (folder / "away").rename(folder / "issued")
    assert main(["keys", "revoke", str(folder), "second"]) == 0


def test_help_of_each_command(capsys):
    assert main(["keys"]) == 0
    assert "thinwire keys revoke FOLDER NAME" in capsys.readouterr().out
    for command, words in (
        ("new", "--days"),
        ("token", "--hours"),
        ("join", "--name"),
        ("revoke", "FOLDER NAME"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["keys", command, "--help"])
        assert end.value.code == 0 and words in capsys.readouterr().out
