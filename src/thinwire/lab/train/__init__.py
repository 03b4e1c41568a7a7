"""Training runs: configuration, the loop, the processes it runs in, and the files it leaves behind."""

from .config import RunConfig
from .results.callbacks import Callback, EachStep, gradient_spectra, worker_differences
from .results.evaluation import evaluate_checkpoint
from .run.interrupt import Interrupted
from .start.launch import train
from .start.watch import WorkerError

__all__ = [
    "Callback",
    "EachStep",
    "Interrupted",
    "RunConfig",
    "WorkerError",
    "evaluate_checkpoint",
    "gradient_spectra",
    "train",
    "worker_differences",
]
