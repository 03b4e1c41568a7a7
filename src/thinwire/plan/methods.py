"""The methods that a plan compares, with the state that they keep and what is known of their accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from ..average import Choco, Mean, Mix, PowerGossip, PowerSGD
from ..codec import QSGD, Cast, SignNorm, TopK, chain
from ..memory import ErrorFeedback, MomentumCorrection
from ..strategy import (
    AveragerAttachment,
    Averaging,
    Gossip,
    Gradients,
    Local,
    demo,
    diloco,
    dion,
    mulo_co,
    no_loco,
    sparse_loco,
    streaming_diloco,
)
from ..topology import Ring

DDP, BF16 = "DDP, float32", "DDP, bfloat16"


@dataclass(frozen=True)
class Method:
    """One way to train.

    Args:
        name: short, for tables.
        strategy: what is averaged, when and how.
        accuracy: what was measured of the accuracy, and on what; a short phrase.
        page: the page of the documentation that it is from.
        state_floats: float32 numbers that it keeps for each parameter.
    """

    name: str
    strategy: Averaging[AveragerAttachment]
    accuracy: str
    page: str = "methods.md"
    state_floats: float = 0.0


def methods(workers_per_node: int = 1) -> list[Method]:
    """All methods of a plan; hierarchical ones only where a node has several workers.

    Example:
        >>> [m.name for m in methods()][:3]
        ['DDP, float32', 'DDP, bfloat16', '4 bits, all_gather']
    """
    nodes = workers_per_node > 1
    sparse = chain(TopK(0.01), QSGD(bits=4))
    return [
        Method(DDP, Gradients(Mean(exchange="all_reduce")), "the baseline"),
        Method(BF16, Gradients(Mean(Cast(), exchange="all_reduce")), _DIGITS.format("99.3")),
        *(
            Method(f"4 bits, {exchange}", Gradients(Mean(QSGD(bits=4), exchange=exchange)), accuracy, page)
            for exchange, accuracy, page in (
                ("all_gather", _DIGITS.format("98.9"), "methods.md"),
                ("scatter_reduce", "not measured alone; encodes twice", "algorithms.md"),
                *([("hierarchical", "as all_gather; encodes means of nodes", "algorithms.md")] if nodes else []),
            )
        ),
        *(
            Method(
                f"top-k 1 %, 4 bits, {exchange}",
                Gradients(Mean(sparse, ErrorFeedback(), exchange=exchange)),
                f"{accuracy}; SGD, not Adam",
                page,
                state_floats=2,
            )
            for exchange, accuracy, page in (
                ("all_gather", _DIGITS.format("99.3"), "methods.md"),
                ("sparse_reduce", "98.9 %, all_gather 99.1 % on digits", "benchmarks.md"),
                *([("hierarchical", "as all_gather", "algorithms.md")] if nodes else []),
                *([("hierarchical_sparse", "as sparse_reduce", "algorithms.md")] if nodes else []),
            )
        ),
        Method(
            "DGC 0.1 %, sparse_reduce",
            Gradients(Mean(TopK(0.001), MomentumCorrection(), exchange="sparse_reduce")),
            "as dense in the paper, after a warm-up; SGD",
            state_floats=4,
        ),
        Method("PowerSGD, rank 4", Gradients(PowerSGD(rank=4)), _DIGITS.format("99.1"), state_floats=2),
        Method(
            "signs, all_gather",
            Gradients(Mean(SignNorm(), ErrorFeedback(), exchange="all_gather")),
            _DIGITS.format("99.1"),
            state_floats=2,
        ),
        Method(
            "every 4 steps, 4 bits",
            Local(Mean(QSGD(bits=4), exchange="scatter_reduce"), every=4),
            "perplexity 5 % above dense, small GPT, AdamW",
            "adam.md",
            state_floats=2,
        ),
        *_internet(),
        Method("gossip, Mix", Gossip(Mix(Ring())), _BY_CLASS.format("97.4"), "decentralised.md"),
        Method(
            "gossip, Choco 4 bits",
            Gossip(Choco(Ring(), QSGD(bits=4))),
            _BY_CLASS.format("96.5") + ", step size 0.5",
            "decentralised.md",
            state_floats=2,
        ),
        Method("gossip, PowerGossip", Gossip(PowerGossip(Ring())), _BY_CLASS.format("79.1"), "decentralised.md"),
    ]


def _internet() -> list[Method]:
    """The methods for the internet, as their recipes have them for a small GPT; a sparse memory suits any optimizer inside."""
    local = (  # they keep anchor, changes and outer momentum, and what a memory holds
        ("DiLoCo, every 30", diloco(every=30), "+19 %", 3),
        ("Streaming DiLoCo, every 30", streaming_diloco(every=30), "+8 %", 3),
        ("SparseLoCo, every 15", sparse_loco(), "+7 %", 4),
        ("NoLoCo, every 30", no_loco(every=30), "+7 %", 4),
        ("MuLoCo, every 30", mulo_co(every=30), "+8 %", 5),
    )
    return [
        *(
            Method(name, strategy, _INTERNET.format(loss), "internet.md", floats)
            for name, strategy, loss, floats in local
        ),
        Method("DeMo, 32 of 4096", demo(), _GPT.format("+11 %"), "internet.md", state_floats=2),
        Method("Dion, rank 64", dion(64), _GPT.format("-2 %"), "internet.md", state_floats=1),
    ]


_GPT = "loss {} to DDP, tiny GPT"
_INTERNET = _GPT + ", rounds of 10 steps"
_DIGITS = "{} %, dense 99.1 % on digits"
_BY_CLASS = "{} %, dense 98.7 % on digits split by class"
