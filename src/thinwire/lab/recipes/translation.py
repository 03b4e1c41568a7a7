"""Translation from English to German: the Transformer on WMT'16 and on Multi30k.

SGP (Assran et al. 2019, arXiv 1811.10792) trained the base model of Vaswani et al. 2017 (arXiv 1706.03762) on WMT'16:
batches of 25,000 tokens over all workers, 100,000 steps of Adam with betas 0.9 and 0.98, a learning rate that rises for
4000 steps to `(512 * 4000)^-0.5` and then falls with the root of the step, dropout and label smoothing of 0.1.

Multi30k (Elliott et al. 2016, arXiv 1605.00459) has 29,000 short pairs, for which the base model is too large: three
layers of 256 learn to translate them in a few epochs, and the small recipe in minutes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..train import RunConfig
from ..train.data import ParallelText
from ..train.loss import CrossEntropy
from ..train.models import Transformer
from ..train.optimize import Adam, LearningRateSchedule
from .base import Task, TaskMethod

WMT16 = RunConfig(
    "wmt16-transformer",
    workers=8,
    epochs=30,
    max_steps=100_000,
    batch_size=1,
    data=ParallelText(Path("data/wmt16"), test="newstest2014", vocabulary_size=37_000, max_tokens=3125),
    model=Transformer(),
    loss=CrossEntropy(label_smoothing=0.1),
    optimizer=Adam((512 * 4000) ** -0.5, schedule=LearningRateSchedule(warmup_steps=4000, shape="inverse_sqrt")),
    checkpoint_every=1000,
    test_batch_size=64,
    log_every=100,
)

MULTI30K = replace(
    WMT16,
    recipe="multi30k-transformer",
    workers=4,
    epochs=30,
    max_steps=None,
    data=ParallelText(vocabulary_size=8000, max_tokens=1024),
    model=Transformer(layers=3, width=256, heads=4, hidden=1024, dropout=0.2),
    optimizer=Adam(1e-3, schedule=LearningRateSchedule(warmup_steps=400, shape="inverse_sqrt")),
    checkpoint_every=None,
    log_every=10,
)

SMALL_ADAM = Adam(1.5e-3, schedule=LearningRateSchedule(warmup_fraction=0.15, shape="linear"))
MULTI30K_SMALL = replace(
    MULTI30K,
    epochs=5,
    data=ParallelText(vocabulary_size=4000, max_tokens=512),
    model=Transformer(layers=3, width=256, heads=4, hidden=512),
    optimizer=SMALL_ADAM,
    precision="bf16",
    evaluate_every=5,
)

# A worker's own gradient comes from a quarter of the batch, so it has up to four times the variance. Adam divides by the
# root of that. With a beta2 of 0.98 Adam remembers about 50 steps. The embedding of a word that is rarer than that moves by
# the same length each time it occurs. Averaging with three workers that did not see the word removes three quarters of it.
OWN_ADAM = replace(SMALL_ADAM, learning_rate=3e-3, beta2=0.999)

METHODS = {
    "dense": TaskMethod("all-reduce of gradients"),
    "sgp": TaskMethod(
        "Stochastic Gradient Push: one peer a step, each worker its own Adam",
        "Gossip(PushSum(Exponential(alternating=True)))",
        small_changes={"optimizer": OWN_ADAM},
    ),
    "osgp": TaskMethod(
        "Overlap SGP: the same, and messages fly during the next step",
        "Gossip(PushSum(Exponential(alternating=True)), overlap=True, staleness=1)",
        small_changes={"optimizer": OWN_ADAM},
    ),
}

TASKS = (
    Task("Base Transformer (arXiv 1706.03762) on WMT'16 En-De, as in SGP (arXiv 1811.10792); small: see multi30k",
         WMT16, METHODS),
    Task("Transformer on Multi30k En-De (arXiv 1605.00459), trained as SGP does on WMT'16 (arXiv 1811.10792)",
         MULTI30K, METHODS, MULTI30K_SMALL),
)  # fmt: skip
