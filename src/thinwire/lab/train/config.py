"""The configuration of a training run: a frozen dataclass that the command line, recipes and saved runs share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro

from ...algorithm import require
from ...attaching import strategy_of
from ...comm.addresses import parse_address
from ...comm.transport import Transport
from ...kernels.parallel import MOST_THREADS
from ...options import require_integer, require_number
from ...plan import Link, Network
from ...strategy import AveragerAttachment, Averaging
from .data import Data, Digits
from .loss import CrossEntropy, Loss
from .models import GPT, DigitsNet, Model
from .optimize import SGD, Optimizer

PARTS: dict[str, type[Any]] = {"data": Data, "model": Model, "loss": Loss, "optimizer": Optimizer}
"""Fields that are configurations of one of several kinds, and the base of these."""


def _checked(check: Callable[..., None], default: Any, **options: Any) -> Any:
    """A field whose value `check` is called with, and with these options; None passes where it is the default."""
    return field(default=default, metadata={"check": partial(check, or_none=default is None, **options)})


_whole = partial(_checked, require_integer, least=1)
_number = partial(_checked, require_number)


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run."""

    # No option: the first word of the command names the recipe.
    recipe: tyro.conf.Suppress[tyro.conf.Fixed[str]]
    """Name of the recipe that this configuration began as."""
    strategy: str = "Gradients(Mean())"
    """What is averaged, when and how, in Python's notation. Gradients in every step: such as
    "Gradients(Mean(TopK(0.01), ErrorFeedback()))". Parameters, where each worker has a model of its own: such as
    "Gossip(Choco(Ring(), TopK(0.01)))", without rounds "Asynchronous()". Changes of parameters, every few steps: such as
    "Local(Mean(QSGD(bits=4)), every=4)" or "diloco(every=30)". Parts of it are options too:
    --strategy.averager.codec.ratio 0.001."""
    workers: int = _whole(4)
    """Number of worker processes on this machine; under torchrun, srun and mpirun, their number of tasks."""
    seed: int = _whole(0, least=0, most=2**31 - 1)
    """Seed of weights, data order and codecs; the same seed gives the same result."""

    epochs: int = _whole(30)
    """Passes over the training data; more => better accuracy, more bytes."""
    max_steps: int | None = _whole(None)
    """Stop after at most this many steps. With a quorum, the round that reaches them may hold more."""
    batch_size: int = _whole(32)
    """Examples per worker in a batch; higher => fewer steps and fewer bytes in an epoch. For sentence pairs, an example is a
    ready-made batch of pairs (see data.max_tokens)."""
    accumulate: int = _whole(1)
    """Batches in one step; higher => larger steps in the same memory, fewer bytes in an epoch."""
    split: Literal["even", "by-class", "by-position"] = "even"
    """How examples are split over workers. "even" splits them anew in every epoch. "by-class" gives a worker few classes,
    "by-position" consecutive examples of the data set; both split once."""
    shuffled: float = _number(0.0, least=0, most=1)
    """With by-class and by-position, share of the examples that is split evenly all the same, 0..1; higher => workers differ
    less."""
    data: Data = field(default_factory=Digits)
    model: Model = field(default_factory=DigitsNet)
    loss: Loss = field(default_factory=CrossEntropy)
    optimizer: Optimizer = field(default_factory=SGD)
    clip_norm: float | None = _number(None, above=0, hint="; leave it out for no clipping")
    """Clip the gradient to this norm: the averaged gradient, or each worker's own if parameters are averaged. None clips
    nothing. (With `MomentumCorrection` use its own `clip` instead.)"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of matrix products and convolutions; weights stay fp32. fp16 uses a loss scaler."""
    compile: bool = False
    """Whether to use `torch.compile`: a faster forward and backward pass, after some minutes at the start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; "auto" takes a GPU if there is one. Workers of a machine share its GPUs."""

    evaluate_every: int = _whole(1)
    """Epochs between two tests. The last epoch always ends with a test."""
    test_batch_size: int = _whole(256)
    """Examples per worker in a batch of the test; higher => faster, for more memory."""
    checkpoint_every: int | None = _whole(None)
    """Steps between two checkpoints, in addition to the one at the end of every epoch."""
    keep: int = _whole(1)
    """Number of latest checkpoints to keep, in addition to the best one."""
    resume: bool = False
    """Continue the run of this name from its last checkpoint; if there is no such run, start it."""

    output: Path = Path("runs")
    """Folder that gets the run's folder."""
    name: str | None = None
    """Name of the run's folder. None makes a name from recipe, strategy and seed, and adds a number if it is taken."""
    suffix: str = ""
    """Text at the end of the folder's name, given or made, such as ".e500"; runs that differ in it keep apart."""
    overwrite: bool = False
    """Replace an existing run of this name."""
    log_every: int = _whole(10)
    """Steps between two rows of metrics; lower => finer curves, larger files."""
    variance: bool = False
    """Also record the relative variance of a lossy codec; costs one more encoding for each row. Local updates, gossip,
    PowerSGD and votes have none."""
    wandb: str | None = None
    """Project of Weights & Biases that also gets the rows; needs its package, and an account or WANDB_MODE=offline."""
    mlflow: str | None = None
    """Experiment of MLflow that also gets the rows; needs its package, and MLFLOW_TRACKING_URI."""

    elastic: bool = False
    """Let workers come, go and die within the run. A worker that is killed is started again."""
    min_workers: int = _whole(2)
    """With elastic: fewer workers wait for others."""
    lighthouse: str | None = None
    """With elastic: address of a Lighthouse such as http://node1:29510, which workers of several starts or machines share.
    None starts one for this run."""
    first_worker: int = _whole(0, least=0)
    """With lighthouse: number of this start's first worker; it must differ between machines by their numbers of workers."""
    check_every: int = _whole(100, least=0)
    """With elastic: every so many rounds, and after the first, workers compare a hash of what they have in common. Give 0,
    which never compares, if machines compute differently under another strategy than Local."""

    network: str | None = None
    """Also count virtual seconds: those of the steps on a modelled network of RATE,LATENCY, such as "1gbit,0.5ms"."""
    per_node: int = _whole(1)
    """With network, the number of consecutive ranks that share a node, and its line to the other nodes."""
    compute: float | None = _number(None, least=0, hint=" seconds")
    """With network, seconds of computation in a step, encoding and decoding included; None measures processor time."""
    transport: Transport = "auto"
    """What carries messages. "auto" is NCCL if every worker has a GPU of its own; else connections of our own ("tcp") for
    tensors in main memory between machines, and with elastic; else Gloo. "mpi" needs a PyTorch that was built with MPI; the
    others work under mpirun too. Elastic runs take no other than "tcp"."""
    measure_lines: bool = False
    """Measure the lines between workers first, about ten seconds, and lay out the averaging by them: the order of ranks, sites
    for hierarchical exchanges, and unequal shares of scatter_reduce. The run's folder keeps the layout for --resume."""
    interface: str | None = None
    """Network interface that reaches the other nodes, such as eth0; None leaves it to the transport."""
    credentials: Path | None = None
    """Folder of keys that `thinwire keys` has made: every connection is encrypted, and only machines of its run take part. None
    takes the folder in the variable THINWIRE_CREDENTIALS, if there is one."""
    listen: bool = True
    """Whether these workers take connections. False, as behind NAT: they dial the others. Differs between machines."""
    relay: str | None = None
    """HOST:PORT of a `thinwire relay`, the same on all machines. It finds out who is behind NAT, and carries messages between
    workers that can only dial out. An elastic run needs credentials with it."""
    port: int = _whole(0, least=0, most=65535)
    """TCP port of the store for workers on this machine; 0 takes a free one. Launchers choose their own, or use MASTER_PORT."""
    timeout: float = _number(180.0, above=0, hint=" seconds")
    """Seconds that a worker may be stopped or silent before the run ends with an error; higher => more patience with slow
    disks and networks."""
    requeue: bool = False
    """Under SLURM: after SIGUSR1, requeue the job; with --resume the same command then continues the run."""
    threads: int = _whole(1, most=MOST_THREADS)
    """Threads of each worker, for PyTorch and for the C++ kernels; more than 1 helps only with more cores than workers."""

    def __post_init__(self):
        for name, base in PARTS.items():
            part = getattr(self, name)
            is_part = isinstance(part, base) and is_dataclass(part)
            require(is_part, f"{name} must be a frozen dataclass derived from {base.__name__}, got {part!r:.100}")
        for one in fields(self):
            if "check" in one.metadata:
                one.metadata["check"](one.name, getattr(self, one.name))
        both = self.resume and self.overwrite
        require(not both, "resume goes on with the run of this name, and overwrite replaces it; leave one of them out")
        alone = self.network is None and (self.compute is not None or self.per_node > 1)
        require(not alone, "compute and per_node belong to a network; add one, such as --network 1gbit,0.5ms")
        self.parsed_network()
        no_lines = self.network is not None or self.transport == "mpi" or self.credentials is not None
        both = self.measure_lines and no_lines
        require(
            not both,
            "measure_lines is for real lines without credentials; leave network, credentials and transport mpi out",
        )
        self._check_elastic()
        even = self.split == "even" and self.shuffled > 0
        require(
            not even, f"shuffled={self.shuffled} means nothing to split 'even'; choose --split by-class or by-position"
        )
        again = self.resume and self.name is not None
        require(again or not self.requeue, "requeue starts the same command again, which needs --resume and a --name")
        plain = self.name is None or (Path(self.name).name == self.name and self.name not in ("", ".", ".."))
        require(plain, f"name must be the plain name of a folder, got {self.name!r}; say where it goes with output")
        require(
            "/" not in self.suffix, f"suffix must have no slash, got {self.suffix!r}; say where it goes with output"
        )
        whole = (self.name or "") + self.suffix
        # File systems allow no longer name.
        require(len(whole.encode()) <= 255, f"name must have at most 255 bytes, got {whole!r}")
        if isinstance(self.model, GPT):
            most, hint = self.model.context, ", which the model reads at once; set model.context to it, or lower it"
            require_number("data.context", getattr(self.data, "context", 0), most=most, hint=hint)

    def _check_elastic(self) -> None:
        encrypts = self.credentials is None or self.transport in ("auto", "tcp")
        ours = self.transport in ("auto", "tcp") or not self.dials_out
        require(
            ours,
            f"transport {self.transport!r} needs to be reached; leave it out, or let workers listen without a relay",
        )
        if self.relay is not None:
            parse_address(self.relay)
        require(encrypts, f"transport {self.transport!r} does not encrypt; leave it out, or leave credentials out")
        options = ("min_workers", "lighthouse", "first_worker", "check_every")
        given = [name for name in options if getattr(self, name) != getattr(RunConfig, name)]
        require(self.elastic or not given, f"there is no use for {', '.join(given)} without elastic; add --elastic")
        reached = not self.elastic or self.relay is not None or self.listen
        require(reached, "workers of an elastic run that take no connections need a relay; add --relay HOST:PORT")
        wrong = {
            "network": self.network is not None,
            "split": self.split != "even",
            "measure_lines": self.measure_lines,
            "data.in_order": bool(getattr(self.data, "in_order", False)),
            f"transport {self.transport}": self.transport not in ("auto", "tcp"),
        }
        named = [name for name, is_wrong in wrong.items() if self.elastic and is_wrong]
        require(
            not named,
            f"elastic runs go over connections of our own, and divide their data evenly; leave out {', '.join(named)}",
        )

    @property
    def dials_out(self) -> bool:
        """Whether workers may be out of each other's reach."""
        return not self.listen or self.relay is not None

    def parsed_strategy(self) -> Averaging[AveragerAttachment]:
        """The strategy object.

        Raises:
            ValueError: the text cannot be read, or names something else than a strategy that suits the run.
        """
        strategy = strategy_of(self.strategy)
        if not isinstance(strategy, Averaging):
            raise ValueError(
                f"strategy must average gradients or parameters, such as Gradients(Mean()), got {strategy!r}"
            )
        require(
            strategy.has_common_steps or self.network is None,
            f"workers of {strategy!r} take unequal numbers of steps, and so have no virtual seconds; leave --network out",
        )
        require(
            not strategy.counts_commits or (self.split == "even" and not getattr(self.data, "in_order", False)),
            f"workers of {strategy!r} take blocks of data as fast as they are, in one order; leave split and data.in_order out",
        )
        require(
            strategy.has_common_steps or not self.elastic,
            f"{strategy!r} needs a fixed number of workers; leave --elastic out",
        )
        return strategy

    def parsed_network(self) -> Network | None:
        """The network of `network`, or None.

        Raises:
            ValueError: the text cannot be read, or `per_node` does not divide the workers.
        """
        if self.network is None:
            return None
        rate, comma, latency = self.network.partition(",")
        require(
            bool(comma),
            f"network is a line, written RATE,LATENCY such as 1gbit,0.5ms; got {self.network!r}; "
            "the recipe chooses the model: thinwire train --list",
        )
        return Network(self.workers, self.per_node, outer=Link.of(rate, latency))

    @property
    def default_name(self) -> str:
        """Default name of the run's folder: recipe, strategy and seed, in characters that are safe in a path.

        Example:
            >>> RunConfig("digits", "Local(Mean(TopK(0.01), ErrorFeedback()), every=4)").default_name
            'digits-local-mean-topk-0.01-errorfeedback-4-seed0'
        """
        # The name must stay below the 255 bytes of file systems, with a number or a suffix behind it.
        words = re.findall(r"[\w.]+", re.sub(r"\w+=", "", repr(self.parsed_strategy())))
        return "-".join([self.recipe, "-".join(words)[:160], f"seed{self.seed}"]).lower()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the strategy as its `repr`; data, model, loss and optimizer with their `kind`.

        Raises:
            ValueError: a part has a field that is no plain value, or the strategy cannot be read.
        """
        plain = {name: _plain(name, value) for name, value in asdict(self).items()}
        for name in PARTS:
            # `overridden` chooses the class by its kind.
            plain[name] = {"kind": type(getattr(self, name)).__name__} | plain[name]
        return plain | {"strategy": repr(self.parsed_strategy())}


def _plain(where: str, value: Any) -> Any:
    """A value for JSON: paths become text, tuples lists."""
    if isinstance(value, Mapping):
        return {name: _plain(f"{where}.{name}", item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(where, item) for item in value]
    if isinstance(value, Path):
        return str(value)
    is_plain = value is None or isinstance(value, (str, int, float))
    # The text of others may differ in every process, and then no run could go on.
    require(is_plain, f"{where} must be text, a number, a path, or a list or table of these, got {value!r:.100}")
    return value
