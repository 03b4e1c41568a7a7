"""PowerGossip on a ring and the methods that the paper compares it with, for data split at random and by class."""

from __future__ import annotations

from dataclasses import replace

from ..train import RunConfig
from .base import TaskMethod

SOURCE = "Vogels et al. 2020, PowerGossip, arXiv 2008.01425"
BASE_RATE = 0.1
"""Of all workers together, at which warm-up starts, whatever the tuned rate is."""
_FASTEST = "step_size=1.308"  # the fastest without compression on a ring of 8; the authors' scripts set it

_METHODS = {
    "powergossip-dense": ("gradients, averaged over all workers", "Gradients(Mean())"),
    "dpsgd": ("D-PSGD: models, averaged with those of both neighbours", f"Gossip(Mix(Ring(), {_FASTEST}))"),
    "powergossip": ("differences along edges, rank 1", f"Gossip(PowerGossip(Ring(), {_FASTEST}))"),
    "powergossip-2it": ("likewise, two iterations a step", f"Gossip(PowerGossip(Ring(), iterations=2, {_FASTEST}))"),
    "powergossip-random": ("likewise, p is random", f"Gossip(PowerGossip(Ring(), warm_start=False, {_FASTEST}))"),
    "powergossip-2it-random": (
        "likewise, two iterations a step, p is random",
        f"Gossip(PowerGossip(Ring(), iterations=2, warm_start=False, {_FASTEST}))",
    ),
    "choco": ("CHOCO, signs of differences, tuned", "Gossip(Choco(Ring(), SignNorm(), step_size=0.45))"),
    "choco-topk": ("CHOCO, top 1 % of differences, tuned", "Gossip(Choco(Ring(), TopK(0.01), step_size=0.0375))"),
    "deepsqueeze": ("DeepSqueeze, signs of models, tuned", "Gossip(DeepSqueeze(Ring(), SignNorm(), step_size=0.01))"),
    "moniqua": (
        "Moniqua, 2 bits modulo a bound, tuned",
        "Gossip(Moniqua(Ring(), theta=0.25, bits=2, step_size=0.005))",
    ),
}
"""End of the name -> what is sent, and the strategy."""
_TOTAL_RATES = {"choco": 1.6, "deepsqueeze": 0.48, "moniqua": 0.4}
"""Learning rates of all workers together, where the paper tuned another than the task's."""


def methods(full: RunConfig) -> dict[str, TaskMethod]:
    """All methods, for data split evenly and by class, with the tuned learning rates of the paper."""
    made = {}
    for end, (how, fields) in {"": ("", {}), "-by-class": (", data split by class", {"split": "by-class"})}.items():
        for name, (about, strategy) in _METHODS.items():
            # The schedule multiplies a worker's rate by the number of workers.
            rate = _TOTAL_RATES[name] / full.workers if name in _TOTAL_RATES else full.optimizer.learning_rate
            schedule = replace(full.optimizer.schedule, warmup_start=BASE_RATE / (rate * full.workers))
            changes = fields | {"optimizer": replace(full.optimizer, learning_rate=rate, schedule=schedule)}
            made[name + end] = TaskMethod(about + how, strategy, changes=changes, small_changes=fields)
    return made
