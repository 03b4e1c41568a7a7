"""`thinwire consensus`: its rows against closed forms, the choice of a step size, and workers of both kinds."""

from __future__ import annotations

import json
from operator import attrgetter
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.lab.bench import ConsensusBench
from thinwire.lab.bench.consensus import best, candidates, reaching
from thinwire.lab.bench.start_values import KINDS, start_values
from thinwire.lab.cli import main

COLUMNS = ["averager", "step_size", "round", "bits_sent", "messages", "squared_error"]
COLUMNS += ["theta", "workers", "data", "shape", "seed"]


def test_rows_of_a_known_graph(tmp_path, capsys):
    """One peer a round on the exponential graph of 8: the mean after three rounds, n m floats a message."""
    file, figure = tmp_path / "rows.json", tmp_path / "error.svg"
    returned = ConsensusBench(
        averager=("Mix(Exponential())", "Choco(step_size=0.5)"), rounds=4, shape=(6, 5), json=file, figure=figure
    ).run()
    rows = json.loads(file.read_text())
    assert rows == returned and all(list(row) == COLUMNS for row in rows)
    mix, choco = rows[:5], rows[5:]
    assert [row["bits_sent"] for row in mix] == [8 * 32 * 30 * k for k in range(5)]
    assert [row["messages"] for row in mix] == [8 * k for k in range(5)]
    x = torch.stack([start_values("normal", (6, 5), rank, 8) for rank in range(8)]).double()
    assert mix[0]["squared_error"] == pytest.approx((x - x.mean(0)).square().sum().item() / 8, rel=1e-6)
    assert mix[2]["squared_error"] > 0.01 and mix[3]["squared_error"] < 1e-11
    assert {row["averager"] for row in choco} == {"Choco(step_size=0.5)"} and choco[0]["step_size"] == 0.5
    assert mix[0]["step_size"] == 1.0 and choco[0]["squared_error"] == mix[0]["squared_error"]
    assert "<svg" in figure.read_text()
    printed = capsys.readouterr().out
    assert "consensus: step 8/8" in printed and "Choco(step_size=0.5), step size 0.5" in printed


def test_processes_do_what_threads_do(capsys):
    options = {"averager": ("Mix()", "PowerGossip(Ring(), rank=1)"), "workers": 3, "rounds": 4, "shape": (8, 6)}
    threads = ConsensusBench(**options).run()
    assert ConsensusBench(**options, processes=True).run() == threads
    assert "step 8/8" in capsys.readouterr().out


def test_a_process_world_returns_in_rank_order_and_names_who_failed():
    assert tw.comm.ProcessWorld(3).run(attrgetter("rank")) == [0, 1, 2]
    with pytest.raises(AttributeError, match="rank [01]: .*no attribute 'rnk'"):
        tw.comm.ProcessWorld(2).run(attrgetter("rnk"))
    with pytest.raises(ValueError, match="at least one worker"):
        tw.comm.ProcessWorld(0)


class TwoParts(Exception):
    """It cannot be made again from its arguments, as unpickling does."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def _fail(comm, error):
    raise error("x") if error is not TwoParts else TwoParts("x", "y")


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (KeyError, KeyError, "KeyError: 'x', in .*test_consensus_bench.py:[0-9]+"),
        (ValueError, ValueError, "x, in .*test_consensus_bench.py:[0-9]+"),
        (TwoParts, RuntimeError, "TwoParts: x and y, in .*test_consensus_bench.py:[0-9]+"),
    ],
)
def test_a_process_world_says_the_class_of_an_error_and_where_it_was_raised(error, expected, text):
    with pytest.raises(expected, match=rf"^[\"']?rank [01]: {text}[\"']?$"):
        tw.comm.ProcessWorld(2).run(_fail, error)


def _die(comm):
    if comm.rank == 1:
        import os

        os._exit(3)
    comm.all_reduce(torch.ones(1)).wait()


def test_a_process_that_dies_ends_the_world():
    with pytest.raises((RuntimeError, tw.comm.CommunicationError), match="rank [01]: "):
        tw.comm.ProcessWorld(2).run(_die)


def test_every_step_size_is_tried_where_there_is_one():
    sizes = (0.1, 0.5)
    assert candidates(tw.DeepSqueeze(step_size=0.2), sizes) == [
        tw.DeepSqueeze(step_size=0.1),
        tw.DeepSqueeze(step_size=0.5),
    ]
    assert candidates(tw.Moniqua(), sizes) == [tw.Moniqua(step_size=0.1), tw.Moniqua(step_size=0.5)]
    assert candidates(tw.PowerGossip(), sizes) == [tw.PowerGossip(step_size=0.1), tw.PowerGossip(step_size=0.5)]
    assert candidates(tw.PushSum(), sizes) == [tw.PushSum()]
    assert candidates(tw.Choco(), ()) == [tw.Choco()]


def test_the_best_step_size_reaches_the_target_for_the_fewest_bits():
    def run(*errors, bits=8):
        return [{"round": i, "bits_sent": bits * i, "squared_error": error} for i, error in enumerate(errors)]

    slow, fast, diverging = run(4.0, 2.0, 1.0, 0.1), run(4.0, 0.4, 0.3, 0.3), run(4.0, 9.0, None, None)
    assert best([slow, fast, diverging], target=0.25) is fast
    assert best([slow, fast, diverging], target=0.05) is slow  # which alone reaches it
    assert best([diverging, fast, slow], target=1e-3) is slow  # none does: the smallest error left
    assert best([fast, run(4.0, 4.0, 0.3, bits=2)], target=0.1)[1]["bits_sent"] == 2
    assert reaching(fast, 0.1)["round"] == 1 and reaching(diverging, 0.1) is None


@pytest.mark.parametrize("data", [kind for kind in KINDS if kind != "faces"])
def test_start_values(data):
    shape, size = (32, 64), 8
    xs = [start_values(data, shape, rank, size) for rank in range(size)]
    assert all(x.shape == shape and x.dtype == torch.float32 for x in xs)
    assert torch.equal(xs[3], start_values(data, shape, 3, size))
    assert not torch.equal(xs[0], xs[1])
    # 5 standard errors of the mean of 2048 normal numbers
    if data in ("normal", "offset"):
        assert all(abs(x.mean() - rank * (data == "offset")) < 5 / 2048**0.5 for rank, x in enumerate(xs))
    if data == "lognormal":
        assert abs(xs[0].log().mean()) < 5 / 2048**0.5
    if data == "sparse":
        assert all(x.sum() == 1 and x.max() == 1 for x in xs)
    if data == "digits":
        assert torch.cat(xs).unique(dim=0).shape == (size * 32, 64)  # no image twice
    else:
        assert not torch.equal(xs[0], start_values(data, shape, 0, size, seed=1))


def test_every_worker_starts_from_the_face_of_another_person(monkeypatch):
    images = np.random.default_rng(0).random((400, 64, 64), dtype=np.float32)  # ten of each of 40 persons
    monkeypatch.setattr("sklearn.datasets.fetch_olivetti_faces", lambda: SimpleNamespace(images=images))
    xs = [start_values("faces", (64, 64), rank, 16) for rank in range(16)]
    places = [int(np.flatnonzero((images == x.numpy()).all(axis=(1, 2))).item()) for x in xs]
    assert len({place // 10 for place in places}) == 16
    for shape, size in [((32, 64), 16), ((64, 64), 401)]:
        with pytest.raises(ValueError, match="faces"):
            start_values("faces", shape, 0, size)


def test_faces_that_cannot_be_downloaded_are_an_error_with_a_remedy(monkeypatch):
    def fetch():
        raise URLError("no route")

    monkeypatch.setattr("sklearn.datasets.fetch_olivetti_faces", fetch)
    with pytest.raises(ValueError, match="olivetti_py3.pkz .*~/scikit_learn_data"):
        start_values("faces", (64, 64), 0, 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--averager", "Mx()"], "did you mean 'Mix'"),
        (["--averager", "Ring()"], "'Ring()' is no averager"),
        (["--averager", "Choco(step_size=0.0)"], "step_size must be above 0 and finite, or None, got 0.0"),
        (["--step-sizes", "0.0"], "step_size must be above 0"),
        (["--averager", "Mix(DirectedRing())", "PowerGossip(Exponential())"], "must not change with time"),
        (["--averager", "Mix(Torus())", "--workers", "7"], "7 is prime"),
        (["--workers", "1"], "workers must be an integer, 2 or more, got 1"),
        (["--rounds", "0"], "rounds must be an integer, 1 or more"),
        (["--target", "2"], "target must be above 0 and below 1"),
        (["--data", "nromal"], "nromal"),
        (["--data", "digits", "--shape", "8", "8"], "digits have 64 pixels"),
        (["--data", "digits", "--shape", "900", "64"], "choose a shape of at most"),
        (["--figure", "error.txt"], "must end in .pdf, .png, .svg"),
        (["--json", "/proc/nowhere"], "cannot write /proc/nowhere"),
        (["--data", "sparse", "--shape", "1", "1"], "all workers start with the same values; choose other data"),
        (["--ruonds", "3"], "did you mean '--rounds'"),
    ],
)
def test_a_mistake_gets_one_clear_line(options, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["consensus", "--rounds", "2", *options]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("thinwire: ") and complaint.count("\n") == 1
    assert expected in complaint
    assert not list(tmp_path.iterdir())


def test_topology_prints_its_facts_and_draws(capsys, tmp_path):
    file = tmp_path / "graph.svg"
    assert main(["topology", "Exponential()", "--workers", "16", "--output", str(file)]) == 0
    printed = capsys.readouterr().out
    for words in ("Exponential()", "directed, repeats every 4 steps", "exact after 4 steps", "graph.svg"):
        assert words in printed
    assert "<svg" in file.read_text()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["Torus()", "--workers", "7"], "Torus() cannot connect 7 workers"),
        (["Rng()"], "did you mean 'Ring'"),
        (["Mix()"], "'Mix()' is no topology"),
        (["--workers", "4"], "thinwire topology needs GRAPH (the topology in Python's notation"),
        (["Ring()", "--output", "ring.txt"], "must end in .pdf, .png, .svg"),
        (["Ring()", "--output", "/proc/nowhere/ring.png"], "cannot write /proc/nowhere/ring.png"),
        (["Ring()", "--wrokers", "4"], "did you mean '--workers'"),
    ],
)
def test_a_mistake_about_a_topology_gets_one_clear_line(options, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["topology", *options]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("thinwire: ") and complaint.count("\n") == 1 and expected in complaint
    assert not list(tmp_path.iterdir())


def test_a_grid_over_theta_takes_the_bound_that_holds(capsys):
    """Neighbours differ by up to about 7: with a theta of 0.1 differences are taken modulo too little, and 8 is enough."""
    rows = ConsensusBench(
        averager=("Moniqua(Ring(), bits=8, step_size=0.5)",), workers=4, rounds=60, shape=(6, 5), thetas=(0.1, 8.0)
    ).run()
    ends = {row["theta"]: row["squared_error"] for row in rows if row["round"] == 60}
    assert ends[8.0] < 0.01 < ends[0.1]
    assert "theta 8" in capsys.readouterr().out
