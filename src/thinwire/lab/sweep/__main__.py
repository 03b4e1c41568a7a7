"""`python -m thinwire.lab.sweep RUN.json`: one run of a sweep, in a process of its own. `... job FOLDER NAMES`: a job of SLURM.

A run's output is the run's log. It writes its exit code to `ended.json`:
0 finished, 1 a worker failed, 2 the configuration is wrong, 130 or 143 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from .execute import execute
from .slurm import work

if __name__ == "__main__":
    if sys.argv[1] == "job":
        sys.exit(work(Path(sys.argv[2]), sys.argv[3:]))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # SLURM may send SIGUSR2 to all processes; it is meant for the job, which then sends SIGTERM to this one.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    sys.exit(execute(Path(sys.argv[1])))
