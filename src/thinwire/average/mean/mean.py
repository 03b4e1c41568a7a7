"""The mean of all workers, encoded: one exchange, and the same bits on every worker.

The path of a gradient through `step` and `wait`:

    0. adapt        in some rounds: fit levels to the gradients       codec, on all workers together
    1. compensate   clip; add what earlier steps lost                 clip, memory
    2. encode       floats -> bytes                                   codec
    3. exchange     send and receive the bytes                        exchange/, communicator
    4. decode       bytes -> floats, added in rank order              codec
    5. commit       keep what this step lost, if all was finite       memory

Fused top-k. Where the codec keeps exactly the k largest elements, memory selects them while it compensates. The codec
says how many (`SparseParts.topk_counts`), memory returns the selection (`compensate_all`), and the codec encodes it
(`SparseParts.encode_topk`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...algorithm import require
from ...codec import Codec, Identity, Key, Selection
from ...codec.adaptive.base import adapted
from ...comm import Communicator, Handle
from ...kernels import Flag
from ...membership import check_state
from ...memory import Memory
from ...options import require_choice, require_integer, require_kind
from ...schedule import Progress, resolve
from ..base import (
    Averager,
    Before,
    NamedTensors,
    begin_step,
    check_agreement,
    check_waited,
    copy_changed,
    result_buffers,
)
from ..robust.base import Rule
from ..robust.record import RuleState
from ..traits import AveragerTraits
from .clip import Clip, clip_gradients, clip_means
from .exchange import Exchange, Load, cheapest, find_exchange, known_words
from .exchange.all_gather import AllGather, check_divisor, check_rule
from .exchange.all_reduce import AllReduce
from .exchange.base import Job, PendingExchange, Shares, complete, flatten, message_nbytes, pack, split_like
from .exchange.hierarchical import agree_on_nodes, launched_nodes
from .exchange.scatter_reduce import OWNER_MEMORY, OwnerMemory, Whole
from .state import MeanState


@dataclass(frozen=True, repr=False)
class Mean(Averager):
    """Every worker gets `1/W sum_i C(x_i + e_i)`, bit for bit the same.

    Args:
        codec: encodes what is sent.
        memory: keeps what the payload did not carry, such as `ErrorFeedback()`; None drops it.
        granularity: what is encoded as one segment. "layer": each tensor. "bucket": all tensors of one call; under DDP
            that is one of its buckets. "model": all tensors of the model, which overlaps with no backward pass.
        exchange: "all_reduce", "all_gather", "scatter_reduce", "sparse_reduce", "hierarchical", "hierarchical_sparse",
            or "auto". "auto" takes the cheapest that suits the codec. For unbiased codecs on 5 workers or more that may
            be "scatter_reduce", which encodes the mean a second time. For `TopK` and its like with a memory, on 5 workers
            or more, it is "sparse_reduce", which keeps the largest coordinates of the sum. `docs/algorithms.md` has the
            rule, and the steps and bytes of each.
        min_ndim: tensors with fewer dimensions travel dense as float32; higher => more travels dense. The default of 2
            keeps biases and norms dense, as Deep Gradient Compression does; 0 encodes everything.
        workers_per_node: how many consecutive ranks share a fast node, for hierarchical exchanges and "auto". None reads
            the launcher's LOCAL_WORLD_SIZE; "auto" uses it if all nodes have equally many workers.
        clip: of each worker's own gradients before they are encoded, and of the means of what travels dense; or None.
        divide_by: "workers", or "senders": only those that sent an element, as DeMo's released code does, by "all_gather".
        rule: what takes the place of the mean where some workers may be wrong, such as `Krum(faulty=1)`; None is the mean.
            It needs every worker's message, so the exchange is "all_gather", and a worker keeps the decoded messages of
            all: 4W bytes an element. `docs/robust.md` says which rule suits which codec.

    Raises:
        ValueError: an unknown word, or an all-reduce of payloads that cannot be added. In `init`: workers that cannot
            be split into such nodes.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.full((2, 2), float(comm.rank))
        ...     averager = tw.Mean(tw.QSGD(bits=8))
        ...     state = averager.init([("x", x)], comm)
        ...     averager.step(state, [("x", x)], comm).wait()
        ...     averager.commit(state)
        ...     return x[0, 0].item()
        >>> tw.LocalWorld(4).run(worker)
        [1.5, 1.5, 1.5, 1.5]
    """

    codec: Codec = field(default_factory=Identity)
    memory: Memory | None = None
    granularity: str = "layer"
    exchange: str = "auto"
    min_ndim: int = 2
    workers_per_node: int | None = None
    clip: Clip | None = None
    divide_by: str = "workers"
    rule: Rule | None = None

    def __post_init__(self) -> None:
        require_kind("Mean: codec", self.codec, Codec, "a codec such as TopK(0.01)")
        require_kind("Mean: memory", self.memory, Memory, "a memory such as ErrorFeedback()", or_none=True)
        require_kind("Mean: clip", self.clip, Clip, "a clip such as ClipByNorm(1.0)", or_none=True)
        for name, allowed in (("granularity", ("layer", "bucket", "model")), ("exchange", ("auto", *known_words()))):
            require_choice(f"Mean: {name}", getattr(self, name), allowed)
        require_kind("Mean: rule", self.rule, Rule, "a rule such as Krum(faulty=1)", or_none=True)
        exchange = self._exchange
        if exchange is not None:
            exchange.check(self.codec)
        require_integer("Mean: min_ndim", self.min_ndim, 0)
        nodes = self.workers_per_node
        require_integer("Mean: workers_per_node", nodes, 1, or_none=True)
        require(
            nodes is None or exchange is None or exchange.needs_nodes,
            f"Mean: exchange={self.exchange!r} does not use workers_per_node={nodes}; use 'hierarchical' or 'auto'",
        )
        part = self.codec.traits.adaptive
        require(
            part is None or not part.needs_memory or self.memory is not None,
            f"Mean: {part} has biased candidates, and nothing would keep what they lose; add a memory such as "
            "ErrorFeedback(), or take candidates='quantizers'",
        )
        require(
            not self.codec.traits.by_layer or self.granularity == "layer",
            f"Mean: {self.codec} gives each layer a codec of its own; use granularity='layer', got {self.granularity!r}",
        )
        check_divisor(self.divide_by, exchange, self.codec, self.memory)
        if self.rule is not None:
            check_rule(self.rule, self.codec, self.memory, self.clip)
            require(
                self._may_gather and nodes is None and self.divide_by == "workers",
                f"Mean: {self.rule} needs every worker's message; use exchange='all_gather', without workers_per_node and "
                f"divide_by, got exchange={self.exchange!r}, workers_per_node={nodes} and divide_by={self.divide_by!r}",
            )
        require(
            self._may_use_nodes or (nodes is None and (exchange is None or exchange.tells_support)),
            f"Mean: with exchange='hierarchical' a worker does not learn which coordinates its node sent, and "
            f"{self.memory} needs to; use masking=False, or another exchange",
        )

    @property
    def _exchange(self) -> Exchange | None:
        """The exchange of the configuration; None if "auto" chooses it."""
        return find_exchange(self.exchange)

    @property
    def _may_gather(self) -> bool:
        """Whether every worker may get the messages of all."""
        return self._exchange is None or self._exchange.gathers

    @property
    def _may_use_nodes(self) -> bool:
        """Whether nodes are of use: where a memory needs the support, only a sparse all-reduce between nodes gives it."""
        tells_support = self._exchange is None or self._exchange.tells_support
        return not self._needs_support or (tells_support and self.codec.traits.sparse is not None)

    @cached_property
    def _needs_support(self) -> bool:
        return self.memory is not None and self.memory.needs_support

    @cached_property
    def _merges(self) -> bool:
        """Whether all tensors of a call are encoded as one segment."""
        return self.granularity != "layer"

    @cached_property
    def traits(self) -> AveragerTraits:
        memory, needs_norms = self.memory, self.clip is not None and self.clip.needs_norms
        return AveragerTraits(
            whole_model=self.granularity == "model" or self.rule is not None or needs_norms,
            couples_tensors=self._merges or self.rule is not None or self.codec.traits.adaptive is not None,
            has_momentum=memory is not None and memory.has_momentum,
            suits_parameters=self.codec.traits.lossless and memory is None,
            suits_adam=memory is None or self.codec.traits.sparse is None,
            leaves_out_nonfinite=self.rule is not None,
            lone_messages=LoneMessages(self) if self._sends_alone else None,
        )

    @property
    def cautions(self) -> list[str]:
        traits = self.codec.traits
        keeps_most = traits.sum_dtype is not None and not traits.shared_key  # floats of fewer bits
        if self.memory is not None or traits.unbiased or traits.lossless or traits.votes or keeps_most:
            return []
        return [f"{self} loses what {self.codec} does not send; write Mean({self.codec}, ErrorFeedback())"]

    def sends_at_once(self, state: MeanState) -> bool:
        return not self._must_agree(state)

    def sends_while_waiting(self, state: MeanState) -> bool:
        return not _exchange_of(state).one_step or self._must_agree(state)

    @property
    def _follows_line(self) -> bool:
        """Whether the codec asks how fast messages travel."""
        part = self.codec.traits.adaptive
        return part is not None and part.line_share is not None

    @property
    def _sends_alone(self) -> bool:
        """Whether a worker's message depends on no other worker, and on no round."""
        traits, memory = self.codec.traits, self.memory
        return (
            self._may_gather
            and self.divide_by == "workers"
            and self.rule is None
            and self.clip is None
            and (memory is None or not (memory.needs_mean or memory.has_momentum))
            # A memory that turns means into results needs the whole round's.
            and (memory is None or type(memory).decoded is Memory.decoded)
            and not (traits.shared_key or traits.votes)
            and self.codec.is_constant
            and traits.agreement is None
            and traits.adaptive is None
        )

    def _must_agree(self, state: MeanState) -> bool:
        """Whether workers agree on numbers before they encode."""
        return self.codec.traits.agreement is not None and _exchange_of(state).adds_payloads

    def init(self, tensors: NamedTensors, comm: Communicator, seed: int = 0) -> MeanState:
        check_agreement(self, tensors, comm, seed)
        encoded, dense = self._split(tensors, self.codec)
        memory = None if self.memory is None else check_state(self.memory.init(encoded, dense), self.memory)
        # An elastic communicator has one worker until its first round, which regroups.
        state = MeanState(seed, memory, *self._choose(tensors, comm, must_fit=not comm.is_elastic))
        state.shapes = {name: t.shape for name, t in tensors}
        state.shares = _shares(state, comm)
        state.wholes = {name: Whole.of(self.codec, t) for name, t in encoded}
        state.owner_memory = self._owner_memory(state, comm)
        part = self.codec.traits.adaptive
        shapes = {name: t.shape for name, t in encoded}
        state.codec = None if part is None else check_state(part.init_state(shapes), part)
        if self.rule is not None:
            self.rule.check_size(comm.rank, comm.size)
            state.rule = RuleState.of(self.rule, tensors, comm.size)
        return state

    def _choose(self, tensors: NamedTensors, comm: Communicator, must_fit: bool = True) -> tuple[str, int]:
        """The exchange and the workers per node, for all rounds and buckets, until other workers take part.

        Args:
            tensors: those of `init`.
            comm: connects the workers.
            must_fit: whether nodes of unequal size are an error; if not, every worker counts as a node then.
        """
        chosen = self._exchange
        needs_nodes = self.workers_per_node is not None or (chosen is not None and chosen.needs_nodes)
        nodes = agree_on_nodes(self.workers_per_node, comm, must_fit) if needs_nodes else 1
        if chosen is not None:
            return chosen.word, nodes
        if self.rule is not None:
            return AllGather.word, nodes
        if self.codec.traits.agreement is not None:
            return AllReduce.word, nodes
        if not needs_nodes and self._may_use_nodes:
            nodes = launched_nodes(comm)
        encoded, dense = self._split(tensors, self.codec)
        load = Load(
            codec=resolve(self.codec, Progress()),
            shapes=tuple(t.shape for _, t in encoded),
            dense_numel=sum(t.numel() for _, t in dense),
            size=comm.size,
            workers_per_node=nodes,
            merged=self._merges,
            memory=self.memory,
        )
        return cheapest(load).word, nodes

    def step(self, state: MeanState, tensors: NamedTensors, comm: Communicator, scale: float = 1.0) -> Handle:
        begin_step(self, state, tensors, comm.rank)
        targets = [(name, t.detach() if t.requires_grad else t) for name, t in tensors]
        comm.ledger.count_averaged(sum([t.numel() for _, t in tensors]))
        job, codec = self._job(state, targets, comm, scale)
        # A rule needs each worker's message, which an all-reduce would add up.
        is_dense = self._is_dense_round(codec) and self.rule is None
        exchange = AllReduce() if is_dense else _exchange_of(state)
        flight = PendingExchange(exchange.begin, job, counts=self._follows_line)
        if self._follows_line:
            flight.waited = state.waited_seconds
        # Exchanges under way advance when one begins or is waited for: in the same order on all workers.
        for earlier in state.flights:
            earlier.advance()
        state.flights.append(flight)
        handle = Handle(lambda: self._finish(state, flight, *self._split(targets, codec), scale))
        state.handles.append(handle)
        return handle

    def _job(self, state: MeanState, targets: NamedTensors, comm: Communicator, scale: float) -> tuple[Job, Codec]:
        """Compensate, and describe what to encode and how."""
        part = self.codec.traits.adaptive
        observe = None if part is None else state.adapt(part, comm, targets[0][1].device)
        codec = self.current_codec(state)
        with state.clock("compensate"):
            encoded, dense = self._split(targets, codec)
            codec = state.codec_of(codec, encoded) if codec.traits.by_layer else codec
            if self.memory is None and scale != 1.0:
                codec = codec.under_scale(scale)  # only memory removes the loss scale from what is encoded
            encoded = encoded if self.clip is None else clip_gradients(self.clip, encoded, comm, scale)
            x, selection = self._compensate(state, codec, encoded, scale)
        all_dense = self._is_dense_round(codec)
        # With a shared key all workers draw what rank 0 does.
        rank, step = 0 if codec.traits.shared_key else comm.rank, state.progress.step
        job = Job(
            comm=comm,
            codec=Identity() if all_dense else codec,
            clock=state.clock,
            tensors=x,
            names=[name for name, _ in encoded],
            keys=[Key.of(state.seed, name, rank, step) for name, _ in encoded],
            merged=self._merges,
            keep_residual=self.memory is not None,
            dense=flatten([g for _, g in dense], targets[0][1].device),
            # Memory is unscaled, so what it sends is too; the result must be scaled as the gradients were.
            # The size of a vote does not depend on the gradients.
            scale=scale if self.memory is not None or self.codec.traits.votes else 1.0,
            owner_memory=state.owner_memory,
            workers_per_node=state.workers_per_node,
            shares=state.shares,
            masked=self._masked(state, encoded),
            selection=selection,
            by_senders=self.divide_by == "senders",
            observe=observe,
            combine=self._rule_of_round(state, encoded, dense, comm, scale),
        )
        return job, codec

    def current_codec(self, state: MeanState) -> Codec:
        codec = self.codec if self.codec.is_constant else resolve(self.codec, state.progress)
        return codec if state.codec is None else adapted(codec, state.codec)

    def diagnostics(self, state: MeanState) -> dict[str, float]:
        """What a rule found out in the last round: "clipped/2", the norm of what it dropped of rank 2's message;
        "not_finite/2" and "set_aside/2", which are 1.0 where rank 2 was left out. And what an adaptive codec has chosen."""
        part = self.codec.traits.adaptive
        chosen = {} if part is None else part.diagnostics(state.codec)
        return chosen if state.rule is None else chosen | state.rule.diagnostics()

    def commit(self, state: MeanState) -> bool:
        check_waited(self, state.handles)
        finite = kernels.flags.read(state.finite)
        for memory, memory_state in self._memories(state):
            if finite and not state.was_not_finite:
                memory.commit(memory_state)
            else:
                memory.discard(memory_state)
        if self.rule is not None and state.rule is not None and finite:
            state.rule.commit(self.rule)
        state.was_not_finite = False
        if self._follows_line:
            state.meter.commit()
        state.progress = state.progress._replace(step=state.progress.step + 1)
        state.finite, state.codec_before = True, None
        state.handles.clear()
        state.stepped.clear()
        return finite

    def discard(self, state: MeanState) -> None:
        for memory, memory_state in self._memories(state):
            memory.discard(memory_state)
        if state.rule is not None:
            state.rule.judgement = None
        state.flights.clear()
        state.handles.clear()
        state.stepped.clear()
        if self._follows_line:
            state.meter.discard(state.waited_seconds)
        state.finite, state.was_not_finite = True, False
        state.restore_codec()

    # ---- when workers come and go ----

    def regroup(self, state: MeanState, tensors: NamedTensors, comm: Communicator, before: Before = None) -> None:
        """Choose the exchange anew, unless owners of shards remember something that belongs to it; cut their memory anew."""
        super().regroup(state, tensors, comm, before)
        if self.rule is not None and state.rule is not None:
            self.rule.check_size(comm.rank, comm.size)
            state.rule.regroup(before, comm.size)
        old = state.owner_memory
        # Before the first commit owners remember nothing, so the exchange may still change.
        remembers = _exchange_of(state).has_owners and self.memory is not None and state.progress.step > 0
        if not remembers:
            state.exchange, state.workers_per_node = self._choose(tensors, comm, must_fit=False)
        state.shares = _shares(state, comm)
        state.owner_memory = self._owner_memory(state, comm)
        if remembers and state.owner_memory is not None:
            state.owner_memory.gather(old, comm)

    def _owner_memory(self, state: MeanState, comm: Communicator) -> OwnerMemory | None:
        """Zero memory of the second encoding, if there is one."""
        remembers = _exchange_of(state).has_owners and self.memory is not None
        return OwnerMemory.of(state.wholes, comm.rank, comm.size, state.shares) if remembers else None

    def _memories(self, state: MeanState) -> list[tuple[Memory, Any]]:
        """Each memory with its state: that of the gradients, and that of the second encoding."""
        own = [] if self.memory is None else [(self.memory, state.memory)]
        return own if state.owner_memory is None else [*own, (OWNER_MEMORY, state.owner_memory)]

    def _rule_of_round(
        self, state: MeanState, encoded: NamedTensors, dense: NamedTensors, comm: Communicator, scale: float
    ) -> Callable[[Tensor], Tensor] | None:
        """What makes the messages of all workers, (W, n) and multiplied by the loss scale, the result; None for the mean."""
        rule, rule_state = self.rule, state.rule
        if rule is None or rule_state is None:
            return None
        names, numels = [name for name, _ in [*encoded, *dense]], [t.numel() for _, t in [*encoded, *dense]]
        # Without the rank, so that all workers draw the same numbers.
        seed = Key(state.seed, 0, state.progress.step).mixed()

        def combine(rows: Tensor) -> Tensor:
            rows = rows if scale == 1.0 else rows / scale
            result = rule_state.combine(rule, names, numels, rows, seed, is_scaled=scale != 1.0)
            found = rule_state.judgement
            state.was_not_finite = found is not None and comm.rank in found.not_finite
            return result if scale == 1.0 else result * scale

        return combine

    def _is_dense_round(self, codec: Codec) -> bool:
        """Whether all tensors travel dense in an all-reduce, so that memory can apply momentum to their mean."""
        return codec.traits.lossless and self.traits.has_momentum

    def _split(self, tensors: NamedTensors, codec: Codec) -> tuple[NamedTensors, NamedTensors]:
        """The tensors that are encoded, and those that travel dense."""
        # A codec that sends plain float32 takes all tensors, so that one collective is enough.
        if self._is_dense_round(codec):
            return [], list(tensors)
        min_ndim = 0 if codec.traits.sends_floats else self.min_ndim
        encoded = [pair for pair in tensors if pair[1].ndim >= min_ndim]
        return encoded, [pair for pair in tensors if pair[1].ndim < min_ndim]

    def _compensate(
        self, state: MeanState, codec: Codec, encoded: NamedTensors, scale: float
    ) -> tuple[list[Tensor], Selection | None]:
        """The values to send, and the codec's selection of them if memory made it in the same pass."""
        gradients = [g for _, g in encoded]
        if self.memory is None:
            return gradients, None
        selects = not self._merges and _exchange_of(state).takes_selection
        sparse = codec.traits.sparse if selects else None
        counts = None if sparse is None else sparse.topk_counts([g.numel() for g in gradients])
        x, selection = self.memory.compensate_all(state.memory, encoded, scale, counts)
        return _shaped(x, gradients), selection

    def _masked(self, state: MeanState, encoded: NamedTensors) -> list[Tensor]:
        """The buffers that memory wants zeroed wherever something was sent."""
        if self.memory is None or not self._needs_support:
            return []
        return _shaped([self.memory.masked(state.memory, name) for name, _ in encoded], [g for _, g in encoded])

    def _finish(
        self, state: MeanState, flight: PendingExchange, encoded: NamedTensors, dense: NamedTensors, scale: float
    ) -> None:
        """Wait for the exchange, and write the means into the tensors."""
        complete(flight, state.flights)
        state.flights.remove(flight)
        outs, dense_outs = [t for _, t in encoded], [t for _, t in dense]
        totals, dense_total = result_buffers(outs), torch.zeros_like(flight.job.dense)
        follows = self._follows_line
        # Messages had come before they were decoded, so the time of decoding is subtracted.
        decoded = state.clock.seconds.get("decode", 0.0) if follows else 0.0
        finite = flight.finished(totals, dense_total)
        if follows:
            state.arrived(flight, state.clock.seconds.get("decode", 0.0) - decoded)
        with state.clock("decode"):
            means = split_like(dense_total, dense_outs)
            means = means if self.clip is None else clip_means(self.clip, means, flight.job.comm.size, scale)
            if self.memory is not None:
                for (name, _), total in zip(encoded, totals, strict=True):
                    self.memory.decoded(state.memory, name, total, scale)
                for (name, _), mean in zip(dense, means, strict=True):
                    self.memory.decoded(state.memory, name, mean, scale, encoded=False)
            written = [copy_changed(totals, outs), copy_changed(means, dense_outs)]
            state.finite = kernels.flags.all_of([state.finite, finite, kernels.all_finite([dense_total]), *written])


@dataclass(frozen=True)
class LoneMessages:
    """Messages of a `Mean` that a worker makes without the others, and that are merged in any number.

    Args:
        mean: the averager.
    """

    mean: Mean

    def make(self, state: MeanState, tensors: NamedTensors, comm: Communicator) -> Tensor:
        """Begin a round alone: what `step` would send, (num_bytes,) uint8. `commit` or `discard` ends the round."""
        targets = [(name, t.detach()) for name, t in tensors]
        comm.ledger.count_averaged(sum([t.numel() for _, t in tensors]))
        job, _ = self.mean._job(state, targets, comm, 1.0)
        return pack(job.dense, job.encode(job.tensors, job.keys, job.masked))

    def nbytes(self, tensors: NamedTensors) -> int:
        """The most bytes of a message of these tensors."""
        encoded, dense = self.mean._split(tensors, self.mean.codec)
        shapes, dense_numel = [t.shape for _, t in encoded], sum(t.numel() for _, t in dense)
        return message_nbytes(self.mean.codec, shapes, dense_numel, self.mean._merges)

    def merge(
        self,
        state: MeanState,
        messages: Sequence[Tensor],
        weights: Sequence[float],
        tensors: NamedTensors,
        comm: Communicator,
    ) -> Flag:
        """Overwrite tensors with `sum_i weights[i] decoded(messages[i])`, added in this order; returns whether it is finite."""
        codec, merged = self.mean.codec, self.mean._merges
        encoded, dense = self.mean._split([(name, t.detach()) for name, t in tensors], codec)
        outs, dense_outs = [t for _, t in encoded], [t for _, t in dense]
        totals, dense_total = result_buffers(outs), flatten(dense_outs, tensors[0][1].device).zero_()
        job = Job(comm, codec, state.clock, [], [], [], merged, keep_residual=False, dense=dense_total, scale=1.0)
        finite = job.decode_weighted(messages, weights, totals, dense_total)
        written = [copy_changed(totals, outs), copy_changed(split_like(dense_total, dense_outs), dense_outs)]
        return kernels.flags.all_of([finite, kernels.all_finite([dense_total]), *written])


def _exchange_of(state: MeanState) -> Exchange:
    """The exchange that was chosen."""
    exchange = find_exchange(state.exchange)
    assert exchange is not None, state.exchange
    return exchange


def _shares(state: MeanState, comm: Communicator) -> Shares:
    """Which part of every tensor each worker owns, by the layout of the workers."""
    return comm.layout.shares if comm.layout is not None and _exchange_of(state).has_owners else ()


def _shaped(flat: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    return [x.view_as(t) for x, t in zip(flat, like, strict=True)]
