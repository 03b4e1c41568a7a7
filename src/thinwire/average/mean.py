"""The mean of all workers, encoded: one exchange, the same bits everywhere.

The path of a gradient through `step` and `wait`:

    0. adapt        at some rounds: fit levels to the gradients     codec, workers together
    1. compensate   clip; add what earlier steps lost               clip, memory
    2. encode       floats -> bytes                                 codec
    3. exchange     the bytes meet                                  exchange/, communicator
    4. decode       bytes -> floats, added in rank order            codec
    5. commit       keep what this step lost, if all was finite     memory
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import debug, kernels
from ..algorithm import require
from ..clock import Clock
from ..codec import Codec, Identity, Key, Selection
from ..comm import Communicator, Handle
from ..memory import Memory
from ..schedule import Progress, resolve
from .base import Averager, NamedTensors, check_agreement
from .clip import Clip, clip_gradients
from .exchange import (
    EXCHANGES,
    ONE_STEP,
    OWNER_MEMORY,
    Finish,
    Job,
    Load,
    Observe,
    agree_on_nodes,
    agreed_all_reduce,
    cheapest,
    flatten,
    init_owner_memory,
    launched_nodes,
    split_like,
)

_GRANULARITIES = ("layer", "bucket", "model")


@dataclass
class MeanState:
    """What changes while `Mean` runs; and what `init` has chosen for good, `exchange` and `workers_per_node`."""

    seed: int
    memory: Any
    exchange: str
    workers_per_node: int = 1
    owner_memory: Any = None
    codec: Any = None
    progress: Progress = Progress()
    finite: bool = True
    clock: Clock = field(default_factory=Clock)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, keyed by parameter name; it differs between workers, so each saves its own."""
        memories = {name: None if m is None else m.state_dict() for name, m in self._memories().items()}
        return {"step": self.progress.step, "epoch": self.progress.epoch} | memories

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, memory in self._memories().items():
            require(
                (saved[name] is None) == (memory is None),
                f"only one of the saved state and this averager has {name}; use the averager it was saved with, on as "
                "many workers",
            )
            if memory is not None:
                memory.load_state_dict(saved[name])
        self.progress = Progress(saved["step"], saved["epoch"])

    def _memories(self) -> dict[str, Any]:
        return {"memory": self.memory, "owner_memory": self.owner_memory, "codec": self.codec}


@dataclass(frozen=True, repr=False)
class Mean(Averager):
    """Every worker gets `1/W sum_i C(x_i + e_i)`, bit for bit the same.

    Args:
        codec: what crosses the wire.
        memory: what happens to what was lost, such as `ErrorFeedback()`; None forgets it.
        granularity: what is encoded as one: each tensor ("layer"), all tensors of one call ("bucket", under DDP one of
            its buckets), or all tensors of the model ("model", which leaves nothing to overlap with the backward pass).
        exchange: "all_reduce", "all_gather", "scatter_reduce", "hierarchical", or "auto": the cheapest of those that
            suit. For unbiased codecs on 5 workers or more that may be "scatter_reduce", which encodes the mean a second
            time. `docs/algorithms.md` gives the rule, and steps and bytes for each.
        min_ndim: tensors of fewer dimensions travel dense as float32; higher => more travels dense. The default of 2
            spares biases and norms, as Deep Gradient Compression does; 0 encodes everything.
        workers_per_node: how many consecutive ranks share a fast node, for "hierarchical" and "auto". None takes what
            the launcher says in LOCAL_WORLD_SIZE; "auto" uses it where all nodes have equally many workers.

        clip: how each worker clips its own gradients first: `ClipByNorm`, `ClipByValue`, `ClipValueByGlobalNorm`, or None.

    Raises:
        ValueError: an unknown word, an all-reduce of payloads that cannot be added, or workers that cannot be split
            into such nodes.

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

    def __post_init__(self):
        require(isinstance(self.codec, Codec), f"Mean: codec must be a codec such as TopK(0.01), got {self.codec!r}")
        require(
            self.memory is None or isinstance(self.memory, Memory),
            f"Mean: memory must be a memory such as ErrorFeedback() or None, got {self.memory!r}",
        )
        require(
            self.clip is None or isinstance(self.clip, Clip),
            f"Mean: clip must be a clip such as ClipByNorm(1.0) or None, got {self.clip!r}",
        )
        for name, allowed in (("granularity", _GRANULARITIES), ("exchange", ("auto", *EXCHANGES))):
            value = getattr(self, name)
            require(value in allowed, f"Mean: {name} must be one of {', '.join(allowed)}, got {value!r}")
        require(
            self.exchange != "all_reduce" or self.codec.summable or self.codec.agreement is not None,
            f"Mean: payloads of {self.codec} cannot be added on the wire; use exchange='all_gather' or 'auto'",
        )
        require(
            isinstance(self.min_ndim, int) and self.min_ndim >= 0,
            f"Mean: min_ndim must be an integer, 0 or more, got {self.min_ndim!r}",
        )
        nodes = self.workers_per_node
        require(
            nodes is None or (isinstance(nodes, int) and nodes >= 1),
            f"Mean: workers_per_node must be a positive integer or None, got {nodes!r}",
        )
        require(
            nodes is None or self.exchange in ("auto", "hierarchical"),
            f"Mean: workers_per_node={nodes} means nothing to exchange={self.exchange!r}; use 'hierarchical' or 'auto'",
        )

        require(
            self.memory is None or not self.memory.needs_support or (self.exchange != "hierarchical" and nodes is None),
            f"Mean: with exchange='hierarchical' a worker does not learn which coordinates its node sent, and "
            f"{self.memory} needs to; use masking=False, or another exchange",
        )

    @property
    def whole_model(self) -> bool:
        return self.granularity == "model" or (self.clip is not None and self.clip.needs_norms)

    @property
    def has_momentum(self) -> bool:
        return self.memory is not None and self.memory.has_momentum

    @property
    def suits_parameters(self) -> bool:
        return self.codec.lossless and self.memory is None

    def sends_at_once(self, state: MeanState) -> bool:
        return state.exchange in ONE_STEP and self.codec.agreement is None

    def init(self, tensors: NamedTensors, comm: Communicator, seed: int = 0) -> MeanState:
        check_agreement(self, tensors, comm, seed)
        encoded, dense = self._split(tensors, self.codec)
        memory = None if self.memory is None else self.memory.init(encoded, dense, comm.size)
        state = MeanState(seed, memory, *self._choose(tensors, comm))
        if state.exchange == "scatter_reduce" and self.memory is not None:
            state.owner_memory = init_owner_memory(self.codec, encoded, comm)
        part = self.codec.adaptive_part
        state.codec = None if part is None else part.init_state()
        return state

    def _choose(self, tensors: NamedTensors, comm: Communicator) -> tuple[str, int]:
        """The exchange of this run, and the workers of a node: chosen once, for all rounds and buckets alike."""
        needs_nodes = self.exchange == "hierarchical" or self.workers_per_node is not None
        nodes = agree_on_nodes(self.workers_per_node, comm) if needs_nodes else 1
        if self.exchange != "auto":
            return self.exchange, nodes
        if self.codec.agreement is not None:
            return "all_reduce", nodes
        if not needs_nodes and (self.memory is None or not self.memory.needs_support):
            nodes = launched_nodes(comm)
        encoded, dense = self._split(tensors, self.codec)
        load = Load(
            codec=resolve(self.codec, Progress()),
            shapes=tuple(t.shape for _, t in encoded),
            dense_numel=sum(t.numel() for _, t in dense),
            size=comm.size,
            workers_per_node=nodes,
            merged=self.granularity != "layer",
        )
        return cheapest(load), nodes

    def step(self, state: MeanState, tensors: NamedTensors, comm: Communicator, scale: float = 1.0) -> Handle:
        observe = self._adapt(state, tensors, comm)
        codec = self.current_codec(state)
        targets = [(name, t.detach()) for name, t in tensors]
        comm.ledger.add_dense(sum(t.numel() for _, t in tensors))

        with state.clock("compensate"):
            clipped = targets if self.clip is None else clip_gradients(self.clip, targets, comm, scale)
            encoded, dense = self._split(clipped, codec)
            x, selection = self._compensate(state, codec, encoded, scale)
        job = Job(
            comm=comm,
            codec=Identity() if self._is_dense_round(codec) else codec,
            clock=state.clock,
            tensors=x,
            names=[name for name, _ in encoded],
            keys=[_key(state, name, 0 if self.codec.shared_key else comm.rank) for name, _ in encoded],
            merged=self.granularity != "layer",
            keep_residual=self.memory is not None,
            dense=flatten([g for _, g in dense], tensors[0][1].device),
            # What memory keeps is unscaled, and so is what was sent from it; the result leaves as the gradients came.
            # A vote has a size of its own.
            scale=scale if self.memory is not None or self.codec.votes else 1.0,
            owner_memory=state.owner_memory,
            workers_per_node=state.workers_per_node,
            masked=self._masked(state, encoded),
            selection=selection,
            observe=observe,
        )
        exchange = "all_reduce" if self._is_dense_round(codec) else state.exchange
        agree = job.codec.agreement is not None and exchange == "all_reduce"
        finish = agreed_all_reduce(job) if agree else EXCHANGES[exchange](job)
        return Handle(lambda: self._finish(state, job, finish, *self._split(targets, codec), scale))

    def current_codec(self, state: MeanState) -> Codec:
        codec = resolve(self.codec, state.progress)
        return codec if state.codec is None else codec.adapted(state.codec)

    def _adapt(self, state: MeanState, tensors: NamedTensors, comm: Communicator) -> Observe | None:
        """Update a codec that adapts where a round begins for which it is due; return how to show it this round."""
        part, step, device = self.codec.adaptive_part, state.progress.step, tensors[0][1].device
        if part is None:
            return None
        if part.is_due(state.codec, step):
            with state.clock("adapt"):
                statistics = comm.all_gather(part.statistics(state.codec).to(device)).wait()
                learned = part.learn(state.codec, statistics).to(device)
                part.adopt(state.codec, comm.broadcast(learned).wait(), step)
        if not part.observes(step):
            return None
        return lambda codec, segments, keys: part.observe(state.codec, codec.reaching(segments, keys), keys)

    def commit(self, state: MeanState) -> bool:
        finite = state.finite
        for memory, memory_state in self._memories(state):
            (memory.commit if finite else memory.discard)(memory_state)
        state.progress = state.progress._replace(step=state.progress.step + 1)
        state.finite = True
        return finite

    def discard(self, state: MeanState) -> None:
        for memory, memory_state in self._memories(state):
            memory.discard(memory_state)
        state.finite = True

    def _memories(self, state: MeanState) -> list[tuple[Memory, Any]]:
        pairs = [(self.memory, state.memory), (OWNER_MEMORY, state.owner_memory)]
        return [(memory, memory_state) for memory, memory_state in pairs if memory_state is not None]

    def _is_dense_round(self, codec: Codec) -> bool:
        """Whether all tensors travel dense, added on the wire, so that momentum is applied to the mean."""
        return self.has_momentum and codec.lossless

    def _split(self, tensors: NamedTensors, codec: Codec) -> tuple[NamedTensors, NamedTensors]:
        """Those that are encoded, and those that travel dense."""
        # Identity sends float32 either way: one collective serves for all.
        min_ndim = 0 if codec.sends_floats else self.min_ndim
        is_encoded = [not self._is_dense_round(codec) and t.ndim >= min_ndim for _, t in tensors]
        parts = list(zip(tensors, is_encoded, strict=True))
        return [pair for pair, yes in parts if yes], [pair for pair, yes in parts if not yes]

    def _compensate(
        self, state: MeanState, codec: Codec, encoded: NamedTensors, scale: float
    ) -> tuple[list[Tensor], Selection | None]:
        """What should be sent; and what the codec will select of it, where memory finds that in the same pass."""
        if self.memory is None:
            return [t for _, t in encoded], None
        names, gradients = [name for name, _ in encoded], [g for _, g in encoded]
        counts = codec.topk_counts([g.numel() for g in gradients])
        if counts and self.granularity == "layer" and state.exchange == "all_gather":
            fused = self.memory.compensate_topk(state.memory, names, gradients, scale, counts)
            if fused is not None:
                x, selected = fused
                return _shaped(x, gradients), Selection(*selected, counts)
        x = [self.memory.compensate(state.memory, name, g, scale) for name, g in encoded]
        return _shaped(x, gradients), None

    def _masked(self, state: MeanState, encoded: NamedTensors) -> list[Tensor]:
        if self.memory is None or not self.memory.needs_support:
            return []
        return [self.memory.masked(state.memory, name).view(g.shape) for name, g in encoded]

    def _finish(
        self, state: MeanState, job: Job, finish: Finish, encoded: NamedTensors, dense: NamedTensors, scale: float
    ) -> None:
        """Add up what came, and put it where it belongs."""
        outs, dense_outs = [t for _, t in encoded], [t for _, t in dense]
        totals, dense_total = _accumulators(outs), torch.zeros_like(job.dense)
        finite = finish(totals, dense_total)
        with state.clock("decode"):
            means = split_like(dense_total, dense_outs)
            if self.memory is not None:
                for (name, _), total in zip(encoded, totals, strict=True):
                    self.memory.decoded(state.memory, name, total, scale)
                for (name, _), mean in zip(dense, means, strict=True):
                    self.memory.decoded(state.memory, name, mean, scale, encoded=False)
            _store(totals, outs)
            _store(means, dense_outs)
            state.finite = state.finite and finite and kernels.all_finite([dense_total])


def _key(state: MeanState, name: str, rank: int) -> Key:
    """Random numbers of this tensor on this worker in this step, whatever bucket it lies in.

    Under a `shared_key` all workers draw those of rank 0.
    """
    return Key(state.seed, zlib.crc32(name.encode()) | rank << 32, state.progress.step)


def _accumulators(tensors: list[Tensor]) -> list[Tensor]:
    """Where to add up: the tensors themselves where that is possible, else new memory."""
    in_place = [t.dtype == torch.float32 and t.is_contiguous() for t in tensors]
    return [t if here else debug.empty(*t.shape, device=t.device) for t, here in zip(tensors, in_place, strict=True)]


def _shaped(flat: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    return [x.view(t.shape) for x, t in zip(flat, like, strict=True)]


def _store(results: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy results into the tensors, where they are not there already."""
    for result, t in zip(results, tensors, strict=True):
        if result.data_ptr() != t.data_ptr():
            t.copy_(result)
