"""Language modelling: the LSTM of PowerGossip on WikiText-2, and a small GPT on any plain text or WikiText-2.

PowerGossip (Vogels et al. 2020, arXiv 2008.01425) trained the LSTM of PowerSGD (arXiv 1905.13727) on 16 workers in a ring:
each worker reads 64 streams of its own part of the text, 30 words at a time, and clips its gradients at 0.4. The optimizer is
plain SGD with a learning rate of 1.25 times a factor, 38 in the authors' code. It is warmed up for 5 of 90 epochs and divided
by 10 after 60 and 80 epochs. Warm-up starts at 1.25. The authors report the perplexity of the validation part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..train import RunConfig
from ..train.data import PlainText, WikiText2
from ..train.models import GPT, LSTMLanguageModel
from ..train.optimize import SGD, Adam, LearningRateSchedule, Muon
from .base import Task, TaskMethod

WIKITEXT2 = RunConfig(
    "wikitext2-lstm",
    workers=16,
    epochs=90,
    batch_size=64,
    split="by-position",
    data=WikiText2(context=30, test="valid.txt"),
    model=LSTMLanguageModel(width=650, layers=3, dropout=0.4),
    optimizer=SGD(
        learning_rate=1.25 * 38,
        weight_decay=0.0,
        momentum=0.0,
        schedule=LearningRateSchedule(
            warmup_fraction=5 / 90, warmup_start=1 / 38, shape="steps", drops=(60 / 90, 80 / 90)
        ),
    ),
    clip_norm=0.4,
    test_batch_size=16,
)

WIKITEXT2_SMALL = replace(
    WIKITEXT2,
    workers=4,
    epochs=5,
    batch_size=8,
    data=WikiText2(context=30, train="valid.txt"),
    model=LSTMLanguageModel(width=200, layers=2, dropout=0.2),
    optimizer=replace(
        WIKITEXT2.optimizer,
        learning_rate=20.0,
        schedule=LearningRateSchedule(warmup_fraction=0.1, shape="linear"),
    ),
    precision="bf16",
    evaluate_every=5,
)

GPT_TEXT = RunConfig(
    "text-gpt",
    epochs=20,
    batch_size=16,
    data=PlainText(unit="subword", context=256, in_order=False),
    model=GPT(),
    optimizer=Adam(1e-3, weight_decay=0.1, beta2=0.95, eps=1e-8, schedule=LearningRateSchedule(warmup_fraction=0.02)),
    clip_norm=1.0,
    test_batch_size=16,
)

GPT_SMALL = replace(
    GPT_TEXT,
    epochs=3,
    data=PlainText(unit="byte", context=64, in_order=False),
    model=GPT(layers=4, width=128, heads=4, context=64, dropout=0.0),
    optimizer=replace(GPT_TEXT.optimizer, learning_rate=3e-3, schedule=LearningRateSchedule(warmup_fraction=0.1)),
    precision="bf16",
)

WIKITEXT2_GPT = replace(GPT_TEXT, recipe="wikitext2-gpt", data=WikiText2(context=256, in_order=False))

WIKITEXT2_GPT_SMALL = replace(
    GPT_SMALL, recipe="wikitext2-gpt", epochs=2, data=WikiText2(context=64, train="valid.txt", in_order=False)
)


def _descent(learning_rate: float, rate_in_loss: bool = False) -> dict[str, Any]:
    """Plain steps along an averager's own update, whose size clipping would change."""
    schedule = LearningRateSchedule(warmup_fraction=0.1)
    optimizer = SGD(learning_rate, weight_decay=0.0, momentum=0.0, nesterov=False, schedule=schedule)
    return {"optimizer": replace(optimizer, rate_in_loss=rate_in_loss), "clip_norm": None}


_MUON = Muon(0.0224, schedule=LearningRateSchedule(warmup_fraction=0.1))
_SPARSE_LOCO = TaskMethod(
    "SparseLoCo: 2 % of each tile, 2 bits, every 15 steps (arXiv 2508.15706)", "sparse_loco()", "sparse_loco(every=10)"
)

WIKITEXT2_METHODS = {
    "dense": TaskMethod("all-reduce of gradients"),
    "powergossip": TaskMethod(
        "PowerGossip of rank 1, 8 iterations a step, nothing to tune",
        "Gossip(PowerGossip(Ring(), rank=1, iterations=8))",
        "Gossip(PowerGossip(Ring(), rank=1, iterations=2))",
    ),
    "dpsgd": TaskMethod("D-PSGD: whole models between neighbours on a ring (arXiv 1705.09056)", "Gossip(Mix(Ring()))"),
    "choco": TaskMethod(
        "CHOCO with signs, step size tuned to 0.8 (arXiv 1902.00340)",
        "Gossip(Choco(Ring(), SignNorm(), step_size=0.8))",
    ),
    "choco-topk": TaskMethod(
        "CHOCO with the top 1 %, step size tuned to 0.01 (arXiv 1902.00340)",
        "Gossip(Choco(Ring(), TopK(0.01), step_size=0.01))",
        "Gossip(Choco(Ring(), TopK(0.01)))",
    ),
    "deepsqueeze": TaskMethod(
        "DeepSqueeze with signs, step size by default (arXiv 1907.07346)", "Gossip(DeepSqueeze(Ring(), SignNorm()))"
    ),
}

GPT_METHODS = {
    "dense": TaskMethod("all-reduce of gradients"),
    "powersgd": TaskMethod("PowerSGD of rank 4 with error feedback (arXiv 1905.13727)", "Gradients(PowerSGD(rank=4))"),
    "sgp": TaskMethod("Stochastic Gradient Push (arXiv 1811.10792)", "Gossip(PushSum(Exponential()))"),
    "ddp": TaskMethod("data-parallel AdamW, what the methods for the internet are compared with"),
    "diloco": TaskMethod("DiLoCo: every 30 steps (arXiv 2311.08105)", "diloco(every=30)", "diloco(every=10)"),
    "streaming-diloco": TaskMethod(
        "Streaming DiLoCo: 4 fragments, 4 bits, a delay of 5 steps (arXiv 2501.18512)",
        "streaming_diloco(every=30)",
        "streaming_diloco(every=10, fragments=2, delay=2)",
    ),
    "asynchronous-diloco": TaskMethod(
        "Asynchronous DiLoCo: workers of unequal speed, 4 bits, every 30 steps of the fastest (arXiv 2401.09135)",
        "asynchronous_diloco(every=30, bits=4)",
        "asynchronous_diloco(every=10, bits=4)",
    ),
    "sparseloco": _SPARSE_LOCO,
    "demo": TaskMethod(
        "DeMo: 32 frequencies of each tile, every step (arXiv 2411.19870)",
        "demo()",
        changes=_descent(1e-3, rate_in_loss=True),
        small_changes=_descent(3e-3, rate_in_loss=True),
    ),
    "dion": TaskMethod(
        "Dion of rank 64, every step (arXiv 2504.05295)",
        "dion(64)",
        "dion(16)",
        changes=_descent(0.02),
        small_changes=_descent(0.05),
    ),
    "noloco": TaskMethod("NoLoCo: random pairs, every 30 steps (arXiv 2506.10911)", "no_loco(30)", "no_loco(10)"),
    "muloco": TaskMethod(
        "MuLoCo: Muon inside, 2 bits, every 30 steps (arXiv 2505.23725)",
        "mulo_co(30)",
        "mulo_co(10)",
        changes={"optimizer": _MUON},
        small_changes={"optimizer": _MUON},
    ),
}

WIKITEXT2_GPT_METHODS = {"dense": TaskMethod("all-reduce of gradients"), "sparseloco": _SPARSE_LOCO}

TASKS = (
    Task("LSTM on WikiText-2 on 16 workers, as in PowerGossip (arXiv 2008.01425)",
         WIKITEXT2, WIKITEXT2_METHODS, WIKITEXT2_SMALL),
    Task("Small GPT (Radford et al. 2019) on your own text, gradients as in PowerSGD (arXiv 1905.13727)",
         GPT_TEXT, GPT_METHODS, GPT_SMALL),
    Task("Small GPT on WikiText-2, as in SparseLoCo (arXiv 2508.15706)",
         WIKITEXT2_GPT, WIKITEXT2_GPT_METHODS, WIKITEXT2_GPT_SMALL),
)  # fmt: skip
