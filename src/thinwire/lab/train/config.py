"""The configuration of a training run: a frozen dataclass that the command line, recipes and saved runs share."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from ...algorithm import require
from ...average import Averager, OuterSGD, Pairwise
from ...network import Link, Network
from ...notation import parse
from .data import CIFAR10, Digits, ImageFolder, ParallelText, PlainText, WikiText2
from .loss import CrossEntropy
from .models import (
    GPT,
    VGG16,
    AlexNet,
    CIFARResNet,
    DigitsNet,
    LSTMLanguageModel,
    ResNet,
    ResNet9,
    Transformer,
)
from .optimize import DGCSGD, SGD, Adam, Muon

DataConfig = Digits | CIFAR10 | ImageFolder | WikiText2 | PlainText | ParallelText
ModelConfig = DigitsNet | ResNet9 | AlexNet | CIFARResNet | ResNet | VGG16 | LSTMLanguageModel | GPT | Transformer


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run."""

    recipe: tyro.conf.Suppress[tyro.conf.Fixed[str]]
    """Name of the recipe that this configuration began as."""
    averager: str = "Mean()"
    """The averager, in Python's notation. Of gradients: such as "Mean(TopK(0.01), ErrorFeedback())". Of parameters, where each
    worker has a model of its own: such as "Choco(Ring(), TopK(0.01))" or, without rounds, "Pairwise()"."""
    overlap: bool = False
    """Averagers of parameters: send messages during the next forward and backward pass."""
    staleness: int = 0
    """With overlap, how many updates a message may come late; higher => slower networks are hidden, fewer rounds."""
    order: Literal["combine_then_adapt", "adapt_then_combine"] = "combine_then_adapt"
    """Averagers of parameters: whether a step mixes before or after the optimizer's update."""
    every: int | None = None
    """Local updates: steps between two rounds, in which workers average what they changed; higher => fewer bytes, workers drift
    further apart. None averages in every step."""
    outer: str | None = None
    """With every, the outer optimizer, such as "OuterSGD(lr=0.7)" for DiLoCo. None is plain averaging of the models."""
    fragments: int = 1
    """With every, parts of the model that are exchanged at different steps; higher => lower peaks."""
    delay: int = 0
    """With every, steps from the begin of a round to its merging, while messages fly; higher => slower networks are hidden."""
    alpha: float = 0.0
    """With every, the share of a worker's own parameters in the merged ones; 0.5 suits a delay."""
    pull: float | None = None
    """With every and Mix, the strength with which anchors are pulled together, as in NoLoCo."""
    workers: int = 4
    """Number of worker processes on this machine; under torchrun, srun and mpirun, their number of tasks."""
    seed: int = 0
    """Seed of weights, data order and codecs; the same seed gives the same result."""

    epochs: int = 30
    """Passes over the training data; more => better accuracy, more bytes."""
    max_steps: int | None = None
    """Stop after at most this many steps."""
    batch_size: int = 32
    """Examples per worker in a batch; higher => fewer steps and fewer bytes in an epoch. For sentence pairs, an example is a
    ready-made batch of pairs (see data.max_tokens)."""
    accumulate: int = 1
    """Batches in one step; higher => larger steps in the same memory, fewer bytes in an epoch."""
    split: Literal["even", "by-class", "by-position"] = "even"
    """How examples are split over workers. "even" deals them out anew in every epoch. "by-class" gives a worker few classes,
    "by-position" consecutive examples of the data set; both split once."""
    shuffled: float = 0.0
    """With by-class and by-position, share of the examples that is split evenly all the same, 0..1; higher => workers differ
    less."""
    data: DataConfig = field(default_factory=Digits)
    model: ModelConfig = field(default_factory=DigitsNet)
    loss: CrossEntropy = field(default_factory=CrossEntropy)
    optimizer: SGD | Adam | DGCSGD | Muon = field(default_factory=SGD)
    clip_norm: float | None = None
    """Clip the gradient to this norm: the averaged gradient, or each worker's own if parameters are averaged. None clips
    nothing. (With `MomentumCorrection` use its own `clip` instead.)"""
    on_nonfinite: Literal["skip", "raise", "apply"] = "skip"
    """If a gradient is infinite or NaN: "skip" leaves the step out and counts it in `skipped_steps`, "raise" ends the run,
    "apply" applies the gradient. Where gradients are averaged, all workers skip together; else only the one concerned."""
    max_nonfinite: int = 100
    """With "skip", this many such steps in a row end the run with an error that names the worker and the parameter."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of matrix products and convolutions; weights stay fp32. fp16 uses a loss scaler."""
    compile: bool = False
    """Whether to use `torch.compile`: a faster forward and backward pass, after some minutes at the start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; "auto" takes a GPU if there is one. Workers of a machine share its GPUs."""

    evaluate_every: int = 1
    """Epochs between two tests. The last epoch always ends with a test."""
    test_batch_size: int = 256
    """Examples per worker in a batch of the test; higher => faster, for more memory."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints, in addition to the one at the end of every epoch."""
    keep: int = 1
    """Number of latest checkpoints to keep, in addition to the best one."""
    resume: bool = False
    """Continue the run of this name from its last checkpoint; if there is no such run, start it."""

    output: Path = Path("runs")
    """Folder that gets the run's folder."""
    name: str | None = None
    """Name of the run's folder. None makes a name from recipe, averager and seed, and adds a number if it is taken."""
    overwrite: bool = False
    """Replace an existing run of this name."""
    log_every: int = 10
    """Steps between two rows of metrics; lower => finer curves, larger files."""
    variance: bool = False
    """Also record the relative variance of a lossy codec; costs one more encoding for each row."""
    wandb: str | None = None
    """Project of Weights & Biases that also gets the rows; needs its package, and an account or WANDB_MODE=offline."""

    elastic: bool = False
    """Let workers come, go and die within the run; needs the extra `elastic`. A worker that is killed is started again."""
    min_workers: int = 2
    """With elastic: fewer workers wait for others."""
    lighthouse: str | None = None
    """With elastic: address of a Lighthouse such as http://node1:29510, which workers of several starts or machines share.
    None starts one for this run."""
    first_worker: int = 0
    """With lighthouse: number of this start's first worker; it must differ between machines by their numbers of workers."""

    network: str | None = None
    """Also count virtual seconds: those of the steps on a network of RATE,LATENCY that is not there, such as "1gbit,0.5ms"."""
    per_node: int = 1
    """With network, the number of consecutive ranks that share a node, and its line to the other nodes."""
    compute: float | None = None
    """With network, seconds of computation in a step, encoding and decoding included; None measures processor time."""
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """Communication backend. "auto" is NCCL if every worker has a GPU of its own, else Gloo; with elastic, it is Gloo. "mpi"
    needs a PyTorch that was built with MPI; the others work under mpirun too."""
    interface: str | None = None
    """Network interface that reaches the other nodes, such as eth0; None leaves it to the backend."""
    port: int = 0
    """TCP port of the store for workers on this machine; 0 takes a free one. Launchers choose their own, or use MASTER_PORT."""
    timeout: float = 180.0
    """Seconds that a worker may be stopped or silent before the run ends with an error; higher => more patience with slow
    disks and networks."""
    requeue: bool = False
    """Under SLURM: after SIGUSR1, requeue the job; with --resume the same command then continues the run."""
    threads: int = 1
    """Threads of each worker, for PyTorch and for the C++ kernels; more than 1 helps only with more cores than workers."""

    def __post_init__(self):
        for name in (
            *("workers", "epochs", "batch_size", "accumulate", "log_every", "threads"),
            *("max_nonfinite", "evaluate_every", "test_batch_size", "keep", "per_node"),
        ):
            require(getattr(self, name) >= 1, f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("max_steps", "checkpoint_every"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be 1 or more, got {value}")
        clips = self.clip_norm is None or self.clip_norm > 0
        require(clips, f"clip_norm must be above 0, got {self.clip_norm}; leave it out for no clipping")
        both = self.resume and self.overwrite
        require(not both, "resume goes on with the run of this name, and overwrite replaces it; leave one of them out")
        require(self.staleness >= 0, f"staleness must be 0 or more, got {self.staleness}")
        require(self.compute is None or self.compute >= 0, f"compute must be 0 seconds or more, got {self.compute}")
        alone = self.network is None and (self.compute is not None or self.per_node > 1)
        require(not alone, "compute and per_node belong to a network; add one, such as --network 1gbit,0.5ms")
        self.parsed_network()
        self._check_local_updates()
        self._check_elastic()
        require(0 <= self.shuffled <= 1, f"shuffled must be in 0 .. 1, got {self.shuffled}")
        even = self.split == "even" and self.shuffled > 0
        require(
            not even, f"shuffled={self.shuffled} means nothing to split 'even'; choose --split by-class or by-position"
        )
        require(0 <= self.seed < 2**31, f"seed must be in 0 .. 2^31 - 1, got {self.seed}")
        again = self.resume and self.name is not None
        require(again or not self.requeue, "requeue starts the same command again, which needs --resume and a --name")
        require(self.timeout > 0, f"timeout must be above 0 seconds, got {self.timeout}")
        require(0 <= self.port < 2**16, f"port must be in 0 .. 65535, got {self.port}")
        plain = self.name is None or (Path(self.name).name == self.name and self.name not in ("", ".", ".."))
        require(plain, f"name must be the plain name of a folder, got {self.name!r}; say where it goes with output")
        require(len((self.name or "").encode()) <= 255, f"name must have at most 255 bytes, got {self.name!r}")
        if isinstance(self.model, GPT):
            context = getattr(self.data, "context", 0)
            fits = context <= self.model.context
            require(
                fits,
                f"data.context {context} is more than the model reads at once; set model.context to it, or lower it",
            )

    def parsed_outer(self) -> OuterSGD | None:
        """The outer optimizer; None for plain averaging.

        Raises:
            ValueError: the text cannot be read, or names something else.
        """
        outer = None if self.outer is None else parse(self.outer)
        require(
            outer is None or isinstance(outer, OuterSGD),
            f"outer must be an outer optimizer such as OuterSGD(lr=0.7), got {outer!r}",
        )
        assert outer is None or isinstance(outer, OuterSGD)
        return outer

    def _check_local_updates(self) -> None:
        """Options of local updates need `every`; `local_updates` checks their values."""
        require(self.every is None or self.every >= 1, f"every must be 1 or more, got {self.every}")
        defaults = {"outer": None, "fragments": 1, "delay": 0, "alpha": 0.0, "pull": None}
        given = [name for name, value in defaults.items() if getattr(self, name) != value]
        require(
            self.every is not None or not given,
            f"{', '.join(given)} are for local updates; add --every H, such as --every 30",
        )
        require(
            self.every is None or not (self.overlap or self.staleness or self.order != "combine_then_adapt"),
            "overlap, staleness and order are for gossip in every step; with every, messages fly for --delay steps",
        )
        self.parsed_outer()

    def _check_elastic(self) -> None:
        require(self.min_workers >= 1, f"min_workers must be 1 or more, got {self.min_workers}")
        require(self.first_worker >= 0, f"first_worker must be 0 or more, got {self.first_worker}")
        alone = not self.elastic and (self.lighthouse is not None or self.first_worker > 0)
        require(not alone, "lighthouse and first_worker belong to elastic; add --elastic")
        wrong = {
            "network": self.network is not None,
            "overlap": self.overlap,
            "split": self.split != "even",
            "data.in_order": bool(getattr(self.data, "in_order", False)),
            "backend mpi": self.backend == "mpi",
        }
        named = [name for name, is_wrong in wrong.items() if self.elastic and is_wrong]
        require(
            not named, f"elastic runs go over Gloo or NCCL with data that is split anew; leave out {', '.join(named)}"
        )

    def parsed_averager(self) -> Averager | Pairwise:
        """The averager object.

        Raises:
            ValueError: the text cannot be read, or names something else than an averager.
        """
        averager = parse(self.averager)
        require(
            isinstance(averager, (Averager, Pairwise)),
            f"averager must be an averager, got {averager!r}; did you mean 'Mean({self.averager.strip()})'?",
        )
        require(
            averager.has_rounds or self.network is None,
            f"{averager!r} has no rounds, and so no virtual seconds; leave --network out",
        )
        require(averager.has_rounds or not self.elastic, f"{averager!r} has no rounds; leave --elastic out")
        late = self.overlap or self.staleness or self.order != "combine_then_adapt"
        require(
            (averager.has_rounds and not averager.gives_one_mean) or not late,
            f"overlap, staleness and order are for averagers of parameters such as Mix(Ring()); {averager!r} "
            + ("averages gradients, always during the backward pass" if averager.has_rounds else "has no rounds"),
        )
        return averager

    def parsed_network(self) -> Network | None:
        """The network of `network`, or None.

        Raises:
            ValueError: the text cannot be read, or `per_node` does not divide the workers.
        """
        if self.network is None:
            return None
        rate, comma, latency = self.network.partition(",")
        require(bool(comma), f"network is written RATE,LATENCY such as 1gbit,0.5ms; got {self.network!r}")
        return Network(self.workers, self.per_node, outer=Link.of(rate, latency))

    @property
    def default_name(self) -> str:
        """Default name of the run's folder: recipe, averager and seed, in characters that are safe in a path.

        Example:
            >>> RunConfig("digits", "Mean(TopK(0.01), ErrorFeedback())").default_name
            'digits-mean-topk-0.01-errorfeedback-seed0'
        """
        words = re.findall(r"[\w.]+", re.sub(r"\w+=", "", repr(self.parsed_averager())))
        local = [] if self.every is None else [f"every{self.every}"]
        return "-".join([self.recipe, "-".join(words)[:160], *local, f"seed{self.seed}"]).lower()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the averager as its `repr`; data, model, loss and optimizer with their `kind`."""
        parts = {name: _plain(getattr(self, name)) for name in ("data", "model", "loss", "optimizer")}
        plain = _plain(self) | {
            name: {"kind": type(getattr(self, name)).__name__} | part for name, part in parts.items()
        }
        return plain | {"averager": repr(self.parsed_averager())}


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, paths as text."""
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
