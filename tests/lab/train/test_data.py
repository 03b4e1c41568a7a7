"""Data sets on small files made here: loading, division among workers, augmentation and scores; and errors of bad input."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import math
import multiprocessing
import os
import pickle
import pwd
import signal
import tarfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import tiny
from helpers.program import wait_until
from PIL import Image
from torch import nn
from torch.nn import functional as F

from thinwire.lab.files import write_whole
from thinwire.lab.train.data import (
    CIFAR10,
    IGNORE,
    Augmentation,
    Digits,
    ImageFolder,
    Images,
    ParallelText,
    PlainText,
    Split,
    Text,
    WikiText2,
    base,
    cifar,
    shard,
    sums,
)
from thinwire.lab.train.data.augment import random_crop, random_cutout, random_flip
from thinwire.lab.train.data.base import batch_generator
from thinwire.lab.train.data.cache import cached
from thinwire.lab.train.data.download import download
from thinwire.lab.train.data.image_folder import random_regions, region_box
from thinwire.lab.train.data.translation import batches_by_tokens, bleu, bleu_sums
from thinwire.lab.train.data.vocabulary import SPECIAL, encode_lines, load_subwords, subwords
from thinwire.lab.train.models import LSTMLanguageModel, Transformer
from thinwire.lab.train.models.transformer import BOS, EOS, PAD, UNK

REAL = os.environ.get("THINWIRE_DATA")
needs_real_data = pytest.mark.skipif(
    not REAL, reason="set THINWIRE_DATA to a folder with cifar10/, multi30k/ and wikitext-2/ to test on real data"
)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Scores


def test_sums_are_those_of_each_label_by_itself():
    torch.manual_seed(0)
    scores, labels = torch.randn(4, 6, 9), torch.randint(9, (4, 6))
    labels[0, :3] = IGNORE
    loss = right = in_5 = count = 0
    for row, label in zip(scores.flatten(0, 1).double(), labels.flatten().tolist(), strict=True):
        if label != IGNORE:
            better = (row > row[label]).sum().item()
            loss += row.logsumexp(0).item() - row[label].item()
            right, in_5, count = right + (better == 0), in_5 + (better < 5), count + 1
    assert sums(scores, labels).tolist() == pytest.approx([loss, right, in_5, count])
    assert sums(scores, torch.full((4, 6), IGNORE)).tolist() == [0, 0, 0, 0]


def test_sums_of_shares_add_up_to_those_of_the_whole():
    torch.manual_seed(0)
    images = Images(*Digits().splits(), num_classes=10)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    whole = images.evaluate(module, rank=0, size=1, batch_size=1000)
    parts = sum(images.evaluate(module, rank, size=3, batch_size=7) for rank in range(3))
    assert parts.tolist() == pytest.approx(whole.tolist())
    assert whole[3] == 539
    assert set(images.metrics(whole)) == set(Images.metric_names)


# Images in memory


def test_digits_come_through_the_common_interface_as_they_are():
    train, test = Digits().splits()
    images = Images(train, test, num_classes=10)
    plan = images.plan(shard(images.num_examples, 1, 4, seed=0, epoch=2), 32)
    assert plan.shape == (images.num_examples // 4 // 32, 32)
    for indices, batch in zip(plan, images.batches(plan, seed=0, rank=1, epoch=2), strict=True):
        assert torch.equal(batch.inputs[0], train.inputs[indices])
        assert torch.equal(batch.labels, train.labels[indices])


@pytest.mark.parametrize("border", ["zeros", "reflect"])
def test_crops_are_those_of_each_image_by_itself(border):
    images = torch.randint(1, 255, (50, 3, 8, 6), dtype=torch.uint8)
    crops = random_crop(images, 2, border, generator())
    top, left = torch.randint(5, (2, 50), generator=generator())
    mode = {"zeros": "constant", "reflect": "reflect"}[border]
    for i in range(50):
        padded = F.pad(images[i].float(), (2, 2, 2, 2), mode=mode)
        assert torch.equal(crops[i].float(), padded[:, top[i] : top[i] + 8, left[i] : left[i] + 6])
    assert crops.dtype == torch.uint8 and len(set(zip(top.tolist(), left.tolist(), strict=True))) > 15


def test_half_of_the_images_are_flipped():
    images = torch.arange(4000.0).view(1000, 1, 1, 4)
    flipped = random_flip(images, generator())
    mirrored = (flipped == images.flip(-1)).all(dim=(1, 2, 3))
    assert ((flipped == images).all(dim=(1, 2, 3)) | mirrored).all()
    assert 430 < mirrored.sum() < 570  # 500 and 4.4 standard deviations


def test_cut_out_squares_lie_inside_and_reach_every_place():
    cut = random_cutout(torch.ones(2000, 2, 10, 10), 4, generator()) == 0
    assert (cut.sum(dim=(2, 3)) == 16).all() and torch.equal(cut[:, 0], cut[:, 1])
    assert cut.any(dim=0).all()
    rows, columns = cut[:, 0].any(dim=2).sum(dim=1), cut[:, 0].any(dim=1).sum(dim=1)
    assert (rows == 4).all() and (columns == 4).all()


def test_standardised_images_are_cut_out_after_standardising_so_that_the_square_has_the_mean_colour():
    pixels = torch.full((4, 3, 8, 8), 200, dtype=torch.uint8)
    split = Split(pixels, torch.zeros(4, dtype=torch.int64))
    images = Images(split, split, 1, (100.0,) * 3, (50.0,) * 3, Augmentation(0, False, cutout=4))
    batch = images.batch(torch.arange(4), generator(), epoch=0).inputs[0]
    assert batch.unique().tolist() == [0.0, 2.0]


def test_batches_are_a_function_of_seed_rank_epoch_and_number():
    pixels = torch.randint(255, (64, 3, 8, 8), dtype=torch.uint8)
    split = Split(pixels, torch.arange(64))
    images = Images(split, split, 64, augmentation=Augmentation(padding=2, cutout=2))
    plan = images.plan(torch.arange(64), 8)

    def pixels_of(**changes):
        call = {"seed": 0, "rank": 0, "epoch": 0} | changes
        return torch.stack([batch.inputs[0] for batch in images.batches(plan, **call)])

    state = torch.get_rng_state()
    assert torch.equal(pixels_of(), pixels_of())
    first = next(images.batches(plan, 0, 0, 0)).to("cpu")
    assert torch.equal(first.inputs[0], pixels_of()[0]) and torch.equal(first.labels, plan[0])
    assert torch.equal(pixels_of()[5:], pixels_of(numbers=range(5, len(plan)))), (
        "an epoch that is resumed goes on as it would have"
    )
    different = [pixels_of(seed=1), pixels_of(rank=1), pixels_of(epoch=1)]
    assert not any(torch.equal(pixels_of(), other) for other in different)
    assert torch.equal(torch.get_rng_state(), state), "the global random state is left alone"


@pytest.mark.parametrize(
    ("augmentation", "message"),
    [
        (Augmentation(cutout=9), "augmentation.cutout must be at most 8 for images of 10x8 pixels, got 9"),
        (Augmentation(padding=8, border="reflect"), "padding must be below 8 to reflect images of 10x8 pixels, got 8"),
    ],
)
def test_an_augmentation_larger_than_the_images_is_refused(augmentation, message):
    split = Split(torch.zeros(2, 3, 8, 10), torch.zeros(2, dtype=torch.int64))
    _refused(lambda: Images(split, split, 1, augmentation=augmentation), message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Augmentation(padding=-1), "augmentation.padding must be an integer, 0 or more, got -1"),
        (lambda: Augmentation(border="wrap"), "augmentation.border must be one of"),
        (lambda: ImageFolder(sizes=()), "data.sizes must start at epoch 0"),
        (lambda: ImageFolder(sizes=((0, 8), (0, 9))), "data.sizes must start at epoch 0 and ascend"),
        (lambda: ImageFolder(min_area=0), "data.min_area must be above 0"),
        (lambda: ImageFolder(num_loaders=-1), "data.num_loaders must be an integer, 0 or more"),
        (lambda: PlainText(unit="letter"), "data.unit must be one of"),
        (lambda: PlainText(context=0), "data.context must be an integer, 1 or more"),
        (lambda: ParallelText(vocabulary_size=10), "data.vocabulary_size must be an integer, 300 or more"),
        (
            lambda: ParallelText(max_length=5000),
            "data.max_length must be an integer from 1 to 4096, got 5000; the most are data.max_tokens",
        ),
    ],
)
def test_values_out_of_range_are_one_line_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# CIFAR-10


def write_archive(path: Path, lacks: str = "") -> list[np.ndarray]:
    """An archive like the official one, with four images a batch; returns the pixels of each batch."""
    random = np.random.default_rng(0)
    batches = [random.integers(256, size=(4, 3072), dtype=np.uint8) for _ in range(6)]
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, pixels in zip(names, batches, strict=True):
            if name != lacks:
                file = path.parent / name
                file.write_bytes(pickle.dumps({b"data": pixels, b"labels": [0, 1, 2, 9]}, protocol=2))
                archive.add(file, f"cifar-10-batches-py/{name}")
                file.unlink()
    return batches


def test_the_official_archive_is_read_in_its_order_and_then_only_its_cache(tmp_path, monkeypatch):
    batches = write_archive(tmp_path / cifar.ARCHIVE)
    data = CIFAR10(tmp_path, Augmentation(0, False)).load()
    assert data.num_examples == 20 and data.labels.tolist() == [0, 1, 2, 9] * 5
    pixels = torch.from_numpy(np.concatenate(batches[:5])).view(20, 3, 32, 32).float()
    expected = (pixels - torch.tensor(cifar.MEAN).view(3, 1, 1)) / torch.tensor(cifar.STD).view(3, 1, 1)
    torch.testing.assert_close(data.batch(torch.arange(20), generator(), 0).inputs[0], expected)
    assert sum(len(batch.labels) for batch in data.test_batches(0, 1, 3)) == 4

    monkeypatch.setattr(cifar, "read_archive", lambda path: pytest.fail("it was read again"))
    assert CIFAR10(tmp_path).load().num_examples == 20


def test_a_truncated_archive_says_so_and_leaves_no_cache(tmp_path):
    archive = tmp_path / cifar.ARCHIVE
    write_archive(archive)
    whole = archive.read_bytes()
    for num_bytes in (0, 100, len(whole) // 2, len(whole) - 20):
        archive.write_bytes(whole[:num_bytes])
        _refused(CIFAR10(tmp_path).load, f"is truncated or damaged: {num_bytes:,} bytes, expected 170,498,071")
    assert not list((tmp_path / "cache" / "thinwire").glob("*.pt"))


def test_an_archive_without_a_batch_or_with_code_in_it_is_refused(tmp_path):
    write_archive(tmp_path / cifar.ARCHIVE, lacks="data_batch_3")
    _refused(CIFAR10(tmp_path).load, "damaged.*data_batch_3")
    batch = tmp_path / "data_batch_1"
    batch.write_bytes(pickle.dumps(os.system))
    with tarfile.open(tmp_path / cifar.ARCHIVE, "w:gz") as archive:
        archive.add(batch, "cifar-10-batches-py/data_batch_1")
    _refused(CIFAR10(tmp_path).load, "it asks for posix.system")


@pytest.fixture
def server(tmp_path):
    """Address of a web server on a folder of this machine."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(_Silent, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", folder
        httpd.shutdown()
        thread.join()


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def archive_of(path: Path, batch: object, kind: bytes = tarfile.REGTYPE) -> Path:
    """An archive of six equal batches, or of members of another kind."""
    content = pickle.dumps(batch)
    with tarfile.open(path, "w:gz") as archive:
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.type, member.size = kind, len(content) if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        ({b"data": np.zeros((4, 3072), np.uint8), b"labels": [1, 2, 3]}, tarfile.REGTYPE, "4 images and 3 labels"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 10]}, tarfile.REGTYPE, "labels must be 0..9"),
        ([1, 2], tarfile.REGTYPE, "a batch must be a dictionary, got list"),
        ({b"data": None, b"labels": [1]}, tarfile.REGTYPE, "TypeError"),
        ({}, tarfile.DIRTYPE, "cifar-10-batches-py/data_batch_1 must be a file"),
    ],
)
def test_an_archive_with_odd_members_or_missing_labels_is_one_line(batch, kind, message, tmp_path):
    path = archive_of(tmp_path / "odd.tar.gz", batch, kind)
    with pytest.raises(ValueError, match=f"odd.tar.gz is truncated or damaged: .*{message}"):
        cifar.read_archive(path)


def test_the_archive_is_fetched_once_where_it_is_missing(tmp_path, monkeypatch, server):
    url, served = server
    write_archive(served / cifar.ARCHIVE)
    monkeypatch.setattr(cifar, "URL", f"{url}/{cifar.ARCHIVE}")
    monkeypatch.setattr(cifar, "ARCHIVE_SHA256", hashlib.sha256((served / cifar.ARCHIVE).read_bytes()).hexdigest())
    assert CIFAR10(tmp_path / "new").load().num_examples == 20
    (served / cifar.ARCHIVE).unlink()
    assert CIFAR10(tmp_path / "new").load().num_examples == 20


def test_a_download_that_is_not_the_file_expected_leaves_nothing(tmp_path, server):
    url, served = server
    (served / "file").write_bytes(b"something else")
    fetch = partial(download, f"{url}/file", tmp_path / "new" / "file", 14, "0" * 64)
    _refused(fetch, "gave 14 bytes that are not the file expected")
    assert not [path for path in (tmp_path / "new").iterdir() if not path.name.endswith(".lock")]


def test_a_folder_that_is_a_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    _refused(
        CIFAR10(tmp_path / "file").load, f"cannot write to {tmp_path / 'file'}: File exists; choose another folder"
    )


@pytest.mark.parametrize("home", ["/dev/null", None])
def test_without_a_home_that_can_be_written_one_line_says_what_to_set(home, monkeypatch):
    """As in a container whose user the system does not know; it was a RuntimeError, or the advice to choose another folder."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError("uid not found")))
    _refused(partial(cached, "a.pt", "b", Path.touch), "name a folder for it with XDG_CACHE_HOME")


def test_without_a_network_one_line_says_where_to_put_the_archive(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "URL", "http://127.0.0.1:9/" + cifar.ARCHIVE)
    _refused(CIFAR10(tmp_path / "none").load, f"put it at {tmp_path / 'none' / cifar.ARCHIVE}")


# Image folders


def write_images(folder: Path, classes: dict[str, int], size: tuple[int, int] = (32, 32)) -> None:
    """Images of one grey value each: 10 times the class, plus the number."""
    for label, (name, num) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for i in range(num):
            Image.new("RGB", size, (10 * label + i,) * 3).save(folder / name / f"{i:04}.png")


def test_cifar_from_an_image_folder_is_decoded_once(tmp_path, monkeypatch):
    write_images(tmp_path / "train", {"cat": 3, "dog": 2})
    write_images(tmp_path / "test", {"cat": 1, "dog": 1})
    data = CIFAR10(tmp_path, Augmentation(0, False)).load()
    assert data.labels.tolist() == [0, 0, 0, 1, 1]
    assert data._train.inputs[:, 0, 0, 0].tolist() == [0, 1, 2, 10, 11]
    monkeypatch.setattr(cifar, "open_image", lambda path: pytest.fail("it was read again"))
    assert CIFAR10(tmp_path).load().num_examples == 5
    write_images(tmp_path / "train", {"eel": 1})
    with pytest.raises(ValueError, match="same class folders; in one of them alone: eel"):
        CIFAR10(tmp_path).load()


def test_image_folder_says_what_is_wrong_with_it(tmp_path, monkeypatch):
    data = ImageFolder(tmp_path, num_loaders=0)
    _refused(data.load, "train is not there; put images into .*: --data.folder")
    (tmp_path / "train").mkdir()
    _refused(data.load, "has no class folders")
    (tmp_path / "train" / "cat").mkdir()
    _refused(data.load, "cat has no images")
    write_images(tmp_path / "val", {"cat": 1})
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"no image")
    loaded = data.load()
    _refused(lambda: loaded.batch(torch.tensor([0]), generator(), 0), "0.png cannot be read as an image")
    ahead = ImageFolder(tmp_path, num_loaders=1).load()
    _refused(
        lambda: next(ahead.batches(torch.zeros(1, 1, dtype=torch.int64), 0, 0, 0)), "0.png cannot be read as an image"
    )
    good = (tmp_path / "val" / "cat" / "0000.png").read_bytes()
    pixels = good.index(b"IDAT")
    # Half a file; and pixels that seem to end early, so that what follows is no part of a PNG.
    for bad in (good[: len(good) // 2], good[: pixels - 4] + (9).to_bytes(4, "big") + good[pixels:]):
        (tmp_path / "train" / "cat" / "0.png").write_bytes(bad)
        _refused(lambda: loaded.batch(torch.tensor([0]), generator(), 0), "0.png cannot be read as an image")
    (tmp_path / "train" / "cat" / "0.png").write_bytes(good)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 32 * 32 // 3)
    _refused(
        lambda: loaded.batch(torch.tensor([0]), generator(), 0), "0.png cannot be read as an image .*decompression bomb"
    )


def test_cifar_images_of_another_size_are_refused(tmp_path):
    for part in ("train", "test"):
        write_images(tmp_path / part, {"cat": 1}, size=(40, 32))
    _refused(CIFAR10(tmp_path).load, "0000.png must be 32x32 pixels, got 40x32")


def test_loader_processes_give_the_same_batches_in_the_same_order(tmp_path):
    for part in ("train", "val"):
        write_images(tmp_path / part, {"cat": 20, "dog": 13}, size=(40, 50))
    runs = []
    state = torch.get_rng_state()
    for num_loaders in (0, 2):
        data = ImageFolder(tmp_path, sizes=((0, 16), (2, 24)), test_size=20, num_loaders=num_loaders).load()
        plan = data.plan(shard(33, 0, 2, seed=0, epoch=2), 4)
        runs.append([*data.batches(plan, 7, 0, epoch=2), *data.test_batches(1, 2, 5)])
    assert [len(batch.labels) for batch in runs[0]] == [4, 4, 4, 4, 5, 5, 5, 1]
    assert runs[0][0].inputs[0].shape == (4, 3, 24, 24) and runs[0][-1].inputs[0].shape == (1, 3, 20, 20)
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one.inputs[0], other.inputs[0]) and torch.equal(one.labels, other.labels)
    assert torch.equal(torch.get_rng_state(), state), "the global random state is left alone"


def _ends_while_it_loads(folder: Path, pids) -> None:
    data = ImageFolder(folder, sizes=((0, 8),), num_loaders=2).load()
    batches = data.batches(torch.zeros(50, 1, dtype=torch.int64), 0, 0, 0)
    next(batches)
    pids.send([child.pid for child in multiprocessing.active_children()])
    os._exit(1)


def _ends_as_loaders_begin(folder: Path, pids) -> None:
    parent = os.getpid()

    def begin_late() -> None:
        while os.getppid() == parent:
            time.sleep(0.01)

    def end() -> None:
        while len(loaders := multiprocessing.active_children()) < 2:
            time.sleep(0.01)
        pids.send([loader.pid for loader in loaders])
        os._exit(1)

    base.ignore_requests = begin_late
    threading.Thread(target=end).start()
    data = ImageFolder(folder, sizes=((0, 8),), num_loaders=2).load()
    next(data.batches(torch.zeros(50, 1, dtype=torch.int64), 0, 0, 0))


@pytest.mark.parametrize("work", [_ends_while_it_loads, _ends_as_loaders_begin])
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks /proc which processes there are")
def test_a_worker_that_ends_at_once_leaves_no_loader_processes(tmp_path, work):
    for part in ("train", "val"):
        write_images(tmp_path / part, {"cat": 1})
    context = multiprocessing.get_context("forkserver")  # as training starts its workers
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=work, args=(tmp_path, sender))
    worker.start()
    pids = receiver.recv()
    worker.join()
    assert len(pids) == 2
    try:
        # PyTorch's watchdog looks every 5 seconds.
        wait_until(lambda: not any(map(_is_alive, pids)), "the end of the loader processes", 100)
    finally:
        for pid in filter(_is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_training_sizes_grow_by_epoch(tmp_path):
    for part in ("train", "val"):
        write_images(tmp_path / part, {"cat": 2})
    data = ImageFolder(tmp_path, sizes=((0, 8), (1, 16), (3, 24)), num_loaders=0).load()
    sides = [data.batch(torch.tensor([0]), generator(), epoch).inputs[0].shape[-1] for epoch in range(5)]
    assert sides == [8, 16, 16, 24, 24]


def test_regions_have_the_area_and_ratio_drawn_and_lie_in_the_image():
    for region in random_regions(2000, 0.1, generator()).tolist():
        left, top, right, bottom = region_box(300, 200, region)
        width, height = right - left, bottom - top
        assert -1e-9 <= left < right <= 300 + 1e-9 and -1e-9 <= top < bottom <= 200 + 1e-9
        assert width <= 300 and height <= 200
        if width < 300 and height < 200:
            assert width * height == pytest.approx(region[0] * 60_000) and width / height == pytest.approx(region[1])
    area, ratio = random_regions(20_000, 0.1, generator())[:, :2].T
    assert area.mean().item() == pytest.approx(0.55, abs=0.01) and ratio.log().mean().item() == pytest.approx(
        0, abs=0.01
    )


def test_a_region_shows_the_pixels_at_its_place_and_the_centre_is_that_of_the_image(tmp_path):
    """An image whose grey rises from left to right: its mean tells which columns were shown."""
    columns = np.tile(np.arange(256, dtype=np.uint8), (128, 1))
    for part in ("train", "val"):
        (tmp_path / part / "grey").mkdir(parents=True)
        Image.fromarray(columns).save(tmp_path / part / "grey" / "0.png")
    data = ImageFolder(tmp_path, sizes=((0, 16),), test_size=32, num_loaders=0).load()
    mean, std = 123.675, 58.395  # of the first channel
    for seed in range(20):
        batch = data.batch(torch.tensor([0]), generator(seed), epoch=0).inputs[0]
        draws = generator(seed)
        left, _, right, _ = region_box(256, 128, random_regions(1, 0.08, draws)[0].tolist())
        flipped = torch.rand(1, generator=draws) < 0.5
        first, last = (batch[0, 0].mean(dim=0) * std + mean)[[0, -1]].tolist()
        assert (first > last) == flipped.item()
        assert (first + last) / 2 == pytest.approx((left + right - 1) / 2, abs=2)
    (batch,) = data.test_batches(0, 1, 1)
    assert (batch.inputs[0][0, 0].mean() * std + mean).item() == pytest.approx(127.5, abs=1)


# Text


def write_text(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def test_words_are_numbered_by_first_appearance_and_unknown_ones_are_unk(tmp_path):
    write_text(tmp_path, train="a b a\n\nc b\n", test="c d\na\n")
    data = PlainText(tmp_path / "train", tmp_path / "test", "word", context=2).load()
    unk, eos, a, b, c = range(5)
    assert data._train.tolist() == [a, b, a, eos, eos, c, b, eos]
    assert data._test.tolist() == [c, unk, eos, a, eos]
    assert data.num_classes == 5 and data.num_examples == 3
    batch = data.batch(torch.tensor([1, 0]), generator(), 0)
    assert batch.inputs[0].tolist() == [[a, eos], [a, b]] and batch.labels.tolist() == [[eos, eos], [b, a]]


def test_the_digest_tells_other_data_apart(tmp_path):
    train, test = Digits().splits()
    write_text(tmp_path, train="a b a c " * 9, copy="a b a c " * 9, other="a b b c " * 9, longer="a b a c " * 11)
    texts = {
        n: PlainText(tmp_path / n, tmp_path / n, context=4).load().digest()
        for n in ("train", "copy", "other", "longer")
    }
    assert texts.pop("copy") == texts["train"]
    same, swapped = Images(train, test, num_classes=10), train._replace(labels=train.labels.flip(0))
    images = {
        same.digest(),
        Images(swapped, test, num_classes=10).digest(),
        Images(train, test, num_classes=11).digest(),
    }
    assert Digits().load().digest() == same.digest()
    assert len(images | set(texts.values())) == 6


def test_bytes_are_the_file(tmp_path):
    write_text(tmp_path, train="Käse\n" * 9, test="Brot\n")
    data = PlainText(tmp_path / "train", tmp_path / "test", "byte", context=4).load()
    assert bytes(data._train.tolist()).decode() == "Käse\n" * 9 and data.num_classes == 256


def test_streams_go_on_from_batch_to_batch_and_cover_a_share_once():
    data = Text(torch.arange(1001), torch.arange(50), 1001, context=5, in_order=True)
    share = torch.arange(data.num_examples).tensor_split(3)[1]
    batches = list(data.batches(data.plan(share, 4), 0, 1, 0))
    for before, after in zip(batches, batches[1:], strict=False):
        assert torch.equal(after.inputs[0][:, 0], before.labels[:, -1])
    seen = torch.cat([batch.inputs[0].flatten() for batch in batches]).sort().values
    assert torch.equal(seen, torch.arange(len(seen)) + share[0] * 5) and len(seen) == len(share) // 4 * 4 * 5


@pytest.mark.parametrize(("size", "batch_size", "context"), [(1, 1, 5), (3, 4, 5), (2, 7, 3), (4, 100, 35)])
def test_every_word_of_a_test_text_counts_once(size, batch_size, context):
    data = Text(torch.arange(101), torch.arange(101), 101, context, in_order=True)
    seen = []
    for rank in range(size):
        batches = list(data.test_batches(rank, size, batch_size))
        assert all(batch.labels.shape == (batch_size, context) for batch in batches)
        for batch in batches:
            counted = batch.labels != IGNORE
            assert torch.equal(batch.labels[counted], batch.inputs[0][counted] + 1)
            seen += batch.labels[counted].tolist()
    assert sorted(seen) == list(range(1, 101))


def test_perplexity_is_that_of_reading_the_text_once_from_its_start():
    torch.manual_seed(0)
    tokens = torch.randint(11, (58,))
    data = Text(tokens, tokens, 11, context=7, in_order=True)
    module = LSTMLanguageModel(width=8, layers=1, dropout=0.5).build(11)
    perplexity = data.metrics(data.evaluate(module, 0, 1, batch_size=1))["perplexity"]
    scores, _ = module(tokens[None, :-1])
    assert perplexity == pytest.approx(math.exp(F.cross_entropy(scores[0], tokens[1:]).item()), rel=1e-5)


def test_text_that_cannot_be_read_is_refused_in_one_line(tmp_path):
    write_text(tmp_path, good="some words of text\n" * 3, empty="\n\n")
    (tmp_path / "latin").write_bytes("eins\nzwei Käse\n".encode("latin-1"))
    for name, message in [
        ("none", "none is not there"),
        ("empty", "empty has no text in it"),
        ("latin", "latin is not UTF-8: byte 0xe4 in line 2"),
    ]:
        for unit in ("word", "byte", "subword"):
            _refused(PlainText(tmp_path / name, tmp_path / "good", unit, context=2).load, message)
            _refused(PlainText(tmp_path / "good", tmp_path / name, unit, context=2).load, message)
    _refused(PlainText(tmp_path / "good", tmp_path / "good").load, "data.context 35 needs 36 training tokens, got 15")
    _refused(WikiText2(tmp_path).load, "train.txt is not there; put .*: --data.folder, or --data.train")


def test_subwords_restore_the_text_and_are_learned_once(tmp_path):
    lines = ["Ein Mann fährt Rad.", "Zwei Frauen, die lachen!", "Ein Hund: (nass)"] * 20
    write_text(tmp_path, train="\n".join(lines) + "\n", test="Ein nasser Mann lacht.\n")
    vocabulary = subwords([tmp_path / "train"], 300)
    tokenizer = load_subwords(vocabulary)
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [PAD, BOS, EOS, UNK]
    encoded = encode_lines(vocabulary, tmp_path / "train")
    assert [tokenizer.decode(encoded.sentence(i).tolist()) for i in range(60)] == lines
    assert all(encoded.sentence(i)[-1] == EOS for i in range(60)) and len(encoded.lengths) == 60

    changed = vocabulary.stat().st_mtime_ns
    assert subwords([tmp_path / "train"], 300) == vocabulary and vocabulary.stat().st_mtime_ns == changed
    content = vocabulary.read_bytes()
    vocabulary.unlink()
    assert subwords([tmp_path / "train"], 300).read_bytes() == content, "workers on other machines must learn the same"
    data = PlainText(tmp_path / "train", tmp_path / "test", "subword", 300, context=4).load()
    assert data.num_classes == tokenizer.get_vocab_size() <= 300


# Translation


@pytest.fixture
def pairs(tmp_path) -> ParallelText:
    return tiny.pairs(tmp_path)


def test_pairs_are_padded_shifted_and_stay_together(pairs):
    data = pairs.load()
    seen = 0
    for batch in data.batches(data.plan(torch.arange(data.num_examples), 1), 0, 0, 0):
        source, target = batch.inputs
        assert max(source.shape[1], target.shape[1]) * len(source) <= 64
        assert (target[:, 0] == BOS).all()
        assert torch.equal(target[:, 1:], batch.labels[:, :-1].where(target[:, 1:] != PAD, PAD))
        for words, answer in zip(source, batch.labels, strict=True):
            texts = [data._tokenizer.decode(row[row > 0].tolist()) for row in (words, answer)]
            assert [tiny.WORDS[word] for word in texts[0].split()] == texts[1].split()
            assert answer[answer != IGNORE][-1] == EOS and words[words != PAD][-1] == EOS
        seen += len(source)
    assert seen == 200


def test_batches_hold_every_pair_once_but_those_too_long_or_empty():
    torch.manual_seed(0)
    source, target = torch.randint(1, 40, (2, 500))
    batches = batches_by_tokens(source, target, max_tokens=200, max_length=30)
    longest = torch.maximum(source, target)
    kept = (longest <= 30) & (torch.minimum(source, target) > 1)
    assert sorted(torch.cat(batches).tolist()) == kept.nonzero().flatten().tolist()
    assert all(longest[batch].max() * len(batch) <= 200 for batch in batches)
    assert len(batches) < 1.15 * longest[kept].sum() / 200, "little is padding"


def test_bleu_of_shares_is_bleu_of_the_whole():
    import sacrebleu

    ours = ["a cat sat on the mat", "there is a dog", "one two three four five", ""]
    theirs = ["the cat sat on the mat", "there is a big dog here", "one two three four five", "not empty"]
    whole = sacrebleu.corpus_bleu(ours, [theirs]).score
    parts = sum(bleu_sums(ours[i::5], theirs[i::5]) for i in range(5))
    assert bleu(parts) == pytest.approx(whole) and 10 < whole < 90


def test_evaluation_translates_every_test_sentence_once(pairs, monkeypatch):
    data = pairs.load()
    torch.manual_seed(0)
    module = Transformer(layers=1, width=16, heads=2, hidden=16).build(data.num_classes)
    parts = [data.evaluate(module, rank, 3, batch_size=5) for rank in range(3)]
    assert sum(part[13] for part in parts) == sum(len(line.split()) for line in data._references)
    metrics = data.metrics(sum(parts))
    assert set(metrics) == set(data.metric_names) and metrics["bleu"] < 5
    alone = data.metrics(data.evaluate(module, 0, 1, batch_size=23))
    assert metrics == pytest.approx(alone, rel=1e-4)

    def perfectly(self, module, source):
        texts = self._tokenizer.decode_batch(source.tolist())
        return [" ".join(tiny.WORDS[word] for word in text.split()) for text in texts]

    monkeypatch.setattr(type(data), "translate", perfectly)
    assert data.metrics(data.evaluate(module, 0, 1, 5))["bleu"] == pytest.approx(100)


def test_a_small_transformer_learns_to_translate(pairs):
    data = pairs.load()
    torch.manual_seed(0)
    module = Transformer(layers=1, width=64, heads=4, hidden=64, dropout=0.0).build(data.num_classes)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for epoch in range(24):
        module.train()
        for batch in data.batches(data.plan(shard(data.num_examples, 0, 1, 0, epoch), 1), 0, 0, epoch):
            optimizer.zero_grad()
            F.cross_entropy(module(*batch.inputs).flatten(0, 1), batch.labels.flatten()).backward()
            optimizer.step()
    metrics = data.metrics(data.evaluate(module, 0, 1, 32))
    assert metrics["accuracy"] > 0.9 and metrics["bleu"] > 50
    assert set(data.metrics(torch.tensor([1.0, 2, 3, 4]))) == {"loss", "accuracy", "perplexity"}, (
        "BLEU is a test's alone"
    )


def test_parallel_files_that_do_not_match_are_refused(pairs):
    target = pairs.folder / "train.b"
    text = target.read_text()
    target.write_text(text + "noch eine\n")
    _refused(pairs.load, "must have a line for each of the other's, got 200 and 201 lines")
    target.write_bytes(b"\xff\xfe" + text.encode())
    _refused(pairs.load, "train.b is not UTF-8")
    target.unlink()
    _refused(pairs.load, "train.b is not there")
    assert not list(pairs.folder.glob("*.pt"))


# Cache


def test_what_fails_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fails(part: Path):
        part.write_text("half of the n")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(path, fails)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_one_worker_makes_a_file_and_the_others_wait_for_it():
    made, paths = [], []

    def make(path: Path):
        made.append(path)
        threading.Event().wait(0.2)
        path.write_text("content")

    threads = [threading.Thread(target=lambda: paths.append(cached("x", "same", make).read_text())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and paths == ["content"] * 4
    assert cached("x", "other", lambda path: path.write_text("new")).read_text() == "new"


def test_a_cache_on_a_file_system_without_locks_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(
        ValueError, match=r"^cannot lock a file in /\S+: No locks available; choose a folder on a file system"
    ):
        cached("x", "other", lambda path: path.write_text("new"))


def test_a_damaged_file_of_the_cache_is_named(tmp_path):
    (tmp_path / "text").write_text("a few words\n" * 20)
    vocabulary = subwords([tmp_path / "text"], 300)
    encode_lines(vocabulary, tmp_path / "text")
    (tokens,) = (tmp_path / "cache").rglob("*-tokens.pt")
    for file in (tokens, vocabulary):  # the vocabulary is read where there are no tokens
        file.write_bytes(b"")
        _refused(
            lambda: encode_lines(vocabulary, tmp_path / "text"), f"{file} in the cache is damaged .*; remove it, and it"
        )
        file.unlink()


# The real thing


@needs_real_data  # takes 20 s, most of it to decode 60,000 images
def test_real_sets_have_the_published_sizes():
    images = CIFAR10(Path(REAL) / "cifar10").load()
    assert images.num_examples == 50_000 and images.labels.bincount().tolist() == [5000] * 10
    x = images.batch(torch.arange(0, 50_000, 10), batch_generator(0, 0, 0, 0), 0).inputs[0]
    assert x.mean().abs() < 0.4 and 0.8 < x.std() < 1.3
    pairs = ParallelText(Path(REAL) / "multi30k").load()
    assert len(torch.cat(pairs._batches)) > 28_900 and len(pairs._references) == 1000
    assert pairs._tokenizer.decode(pairs._test[1].sentence(0).tolist()) == pairs._references[0]
    text = WikiText2(Path(REAL) / "wikitext-2", "valid.txt").load()
    assert len(text._train) == 217_646 and len(text._test) == 245_569


def _refused(act, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        act()
    assert "\n" not in str(error.value)
