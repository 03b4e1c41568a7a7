"""A codec of its own for each layer, fitted to the gradients, and on request to the line.

    1. measure    every so many rounds: the squared error of every candidate on what each layer encodes     `observe`
    2. agree      add the errors of all workers; from the seconds that all have waited, follow the line     `learn`
    3. choose     the candidate of each layer: the least error within the budget                            `allocate`

Between two updates the codec is `PerLayer`: it encodes all layers with one candidate in one call. All workers know the
choice, so payloads do not contain it.

Following the line. Each worker measures the rate of its messages, and the seconds that a step leaves for each byte: until
it wants the last message, and `wait_share` of the step beyond. So many times the bytes of the present choice fit:

    f = rate * least seconds for a byte

A slow worker or a busy processor makes messages late, and never early, so the largest rate of all workers is that of the line.
Measured in a few rounds it may still be too low: a rate above half of the one before leaves that one standing, less 30 %.
The next budget is f times the present bytes, a quarter to four times of them; a little less go half of the way, against
noise. As long as some worker waits less than half of `wait_share`, nobody knows what the line carries, and f is at least 1.1,
next 1.2, then 1.4, and so on, up to 2.
A change of less than 2 % leaves budget and choice as they are, which saves the search. Between two measurements the
choice is not exact: the search for a price takes half of the time, and is no worse than one candidate for all layers either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from ... import debug
from ...algorithm import require
from ...membership import Form, State, config, copied, restart, shared
from ...options import MAX_NUMBER, require_choice, require_integer, require_kind, require_number
from ..base import Codec
from ..compose.chain import chain
from ..compose.per_layer import PerLayer
from ..dense.cast import Identity
from ..dense.low_rank import LowRank
from ..quantize.qsgd import QSGD
from ..sparse.top_k import TopK
from ..traits import Traits
from ..types import Key
from .allocation import Choice, Matrix, allocate, sum_chosen
from .base import UNKNOWN, AdaptiveCodec, LineMeasurement

QUANTIZERS: tuple[Codec, ...] = tuple(QSGD(bits=bits) for bits in range(2, 9))
SPARSE: tuple[Codec, ...] = tuple(chain(TopK(ratio), QSGD(bits=4)) for ratio in (0.003, 0.01, 0.03, 0.1, 0.3))
LOW_RANK: tuple[Codec, ...] = tuple(LowRank(rank, QSGD(bits=6)) for rank in (1, 2, 4, 8, 16, 32))
CANDIDATES: dict[str, tuple[Codec, ...]] = {
    "low_rank": (*QUANTIZERS, *LOW_RANK, Identity()),
    "sparse": (*QUANTIZERS, *SPARSE, Identity()),
    "quantizers": (*QUANTIZERS, Identity()),
}

LINE = "line"
_START_BITS = 4.0  # of the first rounds under "line"
_NEAR, _LESS, _MOST_LOSS, _MOST_GROWTH = 0.85, 0.7, 0.25, 4.0  # factors, see above
_IDLE, _FIRST_GROWTH, _LAST_GROWTH = 0.5, 1.1, 2.0  # of what may be waited; factors
_SAME = 0.02  # a change of the budget that is not worth a new choice
_NOMINAL = [torch.Size([1024, 1024])]  # where the layers are not known

MEASURED = Form(
    lambda state, measured: copied(measured),
    # `torch.distributed.checkpoint` turns keys into text.
    lambda state, measured, saved: {int(stream): row for stream, row in copied(saved).items()},
)


@dataclass
class FittedState(State):
    """The state of `Fitted`.

    Attributes:
        shapes: of each layer, by name.
        choice: the position of each layer's candidate, by name.
        errors: for each layer the squared error of every candidate, and the squared norm behind them, float64, of all
            workers together; zeros before the first measurement.
        budget: bytes of all layers together, as agreed last.
        rate: bytes a second that the line carries, likewise; 0 where it is not known.
        growth: the least factor of the next budget if the line is idle, likewise.
        last_update: round of the last update; 0 before the first.
        measured: the same numbers as `errors` of this worker, by the stream of the random key. A worker that
            joins has none.
    """

    shapes: dict[str, torch.Size] = config()
    choice: dict[str, int] = shared()
    errors: dict[str, Tensor] = shared()
    budget: float = shared()
    rate: float = shared(default=0.0)
    growth: float = shared(default=_FIRST_GROWTH)
    last_update: int = shared(default=0)
    measured: dict[int, Tensor] = restart(form=MEASURED, default_factory=dict)

    def __deepcopy__(self, memo: object) -> FittedState:
        """A cheap copy, as every update keeps one: values are replaced, and only `measured` grows."""
        return replace(self, measured=dict(self.measured))

    @property
    def numels(self) -> list[int]:
        """Elements of each layer."""
        return [shape.numel() for shape in self.shapes.values()]

    def matrix(self) -> Matrix:
        """`errors`, (layers, candidates + 1)."""
        return torch.stack(list(self.errors.values())).numpy()


@dataclass(frozen=True, repr=False)
class Fitted(AdaptiveCodec):
    """Gives each layer one of its candidates, so that the error of all layers is least within a budget of bytes.

        minimise  sum_l w_l |x_l - C_l(x_l)|^2    subject to    sum_l nbytes(C_l) <= budget

    Layers differ: at equal bytes, a choice for each layer loses much less than one setting for all. In `Mean`, rounds before
    `measure_steps` and before every multiple of `measure_every` encode with all candidates and measure their errors on what is
    encoded, memory included. The next round begins with an update: one all-gather of 8 bytes for each layer and candidate, and
    a broadcast as large. All workers take the same choice, which is part of the shared state. The choice is never worse
    than one candidate for all layers that fits the budget, on what was measured. Before the first measurement all
    layers have the candidate of the most bytes that fits.

    `budget="line"` follows the network: the budget is what the line carries while workers compute, between `limits`. Every
    `follow_every` rounds workers agree on it: they share three numbers. `docs/fitted.md` has the rule.
    `handle.diagnostics()` shows what was chosen.

    `error_of=codec` asks for the fewest bytes whose error is at most that of this codec on all layers.

    Args:
        budget: bits an element, a codec whose bytes on the same layers are the budget and which is then a candidate too,
            or "line"; None with `error_of`. Lower => smaller messages, more error.
        candidates: "quantizers": `QSGD` of 2 to 8 bits, and dense. "low_rank": also `LowRank` of rank 1 to 32 with factors of 6
            bits; "sparse": also `TopK` of 0.3 to 30 % with 4 bits. These two are biased and need a memory. Or codecs of fixed
            size. None is "sparse" under "line", which does not see that a low rank takes longer to encode, and else "low_rank".
        error_of: the codec whose error on all layers is the bound; in place of `budget`.
        weighting: of the squared error of a layer. "relative": w_l = n_l / |x_l|^2 for n_l elements, the error after an
            optimizer such as Adam has divided by the size of a layer's gradients. "squared": w_l = 1.
        measure_steps: the first rounds that begin with new measurements.
        measure_every: also measure for every multiple of this round; higher => less work, a later choice.
        follow_every: rounds between two agreements under "line"; higher => fewer small messages, slower to follow.
        wait_share: under "line", the share of a step that may wait for the line; higher => more bytes.
        limits: under "line", the fewest and the most bits an element.

    Raises:
        ValueError: a field out of range, or a candidate that cannot stand for one layer alone. In `Mean`: biased candidates
            without a memory, or a granularity other than "layer". In `init`: a budget below the smallest candidates.

    Source: Markov et al. 2022, L-GreCo, arXiv 2210.17357; for the line Xin et al. 2023, Kimad, arXiv 2312.08053.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     averager = tw.Mean(tw.Fitted(budget=4, candidates="quantizers", measure_steps=(1,)))
        ...     tensors = {"flat": torch.ones(64, 64), "large": 9 * torch.randn(64, 64)}
        ...     state = averager.init(list(tensors.items()), comm)
        ...     for _ in range(2):
        ...         averager.step(state, [(name, x.clone()) for name, x in tensors.items()], comm).wait()
        ...         averager.commit(state)
        ...     found = averager.diagnostics(state)
        ...     return found["bits/flat"] < found["bits/large"], found["bits"] <= 4
        >>> tw.LocalWorld(2).run(worker)
        [(True, True), (True, True)]
    """

    budget: float | Codec | str | None = None
    candidates: str | tuple[Codec, ...] | None = None
    error_of: Codec | None = None
    weighting: str = "relative"
    measure_steps: tuple[int, ...] = (1, 10, 30, 100)
    measure_every: int = 200
    follow_every: int = 5
    wait_share: float = 0.05
    limits: tuple[float, float] = (0.5, 32.0)

    def __post_init__(self) -> None:
        require(
            (self.budget is None) != (self.error_of is None),
            f"Fitted: give either budget or error_of, got budget={self.budget!r} and error_of={self.error_of!r}",
        )
        budget = self.budget
        require(
            budget is None
            or isinstance(budget, Codec)
            or budget == LINE
            or (isinstance(budget, (int, float)) and 0 < budget <= MAX_NUMBER),
            f"Fitted: budget must be bits an element such as 3.0, a codec such as QSGD(bits=3), or 'line', got {budget!r}",
        )
        require_kind("Fitted: error_of", self.error_of, Codec, "a codec such as QSGD(bits=4)", or_none=True)
        for name in ("candidates", "measure_steps", "limits"):
            if name != "candidates" or not isinstance(self.candidates, (str, type(None))):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        words = ", ".join(map(repr, CANDIDATES))
        require(
            self.candidates in CANDIDATES if isinstance(self.candidates, str) else self.candidates != (),
            f"Fitted: candidates must be one of {words}, or codecs, got {self.candidates!r}",
        )
        for codec in self.codecs:
            _check_candidate(codec)
        for step in self.measure_steps:
            require_integer("Fitted: each of measure_steps", step, 1, hint="; round 0 has no gradients to measure")
        for name in ("measure_every", "follow_every"):
            require_integer(f"Fitted: {name}", getattr(self, name), 1)
        require_choice("Fitted: weighting", self.weighting, ("relative", "squared"))
        require_number("Fitted: wait_share", self.wait_share, above=0, below=1)
        require(
            len(self.limits) == 2 and 0 < self.limits[0] <= self.limits[1] <= MAX_NUMBER,
            f"Fitted: limits must be the fewest and the most bits an element, such as (0.5, 32.0), got {self.limits!r}",
        )
        self.init_state()  # refuses a budget that is too small for large layers already

    @cached_property
    def codecs(self) -> tuple[Codec, ...]:
        """All candidates; the codec of `budget` or `error_of` among them."""
        word = self.candidates or ("sparse" if self.budget == LINE else "low_rank")
        named = word if isinstance(word, tuple) else CANDIDATES[word]
        return tuple(dict.fromkeys([*named, *([] if self._reference is None else [self._reference])]))

    @property
    def _reference(self) -> Codec | None:
        return self.budget if isinstance(self.budget, Codec) else self.error_of

    @cached_property
    def traits(self) -> Traits:
        each = [codec.traits for codec in self.codecs]
        needs_shape = any(traits.needs_shape for traits in each)
        unbiased = all(traits.unbiased for traits in each)
        return Traits(unbiased=unbiased, needs_shape=needs_shape, adaptive=self, by_layer=True)

    @property
    def needs_memory(self) -> bool:
        return not self.traits.unbiased

    @property
    def line_share(self) -> float | None:
        return self.wait_share if self.budget == LINE else None

    def settings(self) -> tuple[Codec, ...]:
        """One candidate for all layers: that of the first rounds, or under "line" all within the limits."""
        if self.budget != LINE:
            return (self.at(self.init_state()),)
        bits = {codec: 8 * codec.nbytes(_NOMINAL) / _numel(_NOMINAL) for codec in self.codecs}
        within = [codec for codec in bits if self.limits[0] <= bits[codec] <= self.limits[1]]
        return tuple(sorted(within or [min(bits, key=bits.__getitem__)], key=bits.__getitem__, reverse=True))

    # ---- the codec of a round ----

    def init_state(self, shapes: Mapping[str, torch.Size] | None = None) -> FittedState:
        shapes = dict(shapes or {})
        sizes = list(shapes.values()) or _NOMINAL
        budget = self._first_budget(sizes)
        start = self._start(sizes, budget)
        zeros = {name: torch.zeros(len(self.codecs) + 1, dtype=torch.float64, device="cpu") for name in shapes}
        return FittedState(shapes, dict.fromkeys(shapes, start), zeros, budget)

    def at(self, state: FittedState) -> Codec:
        if not state.choice:  # the layers are not known
            return self.codecs[self._start(_NOMINAL, state.budget)]
        return _per_layer(self, tuple(state.choice.values()))

    def nbytes_at(self, state: FittedState) -> int:
        """Bytes of the payload of all layers in the present round."""
        return int(sum_chosen(_sizes(self.codecs, tuple(state.shapes.values())), _chosen(state)))

    def _first_budget(self, sizes: list[torch.Size]) -> float:
        if self._reference is not None:
            return float(self._reference.nbytes(sizes))
        if self.budget == LINE:
            bits = min(max(_START_BITS, self.limits[0]), self.limits[1])
        else:
            assert isinstance(self.budget, (int, float)), "the constructor has checked it"
            bits = self.budget
        return bits / 8 * _numel(sizes)

    def _start(self, sizes: list[torch.Size], budget: float) -> int:
        """The candidate of the most bytes that fits for all layers; under "line" the smallest if none does."""
        if self._reference is not None:
            return self.codecs.index(self._reference)
        num_bytes = [codec.nbytes(sizes) for codec in self.codecs]
        fitting = [i for i, n in enumerate(num_bytes) if n <= budget]
        numel = _numel(sizes)
        if not (fitting or self.budget == LINE or numel == 0):
            raise ValueError(
                f"Fitted: a budget of {8 * budget / numel:.4g} bits an element is {int(budget)} bytes, and the smallest "
                f"candidate, {self.codecs[int(np.argmin(num_bytes))]}, takes {min(num_bytes)}; give a larger budget or a "
                "smaller candidate"
            )
        return max(fitting, key=lambda i: num_bytes[i]) if fitting else int(np.argmin(num_bytes))

    # ---- what is measured, and when ----

    def observes(self, step: int) -> bool:
        return self._measures_for(step + 1)

    def is_due(self, state: FittedState, step: int) -> bool:
        follows = self.budget == LINE and step > 0 and step % self.follow_every == 0
        return bool(state.choice) and (follows or self._measures_for(step)) and state.last_update != step

    def _measures_for(self, step: int) -> bool:
        return step in self.measure_steps or (step > 0 and step % self.measure_every == 0)

    def observe(self, state: FittedState, segments: Sequence[Tensor], keys: Sequence[Key]) -> None:
        xs = [x.detach().to(torch.float32).contiguous() for x in segments]
        mixed, lost = [key.mixed() for key in keys], [debug.empty_like(x) for x in xs]
        columns = []
        for codec in self.codecs:
            # For the residual alone; the payload is dropped.
            codec.encode_segments(codec.seen(xs), mixed, codec.seen(lost))
            columns.append(_squared(lost))
        found = torch.stack([*columns, _squared(xs)], dim=1)
        for key, row in zip(keys, found, strict=True):
            state.measured[key.stream] = row

    def statistics(self, state: FittedState, step: int = 0, line: LineMeasurement = UNKNOWN) -> Tensor:
        seen = torch.tensor(line, dtype=torch.float64, device="cpu")
        if not self._measures_for(step):
            return seen
        totals = {_stream(name): torch.zeros_like(row) for name, row in state.errors.items()}
        for stream, row in state.measured.items():
            totals[stream % 2**32] += row.cpu()  # the pieces of a tensor have streams of their own above bit 32
        return torch.cat([seen, *(totals[_stream(name)] for name in state.errors)])

    # ---- the choice ----

    def learn(self, state: FittedState, statistics: Sequence[Tensor]) -> Tensor:
        rows = torch.stack([s.cpu() for s in statistics])
        errors = state.matrix()
        measures = rows.shape[1] > len(UNKNOWN)
        if measures:
            added = rows[:, len(UNKNOWN) :].sum(0).view(errors.shape).numpy()
            # Without gradients, or with infinite ones, the last measurement stays.
            errors = added if np.isfinite(added).all() and added.any() else errors
        follows = self.budget == LINE
        budget, rate, growth = (
            self._followed(state, rows[:, : len(UNKNOWN)]) if follows else (state.budget, 0.0, _FIRST_GROWTH)
        )
        if not measures and abs(budget - state.budget) <= _SAME * state.budget:
            budget, choice = state.budget, _chosen(state)
        else:
            choice = self._choose(state, errors, budget, exact=measures)
        # Choices travel as float64 too, which holds small integers exactly.
        return torch.from_numpy(
            np.concatenate([[budget, rate, growth], choice, errors.reshape(-1) if measures else []])
        )

    def _choose(self, state: FittedState, errors: Matrix, budget: float, exact: bool) -> Choice:
        lost = self._weights(errors, state.numels)[:, None] * errors[:, :-1]
        num_bytes = _sizes(self.codecs, tuple(state.shapes.values()))
        if not errors.any():  # nothing is measured yet
            return np.full(len(errors), self._start(list(state.shapes.values()), budget))
        if self.error_of is not None:
            # Bytes are minimised here and errors are the limit, so the two change places.
            return allocate(num_bytes, lost, lost[:, self.codecs.index(self.error_of)].sum())
        # Under "line" the budget may be less than the smallest candidates take, which is no error.
        return allocate(lost, num_bytes, max(budget, num_bytes.min(1).sum()), exact)

    def _weights(self, errors: Matrix, numels: list[int]) -> Matrix:
        """What a squared error of each layer counts, (layers,)."""
        if self.weighting == "squared":
            return np.ones(len(errors))
        sizes, norms = np.array(numels, dtype=np.float64), errors[:, -1]
        # A layer without a gradient, such as one that is not used, has no error to count.
        has_gradient = norms > sizes * np.finfo(np.float64).tiny
        return np.divide(sizes, norms, out=np.zeros(len(norms)), where=has_gradient)

    def _followed(self, state: FittedState, measured: Tensor) -> tuple[float, float, float]:
        """The budget in bytes that suits the line, its rate and the next growth, by the module's rule."""
        known = measured[measured.isfinite().all(1)]
        if not len(known):
            return state.budget, state.rate, state.growth
        fresh, slack, waited = float(known[:, 0].max()), float(known[:, 1].min()), float(known[:, 2].min())
        rate = fresh if fresh < state.rate / 2 else max(fresh, _LESS * state.rate)
        factor = max(0.0, rate * slack)
        factor = factor**0.5 if _NEAR < factor < 1 else min(max(factor, _MOST_LOSS), _MOST_GROWTH)
        growth = _FIRST_GROWTH
        if waited < _IDLE:
            factor, growth = max(factor, state.growth), min(2 * state.growth - 1, _LAST_GROWTH)
        fewest, most = (bits / 8 * sum(state.numels) for bits in self.limits)
        return min(max(self.nbytes_at(state) * factor, fewest), most), rate, growth

    def update(self, state: FittedState, learned: Tensor, step: int) -> None:
        learned, num = learned.to("cpu", torch.float64), len(state.choice)
        agreed, choice, errors = learned.split([3, num, len(learned) - 3 - num])
        (state.budget, state.rate, state.growth), state.last_update = agreed.tolist(), step
        state.choice = dict(zip(state.choice, choice.int().tolist(), strict=True))
        if len(errors):
            state.errors = dict(zip(state.errors, errors.view(num, -1).clone(), strict=True))
            state.measured.clear()

    def diagnostics(self, state: FittedState) -> dict[str, float]:
        """What is in force: `bits` an element, `budget_bits`, the relative squared `error` as measured, `bits/NAME`, and under
        "line" the `line_rate` in bytes a second, once it is known."""
        total = sum(state.numels)
        found = {"bits": 8 * self.nbytes_at(state) / total, "budget_bits": 8 * state.budget / total} if total else {}
        if state.rate:
            found["line_rate"] = state.rate
        errors, choice = state.matrix() if state.errors else np.zeros((0, 1)), _chosen(state)
        if errors.any():
            found["error"] = sum_chosen(errors, choice) / float(errors[:, -1].sum())
        for name, c in state.choice.items():
            found[f"bits/{name}"] = 8 * self.codecs[c].nbytes(state.shapes[name]) / max(1, state.shapes[name].numel())
        return found


def _stream(name: str) -> int:
    """The stream of a named tensor's keys, less what tells workers and pieces apart."""
    return Key.of(0, name, 0, 0).stream


def _check_candidate(codec: Codec) -> None:
    require_kind("Fitted: a candidate", codec, Codec, "a codec such as QSGD(bits=4)")
    codec.traits.check(codec, "Fitted", ("needs_shape",))
    require(
        codec.traits.fixed_size and codec.is_constant,
        f"Fitted: payloads of {codec} vary in size, and the bytes of a choice must be known; use a codec of fixed size",
    )


def _squared(tensors: Sequence[Tensor]) -> Tensor:
    """The squared norm of each tensor, float64."""
    return torch.stack(torch._foreach_norm(list(tensors))).double().square()


@lru_cache(maxsize=64)
def _per_layer(fitted: Fitted, choice: tuple[int, ...]) -> PerLayer:
    return PerLayer(tuple(fitted.codecs[c] for c in choice), fitted.traits.needs_shape)


def _chosen(state: FittedState) -> Choice:
    return np.array(list(state.choice.values()), dtype=np.int64)


@lru_cache(maxsize=64)
def _sizes(codecs: tuple[Codec, ...], shapes: tuple[torch.Size, ...]) -> Matrix:
    """Bytes of each layer with each candidate, (layers, candidates)."""
    return np.array([[codec.nbytes(shape) for codec in codecs] for shape in shapes], dtype=np.float64)


def _numel(sizes: list[torch.Size]) -> int:
    return sum(size.numel() for size in sizes)
