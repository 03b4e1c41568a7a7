"""Attacks of wrong workers, for tests of anyone's rule.

An attack says what a wrong worker averages in place of its own gradients. It sees a `Scene`: the gradients of all honest
workers of the round, as an attacker that listens to everybody does. `corrupt` lets the wrong workers of a communicator
attack before `averager.step`; `check_robust` runs every attack on a small convex problem.

Attackers act before the codec and memory, so that what they send is a valid message of the averager under test.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from ..algorithm import Algorithm
from ..average import Averager, Mean
from ..comm import Communicator, LocalWorld

_FEATURES, _CLASSES = 20, 4  # of the problem of `check_robust`


@dataclass(frozen=True)
class Scene:
    """What a wrong worker knows in a round.

    Attributes:
        honest: (H, n) float32, the gradients of the honest workers, in rank order.
        own: n elements, the attacker's own gradient.
        before: its own gradients of earlier rounds, the latest last.
        index: which of the attackers it is, 0 to num_faulty - 1.
        num_faulty: how many attackers there are, m.
    """

    honest: Tensor
    own: Tensor
    before: Sequence[Tensor] = ()
    index: int = 0
    num_faulty: int = 1


class Attack(Algorithm, ABC):
    """What a wrong worker does."""

    @abstractmethod
    def forge(self, scene: Scene) -> Tensor:
        """What the worker averages in place of its own gradient: n elements."""

    def labels(self, labels: Tensor, num_classes: int) -> Tensor:
        """The labels on which a wrong worker computes its own gradient."""
        return labels


@dataclass(frozen=True, repr=False)
class SignFlip(Attack):
    """`-scale g`, with g the attacker's own gradient."""

    scale: float = 1.0

    def forge(self, scene: Scene) -> Tensor:
        return -self.scale * scene.own


@dataclass(frozen=True, repr=False)
class LabelFlip(Attack):
    """Trains on the label `C - 1 - y` in place of y, and does nothing else wrong."""

    def forge(self, scene: Scene) -> Tensor:
        return scene.own

    def labels(self, labels: Tensor, num_classes: int) -> Tensor:
        return num_classes - 1 - labels


@dataclass(frozen=True, repr=False)
class ALIE(Attack):
    """ "A little is enough": `mean - z std` of the honest workers, coordinate by coordinate.

    Args:
        z: how many standard deviations. None takes the largest that hides among `W` workers with m attackers,
            `Phi^-1((W - m - s) / (W - m))`, `s = floor(W/2 + 1) - m`; that is 0, no attack, for 8 workers with 2 attackers.

    Source: Baruch, Baruch and Goldberg 2019, A Little Is Enough, arXiv 1902.06156.
    """

    z: float | None = 1.5

    def forge(self, scene: Scene) -> Tensor:
        return scene.honest.mean(0) - self.deviations(len(scene.honest), scene.num_faulty) * scene.honest.std(0)

    def deviations(self, num_honest: int, num_faulty: int) -> float:
        """z for these numbers of workers.

        Example:
            >>> ALIE(z=None).deviations(6, 2), round(ALIE(z=None).deviations(20, 5), 2)
            (0.0, 0.25)
        """
        if self.z is not None:
            return self.z
        supporters = (num_honest + num_faulty) // 2 + 1 - num_faulty
        share = (num_honest - supporters) / num_honest
        return NormalDist().inv_cdf(share) if 0 < share < 1 else 0.0


@dataclass(frozen=True, repr=False)
class IPM(Attack):
    """Inner product manipulation: `-epsilon mean` of the honest workers. Above 1 it also grows.

    Source: Xie, Koyejo and Gupta 2019, Fall of Empires, arXiv 1903.03936.
    """

    epsilon: float = 0.1

    def forge(self, scene: Scene) -> Tensor:
        return -self.epsilon * scene.honest.mean(0)


@dataclass(frozen=True, repr=False)
class Mimic(Attack):
    """All attackers send what one honest worker sends, so that its data count more than those of others.

    Args:
        victim: which of the honest workers.

    Source: Karimireddy, He and Jaggi 2022, arXiv 2006.09365.
    """

    victim: int = 0

    def forge(self, scene: Scene) -> Tensor:
        return scene.honest[self.victim % len(scene.honest)].clone()


@dataclass(frozen=True, repr=False)
class LazyCopy(Attack):
    """Each attacker copies another honest worker, to be paid without work."""

    def forge(self, scene: Scene) -> Tensor:
        return scene.honest[scene.index % len(scene.honest)].clone()


@dataclass(frozen=True, repr=False)
class NotFinite(Attack):
    """One element that is not a number."""

    def forge(self, scene: Scene) -> Tensor:
        forged = scene.own.clone()
        forged[0] = math.nan
        return forged


@dataclass(frozen=True, repr=False)
class Huge(Attack):
    """The same large value everywhere."""

    value: float = 1e30

    def forge(self, scene: Scene) -> Tensor:
        return torch.full_like(scene.own, self.value)


@dataclass(frozen=True, repr=False)
class StaleReplay(Attack):
    """Sends its gradient of `delay` rounds ago again; the first one until there are as many."""

    delay: int = 20

    def forge(self, scene: Scene) -> Tensor:
        earlier = [*scene.before, scene.own]
        return earlier[max(0, len(earlier) - 1 - self.delay)].clone()


ATTACKS: tuple[Attack, ...] = (
    SignFlip(),
    SignFlip(scale=10.0),
    LabelFlip(),
    ALIE(),
    IPM(),
    IPM(epsilon=3.0),
    Mimic(),
    NotFinite(),
    Huge(),
    StaleReplay(),
    LazyCopy(),
)
"""Every attack, at strengths with which eight workers can be tested."""


@dataclass
class Attacker:
    """Lets the wrong ones among the workers of a communicator attack; every worker makes one.

    Args:
        attack: what they do.
        faulty: their ranks.

    Example:
        >>> import thinwire as tw
        >>> def worker(comm):
        ...     x = torch.full((2,), float(comm.rank))
        ...     Attacker(IPM(epsilon=1.0), faulty=(0,)).corrupt([("x", x)], comm)
        ...     return x.tolist()
        >>> tw.LocalWorld(3).run(worker)
        [[-1.5, -1.5], [1.0, 1.0], [2.0, 2.0]]
    """

    attack: Attack
    faulty: Sequence[int]
    before: list[Tensor] = field(default_factory=list)

    def corrupt(self, tensors: Sequence[tuple[str, Tensor]], comm: Communicator) -> None:
        """Overwrite the tensors of wrong workers. All workers call it together, before `averager.step`."""
        own = torch.cat([t.detach().reshape(-1).float() for _, t in tensors])
        # Before honest workers return: all must take part in the gather.
        everyone = comm.all_gather(own).wait()
        if comm.rank not in self.faulty:
            return
        honest = torch.stack([x for rank, x in enumerate(everyone) if rank not in self.faulty])
        index = sorted(self.faulty).index(comm.rank)
        forged = self.attack.forge(Scene(honest, own, self.before, index, len(self.faulty)))
        # After `forge`, which sees earlier rounds only. `own` is a copy, made by `cat`.
        self.before.append(own)
        with torch.no_grad():
            for (_, t), part in zip(tensors, forged.split([t.numel() for _, t in tensors]), strict=True):
                t.copy_(part.view(t.shape))


def check_robust(
    averager: Averager,
    attacks: Sequence[Attack] = ATTACKS,
    size: int = 8,
    faulty: Sequence[int] = (1, 6),
    rounds: int = 150,
    bound: float = 0.2,
) -> None:
    """Check that an averager of gradients solves a small convex problem whatever the wrong workers do.

    Each worker has 64 noisy examples of the same logistic regression with 4 classes and 20 features. All take `rounds` steps of
    gradient descent. The loss on the honest workers' examples must not be more than `bound` above the loss that the plain
    mean of the honest workers reaches.

    Args:
        averager: the averager to check.
        attacks: what wrong workers do.
        size: number of workers.
        faulty: ranks of the wrong ones.
        rounds: steps of gradient descent.
        bound: how much loss the attack may cost.

    Raises:
        AssertionError: names the attacks that cost more, with the losses, or an attack under which workers' results differ.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import check_robust
        >>> check_robust(tw.Mean(rule=tw.average.Median()), [Huge(), NotFinite()], rounds=40)
    """
    honest = [rank for rank in range(size) if rank not in faulty]
    clean = _losses(LocalWorld(len(honest)), Mean(), None, (), honest, rounds)[0]
    failed = {}
    for attack in attacks:
        losses = _losses(LocalWorld(size), averager, attack, faulty, range(size), rounds)
        # A NaN never equals itself; the next check reports it.
        assert all(loss == losses[0] or losses[0] != losses[0] for loss in losses), (
            f"{averager}: workers differ under {attack}"
        )
        if not losses[0] <= clean + bound:  # true for NaN too
            failed[repr(attack)] = round(losses[0], 3)
    assert not failed, f"{averager}: the loss is {failed}, and {clean:.3f} without attackers"


def _losses(
    world: LocalWorld,
    averager: Averager,
    attack: Attack | None,
    faulty: Sequence[int],
    shards: Sequence[int],
    rounds: int,
) -> list[float]:
    """The loss on the honest workers' examples that each worker reaches; `shards` has the examples of each rank."""
    honest = [shard for rank, shard in enumerate(shards) if rank not in faulty]
    everything = [torch.cat(parts) for parts in zip(*map(_examples, honest), strict=True)]

    def worker(comm: Communicator) -> float:
        x, labels = _examples(shards[comm.rank])
        attacker = None if attack is None else Attacker(attack, faulty)
        if attack is not None and comm.rank in faulty:
            labels = attack.labels(labels, _CLASSES)
        weights = torch.zeros(_FEATURES, _CLASSES, device="cpu")
        state = averager.init([("weights", weights)], comm)
        for _ in range(rounds):
            gradient = x.T @ (torch.softmax(x @ weights, 1) - one_hot(labels, _CLASSES).float()) / len(x)
            if attacker is not None:
                attacker.corrupt([("weights", gradient)], comm)
            averager.step(state, [("weights", gradient)], comm).wait()
            # A round that is not finite changes no weights.
            if averager.commit(state):
                weights -= gradient
        return float(cross_entropy(everything[0] @ weights, everything[1]))

    return world.run(worker)


def _examples(shard: int) -> tuple[Tensor, Tensor]:
    """The features and labels of one worker."""
    # All shards share the truth: seed 0 belongs to none of them.
    truth = 2 * torch.randn(_FEATURES, _CLASSES, generator=torch.Generator().manual_seed(0), device="cpu")
    generator = torch.Generator().manual_seed(1 + shard)
    x = torch.randn(64, _FEATURES, generator=generator, device="cpu")
    noise = torch.randn(64, _CLASSES, generator=generator, device="cpu")
    return x, (x @ truth + 2 * noise).argmax(1)
