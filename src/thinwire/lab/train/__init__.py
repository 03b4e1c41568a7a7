"""Training runs: configuration, the loop, the processes it runs in, and the files it leaves behind."""

from .callbacks import Callback, EachStep, gradient_spectra, worker_differences
from .config import RunConfig
from .evaluation import evaluate_checkpoint
from .interrupt import Interrupted
from .launch import train
from .spawn import WorkerError

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
