"""The strategy for parameter changes as data: workers train alone for H steps, and then average what they changed.

`rounds.py` has the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...average.base import Averager
from ...comm import Communicator, Group
from ...options import require_integer, require_kind, require_number
from ..strategy import Averaging, Rhythm, Runtime
from ..told import attach_together
from .fragments import Fragments
from .inverse_norm import InverseNorm
from .outer_sgd import OuterSGD
from .quorum import Quorum
from .rounds import LocalUpdates

OuterOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer | LRScheduler]


@dataclass(frozen=True, repr=False)
class Local(Averaging[LocalUpdates]):
    """Workers train alone, and average their parameter changes every H optimizer steps.

        g = 1/W sum_i (anchor - x_i),   anchor <- outer(anchor, g),   x_i <- alpha x_i + (1 - alpha) anchor     (every H steps)

    With `outer=None`, anchor <- anchor - g: Local SGD, x_i <- 1/W sum_j x_j. With Nesterov SGD as the outer and AdamW as
    the inner optimizer: DiLoCo, see `diloco`. With a codec and memory in the averager, the changes are sent encoded, and the
    lost part is added to the next round's. With a gossip averager every worker applies its own g_i, then gossips once.

    Fragments. With P fragments, each is exchanged every H steps at an offset of its own, so that the largest exchange is 1/P of
    the model. With a delay of tau steps, messages fly while the training goes on: a thread encodes, waits and decodes, and the
    result is merged tau steps after the round began (Streaming DiLoCo).

    Rounds run inside `optimizer.step()`. All workers must take equally many steps. Where a loss scaler skips a step on one
    worker, pass it as `scaler`: that worker counts the step too. Otherwise the others wait for it until their time limit.

    Unequal workers. With a `quorum`, workers take as many steps as they are fast and never all wait: a worker sends its change,
    trains on for `delay` steps, and merges the rounds that were committed, each with the changes that had come
    (`asynchronous.py`). A worker that dies is left out of the rounds to come. With equal speeds, K = W and no delay it is the
    same bit for bit. Call `synchronize` on all workers before saving and at the end; buffers of the model stay local.

    Another number of workers that loads a state goes on from the models of the last rounds. The steps since are lost, and rank
    0 warns of it; after `synchronize` on all workers there are none.

    Parameters are looked up in the model at each step, so `p.data = ...` is fine, and counts as a change since the last round:
    load pretrained weights before you attach. Converting, replacing, adding or unfreezing parameters later is an error that
    names the parameter. float64 parameters have a float64 anchor; `Mix` and `PushSum` gossip it in float64, and other averagers
    send its changes as float32. Complex parameters count as pairs of real numbers.

    Bytes per worker and round of a fragment: those of the averager for the fragment's tensors. `ledger.mean_bytes_sent` is the
    mean of all steps, and `ledger.peak_bytes_sent` the most of one round.

    The model's parameters and buffers are first made equal to rank 0's. The inner optimizer's state stays local, but for
    `state_every`. Attached, it has `ledger`, `seconds`, `num_skipped`, `synchronize`, `set_epoch`, `state_dict`,
    `load_state_dict` and `detach`. `state_dict` waits for messages in flight, and saves them unmerged.

    Args:
        averager: such as `Mean()`, `Mean(TopK(0.01), ErrorFeedback())`, `PowerSGD()`, `Mix(Ring())`.
        every: H, steps of the optimizer between rounds; higher => fewer messages, workers drift further apart. A final partial
            period is averaged only by `synchronize`.
        outer: makes an optimizer over given parameters, the anchors: `OuterSGD()`. In Python also any `torch.optim` factory, or
            a function that makes a scheduler of `torch.optim.lr_scheduler` with its optimizer, which steps every H steps; these
            have no notation. None is plain averaging. Under push-sum, where anchors are biased, it should not depend on the
            parameters' scale (weight decay).
        fragments: P, layer i belongs to fragment `i mod P`; or for each fragment a pattern of parameter names, or several.
        delay: tau, steps between the begin of a round and its merging, below H; higher => slower networks are hidden, changes
            come later. The messages of a fragment should need less time than tau steps.
        alpha: the share of the worker's own parameters in the merged ones, in [0, 1). With a delay, 0 drops the worker's own
            changes of the last tau steps; the published value is 0.5 for a delay of 5 of 100 steps.
        weights: `InverseNorm()` weighs changes by their norms and drops outliers (EDiT); None gives all the same weight.
        pull: gamma, with `Mix` only: workers mix both changes and anchors with their neighbours', and apply
            `mixed g + gamma (anchor - mixed anchor)`, so that anchors are pulled together and never replaced (NoLoCo).
        state_every: names of states of the inner optimizer, and after how many steps they are averaged over workers, dense,
            such as `{"exp_avg": 60, "exp_avg_sq": 120}` (DES-LOC). That costs 2 (W-1)/W 4n bytes each time. The state of a
            parameter that a worker has not made yet, such as after a skipped first step, stays each worker's own that time.
        quorum: `Quorum(workers=K)` makes rounds asynchronous; None waits for all workers in each. It goes with averagers that
            are `Mean` of constant codecs, and with a fixed number of workers, which may die but not join.
        on_nonfinite: what a worker does if its own gradient is infinite or NaN in an inner step: "skip" that step, "raise" an
            error, or "apply" it, which loses the changes of the whole period.
        max_nonfinite: with "skip", how many such steps in a row are an error.

    Raises:
        ValueError: a value out of range, an averager without rounds, or options that exclude each other.

    Source: Stich 2018, Local SGD, arXiv 1805.09767; Douillard et al. 2023, DiLoCo, arXiv 2311.08105; Douillard et al. 2025,
        Streaming DiLoCo, arXiv 2501.18512; Cheng et al. 2024, EDiT, arXiv 2412.07210; Kolehmainen et al. 2025, NoLoCo,
        arXiv 2506.10911; Iacob et al. 2025, DES-LOC, arXiv 2505.22549; Liu et al. 2024, Asynchronous Local-SGD,
        arXiv 2401.09135.

    Example:
        >>> import torch, thinwire as tw
        >>> strategy = tw.Local(tw.Mean(), every=2)
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     tw.attach(model, optimizer, strategy, comm=comm)
        ...     start = model.weight.item()
        ...     for _ in range(2):
        ...         model.weight.grad = torch.full((1, 1), float(comm.rank))
        ...         optimizer.step()
        ...     return round(start - model.weight.item(), 5)
        >>> tw.LocalWorld(2).run(worker)
        [1.0, 1.0]
    """

    sends_again: ClassVar[bool] = True
    """Changes are sent again, to those that are left."""

    averager: Averager
    every: int
    outer: OuterSGD | OuterOptimizer | None = None
    _: KW_ONLY
    fragments: Fragments = 1
    delay: int = 0
    alpha: float = 0.0
    weights: InverseNorm | None = None
    pull: float | None = None
    state_every: Mapping[str, int] = field(default_factory=dict, hash=False)  # a dict has no hash
    quorum: Quorum | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_rounds()
        require_integer("Local: every", self.every, 1)
        self._require(
            self.outer is None or callable(self.outer),
            f"outer must be an outer optimizer such as OuterSGD(lr=0.7), got {self.outer!r}",
        )
        if isinstance(self.fragments, int):
            require_integer("Local: fragments", self.fragments, 1)
        else:  # lists of patterns are equal to tuples of them, and have a hash
            require_kind("Local: fragments", self.fragments, (list, tuple), "a number, or lists of patterns")
            patterns = tuple(some if isinstance(some, str) else tuple(some) for some in self.fragments)
            self._require(
                len(patterns) > 0 and all(some and all(isinstance(one, str) for one in some) for some in patterns),
                f"each of fragments must be a pattern of parameter names, or several, got {patterns}",
            )
            object.__setattr__(self, "fragments", patterns)
        require_integer("Local: delay", self.delay, 0)
        self._require(
            self.delay < self.every,
            f"delay must be below every={self.every}, so that a round is merged before the next one of its fragment, got "
            f"{self.delay}",
        )
        require_number("Local: alpha", self.alpha, least=0, below=1)
        require_kind("Local: weights", self.weights, InverseNorm, "InverseNorm()", or_none=True)
        self._require(
            self.weights is None or self.averager.traits.gives_one_mean,
            f"weights are for averagers with one mean, such as Mean(), got {self.averager!r}",
        )
        require_number("Local: pull", self.pull, least=0, or_none=True)
        self._require(
            self.pull is None or self.averager.traits.mixes_plainly,
            f"pull mixes changes and anchors with those of neighbours, as Mix does, and {self.averager!r} does not; use "
            "Mix(RandomPairs()), or leave pull out",
        )
        require_kind("Local: state_every", self.state_every, Mapping, "periods by name, such as {'exp_avg': 60}")
        for key, period in self.state_every.items():
            require_integer(f"Local: state_every[{key!r}]", period, 1)
        self._check_quorum()

    def _check_quorum(self) -> None:
        require_kind("Local: quorum", self.quorum, Quorum, "Quorum(...)", or_none=True)
        if self.quorum is None:
            return
        self._require(
            self.averager.traits.lone_messages is not None,
            "with a quorum each worker makes its message without the others, so the averager must be Mean with a constant "
            f"codec whose workers agree on nothing, by an all-gather and without rule, clip, momentum or signs of the mean; "
            f"got {self.averager!r}",
        )
        excluded = {"alpha": self.alpha, "weights": self.weights, "state_every": self.state_every}
        named = [name for name, value in excluded.items() if value]
        self._require(
            not named,
            f"with a quorum, changes weigh by their tokens and workers keep what they change meanwhile; leave out "
            f"{', '.join(named)}",
        )
        if self.outer is not None:
            self.quorum.stale.outer(self.outer, 1)  # raises if the rule does not suit this optimizer

    @property
    def rhythm(self) -> Rhythm:
        """A round of each fragment every H steps; with `pull` it averages anchors too."""
        parts = self.fragments if isinstance(self.fragments, int) else len(self.fragments)
        return Rhythm(self.every, parts, self.delay, copies=1 if self.pull is None else 2)

    @property
    def counts_commits(self) -> bool:
        """With a quorum."""
        return self.quorum is not None

    def options(self) -> dict[str, Any]:
        """All fields but `outer`: workers compare the optimizers that it makes."""
        return {name: value for name, value in super().options().items() if name != "outer"}

    def _attached(self, model: nn.Module, optimizer: Optimizer | None, runtime: Runtime) -> LocalUpdates:
        return attach_together(model, runtime, lambda: LocalUpdates(self, model, optimizer, runtime))


def local_updates(
    model: nn.Module,
    optimizer: Optimizer,
    averager: Averager,
    every: int,
    outer: OuterOptimizer | None = None,
    *,
    comm: Communicator | None = None,
    replicas: Group | None = None,
    scaler: Any = None,
    seed: int = 0,
    **options: Any,
) -> LocalUpdates:
    """Attach `Local(averager, every, outer, **options)` to a model and its inner optimizer. See `attach` for the arguments.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     with tw.local_updates(model, optimizer, tw.Mean(), every=4, comm=comm, delay=1) as handle:
        ...         return handle.strategy
        >>> tw.LocalWorld(1).run(worker)
        [Local(Mean(), every=4, delay=1)]
    """
    strategy = Local(averager, every, outer, **options)
    return strategy.attach(model, optimizer, comm=comm, replicas=replicas, scaler=scaler, seed=seed)
