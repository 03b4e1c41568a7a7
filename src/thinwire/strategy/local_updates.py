"""The strategy for parameter changes: workers train alone for H steps, and then average what they changed.

Every worker keeps an *anchor*, its parameters as the last round left them, in float32. After H steps of the optimizer a
round follows, inside the step's hook:

    1. measure    the pseudo-gradient g_i = anchor - parameters, the changes since the last round
    2. average    g_i becomes the mean of all workers, with the averager's codec and memory
    3. step       the outer optimizer applies it to the anchor; by default anchor <- anchor - g, which is plain averaging
    4. restart    parameters <- anchor

With a gossip averager there is no mean that all know: 2. is left out, each worker's outer optimizer applies its own
pseudo-gradient, and between 3. and 4. the anchors gossip one round. Where the outer optimizer is linear (SGD, with momentum
or without), the mean of the anchors over workers follows the same equation either way.

Push-sum. The anchor is the biased x, and the parameters restart from z = x/w. Changes of z are applied to x unweighted,
so that the mean of x moves by the mean of all changes whatever the weights are.

What is not finite. A round is a transaction. If a change is infinite or NaN on any worker, the mean is so on all of them:
all go back to the anchor, and neither memory nor the outer optimizer notices. Under gossip a worker gives up its own changes
alone, and gossips its anchor. Either way it warns, for an optimizer whose own state is not finite repeats it for ever.

Buffers (running statistics) are equal at the start, then local; `synchronize` averages those of floating point.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..algorithm import require
from ..average.base import Averager, NamedTensors
from ..average.gossip_base import Gossip
from ..comm import Communicator, Ledger, ProcessGroupCommunicator
from .dgc_sgd import check_optimizer
from .models import make_equal

OuterOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class LocalUpdates:
    """What `local_updates` returns: the rounds of one model."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        averager: Averager,
        every: int,
        outer: OuterOptimizer,
        comm: Communicator | None,
        seed: int,
    ):
        self._owns_comm = comm is None
        comm = ProcessGroupCommunicator() if comm is None else comm
        self._parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        require(bool(self._parameters), "the model has no parameter that requires a gradient; there is nothing to average")
        self._model, self._averager, self._every, self._comm = model, averager, every, comm
        make_equal(model, comm)
        self._anchors = [(name, _anchor(p)) for name, p in self._parameters]
        self._outer = outer([anchor for _, anchor in self._anchors])
        if averager.has_momentum:
            check_optimizer(self._outer, [anchor for _, anchor in self._anchors])
        comm.check_agreement({"every": every, "outer optimizer": repr(self._outer)})
        self._state = averager.init(self._anchors, comm, seed)
        self._step = 0
        self._hook = optimizer.register_step_post_hook(self._after_step)

    @property
    def ledger(self) -> Ledger:
        """Every byte that this worker sent and received, with the dense sizes beside them."""
        return self._comm.ledger

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds so far by phase: measure and outer, and those of the averager."""
        return dict(self._state.clock.seconds)

    def set_epoch(self, epoch: int) -> None:
        """Tell schedules that count epochs which one begins. All workers call it.

        Raises:
            ValueError: on all workers together, if they name different epochs.
        """
        require(isinstance(epoch, int) and epoch >= 0, f"epoch must be an integer, 0 or more, got {epoch!r}")
        self._comm.check_agreement({"epoch": epoch})
        self._averager.set_epoch(self._state, epoch)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Leave the same parameters, and floating-point buffers, on all workers. All of them call it, such as at the end.

        Steps since the last round, fewer than H, are averaged in a round of their own. Under gossip the exact mean of the
        anchors follows, dense: 2 (W-1)/W 4n bytes per worker. The next round is H steps from here.
        """
        if self._step:
            self._round()
        if isinstance(self._averager, Gossip):
            self._average_exactly([anchor for _, anchor in self._anchors])
            # All estimates x/w become the mean, and the sum of x stays, for the weights w sum to W.
            for _, anchor in self._anchors:
                anchor.div_(self._averager.debias_factor(self._state))
            self._restart()
        self._average_exactly([b for b in self._model.buffers() if b.is_floating_point()])

    def state_dict(self) -> dict[str, Any]:
        """This worker's state (anchor, outer optimizer, averager, steps since the last round), keyed by parameter name.

        Workers differ, so each saves its own, beside its own model and optimizer; training then resumes bit for bit.
        """
        return {
            "step": self._step,
            "anchor": {name: anchor.detach().clone() for name, anchor in self._anchors},
            "outer": _rename(copy.deepcopy(self._outer.state_dict()), dict(enumerate(self._outer_names()))),
            "averager": self._state.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, for the same model, averager and outer optimizer."""
        anchors = dict(self._anchors)
        differing = sorted(anchors.keys() ^ saved["anchor"].keys())
        require(not differing, f"saved anchor does not fit this model: {differing[:5]} stand on one side only")
        for name, anchor in self._anchors:
            anchor.data.copy_(saved["anchor"][name])
        indices = {name: i for i, name in enumerate(self._outer_names())}
        self._outer.load_state_dict(_rename(copy.deepcopy(saved["outer"]), indices))
        self._state.load_state_dict(saved["averager"])
        self._step = saved["step"]

    def detach(self) -> None:
        """Stop averaging; the model stays as it is, and its parameters stay local from now on."""
        self._hook.remove()
        if self._owns_comm:
            self._comm.close()

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._step += 1
        if self._step == self._every:
            self._round()

    def _round(self) -> None:
        """The four phases in the module's text."""
        self._step = 0
        with self._state.clock("measure"):
            changes = [(name, self._measure(anchor, p)) for (name, anchor), (_, p) in self._pairs()]
        if isinstance(self._averager, Gossip):
            finite = kernels.all_finite([g for _, g in changes])
        else:
            finite = self._average(changes)
        if finite:
            with self._state.clock("outer"):
                self._outer.step()
        else:
            warnings.warn(f"rank {self._comm.rank}: changes were not finite and are given up", RuntimeWarning, stacklevel=2)
        if isinstance(self._averager, Gossip):
            self._average(self._anchors)
        self._restart()

    def _measure(self, anchor: nn.Parameter, p: nn.Parameter) -> Tensor:
        """The pseudo-gradient, into the anchor's `grad`: from the estimate where this period began to where it ended."""
        torch.mul(anchor, self._averager.debias_factor(self._state), out=anchor.grad)
        return anchor.grad.sub_(p)

    def _average(self, tensors: NamedTensors) -> bool:
        self._averager.step(self._state, tensors, self._comm).wait()
        return self._averager.commit(self._state)

    def _average_exactly(self, tensors: list[Tensor]) -> None:
        for tensor, handle in [(t, self._comm.all_reduce(t.detach())) for t in tensors]:
            handle.wait()
            tensor.div_(self._comm.size)

    def _restart(self) -> None:
        factor = self._averager.debias_factor(self._state)
        for (_, anchor), (_, p) in self._pairs():
            p.copy_(anchor * factor)

    def _pairs(self) -> Iterable[tuple[tuple[str, nn.Parameter], tuple[str, nn.Parameter]]]:
        return zip(self._anchors, self._parameters, strict=True)

    def _outer_names(self) -> list[str]:
        """Names of the anchors in the order in which the outer optimizer numbers them."""
        names = {id(anchor): name for name, anchor in self._anchors}
        return [names[id(p)] for group in self._outer.param_groups for p in group["params"]]


def local_updates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averager: Averager,
    every: int,
    outer: OuterOptimizer | None = None,
    *,
    comm: Communicator | None = None,
    seed: int = 0,
) -> LocalUpdates:
    """Let workers train alone, and average their parameter changes every H optimizer steps.

        g = 1/W sum_i (anchor - x_i),    anchor <- outer(anchor, g),    x_i <- anchor          (every H steps)

    With `outer=None`, anchor <- anchor - g: Local SGD, x_i <- 1/W sum_j x_j. With Nesterov SGD as the outer and AdamW as
    the inner optimizer: DiLoCo. With a codec and memory in the averager the changes are sent encoded, and what was lost is
    added to the next round's. With a gossip averager every worker applies its own g_i, then gossips once. One line is
    added to an ordinary loop; rounds run inside `optimizer.step()`. All workers must take equally many steps: one that
    takes fewer, as a loss scaler that skips a step does, leaves the others waiting until their time limit.

    Args:
        model: any module; its parameters and buffers are first made equal to rank 0's. Frozen parameters take no part.
        optimizer: the inner optimizer, over the model's parameters; its state stays local.
        averager: such as `Mean()`, `Mean(TopK(0.01), ErrorFeedback())`, `PowerSGD()`, `Mix(Ring())`.
        every: H, steps of the optimizer between rounds; higher => fewer messages, workers drift further apart. A rest at
            the end that is shorter stays local until `synchronize`.
        outer: makes an optimizer over given parameters, the anchors; see above. It should not read the parameters' scale
            (weight decay) under push-sum, where anchors are biased.
        comm: how to communicate; by default a process group of its own over all workers.
        seed: seed of the codec's random numbers; the same on all workers.

    Returns:
        A handle with `ledger`, `seconds`, `synchronize`, `set_epoch`, `state_dict`, `load_state_dict` and `detach`.

    Raises:
        ValueError: `every` below 1, an averager without rounds, momentum in both averager and outer optimizer; on all
            workers together, where `every`, the outer optimizers, the averagers or the tensors differ between them.

    Source: Stich 2018, Local SGD, arXiv 1805.09767; Douillard et al. 2023, DiLoCo, arXiv 2311.08105.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     tw.local_updates(model, optimizer, tw.Mean(), every=2, comm=comm)
        ...     start = model.weight.item()
        ...     for _ in range(2):
        ...         model.weight.grad = torch.full((1, 1), float(comm.rank))
        ...         optimizer.step()
        ...     return round(start - model.weight.item(), 5)
        >>> tw.LocalWorld(2).run(worker)
        [1.0, 1.0]
    """
    require(
        isinstance(averager, Averager),
        f"local_updates: averager must be one that has rounds, such as Mean() or Mix(), got {averager!r}",
    )
    require(isinstance(every, int) and every >= 1, f"local_updates: every must be an integer, 1 or more, got {every!r}")
    return LocalUpdates(model, optimizer, averager, every, _plain if outer is None else outer, comm, seed)


def _plain(anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """anchor <- anchor - g: the anchor becomes the mean of the parameters."""
    return torch.optim.SGD(anchors, lr=1.0)


def _anchor(p: nn.Parameter) -> nn.Parameter:
    """A copy in float32 at least, so that small outer steps are not lost; its `grad` is room for the pseudo-gradient."""
    anchor = nn.Parameter(p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True).contiguous())
    anchor.grad = torch.zeros_like(anchor)
    return anchor


def _rename(saved: dict[str, Any], names: dict[Any, Any]) -> dict[str, Any]:
    """An optimizer's state_dict with its parameters called by other names: by name for numbers, or the other way round."""
    unknown = sorted(str(key) for group in saved["param_groups"] for key in group["params"] if key not in names)
    require(not unknown, f"saved outer optimizer does not fit this one: it has {unknown[:5]}")
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[key]: value for key, value in saved["state"].items()}, "param_groups": groups}
