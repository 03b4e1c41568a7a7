"""The least time that a training step needs: its computation, its bytes over the line, and its passes over memory.

    line      bytes of a step / rate of the line, as measured with all workers sending
    memory    passes over the model, at the speed of a copy, which is two passes: a read and a write
    step      computation + max(line, memory)     where messages fly only while the training waits
              max(line, computation + memory)     where they fly while it goes on; a worker has one core

A round must read and write what it averages, and what it remembers of it, such as an error-feedback memory or an anchor. So it
takes at least `2 (1 + remembered / averaged)` passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import Communicator
from ...plan.measure import measure_together
from .parts import seconds_of

LARGE_BYTES, REPETITIONS = 1_000_000, 7


@dataclass(frozen=True)
class Machine:
    """How fast line and memory are: bytes per second that a worker sends while all send, and seconds of one pass."""

    line_bytes_per_second: float
    pass_seconds: float

    @classmethod
    def measured(cls, comm: Communicator, num_elements: int, device: torch.device) -> Machine:
        """Measure the line, and passes over so many float32 values on `device`; all workers call it and get the same."""
        lines = measure_together(comm, REPETITIONS, LARGE_BYTES).bytes_per_second if comm.size > 1 else inf
        return cls(lines, max(comm.gather_objects(_copy_seconds(num_elements, device))) / 2)


@dataclass(frozen=True)
class Floor:
    """The least seconds of a step: of its bytes on the line, of its passes over memory, and of all of it.

    Example:
        >>> Floor.of(Machine(1e8, 0.01), 0.1, num_bytes=2e7, passes=2, is_concurrent=False)
        Floor(line_seconds=0.2, memory_passes=2, memory_seconds=0.02, floor_seconds=0.30000000000000004)
    """

    line_seconds: float
    memory_passes: float
    memory_seconds: float
    floor_seconds: float

    @classmethod
    def of(
        cls, machine: Machine, compute_seconds: float, num_bytes: float, passes: float, is_concurrent: bool
    ) -> Floor:
        """The floor of a step.

        Args:
            machine: as measured.
            compute_seconds: of the step's computation alone.
            num_bytes: that a worker sends in a step, or receives if that is more.
            passes: over the model in a step, each a read or a write.
            is_concurrent: whether messages fly while the training goes on.
        """
        line, memory = num_bytes / machine.line_bytes_per_second, passes * machine.pass_seconds
        least = max(line, compute_seconds + memory) if is_concurrent else compute_seconds + max(line, memory)
        return cls(line, passes, memory, least)


def passes_of(model: nn.Module, state: Any, every: int = 1) -> float:
    """The least passes over the model's trainable parameters in a step.

    Args:
        model: whose parameters or gradients are averaged.
        state: what the strategy remembers of them: its `state_dict`, None for nothing.
        every: steps from one round to the next.

    Example:
        >>> passes_of(nn.Linear(2, 2), {"error": {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}})
        4.0
    """
    averaged = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return 2 * (1 + sum(t.numel() for t in _tensors(state)) / averaged) / every


def _tensors(state: Any) -> Iterator[Tensor]:
    """The tensors of floating-point numbers in nested dictionaries and sequences."""
    if isinstance(state, Tensor):
        if state.is_floating_point():
            yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)


def _copy_seconds(num_elements: int, device: torch.device) -> float:
    source, target = torch.ones(num_elements, device=device), torch.zeros(num_elements, device=device)
    return median(seconds_of(lambda: target.copy_(source), device) for _ in range(REPETITIONS))
