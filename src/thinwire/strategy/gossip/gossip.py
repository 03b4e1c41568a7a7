"""The strategy for parameters as data: workers gossip about their models, and each steps on gradients of its own.

`steps.py` has the steps of the training, `rounds.py` the rounds.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...average.base import Averager
from ...codec import Codec
from ...comm import Communicator, Group
from ...options import require_choice, require_integer
from ..strategy import Averaging, Rhythm, Runtime
from ..told import attach_together
from .steps import ParameterGossip

ORDERS = ("combine_then_adapt", "adapt_then_combine")


@dataclass(frozen=True, repr=False)
class Gossip(Averaging[ParameterGossip]):
    """Average the parameters of a model with those of neighbours, one round in every `optimizer.step()`.

    Every worker keeps a model z_i of its own. With g the gradient at z_i,

        combine_then_adapt:   x_i <- sum_j P_ij x_j, then the optimizer's update with g(z_i)         (D-PSGD)
        adapt_then_combine:   the optimizer's update with g(z_i), then x_i <- sum_j P_ij x_j         (SGP, CHOCO-SGD)

    where the averager defines the mixing, and z = x except under push-sum, where z = x / w. The optimizer updates x, and the
    model holds z at all other times. Optimizer states (momentum) stay local.

    Overlap. A round begins at the end of `optimizer.step()`. Its messages travel during the next forward and backward pass,
    and a thread waits for them. Its change is added `staleness` updates later:

        combine_then_adapt:   x(t+1) = x(t) + [mixed - x](t - staleness) + update;  staleness 0 => same bits as no overlap
        adapt_then_combine:   staleness must be 1 or more, because the update comes first

    One round is in flight at a time. So with staleness s there is one round in every s + 1 steps (in every s steps for
    adapt_then_combine).

    Who takes part. The trainable parameters that the optimizer updates. Frozen parameters and those of other optimizers do
    not; another optimizer may have a call of its own, and steps of one without are warned of. Parameters and buffers are first
    made equal to rank 0's. Buffers (running statistics) then stay local; only `average_model()` averages them. Each round looks
    the parameters up in the model, so `p.data = ...` and `vector_to_parameters` are fine. Converting, replacing, adding or
    unfreezing parameters later is an error that names the parameter.

    Precision. `Mix` and `PushSum` average float64 parameters in float64. Averagers with a codec exchange float32 copies of them
    and add the float32 change to the float64 values. `Mean()` refuses them. Complex parameters count as pairs of real numbers.

    Steps. All workers must step equally often. Where a loss scaler skips a step on one worker, pass it as `scaler`: that worker
    takes part in the round without an update. Otherwise it would be one round late, and its neighbours would wait for its last
    round until the communicator's timeout raises a `CommunicationError`.

    Attached, it has `consensus_distance`, `average_model`, `synchronize`, `ledger`, `seconds`, `num_skipped`, `set_epoch`,
    `state_dict`, `load_state_dict` and `detach`.

    Args:
        averager: any gossip averager, such as `Choco(Ring(), TopK(0.01))`; or `Mean()`, uncompressed and without overlap.
        overlap: whether messages travel while the training goes on.
        staleness: updates that a round may miss; higher => slower networks are hidden, rounds are fewer and later.
        order: "combine_then_adapt" or "adapt_then_combine".
        on_nonfinite: what a worker does if its own gradient is infinite or NaN: "skip" its update and still average, "raise" an
            error, or "apply" it, which spreads to all workers.
        max_nonfinite: with "skip", how many such steps in a row are an error.

    Raises:
        ValueError: a value out of range, or options that exclude each other.

    Source: Lian et al. 2017 (D-PSGD), arXiv 1705.09056; Assran et al. 2019 (SGP, Overlap SGP), arXiv 1811.10792.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     with tw.attach(model, optimizer, tw.Gossip(tw.Mix(), order="adapt_then_combine"), comm=comm):
        ...         model(torch.tensor([[float(comm.rank)]])).sum().backward()
        ...         optimizer.step()
        ...     return model.weight.item()
        >>> tw.LocalWorld(2).run(worker)
        [-0.5, -0.5]
    """

    averager: Averager
    _: KW_ONLY
    overlap: bool = False
    staleness: int = 0
    order: str = "combine_then_adapt"

    def __post_init__(self) -> None:
        is_codec = isinstance(self.averager, Codec)
        self._require(not is_codec, f"{self.averager!r} is a codec; write Choco(Ring(), {self.averager!r})")
        super().__post_init__()
        self._require_rounds()
        self._require(
            self.averager.traits.suits_parameters,
            f"{self.averager!r} compresses values themselves, which suits gradients, see Gradients; parameters need a gossip "
            "averager such as Choco(Ring(), TopK(0.01)), or plain Mean()",
        )
        require_choice("Gossip: order", self.order, ORDERS)
        require_integer("Gossip: staleness", self.staleness, 0)
        self._require(
            self.overlap or self.staleness == 0,
            f"staleness={self.staleness} needs overlap=True; otherwise a round is never late",
        )
        self._require(
            not self.overlap or not self.averager.traits.gives_one_mean,
            f"{self.averager!r} replaces parameters, and overlap needs an averager that adds to them, such as "
            "Mix(Complete())",
        )
        self._require(
            not self.overlap or self.combines_first or self.staleness >= 1,
            f"with order={self.order!r} and overlap, staleness must be 1 or more, or else use order={ORDERS[0]!r}",
        )

    @property
    def combines_first(self) -> bool:
        """Whether a step mixes before the optimizer's update."""
        return self.order == ORDERS[0]

    @property
    def rhythm(self) -> Rhythm:
        """A round in every step; with overlap in every few, whose messages fly until the next one begins."""
        if not self.overlap:
            return Rhythm()
        steps = self.staleness + 1 if self.combines_first else self.staleness
        return Rhythm(every=steps, delay=steps)

    def _attached(self, model: nn.Module, optimizer: Optimizer | None, runtime: Runtime) -> ParameterGossip:
        return attach_together(model, runtime, lambda: ParameterGossip(self, model, optimizer, runtime))


def gossip_parameters(
    model: nn.Module,
    optimizer: Optimizer,
    averager: Averager,
    *,
    comm: Communicator | None = None,
    replicas: Group | None = None,
    scaler: Any = None,
    seed: int = 0,
    **options: Any,
) -> ParameterGossip:
    """Attach `Gossip(averager, **options)` to a model and its optimizer. See `attach` for the arguments.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     with tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm, overlap=True) as handle:
        ...         return handle.strategy
        >>> tw.LocalWorld(1).run(worker)
        [Gossip(Mix(), overlap=True)]
    """
    strategy = Gossip(averager, **options)
    return strategy.attach(model, optimizer, comm=comm, replicas=replicas, scaler=scaler, seed=seed)
