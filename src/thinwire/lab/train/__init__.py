"""Training runs: configuration, the loop, the processes it runs in, and the files it leaves behind."""

from .callbacks import Callback, worker_differences
from .config import RunConfig
from .interrupt import Interrupted
from .launch import train
from .spawn import WorkerError

__all__ = ["Callback", "Interrupted", "RunConfig", "WorkerError", "train", "worker_differences"]
