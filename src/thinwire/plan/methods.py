"""The methods that a plan compares, with the state that they keep and what is known of their accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from ..average import (
    Averager,
    Choco,
    LocalParts,
    Mean,
    Mix,
    PowerGossip,
    PowerSGD,
    demo,
    diloco,
    dion,
    mulo_co,
    no_loco,
    sparse_loco,
    streaming_diloco,
)
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
        accuracy: what was measured of the accuracy, and on what; a short phrase.
        page: the page of the documentation that it is from.
        state_floats: float32 numbers that it keeps for each parameter.
        every: steps in a round; above 1 for local updates.
        fragments: parts of the model that are exchanged at different steps.
        delay: steps of computation that hide the exchange of a fragment.
        copies: how many tensors of each parameter's size a round averages.
        overlaps: whether buckets are averaged while backward runs; if not, the round follows the step.
    """

    name: str
    averager: Averager
    accuracy: str
    page: str = "methods.md"
    state_floats: float = 0.0
    every: int = 1
    overlaps: bool = True
    fragments: int = 1
    delay: int = 0
    copies: int = 1


def methods(workers_per_node: int = 1) -> list[Method]:
    """All methods of a plan; hierarchical ones only where a node has several workers.

    Example:
        >>> [m.name for m in methods()][:3]
        ['DDP, float32', 'DDP, bfloat16', '4 bits, all_gather']
    """
    nodes = workers_per_node > 1
    sparse = chain(TopK(0.01), QSGD(bits=4))
    return [
        Method(DDP, Mean(exchange="all_reduce"), "the baseline"),
        Method(BF16, Mean(Cast(), exchange="all_reduce"), _DIGITS.format("99.3")),
        *(
            Method(f"4 bits, {exchange}", Mean(QSGD(bits=4), exchange=exchange), accuracy, page)
            for exchange, accuracy, page in (
                ("all_gather", _DIGITS.format("98.9"), "methods.md"),
                ("scatter_reduce", "not measured alone; encodes twice", "algorithms.md"),
                *([("hierarchical", "as all_gather; encodes means of nodes", "algorithms.md")] if nodes else []),
            )
        ),
        *(
            Method(
                f"top-k 1 %, 4 bits, {exchange}",
                Mean(sparse, ErrorFeedback(), exchange=exchange),
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
            Mean(TopK(0.001), MomentumCorrection(), exchange="sparse_reduce"),
            "as dense in the paper, after a warm-up; SGD",
            state_floats=4,
        ),
        Method("PowerSGD, rank 4", PowerSGD(rank=4), _DIGITS.format("99.1"), state_floats=2),
        Method(
            "signs, all_gather",
            Mean(SignNorm(), ErrorFeedback(), exchange="all_gather"),
            _DIGITS.format("99.1"),
            state_floats=2,
        ),
        Method(
            "every 4 steps, 4 bits",
            Mean(QSGD(bits=4), exchange="scatter_reduce"),
            "perplexity 5 % above dense, small GPT, AdamW",
            "adam.md",
            state_floats=2,
            every=4,
            overlaps=False,
        ),
        *_internet(),
        Method("gossip, Mix", Mix(Ring()), _BY_CLASS.format("97.4"), "decentralised.md", overlaps=False),
        Method(
            "gossip, Choco 4 bits",
            Choco(Ring(), QSGD(bits=4)),
            _BY_CLASS.format("96.5") + ", step size 0.5",
            "decentralised.md",
            state_floats=2,
            overlaps=False,
        ),
        Method(
            "gossip, PowerGossip", PowerGossip(Ring()), _BY_CLASS.format("79.1"), "decentralised.md", overlaps=False
        ),
    ]


def _internet() -> list[Method]:
    """The methods for the internet, as their recipes have them for a small GPT; a sparse memory suits any optimizer inside."""
    return [
        local_method("DiLoCo, every 30", diloco(every=30), _INTERNET.format("+19 %")),
        local_method("Streaming DiLoCo, every 30", streaming_diloco(every=30), _INTERNET.format("+8 %")),
        local_method("SparseLoCo, every 15", sparse_loco(), _INTERNET.format("+7 %"), state_floats=4),
        local_method("NoLoCo, every 30", no_loco(every=30), _INTERNET.format("+7 %"), state_floats=4),
        local_method("MuLoCo, every 30", mulo_co(every=30), _INTERNET.format("+8 %"), state_floats=5),
        Method("DeMo, 32 of 4096", demo(), _GPT.format("+11 %"), "internet.md", state_floats=2),
        Method("Dion, rank 64", dion(64), _GPT.format("-2 %"), "internet.md", state_floats=1),
    ]


def local_method(name: str, parts: LocalParts, accuracy: str = "not measured", state_floats: float = 3) -> Method:
    """The method of local updates that has these parts; by default it keeps anchor, changes and outer momentum.

    Example:
        >>> from thinwire.average import streaming_diloco
        >>> method = local_method("streaming", streaming_diloco(every=40))
        >>> method.every, method.fragments, method.delay
        (40, 4, 5)
    """
    return Method(
        name,
        parts["averager"],
        accuracy,
        "internet.md",
        state_floats=state_floats,
        every=parts["every"],
        overlaps=False,
        fragments=parts.get("fragments", 1),
        delay=parts.get("delay", 0),
        copies=2 if parts.get("pull") is not None else 1,
    )


_GPT = "loss {} to DDP, tiny GPT"
_INTERNET = _GPT + ", rounds of 10 steps"
_DIGITS = "{} %, dense 99.1 % on digits"
_BY_CLASS = "{} %, dense 98.7 % on digits split by class"
