"""Training runs: configuration, the loop, the processes it runs in, and the files it leaves behind."""

from .config import RunConfig
from .interrupt import Interrupted
from .launch import train
from .spawn import WorkerError

__all__ = ["Interrupted", "RunConfig", "WorkerError", "train"]
