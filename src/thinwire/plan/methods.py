"""The methods that a plan compares, with the state that they keep and what is known of their accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from ..average import Averager, Choco, Mean, Mix, PowerGossip, PowerSGD
from ..codec import QSGD, Cast, SignNorm, TopK, chain
from ..memory import ErrorFeedback, MomentumCorrection
from ..topology import Ring

DDP, BF16 = "DDP, float32", "DDP, bfloat16"


@dataclass(frozen=True)
class Method:
    """One way to train.

    Args:
        name: short, for tables.
        averager: how workers agree.
        accuracy: what is known of the accuracy; a short phrase.
        page: the page of the documentation that says more.
        state_floats: float32 numbers that it keeps for each parameter.
        every: steps in a round; above 1 for local updates.
        overlaps: whether buckets are averaged while backward runs; if not, the round follows the step.
    """

    name: str
    averager: Averager
    accuracy: str
    page: str
    state_floats: float = 0.0
    every: int = 1
    overlaps: bool = True


def methods(workers_per_node: int = 1, every: int = 20) -> list[Method]:
    """All methods of a plan; hierarchical ones only where a node has several workers.

    Example:
        >>> [m.name for m in methods()][:3]
        ['DDP, float32', 'DDP, bfloat16', '4 bits, all_gather']
    """
    exchanges = ["all_gather", "scatter_reduce", *(["hierarchical"] if workers_per_node > 1 else [])]
    sparse_exchanges = [name for name in exchanges if name != "scatter_reduce"]
    twice = {"scatter_reduce": "; encodes the mean again"}
    return [
        Method(DDP, Mean(exchange="all_reduce"), "the baseline", "methods.md"),
        Method(BF16, Mean(Cast(), exchange="all_reduce"), "as dense: 99.3 %, dense 99.1 % on digits", "methods.md"),
        *(
            Method(
                f"4 bits, {exchange}",
                Mean(QSGD(bits=4), exchange=exchange),
                f"98.9 %, dense 99.1 % on digits{twice.get(exchange, '')}",
                "methods.md",
            )
            for exchange in exchanges
        ),
        *(
            Method(
                f"top-k 1 %, 4 bits, {exchange}",
                Mean(chain(TopK(0.01), QSGD(bits=4)), ErrorFeedback(), exchange=exchange),
                "99.3 %, dense 99.1 % on digits; not under Adam",
                "methods.md",
                state_floats=2,
            )
            for exchange in sparse_exchanges
        ),
        Method(
            "DGC 0.1 %",
            Mean(TopK(0.001), MomentumCorrection(), exchange="all_gather"),
            "as dense in the paper, after a warm-up; SGD only",
            "methods.md",
            state_floats=4,
        ),
        Method("PowerSGD, rank 4", PowerSGD(rank=4), "99.1 %, dense 99.1 % on digits", "methods.md", state_floats=2),
        Method(
            "signs, all_gather",
            Mean(SignNorm(), ErrorFeedback(), exchange="all_gather"),
            "within 1 % of dense on digits",
            "methods.md",
            state_floats=2,
        ),
        *(
            Method(
                f"every {every} steps, {name}",
                averager,
                "4.5 % more perplexity at every 4, 4 bits; more at more",
                "language.md",
                state_floats=2,
                every=every,
                overlaps=False,
            )
            for name, averager in (
                ("float32", Mean(exchange="all_reduce")),
                ("4 bits", Mean(QSGD(bits=4), exchange="scatter_reduce")),
            )
        ),
        Method("gossip on a ring, Mix", Mix(Ring()), _GOSSIP.format("97.4"), "decentralised.md", overlaps=False),
        Method(
            "gossip on a ring, Choco 4 bits",
            Choco(Ring(), QSGD(bits=4)),
            _GOSSIP.format("at most 96.5"),
            "decentralised.md",
            state_floats=2,
            overlaps=False,
        ),
        Method(
            "gossip on a ring, PowerGossip",
            PowerGossip(Ring()),
            _GOSSIP.format("at most 96.5"),
            "decentralised.md",
            overlaps=False,
        ),
    ]


_GOSSIP = "{} %, dense 98.7 % on digits split by class"
