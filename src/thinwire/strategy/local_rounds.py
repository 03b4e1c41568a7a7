"""The rounds of `local_updates`: workers train alone for H steps, and then average what they changed.

Every worker keeps an *anchor*: its parameters after the last round, in float32 (float64 for float64 parameters). After H
steps of the optimizer a round follows, inside the step's hook:

    1. measure    the pseudo-gradient g_i = anchor - parameters, the changes since the last round
    2. average    g_i becomes the mean of all workers, with the averager's codec and memory
    3. step       the outer optimizer applies it to the anchor; by default anchor <- anchor - g, which is plain averaging
    4. restart    parameters <- anchor

A gossip averager has no mean that all workers know. Step 2 is left out: each worker's outer optimizer applies its own
pseudo-gradient, and the anchors gossip one round between steps 3 and 4. Where the outer optimizer is linear (SGD, with or
without momentum), the mean of the anchors over workers follows the same equation either way.

Push-sum. The anchor is the biased x, and the parameters restart from z = x/w. Changes of z are applied to x unweighted, so
the mean of x moves by the mean of all changes, whatever the weights are.

Steps that are not finite. By default an inner step with an infinite or NaN gradient is skipped on its worker
(`own_gradients.py`). A round is a transaction besides. If a change is infinite or NaN on any worker, the mean is so on all
of them: all go back to the anchor, and memory and outer optimizer keep their state. Under gossip only that worker gives up its
changes, and gossips its anchor. Either way it warns.

Buffers (running statistics) are equal at the start, then local; `synchronize` averages those of floating point.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..algorithm import require
from ..average.base import Averager, NamedTensors
from ..comm import Communicator
from .base import Strategy
from .dgc_sgd import check_optimizer
from .live_parameters import LiveParameters
from .models import as_real, make_equal, refuse_ddp, trainable, unexpanded
from .optimizer_step import Arguments, stepping_optimizer
from .own_gradients import OwnGradients

OuterOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class LocalUpdates(Strategy):
    """What `local_updates` returns: the rounds of one model."""

    call = "local_updates"
    averager: Averager

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        averager: Averager,
        every: int,
        outer: OuterOptimizer,
        *,
        comm: Communicator | None,
        on_nonfinite: str,
        max_nonfinite: int,
        seed: int,
    ):
        refuse_ddp(self.call, model)
        super().__init__(model, trainable(model), averager, comm, on_nonfinite, max_nonfinite)
        self._optimizer, self._every, self._step = stepping_optimizer(self.call, optimizer), every, 0
        with self._attaching() as comm:
            names = [name for name, _ in self.parameters]
            make_equal(model, comm, averager=averager, every=every, parameters=names)
            self._live = LiveParameters(self.call, comm.rank, model, self.parameters, self._trained)
            self._own_gradients = OwnGradients(self._nonfinite, comm.rank, model.named_parameters())
            self._anchors = [(name, _anchor(p)) for name, p in self._live.tensors()]
            self._outer = outer([anchor for _, anchor in self._anchors])
            comm.check_agreement({"outer optimizer": repr(self._outer)})
            if averager.has_momentum:
                check_optimizer(self._outer, [anchor for _, anchor in self._anchors])
            self._state = averager.init(self._anchors, comm, seed)
            self._on_detach(self._optimizer.register_step_post_hook(self._after_step).remove)

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds so far by phase: measure and outer, and those of the averager."""
        return super().seconds

    @torch.no_grad()
    def synchronize(self) -> None:
        """Leave the same parameters and floating-point buffers on all workers. All call it, for example at the end.

        A partial period, of fewer than H steps, gets a round of its own. Under gossip the exact mean of the anchors follows,
        dense: 2 (W-1)/W 4n bytes per worker. The next round is H steps later.
        """
        self._live.check()
        if self._step:
            self._round()
        if not self.averager.gives_one_mean:
            _average_exactly([anchor for _, anchor in self._anchors], self.comm)
            # All estimates x/w become the mean. The sum of x stays, because the weights w sum to W.
            for _, anchor in self._anchors:
                anchor.div_(self.averager.debias_factor(self._state))
            self._restart()
        buffers = [as_real(b.detach()) for b in self._model.buffers()]
        _average_exactly([unexpanded(b) for b in buffers if b.is_floating_point()], self.comm)

    # ---- what the base asks for ----

    def _own_state(self) -> dict[str, Any]:
        """Anchor, outer optimizer, averager and steps since the last round; with the model and the inner optimizer, beside
        which each worker saves it, training resumes bit for bit."""
        return {
            "step": self._step,
            "anchor": {name: anchor.detach().clone() for name, anchor in self._anchors},
            "outer": _rename(copy.deepcopy(self._outer.state_dict()), dict(enumerate(self._outer_names()))),
            "averager": self._state.state_dict(),
        }

    def _load_own(self, saved: dict[str, Any]) -> None:
        for name, anchor in self._anchors:
            anchor.data.copy_(saved["anchor"][name])
        indices = {name: i for i, name in enumerate(self._outer_names())}
        self._outer.load_state_dict(_rename(copy.deepcopy(saved["outer"]), indices))
        self._state.load_state_dict(saved["averager"])
        self._step = saved["step"]

    def _ready(self) -> None:
        """Nothing to do: no round outlasts a step."""

    def _finish(self) -> None:
        """Nothing to do: the parameters stay as they are, and local."""

    def _abandon(self, error: BaseException) -> None:
        """Nothing to do."""

    # ---- one step of the inner optimizer ----

    def _before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        self._live.check()
        return self._own_gradients.guard(optimizer, args, kwargs)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._step += 1
        if self._step == self._every:
            self._round()

    # ---- a round, in the four phases of the module's text ----

    def _round(self) -> None:
        self._step = 0
        with self._state.clock("measure"):
            changes = [(name, self._measure(anchor, p)) for (name, anchor), (_, p) in self._pairs()]
        if not self.averager.gives_one_mean:
            finite = kernels.flags.read(kernels.all_finite([g for _, g in changes]))
        else:
            finite = self._average(changes)
        if finite:
            with self._state.clock("outer"):
                self._outer.step()
        else:
            warnings.warn(
                f"rank {self.comm.rank}: changes were not finite and are given up", RuntimeWarning, stacklevel=2
            )
        if not self.averager.gives_one_mean:
            self._average(self._anchors)
        self._restart()

    def _measure(self, anchor: nn.Parameter, p: Tensor) -> Tensor:
        """The pseudo-gradient, in the anchor's `grad`: from the estimate where this period began to where it ended."""
        gradient = anchor.grad
        assert gradient is not None
        torch.mul(anchor, self.averager.debias_factor(self._state), out=gradient)
        return gradient.sub_(p)

    def _average(self, tensors: NamedTensors) -> bool:
        self.averager.step(self._state, tensors, self.comm).wait()
        return self.averager.commit(self._state)

    def _restart(self) -> None:
        factor = self.averager.debias_factor(self._state)
        for (_, anchor), (_, p) in self._pairs():
            p.copy_(anchor * factor)

    def _pairs(self) -> Iterable[tuple[tuple[str, nn.Parameter], tuple[str, Tensor]]]:
        return zip(self._anchors, self._live.tensors(), strict=True)

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def _outer_names(self) -> list[str]:
        """Names of the anchors in the order in which the outer optimizer numbers them."""
        names = {id(anchor): name for name, anchor in self._anchors}
        return [names[id(p)] for group in self._outer.param_groups for p in group["params"]]


def plain(anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer optimizer anchor <- anchor - g: the anchor becomes the mean of the parameters."""
    return torch.optim.SGD(anchors, lr=1.0)


def _anchor(p: Tensor) -> nn.Parameter:
    """A copy in float32 at least, so that small outer steps are not lost; its `grad` has room for the pseudo-gradient."""
    wide = torch.promote_types(p.dtype, torch.float32)
    anchor = nn.Parameter(p.to(wide, copy=True, memory_format=torch.contiguous_format))
    anchor.grad = torch.zeros_like(anchor)
    return anchor


def _average_exactly(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Replace tensors by their mean over all workers, in place, whatever their layout in memory."""
    whole = [t.detach().contiguous() for t in tensors]
    for t, total, handle in [(t, w, comm.all_reduce(w)) for t, w in zip(tensors, whole, strict=True)]:
        handle.wait()
        t.detach().copy_(total.div_(comm.size))


def _rename(saved: dict[str, Any], names: dict[Any, Any]) -> dict[str, Any]:
    """An optimizer's state_dict with other names for its parameters: names for numbers, or numbers for names."""
    unknown = sorted(str(key) for group in saved["param_groups"] for key in group["params"] if key not in names)
    require(not unknown, f"saved outer optimizer does not fit this one: it has {unknown[:5]}")
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[key]: value for key, value in saved["state"].items()}, "param_groups": groups}
