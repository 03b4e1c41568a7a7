"""Our own buckets and hooks, for modules that are not wrapped in DDP.

Buckets take parameters in reverse order, which is about the order in which their gradients arrive. A bucket is launched
when all of its gradients have been accumulated and all buckets before it have been launched. So all workers launch buckets
in the same order. At the end of backward, the remaining buckets are launched with zeros for missing gradients.

A parameter that was frozen since is sent, because rounds are the same on all workers, but `grad` stays None: with zeros, the
optimizer would still apply decay and momentum.

Gradients of a bucket may come on several streams of a GPU: FSDP reduces on one of its own, and a model may use more. The stream
on which the bucket is launched waits for the others.

Under FSDP the gradient of a parameter is complete when FSDP has reduced it. A loss that also uses the shard itself, such as a
penalty on `model.parameters()`, adds to it by way of autograd, before that or after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from ...algorithm import require
from ...average.base import NamedTensors
from ...streams import note_stream, wait_for_streams
from ..model.models import NamedParameters, values_of
from ..model.shards import is_sharded, local

StartBucket = Callable[[NamedTensors, Tensor, bool, bool], object]
"""Starts to average one bucket: its gradients, a tensor of the bucket, and whether it is the first and the last one."""
# Faster than DDP's 25 MiB, because messages leave earlier (docs/negative-results.md).
BUCKET_BYTES = 10 * 2**20
"""The default size of a bucket."""


class GradientBuckets:
    """Calls `launch` for each bucket of every backward pass, in a fixed order.

    Args:
        parameters: with their names, in the order of the model.
        launch: see `StartBucket`.
        bucket_bytes: a bucket is full as soon as it holds this many bytes; smaller => more messages, sent earlier.
        gathered: the `id`s of parameters whose gradients FSDP reduces.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        launch: StartBucket,
        bucket_bytes: int,
        gathered: Collection[int] = (),
    ):
        require(bucket_bytes > 0, f"bucket_bytes must be positive, got {bucket_bytes}")
        self._launch, self._gathered = launch, gathered
        self._names = {id(p): name for name, p in parameters}
        self._sharded = {id(p) for _, p in parameters if is_sharded(p)}
        self._buckets = _partition(parameters, bucket_bytes)
        self._bucket_of = {id(p): i for i, bucket in enumerate(self._buckets) for _, p in bucket}
        self._syncing = True
        self._graph_task: int | None = None
        # The garbage collector does not see who refers to these hooks, so they refer to the buckets weakly. It sees the other
        # kind of hooks; one of them keeps the buckets alive for as long as the model is.
        on_gradient = partial(_tell, ref(self))
        self._hooks = {id(p): p.register_post_accumulate_grad_hook(on_gradient) for _, p in parameters}
        keep = unserializable_hook(partial(_keep, self))  # without a warning where a model is sent to another process
        self._kept = [p.register_hook(keep) for _, p in parameters[:1]]
        for _, p in parameters:
            # One that had hooks before `swap_tensors` got further ones, and PyTorch would call none of them.
            p._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks
        self._held = [(p, p._cdata) for _, p in parameters if id(p) not in gathered]  # FSDP calls the hooks itself

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which gradients only accumulate."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def rest(self, launched: int) -> list[NamedTensors]:
        """The buckets behind the first ones, with NaN as gradients."""
        return [
            [(name, torch.full_like(values_of(p), math.nan)) for name, p in bucket]
            for bucket in self._buckets[launched:]
        ]

    def require_hooks(self) -> None:
        """Raise a ValueError if a parameter got the contents of another tensor, and so lost its hooks."""
        for p, contents in self._held:
            if p._cdata != contents:
                raise ValueError(
                    f"parameter {self._names[id(p)]!r} was given other contents by torch.utils.swap_tensors, as model.to() "
                    "does to a DTensor, which takes the hooks away that average its gradient; detach(), and attach after "
                    "model.to()"
                )

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in (*self._hooks.values(), *self._kept):
            hook.remove()

    def _on_gradient(self, parameter: Any) -> None:
        key, gradient = id(parameter), parameter.grad
        if key in self._sharded and is_sharded(gradient) and gradient.placements != parameter.placements:
            # A partial sum, for example. Here, where the workers of a replica do it in one order: their buckets may differ.
            parameter.grad = gradient.redistribute(placements=parameter.placements)
        if not self._syncing:
            return
        # A failed backward pass only leaves its number behind, so a new number begins a new round.
        graph_task = torch._C._current_graph_task_id()
        if graph_task == -1:
            raise ValueError(
                f"the gradient of {self._names[key]!r} came outside of a backward pass, as torch.distributed.pipelining gives "
                "it to FSDP; call the schedule's step within no_sync(), and average after it: "
                "torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])"
            )
        if graph_task != self._graph_task:
            self._graph_task = graph_task
            self._missing = [{id(p) for _, p in bucket} for bucket in self._buckets]
            self._streams: list[set[Any]] = [set() for _ in self._buckets]
            self._num_launched = 0
            _at_end(lambda: _at_end(self._finish_backward))  # behind FSDP, which reduces at the end too
        self._launch_complete()
        bucket = self._bucket_of[key]
        note_stream(self._streams[bucket], parameter.device)
        # This runs for each parameter, so messages are built only when they are raised.
        if bucket < self._num_launched:
            raise ValueError(
                f"the gradient of {self._names[key]!r} went on growing after it was sent, as where a loss uses the parameter "
                "inside of the model's forward pass and outside of it; let the part outside have a backward pass of its own "
                "before, within no_sync()"
            )
        if key in self._gathered and _is_accumulated():
            return
        self._missing[bucket].discard(key)
        # Hooks that the user has set since run after this one, and may change the gradient: it leaves with the next one then.
        if next(reversed(parameter._post_accumulate_grad_hooks)) == self._hooks[key].id:
            self._launch_complete()

    def _launch_complete(self) -> None:
        while self._num_launched < len(self._buckets) and not self._missing[self._num_launched]:
            self._launch_next()

    def _launch_next(self) -> None:
        i = self._num_launched
        tensors = []
        wait_for_streams(self._streams[i], self._buckets[i][0][1].device)
        for name, p in self._buckets[i]:
            if p.grad is None and not p.requires_grad:
                tensors.append((name, torch.zeros_like(p)))
                continue
            if p.grad is None:
                if id(p) not in self._missing[i]:
                    raise ValueError(
                        f"a hook took the gradient of {name!r} away before workers have averaged it, and what it made of it is "
                        "each worker's own; use gradients once backward has returned"
                    )
                p.grad = torch.zeros_like(p)
            if p.grad.is_sparse:
                raise ValueError(f"the gradient of {name!r} is sparse; build its embedding with sparse=False")
            # Autograd leaves conjugate and negative views, whose numbers cannot be averaged in place.
            p.grad = p.grad.resolve_conj().resolve_neg()
            held, expected = local(p.grad).shape, local(p).shape
            if held != expected:
                raise ValueError(
                    f"the gradient of {name!r} is laid out differently from the parameter: this worker holds {tuple(held)} of "
                    f"the one and {tuple(expected)} of the other; redistribute the gradient like the parameter"
                )
            tensors.append((name, p.grad))
        self._num_launched += 1
        self._launch(tensors, local(tensors[0][1]), i == 0, i == len(self._buckets) - 1)

    def _finish_backward(self) -> None:
        require(
            torch._C._current_autograd_node() is None,
            "a part of the model runs a backward pass of its own inside of another one, such as by checkpoint(..., "
            "use_reentrant=True), which would be averaged apart; set use_reentrant=False, or wrap the model in "
            "DistributedDataParallel",
        )
        while self._num_launched < len(self._buckets):
            self._launch_next()


def _tell(buckets: ref[GradientBuckets], parameter: Tensor) -> None:
    found = buckets()
    if found is None:
        raise ValueError(
            "Gradients: the program has kept neither the strategy nor the first parameter of its model, so that nothing would "
            "average the gradients of the others; keep what attach() returns"
        )
    found._on_gradient(parameter)


def _keep(buckets: GradientBuckets, gradient: Tensor) -> None:
    """A hook that does nothing."""


def _at_end(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _is_accumulated() -> bool:
    """Whether autograd itself calls the hook of a parameter, and not FSDP."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _partition(parameters: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[NamedParameters]:
    """A bucket is full as soon as it holds `bucket_bytes`, as in DDP, so that biases travel with a weight."""
    buckets: list[NamedParameters] = []
    free_bytes = 0
    for name, p in reversed(parameters):
        if free_bytes <= 0:
            buckets.append([])
            free_bytes = bucket_bytes
        buckets[-1].append((name, p))
        free_bytes -= local(p).numel() * p.element_size()
    return buckets
