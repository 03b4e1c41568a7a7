"""The library's own algorithms pass the suites that authors of other packages run; broken ones do not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from helpers.averagers import GOSSIP
from helpers.codecs import CODECS, ONE_OF_EACH

import thinwire as tw
from thinwire import kernels
from thinwire.average.base import check_agreement
from thinwire.clock import Clock
from thinwire.comm import Handle
from thinwire.membership import State, config, own, pending, shared
from thinwire.memory import ErrorFeedbackState
from thinwire.schedule import Progress
from thinwire.testing import (
    check_averager,
    check_clip,
    check_codec,
    check_communicator,
    check_exchange,
    check_memory,
    check_rule,
    check_topology,
    check_traits,
)
from thinwire.topology.base import Neighbours


@pytest.mark.parametrize("codec", ONE_OF_EACH, ids=repr)
def test_codecs_keep_the_contract(codec):
    """Whatever PyTorch's default device is: a tensor that was made there could not be read."""
    with torch.device("meta"):
        check_codec(codec, device="cpu")


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec not in ONE_OF_EACH], ids=repr)
def test_other_configurations_are_what_they_say(codec):
    """`test_codecs.py` checks their encoding too, and `test_fuzz.py` how they decode."""
    again = tw.parse(repr(codec))
    assert again == codec and hash(again) == hash(codec)
    check_traits(codec)


@pytest.mark.parametrize(
    "codec", [tw.TopK(0.3), tw.chain(tw.TopK(0.05), tw.codec.Rice()), tw.codec.CoarseGrainedTopK(0.3, chunk=32)]
)
def test_codecs_keep_the_contract_where_kernels_count_faults(codec, monkeypatch):
    """As on a GPU: a kernel does not raise, tensors cannot be viewed as arrays, and no fault stays counted."""
    monkeypatch.setattr(kernels.flags, "in_main_memory", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    with kernels.use_backend("reference"):
        check_codec(codec)
    kernels.flags.check_faults(torch.device("cpu"))


@pytest.mark.parametrize(
    "memory",
    [
        tw.ErrorFeedback(),
        tw.memory.EF21(),
        tw.memory.DIANA(),
        tw.MomentumCorrection(),
        tw.MomentumCorrection(0.5, nesterov=True, masking=False),
        tw.memory.LocalMomentum(),
        tw.memory.SignDescent(),
    ],
    ids=repr,
)
def test_memories_keep_the_contract(memory):
    check_memory(memory)


def test_loco_keeps_the_contract_to_its_8_bits():
    check_memory(tw.memory.LoCo(), rounding=1 / 127)
    check_averager(tw.Mean(tw.QSGD(bits=4), tw.memory.LoCo()), sizes=(2, 1), rounding=1 / 127)


@pytest.mark.parametrize(
    "averager",
    [
        tw.Mean(),
        tw.Mean(tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), tw.ErrorFeedback()),
        tw.Mean(tw.TopK(0.1), tw.memory.EF21()),
        tw.Mean(tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), tw.ErrorFeedback(), exchange="sparse_reduce"),
        tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback(), exchange="scatter_reduce"),
        tw.Mean(tw.ALQ(bucket_size=64, update_steps=(1, 2))),
        tw.dgc(0.1),
        tw.PowerSGD(rank=2),
        tw.average.Dion(rank=2),
        tw.ByName({"kernel": tw.PowerSGD(rank=1), "*": tw.Mean(tw.TopK(0.1), tw.ErrorFeedback())}),
    ],
    ids=repr,
)
def test_averagers_of_gradients_keep_the_contract(averager):
    check_averager(averager)


@pytest.mark.parametrize("averager", GOSSIP, ids=repr)
def test_gossip_averagers_keep_the_contract(averager):
    check_averager(averager, sizes=(1, 4))


TWO_PHASES = tw.topology.Phases(phases=((0, tw.Exponential(peers=2)), (3, tw.Ring())), steps_per_epoch=2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_threads_keep_the_contract(size):
    check_communicator(tw.LocalWorld(size).run)


@dataclass(frozen=True, repr=False)
class Forgetful(tw.Cast):
    """Loses infinities."""

    def encode_segments(self, segments, keys, residuals):
        return super().encode_segments([x.nan_to_num(0, 0, 0) for x in segments], keys, residuals)


@dataclass(frozen=True, repr=False)
class Oversized(tw.Cast):
    """Claims fewer bytes than it sends."""

    def nbytes(self, size):
        return super().nbytes(size) - 1


@dataclass(frozen=True, repr=False)
class Trusting(tw.Cast):
    """Takes payloads of any size."""

    def _check_decoding(self, payloads, outs):
        pass

    def decode_add_segments(self, payload, outs, weight, keys):
        whole = torch.zeros(self.nbytes([out.numel() for out in outs]), dtype=torch.uint8)
        whole[: payload.numel()] = payload[: whole.numel()]
        super().decode_add_segments(whole, outs, weight, keys)


@dataclass(frozen=True, repr=False)
class Careless(tw.Cast):
    """Gives a residual that is not the loss, for numbers that are tiny."""

    def encode_segments(self, segments, keys, residuals):
        payload = super().encode_segments(segments, keys, residuals)
        for residual in residuals or []:
            residual[residual.abs() < 1e-44] = 0
        return payload


@dataclass(frozen=True, repr=False)
class Biased(tw.codec.SignNorm):
    """Claims that its noise has no mean."""

    @property
    def traits(self):
        return replace(super().traits, unbiased=True)


@dataclass(frozen=True, repr=False)
class SignOfAll(tw.Cast):
    """Votes by the sign, which an infinity has too."""

    traits = tw.codec.Traits(votes=True)

    def combine(self, totals):
        torch._foreach_sign_(totals)


@dataclass(frozen=True, repr=False)
class Drawing(tw.Cast):
    """Draws from the global random numbers to decode."""

    def decode_add_segments(self, payload, outs, weight, keys):
        torch.rand(1)
        super().decode_add_segments(payload, outs, weight, keys)


@dataclass(frozen=True, repr=False)
class Hasty(tw.ErrorFeedback):
    """Changes memory before commit."""

    def compensate(self, state, name, gradient, scale=1.0):
        state.residual[name] += 1
        return super().compensate(state, name, gradient, scale)


@dataclass(frozen=True, repr=False)
class Absent(tw.ErrorFeedback):
    """Never commits."""

    def commit(self, state):
        self.discard(state)


@dataclass(frozen=True, repr=False)
class Noisy(tw.ErrorFeedback):
    """Draws from the global random numbers."""

    def compensate(self, state, name, gradient, scale=1.0):
        return super().compensate(state, name, gradient, scale).add_(torch.rand(1))


@dataclass
class MisdeclaredState(ErrorFeedbackState):
    """Says that its residual is the same on all workers."""

    residual: dict[str, torch.Tensor] = shared()


@dataclass(frozen=True, repr=False)
class Misdeclared(tw.ErrorFeedback):
    """Would give one worker's residual to all."""

    def init(self, tensors, dense=()):
        plain = super().init(tensors, dense)
        return MisdeclaredState(plain.residual, plain.spare)


@dataclass
class UndeclaredState(State):
    """Does not say what becomes of its field."""

    error: dict[str, torch.Tensor]


@dataclass(frozen=True, repr=False)
class Undeclared(tw.ErrorFeedback):
    """Has a state whose field has no kind."""

    def init(self, tensors, dense=()):
        return UndeclaredState({})


@dataclass(frozen=True, repr=False)
class Plain(tw.ErrorFeedback):
    """Has a state of its own making."""

    def init(self, tensors, dense=()):
        return {}


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (Undeclared(), r"UndeclaredState.error must say .* write `error: ... = own\(\)`"),
        (Plain(), r"its state must be a dataclass derived from thinwire.membership.State.*got dict"),
    ],
)
def test_a_state_without_kinds_is_refused_when_it_is_made(memory, message):
    with pytest.raises(TypeError, match=message):
        tw.LocalWorld(1).run(lambda comm: tw.Mean(tw.TopK(0.1), memory).init([("w", torch.zeros(4))], comm))


@dataclass(frozen=True, repr=False)
class Own(tw.Mix):
    """Leaves every worker a value of its own, and claims one mean."""

    @property
    def traits(self):
        return replace(super().traits, gives_one_mean=True)


@dataclass
class RoundingState(State):
    """By name: what rounding to float16 lost, and what it loses in this round."""

    error: dict[str, torch.Tensor] = own()
    lost: dict[str, torch.Tensor] = pending(default_factory=dict)
    finite: bool = pending(default=True)
    progress: Progress = shared(default=Progress())
    clock: Clock = config(default_factory=Clock)


@dataclass(frozen=True, repr=False)
class Rounding(tw.average.Averager):
    """A right averager: the mean of `half(g + e)`, with error feedback. Those below break one rule each."""

    def init(self, tensors, comm, seed=0):
        check_agreement(self, tensors, comm, seed)
        return self._state(tensors)

    def step(self, state, tensors, comm, scale=1.0):
        for name, t in tensors:
            x = t / scale + state.error[name]
            t.copy_(x.half().float() * scale)
            state.lost[name] = x - x.half()
        handles = [comm.all_reduce(t) for _, t in tensors]

        def finish():
            for handle, (_, t) in zip(handles, tensors, strict=True):
                handle.wait()
                t /= comm.size
                state.finite = state.finite and bool(t.isfinite().all())

        return Handle(finish)

    def commit(self, state):
        finite = state.finite
        if finite:
            state.error.update(state.lost)
        self.discard(state)
        return finite

    @staticmethod
    def _state(tensors):
        return RoundingState({name: torch.zeros(t.shape) for name, t in tensors})


@dataclass
class BareState(State):
    """What the algorithm needs, and not what strategies do."""

    error: dict[str, torch.Tensor] = own()
    lost: dict[str, torch.Tensor] = pending(default_factory=dict)
    finite: bool = pending(default=True)


@dataclass(frozen=True, repr=False)
class Bare(Rounding):
    """No strategy could use its state."""

    @staticmethod
    def _state(tensors):
        return BareState({name: torch.zeros(t.shape) for name, t in tensors})


@dataclass(frozen=True, repr=False)
class Unchecked(Rounding):
    """Does not compare what workers have."""

    def init(self, tensors, comm, seed=0):
        return self._state(tensors)


@dataclass(frozen=True, repr=False)
class Poisoned(Rounding):
    """Keeps what an infinite round lost, which is not a number."""

    def commit(self, state):
        state.error.update(state.lost)
        return super().commit(state)


@dataclass(frozen=True, repr=False)
class Sticky(Rounding):
    """Commits no round after an infinite one."""

    def discard(self, state):
        finite = state.finite
        super().discard(state)
        state.finite = finite


@dataclass(frozen=True, repr=False)
class Unscaled(Rounding):
    """Ignores the loss scale."""

    def step(self, state, tensors, comm, scale=1.0):
        return super().step(state, tensors, comm)


@dataclass(frozen=True, repr=False)
class Tossing(Rounding):
    """Draws from the global random numbers."""

    def step(self, state, tensors, comm, scale=1.0):
        torch.rand(1)
        return super().step(state, tensors, comm, scale)


@dataclass
class ScaleState(State):
    scale: float = config(default=1.0)
    learned_at: int = shared(default=-1)


@dataclass(frozen=True, repr=False)
class Unsaved(tw.codec.AdaptiveCodec):
    """Learns a ratio in every second round, and does not save it."""

    def init_state(self, shapes=None):
        return ScaleState()

    def at(self, state):
        return tw.TopK(0.5 if state.scale == 1.0 else 0.25)

    def observes(self, step):
        return False

    def observe(self, state, segments, keys):
        pass

    def is_due(self, state, step):
        return step % 2 == 1 and state.learned_at != step

    def statistics(self, state, step=0, line=None):
        return torch.zeros(1, dtype=torch.float64)

    def learn(self, state, statistics):
        return statistics[0]

    def update(self, state, learned, step):
        state.scale, state.learned_at = float(learned[0]), step


@dataclass
class CountingState(RoundingState):
    largest: float = own(default=0.0)


@dataclass(frozen=True, repr=False)
class Counting(Rounding):
    """Keeps a number of its own, which no other number of workers can share out."""

    @staticmethod
    def _state(tensors):
        return CountingState({name: torch.zeros(t.shape) for name, t in tensors})


@dataclass(frozen=True, repr=False)
class Amnesic(Rounding):
    """Never commits what it lost."""

    def commit(self, state):
        finite = state.finite
        self.discard(state)
        return finite


@dataclass(frozen=True, repr=False)
class Silent(Rounding):
    """Leaves zeros."""

    def step(self, state, tensors, comm, scale=1.0):
        handle = super().step(state, tensors, comm, scale)

        def finish():
            handle.wait()
            for _, t in tensors:
                t *= 0  # keeps what is not finite

        return Handle(finish)


def test_an_averager_of_gradients_from_scratch_keeps_the_contract():
    check_averager(Rounding(), sizes=(1, 2), named=False)

    def worker(comm):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.compress_gradients(model, tw.ByName({"*": Rounding()}), comm=comm) as handle:
            handle.set_epoch(1)
            model(torch.full((1, 3), 1.0 + comm.rank)).sum().backward()
            optimizer.step()
            return model.weight.grad[0, 0].item() if "blocked" in handle.seconds else None

    assert tw.LocalWorld(2).run(worker) == [1.5, 1.5]


@pytest.mark.parametrize(
    "check, message",
    [
        (lambda: check_codec(Forgetful(), named=False), "was lost"),
        (lambda: check_codec(Oversized(), named=False), "nbytes says"),
        (lambda: check_codec(Trusting(), named=False), "was accepted for shape"),
        (lambda: check_codec(Careless(), named=False), "the residual is not"),
        (lambda: check_codec(Biased(), named=False), "is not unbiased"),
        (lambda: check_codec(SignOfAll(), named=False), "was lost by `combine`"),
        (lambda: check_codec(Drawing(), named=False), "touched the global random state"),
        (lambda: check_memory(Hasty(), named=False), "memory changed before commit"),
        (lambda: check_memory(Absent(), named=False), "commit keeps nothing"),
        (lambda: check_memory(Noisy(), named=False), "touched the global random state"),
        (
            lambda: check_averager(tw.Mean(tw.TopK(0.1), Misdeclared()), sizes=(2,), named=False),
            "what is shared has other bits on rank 1",
        ),
        (
            lambda: check_averager(tw.Mean(Unsaved(), tw.ErrorFeedback()), sizes=(2,), named=False),
            "a resumed run has other bits",
        ),
        (lambda: check_averager(Own(), sizes=(4,), named=False), "has other bits than rank 0"),
        (lambda: check_averager(Bare(), sizes=(2,), named=False), r"need the fields \['clock', 'progress'\]"),
        (lambda: check_averager(Unchecked(), sizes=(2,), named=False), "init accepts tensors that differ"),
        (lambda: check_averager(Poisoned(), sizes=(2,), named=False), "a round that was not committed changed memory"),
        (lambda: check_averager(Sticky(), sizes=(2,), named=False), "after an infinite one is called not finite"),
        (
            lambda: check_averager(Counting(), sizes=(2,), named=False),
            r"largest is own\(\).* must be a tensor, got 0.0",
        ),
        (lambda: check_averager(Amnesic(), sizes=(2,), named=False), "commit keeps nothing of rounds that lost"),
        (lambda: check_averager(Silent(), sizes=(2,), named=False), "do not point where the means do"),
        (lambda: check_averager(Unscaled(), sizes=(2,), named=False), "the loss scale changes results"),
        (lambda: check_averager(Tossing(), sizes=(2,), named=False), "touched the global random state"),
    ],
)
def test_broken_algorithms_are_found(check, message):
    with pytest.raises(AssertionError, match=message):
        check()


@pytest.mark.parametrize(
    "topology",
    [tw.Ring(), tw.topology.Star(), tw.Exponential(peers=2), tw.topology.RandomPairs(num_steps=5), TWO_PHASES],
    ids=repr,
)
def test_topologies_keep_the_contract(topology):
    check_topology(topology, sizes=(1, 4, 8))


@dataclass(frozen=True, repr=False)
class Shifts(tw.topology.Topology):
    """Each worker sends to the rank that is `distance` further on, with `weight`, and receives with `received`."""

    distance: int = 1
    weight: float = 0.5
    received: float = 0.5
    kept: float = 0.5
    moves: bool = False

    def _neighbours(self, rank, step, size):
        distance = self.distance + step * self.moves
        sends, receives = {(rank + distance) % size: self.weight}, {(rank - distance) % size: self.received}
        return Neighbours(sends, receives, self.kept)


def test_a_topology_from_scratch_keeps_the_contract():
    check_topology(Shifts(), sizes=(1, 2, 5), named=False)


@dataclass(frozen=True, repr=False)
class Returning(tw.Cast):
    """Returns what it is told to, in place of a payload."""

    what: object = None

    def encode_segments(self, segments, keys, residuals):
        return self.what


@dataclass(frozen=True, repr=False)
class Fractional(tw.Cast):
    """Counts bits, and divides."""

    def nbytes(self, size):
        return 8 * super().nbytes(size) / 8


@dataclass(frozen=True, repr=False)
class Plainly(tw.codec.Codec):
    """Sends float32 as it lies in memory, and reads it so."""

    copies: bool = False

    def encode_segments(self, segments, keys, residuals):
        for r in residuals or []:
            segments = [s.clone() for s in segments]
            r.zero_()
        is_lone = len(segments) == 1 and not self.copies
        return (segments[0] if is_lone else torch.cat(segments)).view(torch.uint8)

    def decode_add_segments(self, payload, outs, weight, keys):
        for out, sent in zip(outs, payload.view(torch.float32).split([o.numel() for o in outs]), strict=True):
            out.add_(sent, alpha=weight)

    def segments_nbytes(self, numels):
        return 4 * sum(numels)


@dataclass(frozen=True, repr=False)
class Strided(tw.Cast):
    """Returns every second byte of a buffer."""

    def encode_segments(self, segments, keys, residuals):
        return super().encode_segments(segments, keys, residuals).repeat_interleave(2)[::2]


@dataclass(frozen=True, repr=False)
class InDict(tw.ErrorFeedback):
    def init(self, tensors, dense=()):
        return {name: torch.zeros(t.numel()) for name, t in tensors}


@dataclass(frozen=True, repr=False)
class Bufferless(tw.ErrorFeedback):
    def compensate(self, state, name, gradient, scale=1.0):
        return None


@dataclass(frozen=True, repr=False)
class TensorRule(tw.average.Rule):
    def combine(self, messages):
        return messages.rows.mean(0)


@dataclass(frozen=True, repr=False)
class NoClip(tw.average.Clip):
    def apply(self, gradient, num_workers, norm=None):
        return None


@dataclass(frozen=True, repr=False)
class Halves(tw.topology.Topology):
    """Gives a plain tuple, or a period that is no integer."""

    period_of: float = 1

    def _neighbours(self, rank, step, size):
        return {(rank + 1) % size: 0.5}, {(rank - 1) % size: 0.5}, 0.5

    def _period(self, size):
        return self.period_of


@pytest.mark.parametrize(
    "check, message",
    [
        (lambda: check_codec("TopK(0.1)"), "expected an instance of a codec, derived from Codec, got 'TopK"),
        (lambda: check_codec(tw.Cast), "expected an instance of a codec, derived from Codec, got <class"),
        (
            lambda: check_codec(Returning()),
            r"unknown name 'Returning'.*must be registered with thinwire.notation.register",
        ),
        (lambda: check_codec(Returning(what=[1])), r"what=\[1\].: unhashable type: 'list'; use tuples"),
        (lambda: check_codec(Returning(), named=False), "a payload is a vector of uint8, got NoneType"),
        (lambda: check_codec(Strided(), named=False), r"a payload is contiguous, got strides \(2,\)"),
        (lambda: check_codec(Plainly(), named=False), "or it shares memory with the input, which may change"),
        (lambda: check_codec(Plainly(copies=True), named=False), "1 modulo 4 is not decoded.*kernels.payload_as"),
        (lambda: check_codec(Fractional(), named=False), r"nbytes must be an int, got 2\.0"),
        (lambda: check_memory(tw.TopK(0.1)), r"derived from Memory, got TopK\(ratio=0.1\)"),
        (lambda: check_memory(Bufferless(), named=False), "compensate returns a flat float32 buffer, got NoneType"),
        (lambda: check_averager(tw.TopK(0.1)), r"derived from Averager, got TopK\(ratio=0.1\)"),
        (lambda: check_rule(TensorRule(), named=False), "combine returns a Combined, got torch.float32 of shape"),
        (lambda: check_clip(NoClip(), named=False), r"the result must be torch.float32 of shape \(\), got NoneType"),
        (lambda: check_topology(Halves(), named=False), r"_neighbours returns Neighbours, got \({1: 0.5}"),
        (lambda: check_topology(Halves(1.5), named=False), "the period must be 1 or more, got 1.5"),
        (lambda: check_exchange("ring"), "derived from Exchange, got 'ring'"),
    ],
)
def test_a_mistake_is_named_where_it_was_made(check, message):
    """They were errors of Python, from the depths of a suite."""
    with pytest.raises(AssertionError, match=message) as caught:
        check()
    assert "\n" not in str(caught.value)


def test_a_memory_whose_state_is_a_dict_is_refused():
    with pytest.raises(TypeError, match=r"InDict.*its state must be a dataclass derived from .*State.*got dict"):
        check_memory(InDict(), named=False)


@pytest.mark.parametrize(
    "topology, message",
    [
        (Shifts(received=0.25), "the weight is 0.5 for the sender and 0.25 for the receiver"),
        (Shifts(distance=5), "from 0 to 0: a peer must be another worker"),
        (Shifts(weight=-0.5, received=-0.5, kept=1.5), "the weight must be positive"),
        (Shifts(kept=0.25), "is used 0.75 times"),
        (Shifts(moves=True), "step 1 is not step 0 again"),
    ],
)
def test_broken_topologies_are_found(topology, message):
    with pytest.raises(AssertionError, match=message):
        check_topology(topology, sizes=(5,), named=False)


def test_a_disconnected_topology_is_found_and_refused_by_gossip():
    """Averagers that tell all others something waited for ever."""
    pairs = Shifts(distance=2)
    with pytest.raises(ValueError, match="does not connect 4 workers"):
        check_topology(pairs, sizes=(4,), named=False)
    with pytest.raises(ValueError, match="does not connect 4 workers"):
        check_averager(tw.Choco(pairs), sizes=(4,), named=False)


@pytest.mark.parametrize("averager", [tw.Mix, tw.PushSum], ids=lambda averager: averager.__name__)
def test_gossip_refuses_a_graph_whose_parts_would_agree_alone(averager):
    """Each pair of workers came to a mean of its own, without a word."""
    with pytest.raises(ValueError, match=r"does not connect 4 workers: .* rank 0 both ways with the ranks \[1, 3\]"):
        tw.LocalWorld(4).run(lambda comm: averager(Shifts(distance=2)).init([("w", torch.zeros(4))], comm))


@dataclass(frozen=True, repr=False)
class OneWay(tw.topology.Topology):
    """Every worker sends to the next rank, and waits for it."""

    def _neighbours(self, rank, step, size):
        return Neighbours({(rank + 1) % size: 0.5}, {(rank + 1) % size: 0.5}, 0.5)


@pytest.mark.parametrize("averager", [tw.Mix(OneWay()), tw.PushSum(OneWay())], ids=["Mix", "PushSum"])
def test_gossip_refuses_a_topology_whose_receivers_wait_for_others(averager):
    """It failed by a timeout."""
    with pytest.raises(
        ValueError, match="from rank 0 to rank 1 of 3 workers at step 0, the weight is 0.5 for the sender"
    ):
        tw.LocalWorld(3).run(lambda comm: averager.init([("w", torch.zeros(4))], comm))


def test_a_communicator_that_adds_wrongly_is_found():
    def run(operation):
        def worker(comm):
            plain = comm.all_reduce
            comm.all_reduce = lambda x: plain(x + 1)
            return operation(comm)

        return tw.LocalWorld(2).run(worker)

    with pytest.raises((AssertionError, tw.comm.CommunicationError), match="all_reduce gave"):
        check_communicator(run)
