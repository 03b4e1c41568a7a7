"""`thinwire bench`: the rows that it writes, on tiny sizes, and what its numbers must agree with."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.command import python

import thinwire as tw
from thinwire.lab.bench import CodecsBench, StepBench, timeline
from thinwire.lab.bench.codecs import DEFAULT_CODECS
from thinwire.lab.bench.floor import Floor, Machine
from thinwire.lab.bench.methods import SyntheticTraining, TimedMethod, mlp, of_strategy
from thinwire.lab.bench.step import DEFAULT_STRATEGIES, Turns
from thinwire.strategy import Rhythm

CODEC_COLUMNS = [
    "codec", "backend", "num_elements", "encode_gb_per_s", "decode_gb_per_s", "copy_gb_per_s", "encode_ratio",
    "decode_ratio", "reference_encode_gb_per_s", "payload_bytes", "compression",
]  # fmt: skip
STEP_COLUMNS = [
    *("rate", "workers", "device", "method", "step_seconds", "compute_seconds", "cpu_seconds", "compute_cpu_seconds"),
    *("thread_seconds", "bytes_sent_per_step", "line_seconds", "memory_passes", "memory_seconds", "floor_seconds"),
    "phase_seconds",
]


def _run_step(tmp_path: Path, **options) -> list[dict]:
    """Run the benchmark in processes of its own, as the command does, and read what it wrote."""
    file = tmp_path / "step.json"
    code = f"from pathlib import Path, PosixPath; from thinwire.lab.bench import StepBench; b = {options!r}"
    main = f"\nif __name__ == '__main__':\n    StepBench(json=Path({str(file)!r}), **b).run()\n"
    script = tmp_path / "step.py"
    script.write_text(code + main)
    done = python(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ratio" in done.stdout
    return json.loads(file.read_text())


def test_codecs_rows_have_the_documented_columns_and_true_sizes(tmp_path, capsys):
    file = tmp_path / "codecs.json"
    returned = CodecsBench(megabytes=0.04, repetitions=2, json=file).run()
    rows = json.loads(file.read_text())
    assert rows == returned
    rows, parts = rows[: len(DEFAULT_CODECS)], rows[len(DEFAULT_CODECS) :]
    assert [list(part) for part in parts] == [["part", "milliseconds", "copy_ratio"]] * 3
    assert [part["copy_ratio"] is None for part in parts] == [False, False, True]
    assert all(part["milliseconds"] > 0 for part in parts)
    assert [row["codec"] for row in rows] == [repr(tw.parse(text)) for text in DEFAULT_CODECS]
    for row in rows:
        assert list(row) == CODEC_COLUMNS
        assert row["backend"] == "cpu"
        assert row["num_elements"] == 10_000
        codec, bound = tw.parse(row["codec"]), tw.parse(row["codec"]).nbytes(10_000)
        assert row["payload_bytes"] == bound if codec.traits.fixed_size else 0 < row["payload_bytes"] <= bound
        assert row["compression"] == pytest.approx(40_000 / row["payload_bytes"])
        assert row["encode_ratio"] == pytest.approx(row["encode_gb_per_s"] / row["copy_gb_per_s"])
        assert row["decode_ratio"] == pytest.approx(row["decode_gb_per_s"] / row["copy_gb_per_s"])
        assert row["reference_encode_gb_per_s"] > 0
    assert "chain(TopK(ratio=0.01), QSGD(bits=4))" in capsys.readouterr().out


def test_codecs_without_the_reference_and_with_the_callers_threads_restored():
    before = torch.get_num_threads()
    options = {"repetitions": 1, "reference_repetitions": 0, "threads": 2, "parts": False}
    rows = CodecsBench(codecs=("SignNorm()",), megabytes=0.01, **options).run()
    assert [row["reference_encode_gb_per_s"] for row in rows] == [None]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"megabytes": 0}, "megabytes must be"),
        ({"repetitions": 0}, "repetitions must be"),
        ({"reference_repetitions": -1}, "reference_repetitions must be"),
        ({"threads": 0}, "threads must be"),
        ({"codecs": ("TopK(2)",)}, "ratio must be"),
        ({"codecs": ("TopQ(0.1)",)}, "did you mean 'TopK'"),
        ({"codecs": ("Mean()",)}, "is no codec"),
        ({"json": Path("/nowhere/at/all.json")}, "cannot write /nowhere/at/all.json"),
    ],
)
def test_codecs_mistakes_are_said_in_one_line(options, words):
    with pytest.raises(ValueError, match=words) as error:
        CodecsBench(**options).run()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "workers must be"),
        ({"steps": 0}, "steps must be"),
        ({"warmup": -1}, "warmup must be"),
        ({"bucket_megabytes": 0.0}, "bucket_megabytes must be"),
        ({"strategies": ("TopK(0.1)",)}, r'write "Gradients\(Mean\(TopK\(0.1\), ErrorFeedback\(\)\)\)"$'),
        ({"strategies": ("Asynchronous()",)}, "has no rounds to measure"),
        ({"strategies": ("Shards()",)}, "has no rounds to measure"),
        ({"strategies": ("streaming_diloco()",)}, "leave delay and staleness out"),
        ({"strategies": ("Gossip(Mix(), overlap=True, staleness=1)",)}, "leave delay and staleness out"),
        ({"strategies": ("Gradients(Mean(QSGD(bits=9)))",)}, "bits must be"),
        ({"json": Path("/nowhere/at/all.json")}, "cannot write"),
        ({"timeline": Path("timeline.words")}, "the file must end in"),
        ({"strategies": (), "baselines": False}, "nothing to measure"),
        ({"device": "tpu"}, "'cpu' or 'cuda'"),
        ({"device": "cuda"}, "needs a GPU"),
    ],
)
def test_step_mistakes_are_said_before_any_worker_starts(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=words) as error:
        StepBench(**options).run()
    assert "\n" not in str(error.value)


def test_step_rows_have_the_documented_columns_and_true_bytes_beside_a_timeline(tmp_path):
    drawing = tmp_path / "timeline.svg"
    strategies = (*DEFAULT_STRATEGIES, "Gossip(Mix(), overlap=True)")
    sizes = {"steps": 2, "warmup": 1, "hidden": 64, "layers": 2, "batch_size": 4}
    rows = _run_step(tmp_path, strategies=strategies, timeline=drawing, **sizes)
    assert drawing.read_text().count("<svg") == 1 and len(drawing.read_text()) > 10_000
    assert [row["method"] for row in rows] == ["DDP fp32", "DDP fp16 hook", *strategies]
    for row in rows:
        assert list(row) == STEP_COLUMNS
        assert (row["rate"], row["workers"], row["device"]) == ("loopback", 2, "cpu")
        assert row["step_seconds"] > 0
        assert 0 < row["compute_seconds"] <= row["floor_seconds"]
        assert row["thread_seconds"]["training"] > 0
    assert [row["memory_passes"] for row in rows] == [2, 2, 2, pytest.approx(4, abs=0.1), 2]  # biases have no memory
    model = mlp(64, 2)
    numel = sum(p.numel() for p in model.parameters())
    matrices = [p.numel() for p in model.parameters() if p.ndim == 2]
    dense_bytes = 4 * (numel - sum(matrices))  # biases travel as they are
    codecs = [tw.parse(text).averager.codec for text in DEFAULT_STRATEGIES]
    # Two workers: a ring all-reduce sends n bytes, a gather one payload, gossip the parameters.
    expected = [4 * numel, 2 * numel, *(codec.nbytes(matrices) + dense_bytes for codec in codecs), 4 * numel]
    assert [row["bytes_sent_per_step"] for row in rows] == expected


@pytest.mark.parametrize(
    ("rhythm", "expected"),
    [
        (Rhythm(), ["alone", "step", "settle"] * 4),
        (Rhythm(every=3), [*["alone"] * 3, *["step"] * 3, "settle"] * 2),  # whole periods, at least 4 steps
        (Rhythm(delay=1), ["alone", "step", "step", "settle"] * 4),  # the first is untimed
    ],
)
def test_turns_are_whole_periods_and_leave_nothing_in_flight(rhythm, expected):
    calls: list[str] = []
    alone, step, settle = (partial(calls.append, name) for name in ("alone", "step", "settle"))
    method = TimedMethod("some", False, lambda training, comm: None, rhythm=rhythm)

    def worker(comm):
        return Turns(comm, method, alone, step, settle).run(4)

    [(times, steps)] = tw.LocalWorld(1).run(worker)
    assert calls == expected
    assert steps == expected.count("step")
    assert 0 < times.step_seconds < 1


def test_processor_time_of_a_step_is_counted_for_the_thread_that_spends_it():
    def spend(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def worker(comm):
        idle = [threading.Thread(target=done.wait) for _ in range(200)]
        for thread in idle:
            thread.start()  # that there are many threads costs the step nothing
        with ThreadPoolExecutor(1, thread_name_prefix="helper") as helper:
            helper.submit(spend, 0.0).result()

            def step() -> None:
                helper.submit(spend, 0.03).result()
                spend(0.01)

            method = TimedMethod("some", False, lambda training, comm: None)
            try:
                return Turns(comm, method, partial(spend, 0.0), step, partial(spend, 0.0)).run(3)[0]
            finally:
                done.set()

    done = threading.Event()
    [times] = tw.LocalWorld(1).run(worker)
    assert times.thread_seconds["helper_0"] == pytest.approx(0.03, abs=0.004)
    assert times.thread_seconds["training"] == pytest.approx(0.01, abs=0.004)
    assert sum(times.thread_seconds.values()) == pytest.approx(times.cpu_seconds, abs=0.008)


def test_the_strategy_says_what_is_timed_and_the_floor():
    gradients = of_strategy("Gradients(Mean())", ddp=True, bucket_bytes=None)
    assert (gradients.name, gradients.ddp, gradients.is_concurrent) == ("Gradients(Mean())", True, True)
    gossip = of_strategy("Gossip(Mix())", ddp=True, bucket_bytes=1000)
    assert (gossip.ddp, gossip.is_concurrent, gossip.is_late) == (False, False, False)
    late = of_strategy("Gossip(Mix(), overlap=True)", ddp=False, bucket_bytes=None)
    assert (late.rhythm.every, late.is_concurrent, late.is_late) == (1, True, True)
    local = of_strategy("Local(Mix(), every=4)", ddp=False, bucket_bytes=None)
    assert (local.name, local.rhythm.every, local.is_concurrent, local.is_late) == (
        "Local(Mix(), every=4)",
        4,
        False,
        False,
    )
    assert of_strategy("Gradients(Mean())", ddp=False, bucket_bytes=1000).name == "Gradients(Mean(), bucket_bytes=1000)"
    machine = Machine(line_bytes_per_second=100.0, pass_seconds=0.5)
    assert Floor.of(machine, 1.0, 300, 2, is_concurrent=True) == Floor(3.0, 2, 1.0, 3.0)
    assert Floor.of(machine, 1.0, 300, 2, is_concurrent=False) == Floor(3.0, 2, 1.0, 4.0)
    assert Floor.of(machine, 1.0, 50, 8, is_concurrent=True) == Floor(0.5, 8, 4.0, 5.0)


@pytest.mark.parametrize("text", ["Gradients(Mean())", "Gossip(Mix(Ring()))"])
def test_a_strategy_is_timed_over_the_transport_that_was_asked_for(text):
    def worker(comm):
        with of_strategy(text, False, None).attach(SyntheticTraining(mlp(4, 1), 2, comm.rank), comm) as strategy:
            return strategy.comm is comm

    assert tw.LocalWorld(2).run(worker) == [True, True]


def test_the_timed_model_is_the_one_of_22_million_parameters():
    with torch.device("meta"):
        assert sum(p.numel() for p in mlp(2048, 6).parameters()) == 22_052_874


def test_a_timeline_holds_marked_phases_of_all_threads_in_milliseconds():
    events = [
        {"ph": "X", "name": "thinwire::encode", "ts": 2500.0, "dur": 500.0, "tid": 1},
        {"ph": "X", "name": "backward", "ts": 2000.0, "dur": 3000.0, "tid": 1},
        {"ph": "X", "name": "aten::mm", "ts": 2100.0, "dur": 10.0, "tid": 1},
        {"ph": "X", "name": "thinwire::decode", "ts": 4000.0, "dur": 250.0, "tid": 2},
        {"ph": "i", "name": "thinwire::wait", "ts": 0.0, "tid": 2},
    ]
    assert timeline.spans_of({"traceEvents": events}) == [
        ("backward", 1, 0.0, 3.0),
        ("encode", 1, 0.5, 1.0),
        ("decode", 2, 2.0, 2.25),
    ]
