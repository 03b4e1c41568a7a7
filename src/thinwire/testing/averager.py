"""The conformance suite of averagers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..average import Averager
from ..comm import Communicator, LocalWorld
from ..membership import rewind
from .algorithm import check_algorithm
from .random import untouched_random_state
from .state import check_joining, check_redistribution, of_kind, same

# Also a tensor of one dimension, which `Mean` sends dense unless `min_ndim` is lower.
SHAPES = {"weight": (12, 20), "bias": (12,), "kernel": (4, 3, 3, 3)}


def check_averager(
    averager: Averager, sizes: tuple[int, ...] = (1, 2, 4), named: bool = True, rounding: float = 1e-6
) -> None:
    """Check that an averager fulfils the contract of `thinwire.average.base`.

    The state has the fields that strategies need. Averagers of gradients leave the same bits on all workers, which point where
    the mean does; what is a worker's own changes in rounds that lost something. Gossip keeps the mean if it says so, and
    moves workers closer; it leaves a lone worker as it is; it takes tensors of any float type, strides and size; and a step
    that is under way adds its change to what the tensors hold when it is waited for. A repeated round gives the same bits,
    and so does a saved and loaded state. A round that is given up leaves no trace; on another number of workers what is a
    worker's own keeps its mean, and what is shared its bits. `commit` reports a round with an infinity on the workers that
    received it, also where a finite result is too large for a tensor's type; an averager with `leaves_out_nonfinite` leaves
    a finite result without that worker. A round that is not committed leaves what is a worker's own as it was, and later
    rounds are committed. A loss scale of a power of two does not change the results of averagers of gradients. Workers with
    different tensors fail together in `init`. No global random state is changed.

    Args:
        averager: the averager to check.
        sizes: numbers of workers that its topology can connect.
        named: whether `parse(repr(averager))` must equal it.
        rounding: how far what is a worker's own is rounded when it is kept, relative to the largest number.

    Raises:
        AssertionError: the averager breaks the contract.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import check_averager
        >>> check_averager(tw.Mean(tw.TopK(0.1), tw.ErrorFeedback()), sizes=(2,))
    """
    check_algorithm(averager, Averager, named)
    for size in sizes:
        world = LocalWorld(size)
        with untouched_random_state(averager):
            plain = world.run(_rounds, averager, None)
        again = world.run(_rounds, averager, None)
        # In two places, because an adaptive codec may learn anew right after one of them.
        resumed = [world.run(_rounds, averager, at) for at in (3, 4)]
        world.run(_overflowing, averager)
        assert size == 1 or all(world.run(_disagreeing, averager)), f"{averager}: init accepts tensors that differ"
        for rank in range(size):
            assert _same(plain[rank], again[rank]), f"{averager}, {size} workers: a second run has other bits"
            for results in resumed:
                assert _same(plain[rank], results[rank]), f"{averager}, {size} workers: a resumed run has other bits"
        # The next size, and the first after the last, so that workers leave as well as join.
        _check_membership(averager, size, sizes[(sizes.index(size) + 1) % len(sizes)], rounding)
        if averager.traits.gives_one_mean:
            kept = any(world.run(_keeps_what_was_lost, averager))
            assert kept, f"{averager}, {size} workers: commit keeps nothing of rounds that lost something"
            for rank in range(size):
                assert _same(plain[rank], plain[0]), f"{averager}: rank {rank} of {size} has other bits than rank 0"
            scaled = world.run(_rounds, averager, None, 4.0)
            assert _same(scaled[0], plain[0]), f"{averager}, {size} workers: the loss scale changes results"
            finite = world.run(_infinite, averager)
            if averager.traits.leaves_out_nonfinite and size > 1:
                assert all(finite), f"{averager}, {size} workers: one infinite worker stopped a round"
            else:
                assert not any(finite), f"{averager}, {size} workers: an infinity was committed"
        else:
            _check_gossip(averager, world.run(_gossip, averager))
            world.run(_any_tensors, averager)
            world.run(_in_flight, averager)


def _check_membership(averager: Averager, size: int, other: int, rounding: float) -> None:
    """The states of `size` workers go on as those of `other` workers."""

    def worker(comm: Communicator, steps: int) -> Any:
        state = averager.init(_tensors(comm.rank, 0), comm)
        for step in range(steps):
            averager.step(state, _tensors(comm.rank, step), comm).wait()
            averager.commit(state)
        return state

    states = LocalWorld(size).run(worker, 3)
    for rank, state in enumerate(states):
        is_shared = same(of_kind(state, "shared"), of_kind(states[0], "shared"))
        assert is_shared, f"{averager}: what is shared has other bits on rank {rank} of {size}"
    check_redistribution(averager, states, LocalWorld(other).run(worker, 0), rounding)
    check_joining(averager, states[0], LocalWorld(size).run(worker, 1)[-1])


def _check_gossip(averager: Averager, results: list[tuple[Tensor, Tensor]]) -> None:
    before, after = (torch.stack(list(side)) for side in zip(*results, strict=True))
    drift = (after.mean(0) - before.mean(0)).abs().max().item()
    assert drift <= 1e-3 or not averager.traits.keeps_mean, (
        f"{averager}: the mean over {len(results)} workers moved by {drift}"
    )
    spread = [(x - x.mean(0)).norm().item() for x in (before, after)]
    assert spread[1] <= spread[0], f"{averager}: workers moved apart, from {spread[0]} to {spread[1]}"
    assert len(results) > 1 or torch.equal(before, after), f"{averager}: a lone worker was changed"


def _rounds(comm: Communicator, averager: Averager, resume_at: int | None, growth: float = 1.0) -> list[Tensor]:
    """The unscaled results of the last of six rounds; the loss scale grows by a factor from round to round."""
    tensors = _tensors(comm.rank, 0)
    state = averager.init(tensors, comm, seed=5)
    missing = {"clock", "finite", "progress"} - set(dir(state))
    assert not missing, (
        f"{averager}: strategies need the fields {sorted(missing)} of its state; see thinwire.average.base"
    )
    for step in range(6):
        if step == resume_at:
            saved = state.state_dict()
            averager.step(state, [(name, t.clone()) for name, t in tensors], comm).wait()
            averager.commit(state)
            rewind(state, saved)
            assert same(state.state_dict(), saved), f"{averager}: a round that is given up leaves a trace"
            state = averager.init(tensors, comm, seed=5)
            state.load_state_dict(saved)
        for (_, t), (_, value) in zip(tensors, _tensors(comm.rank, step), strict=True):
            # Gossip averages parameters, so later rounds go on from what it left.
            if averager.traits.gives_one_mean or step == 0:
                t.copy_(value * growth**step)
        averager.step(state, tensors, comm, growth**step).wait()
        assert averager.commit(state), f"{averager}: a finite round is called not finite"
    return [t / growth**step for _, t in tensors]


def _keeps_what_was_lost(comm: Communicator, averager: Averager) -> bool:
    """Whether six rounds changed what is this worker's own; True where there is nothing to keep.

    Fails unless the results point where the means do.
    """
    state = averager.init(_tensors(comm.rank, 0), comm)
    before, results, means = of_kind(state, "own"), [], []
    for step in range(6):
        tensors = _tensors(comm.rank, step)
        averager.step(state, tensors, comm).wait()
        averager.commit(state)
        results.append(_flat(tensors))
        means.append(torch.stack([_flat(_tensors(rank, step)) for rank in range(comm.size)]).mean(0))
    result, mean = torch.stack(results).sum(0), torch.stack(means).sum(0)
    assert result.dot(mean) > 0, f"{averager}, {comm.size} workers: results do not point where the means do"
    return not before or torch.allclose(result, mean, atol=1e-5) or not same(of_kind(state, "own"), before)


def _disagreeing(comm: Communicator, averager: Averager) -> bool:
    """Whether `init` refuses a tensor that has another name on the last worker."""
    first, *others = _tensors(comm.rank, 0)
    try:
        averager.init([first if comm.rank < comm.size - 1 else ("other", first[1]), *others], comm)
    except ValueError:
        return True
    return False


def _infinite(comm: Communicator, averager: Averager) -> bool:
    tensors = _tensors(comm.rank, 0)
    state = averager.init(tensors, comm)
    before = of_kind(state, "own")
    if comm.rank == comm.size - 1:
        # On one worker alone: the others learn of it by the exchange.
        tensors[0][1][3, 3] = float("inf")
    averager.step(state, tensors, comm).wait()
    committed = averager.commit(state)
    assert committed == all(bool(t.isfinite().all()) for _, t in tensors), f"{averager}: commit says {committed}"
    is_kept = committed or same(of_kind(state, "own"), before)
    assert is_kept, f"{averager}: a round that was not committed changed memory"
    averager.step(state, _tensors(comm.rank, 1), comm).wait()
    assert averager.commit(state), f"{averager}: a finite round after an infinite one is called not finite"
    return committed


def _overflowing(comm: Communicator, averager: Averager) -> None:
    """Values near the end of float16: a lossy codec may decode a mean beyond it, which is infinite once it is written."""
    for step in range(4):
        tensors = [(name, (t.clamp(-1, 1) * 65504.0).half()) for name, t in _tensors(comm.rank, step)]
        state = averager.init(tensors, comm, seed=step)
        averager.step(state, tensors, comm).wait()
        written = all(bool(t.isfinite().all()) for _, t in tensors)
        assert averager.commit(state) == written, f"{averager}: commit says {not written} where finite is {written}"


def _gossip(comm: Communicator, averager: Averager) -> tuple[Tensor, Tensor]:
    tensors = _tensors(comm.rank, 0)
    state: Any = averager.init(tensors, comm)
    before = _flat(tensors)
    for _ in range(40):
        averager.step(state, tensors, comm).wait()
        averager.commit(state)
    return before, _flat(tensors) * averager.debias_factor(state)


def _any_tensors(comm: Communicator, averager: Averager) -> None:
    base = torch.arange(12.0, device="cpu").view(3, 4) + comm.rank
    tensors = [
        ("half", base.to(torch.bfloat16)),
        ("strided", base.double().t()),
        ("every second", base.view(-1)[::2]),
        ("column", base.clone()[:, :1]),
        ("empty", torch.empty(0, 3, device="cpu")),
        ("parameter", torch.nn.Parameter(base.clone())),
    ]
    dtypes, state = [t.dtype for _, t in tensors], averager.init(tensors, comm, seed=3)
    for _ in range(2):
        averager.step(state, tensors, comm).wait()
        averager.commit(state)
    for (name, t), dtype in zip(tensors, dtypes, strict=True):
        assert t.dtype == dtype and t.isfinite().all(), f"{averager}: the tensor {name!r} is {t.dtype}, {t}"


def _in_flight(comm: Communicator, averager: Averager) -> None:
    """Steps of an optimizer that are taken while messages fly are kept, and the mixture is that of the values sent."""
    at_once, tensors = _tensors(comm.rank, 0), _tensors(comm.rank, 0)
    averager.step(averager.init(at_once, comm, seed=3), at_once, comm).wait()
    state = averager.init(tensors, comm, seed=3)
    handle = averager.step(state, tensors, comm)
    for _, t in tensors:
        t += 64.0
    for operation in (lambda: averager.step(state, tensors, comm), state.state_dict):
        try:
            operation()
        except ValueError as error:
            assert "in flight" in str(error), f"{averager}: {error} does not say that a step is in flight"
        else:
            raise AssertionError(f"{averager}: a second step, or saving, was allowed while a step is in flight")
    handle.wait()
    off = (_flat(at_once) + 64.0 - _flat(tensors)).abs().max().item()
    assert off < 1e-4, f"{averager}: changes made while messages flew were lost or mixed in, by {off}"


def _flat(tensors: list[tuple[str, Tensor]]) -> Tensor:
    return torch.cat([t.reshape(-1) for _, t in tensors])


def _tensors(rank: int, step: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [(name, torch.randn(shape, generator=generator, device="cpu")) for name, shape in SHAPES.items()]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))
