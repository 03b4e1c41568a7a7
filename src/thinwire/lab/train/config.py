"""The configuration of a training run: a frozen dataclass that the command line, recipes and saved runs share."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from ...algorithm import require
from ...average import Averager, Pairwise
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
from .optimize import DGCSGD, SGD, Adam

DataConfig = Digits | CIFAR10 | ImageFolder | WikiText2 | PlainText | ParallelText
ModelConfig = (
    DigitsNet | ResNet9 | AlexNet | CIFARResNet | ResNet | VGG16 | LSTMLanguageModel | GPT | Transformer
)


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run."""

    recipe: tyro.conf.Suppress[tyro.conf.Fixed[str]]
    """Name of the recipe that this configuration began as."""
    averager: str = "Mean()"
    """How workers agree, in Python's notation: on gradients, such as "Mean(TopK(0.01), ErrorFeedback())", or, each with a
    model of its own, on parameters, such as "Choco(Ring(), TopK(0.01))" or, without rounds, "Pairwise()"."""
    overlap: bool = False
    """Averagers of parameters: let messages fly during the next forward and backward pass."""
    staleness: int = 0
    """With overlap, how many updates a message may come late; higher => slower networks are hidden, fewer rounds."""
    order: Literal["combine_then_adapt", "adapt_then_combine"] = "combine_then_adapt"
    """Averagers of parameters: whether a step first mixes and then updates, or the other way round."""
    workers: int = 4
    """Number of worker processes on this machine; under torchrun, srun and mpirun, their number of tasks."""
    seed: int = 0
    """Seed of weights, data order and codecs; the same seed gives the same result."""

    epochs: int = 30
    """Passes over the training data; more => better, for as many more bytes."""
    max_steps: int | None = None
    """Stop after this many steps, whatever `epochs` says."""
    batch_size: int = 32
    """Examples per worker in a batch; higher => fewer steps and fewer bytes in an epoch. Sentence pairs come in ready-made
    batches (see data.max_tokens), which count as an example each."""
    accumulate: int = 1
    """Batches whose gradients make up one step; higher => larger steps in the same memory, and fewer bytes in an epoch."""
    split: Literal["even", "by-class", "by-position"] = "even"
    """How examples are dealt out: evenly and anew in every epoch; or once, so that a worker has few classes, or examples
    that lie next to each other in the data set."""
    shuffled: float = 0.0
    """Share of the examples that is dealt out evenly even so, 0..1; higher => workers differ less."""
    data: DataConfig = field(default_factory=Digits)
    model: ModelConfig = field(default_factory=DigitsNet)
    loss: CrossEntropy = field(default_factory=CrossEntropy)
    optimizer: SGD | Adam | DGCSGD = field(default_factory=SGD)
    clip_norm: float | None = None
    """Largest norm of the gradient that a step may follow: of the mean where gradients are averaged, of each worker's own
    where parameters are. (`MomentumCorrection` clips before it adds up, and has an option of its own for that.)"""
    on_nonfinite: Literal["skip", "raise", "apply"] = "skip"
    """If a gradient is infinite or NaN: "skip" leaves the step out and counts it in `skipped_steps`, "raise" ends the run,
    "apply" applies the gradient. Where gradients are averaged, all workers skip together; else only the one concerned."""
    max_nonfinite: int = 100
    """With "skip", this many such steps in a row end the run with an error that names the worker and the parameter."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What matrix products and convolutions are computed in; weights stay fp32. fp16 comes with a loss scaler."""
    compile: bool = False
    """Whether `torch.compile` makes the forward and backward pass faster, after some minutes at the start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; "auto" takes a GPU where there is one. Workers of a machine share its GPUs."""

    evaluate_every: int = 1
    """Epochs between two tests; the last epoch always has one."""
    test_batch_size: int = 256
    """Examples per worker in a batch of the test; higher => faster, for more memory."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints, beside those at the end of every epoch."""
    keep: int = 1
    """How many of the last checkpoints are kept, beside the best."""
    resume: bool = False
    """Go on with the run of this name where it left off, if there is one, so that the same command serves every start."""

    output: Path = Path("runs")
    """Folder in which the run's own folder is made."""
    name: str | None = None
    """Name of the run's folder. None makes one of recipe, averager and seed, numbered where it is taken."""
    overwrite: bool = False
    """Replace the run that has this name, instead of refusing."""
    log_every: int = 10
    """Steps between two rows of metrics; lower => finer curves, larger files."""
    variance: bool = False
    """Also record what a lossy codec loses of a gradient, for one more encoding a row."""
    wandb: str | None = None
    """Project of Weights & Biases to send the rows to as well; needs its package, and an account or WANDB_MODE=offline."""

    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """What carries messages; "auto" is NCCL where every worker has a GPU of its own, else Gloo. "mpi" needs a PyTorch that
    was built with it; under mpirun the others serve as well."""
    interface: str | None = None
    """Network interface that reaches the other nodes, such as eth0; None leaves it to the backend."""
    port: int = 0
    """TCP port where workers of this machine meet; 0 takes a free one. Launchers choose by themselves, or take MASTER_PORT."""
    timeout: float = 180.0
    """Seconds that a worker may be stopped or silent before the run ends with an error; higher => more patience with slow
    disks and networks."""
    requeue: bool = False
    """Under SLURM: after SIGUSR1, put the job back into the queue; the same command then goes on with --resume."""
    threads: int = 1
    """Threads of each worker; higher pays only with more cores than workers."""

    def __post_init__(self):
        for name in (
            *("workers", "epochs", "batch_size", "accumulate", "log_every", "threads"),
            *("max_nonfinite", "evaluate_every", "test_batch_size", "keep"),
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
        require(0 <= self.shuffled <= 1, f"shuffled must be in 0 .. 1, got {self.shuffled}")
        even = self.split == "even" and self.shuffled > 0
        require(not even, f"shuffled={self.shuffled} means nothing to split 'even'; choose --split by-class or by-position")
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
            require(fits, f"data.context {context} is more than the model reads at once; set model.context to it, or lower it")

    def parsed_averager(self) -> Averager | Pairwise:
        """The averager itself.

        Raises:
            ValueError: the text cannot be read, or names something else than an averager.
        """
        averager = parse(self.averager)
        require(
            isinstance(averager, (Averager, Pairwise)),
            f"averager must be an averager, got {averager!r}; did you mean 'Mean({self.averager.strip()})'?",
        )
        late = self.overlap or self.staleness or self.order != "combine_then_adapt"
        require(
            (averager.has_rounds and not averager.gives_one_mean) or not late,
            f"overlap, staleness and order are for averagers of parameters such as Mix(Ring()); {averager!r} "
            + ("averages gradients, always during the backward pass" if averager.has_rounds else "has no rounds"),
        )
        return averager

    @property
    def default_name(self) -> str:
        """Name of the run's folder, unless it is given: recipe, averager and seed, in characters safe in a path.

        Example:
            >>> RunConfig("digits", "Mean(TopK(0.01), ErrorFeedback())").default_name
            'digits-mean-topk-0.01-errorfeedback-seed0'
        """
        words = re.findall(r"[\w.]+", re.sub(r"\w+=", "", repr(self.parsed_averager())))
        return "-".join([self.recipe, "-".join(words)[:160], f"seed{self.seed}"]).lower()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; the averager as its `repr`, and data, model and optimizer with their `kind`."""
        parts = {name: _plain(getattr(self, name)) for name in ("data", "model", "loss", "optimizer")}
        plain = _plain(self) | {name: {"kind": type(getattr(self, name)).__name__} | part for name, part in parts.items()}
        return plain | {"averager": repr(self.parsed_averager())}


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, paths as text."""
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
