"""Training runs: configuration, the loop, the processes it runs in, and the files it leaves behind."""

from .config import RunConfig
from .launch import WorkerError, train

__all__ = ["RunConfig", "WorkerError", "train"]
