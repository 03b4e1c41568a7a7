"""Data that cannot be used: one clear line, however many workers find it, and nothing overwritten."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from helpers import tiny
from helpers.command import TORCHRUN, python

from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.data import CIFAR10, ImageFolder
from thinwire.lab.train.data.cifar import ARCHIVE
from thinwire.lab.train.shared_errors import SharedError, run_on_all

# What is wrong, made in a folder; returns the data set and what the line must say.


def missing_folder(folder: Path):
    return ImageFolder(folder / "nowhere"), "nowhere/train is not there; put images into"


def truncated_archive(folder: Path):
    (folder / ARCHIVE).write_bytes(b"\x1f\x8b\x08\x00" + bytes(500))
    return CIFAR10(folder), f"{ARCHIVE} is truncated or damaged: 504 bytes, expected 170,498,071"


def empty_class(folder: Path):
    tiny.images(folder)
    (folder / "train" / "class9" / "0.png").rename(folder / "kept.png")
    for path in (folder / "train" / "class9").iterdir():
        path.unlink()
    return CIFAR10(folder), "train/class9 has no images"


def not_utf8(folder: Path):
    text = tiny.text(folder)
    text.train.write_bytes(b"good words\nna\xefve ones\n")
    return text, "train.txt is not UTF-8: byte 0xef in line 2"


def different_lengths(folder: Path):
    pairs = tiny.pairs(folder)
    with (folder / "train.b").open("a") as file:
        file.write("ein Satz zu viel\n")
    return pairs, "must have a line for each of the other's, got 200 and 201 lines"


WRONG = [missing_folder, truncated_archive, empty_class, not_utf8, different_lengths]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("wrong", WRONG)
def test_data_that_cannot_be_used_is_one_line(wrong, workers, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    data, expected = wrong(tmp_path / "data")
    before = files_of(tmp_path / "data")
    with pytest.raises(ValueError) as error:
        train(RunConfig("mine", data=data, workers=workers, output=tmp_path / "runs"))
    assert expected in str(error.value) and "\n" not in str(error.value)
    assert files_of(tmp_path / "data") == before
    assert not list((tmp_path / "runs").rglob("metrics.*")) and not list((tmp_path / "cache").rglob("*.pt"))


def command(folder: Path, *start: str) -> subprocess.CompletedProcess:
    options = ["train", "cifar10-resnet20-dense-small", "--data.folder", str(folder / "train" / "class0")]
    (folder / "train" / "class0" / "train").mkdir(parents=True)
    return python(*start, "-m", "thinwire", *options, cwd=folder, GLOO_SOCKET_IFNAME="lo", XDG_CACHE_HOME=str(folder))


def test_the_command_says_so_once_and_fails(tmp_path):
    done = command(tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("thinwire: ")
    assert "class0/train has no class folders" in done.stderr


def test_under_torchrun_one_worker_says_so_for_all(tmp_path):
    done = command(tmp_path, *TORCHRUN, "--nproc-per-node", "3")
    said = [line for line in done.stderr.splitlines() if line.startswith("thinwire: ")]
    assert done.returncode != 0 and len(said) == 1 and "class0/train has no class folders" in said[0], done.stderr


def test_what_one_worker_finds_stops_all_of_them(tmp_path):
    from thinwire.comm import LocalWorld

    def worker(comm):
        def find() -> int:
            if comm.rank == 1:
                raise ValueError("my disk has no data")
            return comm.rank

        with pytest.raises(SharedError, match=r"^worker 1: my disk has no data, in \S*test_loop_bad_input.py:\d+$"):
            run_on_all(comm, find)
        with pytest.raises(SharedError, match=r"^nobody has, in \S*test_loop_bad_input.py:\d+$"):
            run_on_all(comm, lambda: (_ for _ in ()).throw(ValueError("nobody has")))
        before = comm.ledger.messages
        return run_on_all(comm, lambda: comm.rank * 2), comm.ledger.messages - before

    assert LocalWorld(3).run(worker) == [(0, 2), (2, 2), (4, 2)]  # without an error, one message to each other worker
