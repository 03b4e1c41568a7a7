"""Error feedback conserves mass; and what holds for every memory."""

from __future__ import annotations

import pytest
import torch
from helpers.states import leaves

import thinwire as tw

CODECS = [tw.TopK(0.1), tw.QSGD(bits=2), tw.codec.SignNorm(), tw.chain(tw.TopK(0.1), tw.QSGD(bits=4))]

MEMORIES = [
    tw.ErrorFeedback(),
    tw.MomentumCorrection(),
    tw.MomentumCorrection(0.5, nesterov=True, masking=False),
    tw.memory.EF21(),
    tw.memory.DIANA(),
    tw.memory.LoCo(),
    tw.memory.LocalMomentum(),
]
every_memory = pytest.mark.parametrize("memory", MEMORIES, ids=repr)


def assert_same(a, b):
    a, b = leaves(a), leaves(b)
    assert a and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def send(memory, state, codec, gradient, step=0):
    x = memory.compensate(state, "w", gradient)
    payload = codec.encode(x, tw.codec.Key(step=step), x)
    return codec.decode(payload, gradient.numel())


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_was_sent_and_what_is_kept_is_all_there_was(codec):
    """sum of sent + e = sum of gradients, up to float32 rounding of 50 steps, in float64 sums."""
    memory, generator = tw.ErrorFeedback(), torch.Generator().manual_seed(0)
    state = memory.init([("w", torch.zeros(1000))])
    sent, total = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    for step in range(50):
        gradient = torch.randn(1000, generator=generator)
        sent += send(memory, state, codec, gradient, step)
        total += gradient
        memory.commit(state)
    # one rounding a step of numbers below 2^6
    torch.testing.assert_close(sent + state.residual["w"], total, rtol=0, atol=50 * 2.0**-18)


def test_dyadic_numbers_are_conserved_exactly():
    memory, codec = tw.ErrorFeedback(), tw.TopK(0.1)
    state = memory.init([("w", torch.zeros(64))])
    generator = torch.Generator().manual_seed(1)
    sent, total = torch.zeros(64), torch.zeros(64)
    for _ in range(30):
        gradient = torch.randint(-64, 64, (64,), generator=generator) / 16
        sent += send(memory, state, codec, gradient)
        total += gradient
        memory.commit(state)
    assert torch.equal(sent + state.residual["w"], total)


@every_memory
def test_discard_leaves_memory_as_it_was(memory):
    codec, averaged = tw.TopK(0.1), torch.ones(3)
    state = memory.init([("w", torch.zeros(100))], dense=[("b", torch.zeros(3))])
    send(memory, state, codec, torch.randn(100, generator=torch.Generator().manual_seed(2)))
    memory.decoded(state, "b", averaged, encoded=False)
    memory.commit(state)
    before = state.state_dict()
    send(memory, state, codec, torch.full((100,), float("inf")))
    assert_same(state.state_dict(), before)
    if memory.needs_support:
        memory.masked(state, "w").zero_()
    memory.decoded(state, "b", torch.full((3,), float("inf")), encoded=False)
    memory.discard(state)
    assert_same(state.state_dict(), before)
    memory.commit(state)
    assert_same(state.state_dict(), before)  # there was nothing to commit
    send(memory, state, codec, torch.ones(100))
    memory.commit(state)
    assert all(torch.isfinite(value).all() for value in leaves(state.state_dict()).values())


@every_memory
def test_state_dict_loads_with_weights_only(memory, tmp_path):
    state = memory.init([("w", torch.zeros(2, 3))])
    send(memory, state, tw.TopK(0.1), torch.randn(2, 3))
    memory.commit(state)
    torch.save(state.state_dict(), tmp_path / "state.pt")
    other = memory.init([("w", torch.zeros(2, 3))])
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same(other.state_dict(), state.state_dict())
    with pytest.raises(ValueError, match="does not fit this model.*'w"):
        memory.init([("v", torch.zeros(2, 3))]).load_state_dict(state.state_dict())
    with pytest.raises(ValueError, match="'w.* has 6 elements, expected 4"):
        memory.init([("w", torch.zeros(4))]).load_state_dict(state.state_dict())


def test_sign_descent_lets_the_other_memory_discard():
    class Counting(tw.ErrorFeedback):
        def discard(self, state):
            super().discard(state)
            discarded.append(state)

    discarded, memory = [], tw.memory.SignDescent(Counting())
    state = memory.init([("w", torch.zeros(2))])
    memory.discard(state)
    assert discarded == [state]
