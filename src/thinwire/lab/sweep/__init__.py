"""Sweeps: many runs from one file, here or on a cluster, that can be stopped and continued.

`file.py` says what is in a file, `identity.py` which runs are the same, `status.py` what a run's files tell of it.
"""

from .file import PlannedRun, Sweep, read_sweep
from .identity import identity
from .local import run_locally
from .slurm import submit
from .status import Status, status_of

__all__ = ["PlannedRun", "Status", "Sweep", "identity", "read_sweep", "run_locally", "status_of", "submit"]
