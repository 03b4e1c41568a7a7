"""Encoded communication inside one sharded model: what FSDP gathers and reduces.

FSDP gathers a module's parameters before its forward and its backward pass, and reduces and scatters its gradients after the
backward pass. Both calls of a module go through the objects that `set_custom_all_gather` and `set_custom_reduce_scatter`
take. Here they encode:

    all-gather       every worker encodes its shard, sends the payload to all others, and decodes all payloads, its own too,
                     so that all workers compute with the same parameters. The shards themselves stay exact.
    reduce-scatter   every worker encodes the shard of each other worker, and sends it there (all-to-all). A worker decodes and
                     adds what it got in one pass, in rank order.

Random numbers. The forward and the backward pass of a step gather the same bits: the key of a module's parameters counts its
reduce-scatters before its last forward pass, encoded or dense. So every step rounds with new random numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ... import debug
from ...algorithm import require
from ...clock import Clock
from ...codec import QSGD, Codec, Key
from ...comm import Communicator, Ledger, ProcessGroupCommunicator
from ...comm.check import announced_sizes
from ...comm.dense import gather_shards, reduce_scatter_shards
from ...options import require_kind
from ..attached import SHARDED
from ..base import Attachment
from ..model.models import require_steps_on
from ..model.optimizer_step import Arguments
from ..model.own_gradients import OwnGradients
from ..model.shards import Replica, reshard, trained
from ..nonfinite import Looks, NonfiniteSteps, look_at
from ..strategy import Runtime, Strategy


class ShardCompression(Attachment):
    """What `Shards` attaches: the encoded communication of one model under `fully_shard`.

    Attributes:
        parameters: with their names.
        clock: times the phases.
        is_detached: whether collectives are dense again.
    """

    call = "Shards"

    def __init__(self, strategy: Shards, model: nn.Module, seed: int):
        modules = reshard(model)
        require(bool(modules), f"{self.call}: no part of the model is under fully_shard; shard it first")
        self.strategy, self._seed = strategy, seed
        self.clock, self.is_detached = Clock(), False
        self._comm: ProcessGroupCommunicator | None = None
        self._nonfinite = NonfiniteSteps(self.call, strategy.on_nonfinite, strategy.max_nonfinite)
        self._shards, self.parameters = Replica(self.call, model), list(model.named_parameters())
        self._own_gradients: OwnGradients | None = None
        self._looks: Looks = []
        SHARDED.register(self)
        names = {id(module): name for name, module in model.named_modules()}
        self._wires = [_Wire(self, names[id(module)]) for module in modules]
        for module, wire in zip(modules, self._wires, strict=True):
            if strategy.parameters is not None:
                module.set_custom_all_gather(_AllGather(wire))
            module.set_custom_reduce_scatter(_ReduceScatter(wire))  # also where it stays dense: it counts steps
            if strategy.gradients is not None:
                module.set_force_sum_reduction_for_comms(True)  # FSDP divides, by the factor that the user chose

    @property
    def ledger(self) -> Ledger:
        """The bytes that this worker sent and received, and what the same collectives would have sent dense.

        An empty one until the first forward pass connects the workers, and for a single worker.
        """
        return Ledger(1) if self._comm is None else self._comm.ledger

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds so far by phase: encode, wait, decode."""
        return self.clock.seconds

    def state_dict(self) -> dict[str, Any]:
        """How many steps each module has made, from which random numbers follow. The same on all workers."""
        return {wire.name: wire.step for wire in self._wires}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on any number of workers.

        Raises:
            ValueError: it is of a model with other modules under `fully_shard`.
        """
        differing = sorted(saved.keys() ^ {wire.name for wire in self._wires})
        require(
            not differing, f"{self.call}: the saved state does not fit: modules {differing[:5]} are only in one of them"
        )
        for wire in self._wires:
            wire.step = saved[wire.name]

    def detach(self) -> None:
        """Go on with FSDP's own dense collectives. Calling it again does nothing.

        While an exception propagates, as in a `finally`, it waits for no other worker.
        """
        self.is_detached = True
        SHARDED.release(self)
        waits = sys.exc_info()[1] is None
        self._shards.close(waits)
        if self._comm is not None:
            self._comm.close() if waits else self._comm.abandon()

    # ---- steps that are not finite ----

    def before_step(self, optimizer: Optimizer, arguments: Arguments) -> Arguments:
        """Called by the hook of `attached.py` before each step of an optimizer over these parameters."""
        if self._own_gradients is None:
            self._shards.connect_replica()
            rank = self._comm.rank if self._comm else 0  # FSDP of a single worker calls no collective
            self._own_gradients = OwnGradients(self._nonfinite, rank, self.parameters, self._shards)
        self._own_gradients.looks, self._looks = self._looks, []
        return self._own_gradients.guard(optimizer, arguments)

    def note(self, wire: _Wire, gradient: Tensor) -> None:
        """Note whether a module's own gradient is finite, if the next step that is not so is an error."""
        if self._nonfinite.is_last_chance:
            self._looks += look_at([(f"gradient of the module {wire.name!r}", gradient)])

    # ---- what the collectives use ----

    def connected(self, group: Any, device: torch.device) -> ProcessGroupCommunicator:
        """The communicator over FSDP's group, made by the first collective."""
        if self._comm is None:
            self._comm = ProcessGroupCommunicator(group, device=device)
            self.clock.device = device
            self._comm.check_agreement(self.strategy.options() | {"seed": self._seed} | trained(self.parameters))
        require(
            torch.distributed.get_process_group_ranks(group) == self._comm.global_ranks,
            f"{self.call}: modules are sharded over different groups, or gathered over a part of one; use one mesh for all of "
            "them, and no number as reshard_after_forward",
        )
        return self._comm

    def key(self, wire: _Wire, codec: Codec, what: str, rank: int, step: int) -> Key:
        """The key of what worker `rank` encodes; the same for all workers where the codec asks for it."""
        return Key.of(self._seed, f"{what} {wire.name}", 0 if codec.traits.shared_key else rank, step)


class _Wire:
    """What the collectives of one module share.

    Attributes:
        step: how many reduce-scatters it has made.
        forward_step: how many it had made when its last forward pass gathered.
    """

    def __init__(self, owner: ShardCompression, name: str):
        self.owner, self.name, self.step, self.forward_step = owner, name, 0, 0


class _Collective:
    """What FSDP asks of the collectives that replace its own."""

    def __init__(self, wire: _Wire):
        self._wire = wire

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of FSDP, which it writes itself."""
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_Collective):
    """What `set_custom_all_gather` takes: fills the output with the decoded shards of all workers, in rank order.

    This worker's shard may lie in the output.
    """

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        owner, codec = self._wire.owner, self._wire.owner.strategy.parameters
        if owner.is_detached:
            return gather_shards(output_tensor, input_tensor, group=group, async_op=async_op)
        assert codec is not None
        comm = owner.connected(group, input_tensor.device)
        comm.ledger.count_averaged(output_tensor.numel() // 2)  # an all-gather sends half of an all-reduce
        parts = output_tensor.view(comm.size, -1)
        if not input_tensor.is_floating_point():  # several dtypes in one module: FSDP gathers bytes
            # A copy, because the shard may lie in the output, which is overwritten.
            for part, whole in zip(parts, comm.all_gather(input_tensor.clone()).wait(), strict=True):
                part.copy_(whole)
            return None
        if torch._C._current_graph_task_id() == -1:  # outside of a backward pass
            self._wire.forward_step = self._wire.step
        step = self._wire.forward_step
        keys = [owner.key(self._wire, codec, "parameters", rank, step) for rank in range(comm.size)]
        with owner.clock("encode"):
            payload = codec.encode(input_tensor, keys[comm.rank])
        with owner.clock("wait"):
            # The limit bounds the memory that an announced size can take.
            limit = codec.nbytes(input_tensor.numel())
            payloads = comm.all_gather(payload, variable=not codec.traits.fixed_size, limit=limit).wait()
        with owner.clock("decode"):
            for part, received, key in zip(parts, payloads, keys, strict=True):
                _decode(codec, [received], part, key)
        return None


class _ReduceScatter(_Collective):
    """What `set_custom_reduce_scatter` takes: the output becomes the sum over all workers of this worker's shard."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        owner, codec = self._wire.owner, self._wire.owner.strategy.gradients
        owner.note(self._wire, input_tensor)
        if owner.is_detached or codec is None:
            self._wire.step += 1
            return reduce_scatter_shards(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        comm = owner.connected(group, input_tensor.device)
        comm.ledger.count_averaged(input_tensor.numel() // 2)
        key = owner.key(self._wire, codec, "gradients", comm.rank, self._wire.step)
        with owner.clock("encode"):
            keys = [key._replace(step=key.step * comm.size + r) for r in range(comm.size)]  # of each shard
            parts = input_tensor.view(comm.size, -1)
            messages = [codec.encode(part, part_key) for part, part_key in zip(parts, keys, strict=True)]
        with owner.clock("wait"):
            sizes = None if codec.traits.fixed_size else _sizes(comm, messages, codec.nbytes(output_tensor.numel()))
            received = comm.all_to_all(messages, sizes).wait()
        with owner.clock("decode"):
            _decode(codec, received, output_tensor, keys[comm.rank])
        self._wire.step += 1
        return None


def _decode(codec: Codec, payloads: Sequence[Tensor], out: Tensor, key: Key) -> None:
    """Overwrite `out`, of any float dtype, by the sum of the payloads."""
    # Codecs write contiguous float32 only.
    is_direct = out.dtype == torch.float32 and out.is_contiguous()
    buffer = out if is_direct else debug.empty(out.numel(), dtype=torch.float32, device=out.device)
    codec.decode_sum(payloads, buffer, 1.0, key)
    if not is_direct:
        out.copy_(buffer)


def _sizes(comm: Communicator, messages: list[Tensor], limit: int) -> list[int]:
    """Bytes of what each worker sends to this one, at most `limit` each; more is a `CommunicationError`."""
    lengths = torch.tensor([m.numel() for m in messages], device=messages[0].device)
    return announced_sizes(torch.cat(comm.all_to_all(list(lengths.split(1))).wait()).tolist(), limit)


@dataclass(frozen=True, repr=False)
class Shards(Strategy[ShardCompression]):
    """Encode what FSDP sends between the shards of one model: gradients when it reduces them, parameters when it gathers them.

        shard r of the gradient    g_r <- 1/W sum_i C_g(g_i,r)        reduce-scatter
        gathered parameters        x   <- (C_p(x_1), ..., C_p(x_W))   all-gather, before forward and before backward

    Attach it after `fully_shard`; it needs no optimizer, and communicates over the mesh of the model. Optimizers, checkpoints
    and clipping see exact shards; only what travels is encoded. The gradient is unbiased at the parameters that the forward
    pass has used. What is encoded is float32, so a model in float64 loses digits. In the first forward pass all workers
    compare options, seeds and which parameters are trained.

    Bytes sent per worker and module, n elements: `(W-1)/W (n_g + n_p)`, where n_g and n_p are the bytes of the encoded n
    elements; n_p twice if FSDP gathers again before backward (`reshard_after_forward`). Dense, n_g = n_p = 4n in float32.
    The ledger's dense bytes are those of the same collectives.

    Attached, it has `ledger`, `seconds`, `num_skipped`, `state_dict`, `load_state_dict` and `detach`.

    Args:
        gradients: an unbiased codec, such as `QSGD(bits=4)`; None leaves gradients to FSDP.
        parameters: a codec such as `QSGD(bits=8)`; fewer bits => fewer bytes, more noise in the weights; None leaves them to
            FSDP.
        on_nonfinite: what to do if a gradient is infinite or NaN on any worker. "skip": no optimizer updates these parameters,
            on any worker. "raise": `optimizer.step()` raises on all workers. "apply": nothing.
        max_nonfinite: with "skip", how many such steps in a row are an error.

    Raises:
        ValueError: a codec does not suit, or a value out of range. When it is attached: no part of the model is under
            `fully_shard`, another `Shards` is attached to it, or the optimizer has none of its parameters. In the first
            forward pass: options, seeds or frozen parameters differ.

    Source: Wang et al. 2023, ZeRO++, arXiv 2306.10209; Markov et al. 2023, QSDP, arXiv 2302.02390.

    Example:
        >>> import thinwire as tw
        >>> # fully_shard(model, mesh=mesh)
        >>> # handle = tw.attach(model, optimizer, tw.Shards(gradients=tw.QSGD(bits=4), parameters=tw.QSGD(bits=8)))
        >>> tw.attach(torch.nn.Linear(2, 2), None, tw.Shards(parameters=None))
        Traceback (most recent call last):
        ValueError: Shards: no part of the model is under fully_shard; shard it first
    """

    gradients: Codec | None = QSGD(bits=4)
    parameters: Codec | None = QSGD(bits=8)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, codec in (("gradients", self.gradients), ("parameters", self.parameters)):
            require_kind(f"Shards: {name}", codec, Codec, "a codec such as QSGD(bits=8)", or_none=True)
            if codec is not None:
                codec.traits.check(codec, f"Shards({name}=...)", carries=("shared_key",))
        self._require(
            self.gradients is None or self.gradients.traits.unbiased,
            f"gradients={self.gradients} is biased, and there is no memory for what it loses, as that would have the "
            "size of the whole model; use an unbiased codec, such as QSGD(bits=4)",
        )

    def _attached(self, model: nn.Module, optimizer: Optimizer | None, runtime: Runtime) -> ShardCompression:
        alone = runtime.comm is None and runtime.replicas is None and runtime.layout is None
        self._require(alone, "it communicates over the model's mesh; leave comm, replicas and layout out")
        if optimizer is not None:
            require_steps_on("Shards", optimizer, model)
        return ShardCompression(self, model, runtime.seed)


def compress_shards(model: nn.Module, *, seed: int = 0, **options: Any) -> ShardCompression:
    """Attach `Shards(**options)` to a model under `fully_shard`. See `attach` for the arguments.

    Example:
        >>> import thinwire as tw
        >>> tw.compress_shards(torch.nn.Linear(2, 2), parameters=None)
        Traceback (most recent call last):
        ValueError: Shards: no part of the model is under fully_shard; shard it first
    """
    return Shards(**options).attach(model, seed=seed)
