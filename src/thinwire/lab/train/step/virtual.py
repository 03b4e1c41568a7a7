"""Virtual seconds of a run: what its steps would take on a modelled network (`--network`).

The averager's communicator is traced (`TracedCommunicator`). Computation is the processor time of the steps'
threads; or, with `--compute`, the declared seconds: a third passes in forward, and the rest in backward, in proportion to
the parameters as their gradients come. Then encoding and decoding take no time, and runs repeat exactly. Loading data,
tests, rows and checkpoints take no virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ....algorithm import require
from ....comm import Communicator
from ....plan import Network, TracedCommunicator
from ....plan.predict import FORWARD_SHARE
from ....plan.trace import Trace
from ..config import RunConfig


class VirtualTime:
    """The virtual clock of one worker's run. Without a network it does nothing.

    Args:
        network: the modelled network.
        compute_seconds: of a batch's forward and backward; None measures processor time.
    """

    def __init__(self, network: Network | None = None, compute_seconds: float | None = None):
        self.network, self._compute_seconds = network, compute_seconds
        self._comm: TracedCommunicator | None = None
        self._numel = 0

    @classmethod
    def of(cls, config: RunConfig, model: nn.Module, device: torch.device) -> VirtualTime:
        """The virtual time of a run; call it before the averager is attached to the model.

        Raises:
            ValueError: the computation is on a GPU, and was not declared.
        """
        # The option is for a whole step.
        virtual = cls(config.parsed_network(), None if config.compute is None else config.compute / config.accumulate)
        require(
            virtual.network is None or config.compute is not None or device.type == "cpu",
            "--network cannot measure the computation of a GPU; declare it with --compute SECONDS",
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        virtual._numel = sum(p.numel() for p in trained)
        if config.compute is not None:
            for p in trained:
                # Before the hook that sends, because hooks run in the order of their registration.
                p.register_post_accumulate_grad_hook(virtual._pass_backward)
        return virtual

    def begin(self, comm: Communicator, side: Communicator, start_seconds: float) -> None:
        """Start the clock.

        Args:
            comm: the averager's communicator.
            side: another one, for reading the clock.
            start_seconds: of the run before a resume.
        """
        if self.network is not None:
            assert isinstance(comm, TracedCommunicator), "`attach` has opened it"
            self._comm = comm
            comm.start(side, start_seconds)

    @property
    def _trace(self) -> Trace | None:
        return None if self._comm is None else self._comm.trace

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a training step: its processor time counts."""
        if self._trace is not None:
            # What came since the last step, such as a test, takes no virtual time.
            self._trace.skip()
        yield
        if self._trace is not None:
            self._trace.charge()
            self._trace.skip()

    def pass_forward(self) -> None:
        """A forward pass was done."""
        self._pass(FORWARD_SHARE)

    def seconds(self) -> float | None:
        """Virtual seconds so far, of the slowest worker; None without a network. All workers call it, between steps."""
        if self._comm is None or self._trace is None:
            return None
        self._trace.skip()
        return self._comm.virtual_seconds()

    def _pass_backward(self, parameter: Tensor) -> None:
        self._pass((1 - FORWARD_SHARE) * parameter.numel() / self._numel)

    def _pass(self, share: float) -> None:
        if self._comm is not None and self._compute_seconds is not None:
            self._comm.compute(share * self._compute_seconds)
