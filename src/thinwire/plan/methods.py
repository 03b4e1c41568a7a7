"""The methods that a plan compares, with the state that they keep and what is known of their accuracy."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
class Measured:
    """What was measured of a method's accuracy, in the largest study that there is.

    Args:
        optimizer: "sgd", "adam" or "muon".
        text: the result beside that of dense training, and on what; a short phrase.
        page: the page of the documentation that it is from.
        is_near: whether it is within 2 % of dense training.
    """

    optimizer: str
    text: str
    page: str = "methods.md"
    is_near: bool = False


OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "muon": "Muon"}


@dataclass(frozen=True)
class Method:
    """One way to train.

    Args:
        name: short, for tables.
        strategy: what is averaged, when and how.
        measured: what is known of its accuracy, by optimizer; the first is shown where no optimizer is named.
        state_floats: float32 numbers that it keeps for each parameter; None if nobody has counted them.
    """

    name: str
    strategy: Averaging[AveragerAttachment]
    measured: tuple[Measured, ...] = ()
    state_floats: float | None = 0.0

    def under(self, optimizer: str | None) -> Measured:
        """What was measured with an optimizer, or with any if None; then it says which, where another one is not near dense."""
        known = [m for m in self.measured if optimizer is None or m.optimizer in (optimizer, "any")]
        if not known:
            others = sorted({m.optimizer for m in self.measured})
            where = f" under {optimizer}, only under {' and '.join(others)}" if others else ""
            return Measured(optimizer or "any", f"not measured{where}")
        first, adam = known[0], [m for m in self.measured if m.optimizer == "adam"]
        if optimizer is None and first.is_near and not any(m.is_near for m in adam):
            but = ", not Adam" * bool(adam)
            return replace(first, text=f"{first.text}; {OPTIMIZERS[first.optimizer]}{but}")
        return first


def methods(workers_per_node: int = 1) -> list[Method]:
    """All methods of a plan; hierarchical ones only where a node has several workers.

    Example:
        >>> [m.name for m in methods()][:3]
        ['DDP, float32', 'DDP, bfloat16', '4 bits, all_gather']
    """
    nodes = workers_per_node > 1
    sparse = chain(TopK(0.01), QSGD(bits=4))
    four_bits = (
        _digits("98.9"),
        Measured("adam", "perplexity 0.6 % below dense, GPT of 0.44 M", "adam.md", True),
        Measured("muon", "loss +4 % to dense, GPT of 0.12 M", "first-lines.md"),
    )
    bad_under_adam = Measured("adam", "perplexity 2.4 times that of dense, GPT of 0.44 M", "adam.md")
    as_all_gather = Measured("sgd", "as all_gather", "algorithms.md", True)
    return [
        Method(DDP, Gradients(Mean(exchange="all_reduce")), _with("the baseline", *OPTIMIZERS)),
        Method(BF16, Gradients(Mean(Cast(), exchange="all_reduce")), (_digits("99.3"),)),
        *(
            Method(f"4 bits, {exchange}", Gradients(Mean(QSGD(bits=4), exchange=exchange)), measured)
            for exchange, measured in (
                ("all_gather", four_bits),
                ("scatter_reduce", (Measured("any", "not measured alone; encodes twice", "algorithms.md"),)),
                *([("hierarchical", _with("as all_gather; encodes means of nodes", "sgd", "adam"))] if nodes else []),
            )
        ),
        Method(
            "8 bits, scatter_reduce",
            Gradients(Mean(QSGD(bits=8), exchange="scatter_reduce")),
            (Measured("muon", "loss +0.2 % to dense, GPT of 0.12 M", "first-lines.md", True),),
        ),
        *(
            Method(
                f"top-k 1 %, 4 bits, {exchange}",
                Gradients(Mean(sparse, ErrorFeedback(), exchange=exchange)),
                (measured, bad_under_adam),
                state_floats=2,  # the memory, committed and pending
            )
            for exchange, measured in (
                ("all_gather", _digits("99.3")),
                ("sparse_reduce", Measured("sgd", "98.9 %, all_gather 99.1 % on digits", "benchmarks.md", True)),
                *([("hierarchical", as_all_gather)] if nodes else []),
                *([("hierarchical_sparse", replace(as_all_gather, text="as sparse_reduce"))] if nodes else []),
            )
        ),
        Method(
            "DGC 0.1 %, sparse_reduce",
            Gradients(Mean(TopK(0.001), MomentumCorrection(), exchange="sparse_reduce")),
            (Measured("sgd", "98.3 %, dense 99.1 % on digits, after a warm-up", is_near=True),),
            state_floats=4,  # momentum and velocity, committed and pending
        ),
        Method(
            "PowerSGD, rank 4",
            Gradients(PowerSGD(rank=4)),
            (_digits("99.1"), Measured("adam", "perplexity 38 % above dense, GPT of 0.44 M", "adam.md")),
            state_floats=2,
        ),
        Method(
            "signs, all_gather",
            Gradients(Mean(SignNorm(), ErrorFeedback(), exchange="all_gather")),
            (_digits("99.1"),),
            state_floats=2,
        ),
        Method(
            "every 4 steps, 4 bits",
            Local(Mean(QSGD(bits=4), exchange="scatter_reduce"), every=4),
            (
                Measured("adam", "perplexity 5 % above dense, GPT of 0.44 M", "adam.md"),
                Measured("sgd", "perplexity 10 % above dense, GPT of 0.44 M", "adam.md"),
            ),
            state_floats=2,
        ),
        *_internet(),
        Method("gossip, Mix", Gossip(Mix(Ring())), (_by_class("97.4"),)),
        Method(
            "gossip, Choco 4 bits",
            Gossip(Choco(Ring(), QSGD(bits=4))),
            (_by_class("96.5", ", step 0.5"),),
            state_floats=3,  # the copy in float32 and the gap in float64
        ),
        Method("gossip, PowerGossip", Gossip(PowerGossip(Ring())), (_by_class("79.1"),)),
    ]


def _internet() -> list[Method]:
    """The methods for the internet, as their recipes have them for a small GPT; a sparse memory suits any optimizer inside."""
    earlier, present = "GPT of 5.4 M, rounds of 10 steps", "GPT of 0.44 M, rounds of 20 steps"
    local = (  # they keep anchor, changes and outer momentum, and what a memory holds
        ("DiLoCo, every 30", diloco(every=30), "adam", 12, earlier, 3),
        ("Streaming DiLoCo, every 30", streaming_diloco(every=30), "adam", 14.1, present, 3),
        ("SparseLoCo, every 15", sparse_loco(), "adam", 16.8, present, 4),
        ("NoLoCo, every 30", no_loco(every=30), "adam", 9, earlier, 4),
        ("MuLoCo, every 30", mulo_co(every=30), "muon", 1.3, present, 5),
    )
    return [
        *(
            Method(
                name,
                strategy,
                (Measured(optimizer, f"loss +{percent} % to DDP, {study}", "internet.md", percent <= 2),),
                floats,
            )
            for name, strategy, optimizer, percent, study, floats in local
        ),
        Method("DeMo, 32 of 4096", demo(), (Measured("sgd", "loss +3.0 % to DDP, GPT of 0.44 M", "internet.md"),), 2),
        Method("Dion, rank 64", dion(64), (Measured("sgd", "loss +18 % to DDP, GPT of 5.4 M", "internet.md"),), 1),
    ]


def _with(text: str, *optimizers: str) -> tuple[Measured, ...]:
    return tuple(Measured(optimizer, text, "algorithms.md", True) for optimizer in optimizers)


def _digits(percent: str) -> Measured:
    return Measured("sgd", f"{percent} %, dense 99.1 % on digits", is_near=True)


def _by_class(percent: str, more: str = "") -> Measured:
    return Measured("sgd", f"{percent} %, dense 98.7 % on digits by class{more}", "decentralised.md")
