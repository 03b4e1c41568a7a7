"""Recipes of translation and language modelling: published sizes and schedules, and small versions at work on made-up text."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from thinwire import Local
from thinwire.comm import ProcessGroupCommunicator
from thinwire.lab.recipes import recipes
from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.data import ParallelText, PlainText
from thinwire.lab.train.folder.run_folder import make_folder
from thinwire.lab.train.models import GPT, LSTMLanguageModel, Transformer
from thinwire.lab.train.models.base import num_parameters
from thinwire.lab.train.optimize import LearningRateSchedule
from thinwire.lab.train.run import loop
from thinwire.lab.train.run.interrupt import Interruption

TASKS = ("multi30k-transformer-", "wikitext2-lstm-", "wikitext2-gpt-", "text-gpt-")
SMALL = [name for name in recipes() if name.startswith(TASKS) and name.endswith("-small")]
WORDS = "a the cat dog sees finds big red house tree . , and on in under old new man woman child ball".split()


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sentences(num: int, seed: int) -> str:
    choose = random.Random(seed)
    return "".join(" ".join(choose.choices(WORDS, k=choose.randint(3, 12))) + "\n" for _ in range(num))


def shrunk(name: str, folder: Path) -> RunConfig:
    """The recipe, as it is but for the sizes, two steps long, on made-up text."""
    config = recipes()[name].config
    for i, (part, num) in enumerate({"train": 60, "valid": 60, "test": 11, "test_2016_flickr": 11}.items()):
        for j, end in enumerate(("txt", "en", "de")):
            (folder / f"{part}.{end}").write_text(sentences(num, seed=10 * i + j // 2))
    match config.data:
        case ParallelText():
            data = replace(config.data, folder=folder, vocabulary_size=300, max_tokens=64, max_length=64)
        case PlainText():
            data = replace(config.data, train=folder / "train.txt", test=folder / "test.txt", context=8)
        case _:
            data = replace(config.data, folder=folder, context=5)
    match config.model:
        case Transformer():
            model = replace(config.model, layers=1, width=16, heads=2, hidden=16)
        case LSTMLanguageModel():
            model = replace(config.model, width=16)
        case GPT():
            model = replace(config.model, layers=1, width=16, heads=2, context=8)
    batch_size = min(config.batch_size, 2)
    strategy = config.parsed_strategy()
    if isinstance(strategy, Local):
        strategy = replace(strategy, every=2, delay=min(strategy.delay, 1))
    return replace(
        config,
        strategy=repr(strategy),
        data=data,
        model=model,
        batch_size=batch_size,
        epochs=1,
        max_steps=2,
        log_every=1,
        output=folder / "runs",
    )


def check_records(folder: Path, config: RunConfig) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert summary["recipe"] == config.recipe and summary["final"]["steps"] == steps[-1]
    if config.parsed_strategy().counts_commits:  # rounds of two steps, and the one under way at the end
        assert steps[-1] in (2, 3)
    else:
        assert steps == [1, 2]
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert math.isfinite(summary["final"][summary["metric"]])
    assert summary["metric"] == ("test_bleu" if isinstance(config.data, ParallelText) else "test_perplexity")


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    with ProcessGroupCommunicator() as comm:
        yield comm
    dist.destroy_process_group()


@pytest.mark.parametrize("name", SMALL)
def test_a_small_recipe_takes_two_steps(name, tmp_path, alone):
    config = replace(shrunk(name, tmp_path), workers=1)
    folder = make_folder(config)
    loop.run(config, folder, alone, Interruption())
    check_records(folder, config)


@pytest.mark.parametrize("name", ["multi30k-transformer-sgp-small", "wikitext2-lstm-powergossip-small"])
def test_workers_gossip_and_their_mean_is_tested_too(name, tmp_path):
    config = replace(shrunk(name, tmp_path), workers=2)
    folder = train(config)
    check_records(folder, config)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["bytes_sent_per_worker"] > 0 and "mean_model_" + summary["metric"] in summary["final"]


def test_the_base_transformer_follows_the_published_schedule():
    config = recipes()["wmt16-transformer-sgp"].config
    rates = torch.tensor(
        [config.optimizer.learning_rate_at(i, config.max_steps, config.workers) for i in range(20_000)]
    )
    step = torch.arange(1, 20_001, dtype=torch.float64)
    published = 512**-0.5 * torch.minimum(step**-0.5, step * 4000**-1.5)  # Vaswani et al. 2017, equation 3
    torch.testing.assert_close(rates.double(), published, rtol=1e-6, atol=0)  # both were rounded to float32 once
    assert rates.argmax() + 1 == 4000
    assert config.data.max_tokens * config.workers == 25_000
    assert (config.optimizer.beta1, config.optimizer.beta2) == (0.9, 0.98) and config.loss.label_smoothing == 0.1


def test_warm_up_in_steps_is_as_long_in_every_run():
    schedule = LearningRateSchedule(warmup_steps=4, shape="constant")
    assert [schedule.at(i, 100) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [schedule.at(i, 2) for i in range(2)] == [0.25, 0.5]
    with pytest.raises(ValueError, match="warmup_steps must be an integer, 0 or more, or None, got -1"):
        LearningRateSchedule(warmup_steps=-1)


def test_the_lstm_is_trained_as_published():
    config = recipes()["wikitext2-lstm-powergossip"].config
    assert (config.workers, config.batch_size, config.data.context, config.clip_norm) == (16, 64, 30, 0.4)
    num_steps = 90 * 100
    rates = [config.optimizer.learning_rate_at(i, num_steps, config.workers) for i in range(num_steps)]
    assert rates[499] == rates[5999] == 1.25 * 38 and rates[498] < rates[499]
    assert rates[6000] == pytest.approx(rates[5999] / 10) and rates[8000] == pytest.approx(rates[5999] / 100)
    assert config.optimizer.momentum == config.optimizer.weight_decay == 0
    with torch.device("meta"):
        assert num_parameters(config.model.build(28_869)) == 28_949_319  # of PowerSGD's and PowerGossip's vocabulary


def test_the_transformer_has_its_published_size():
    model = recipes()["wmt16-transformer-dense"].config.model
    with torch.device("meta"):
        assert num_parameters(model.build()) == 63_121_544
