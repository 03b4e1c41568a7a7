"""The layout of a run's workers: measured at its start, and kept in its folder, because saved states belong to its ranks."""

from __future__ import annotations

import logging
from pathlib import Path

from ....comm import Communicator, Layout
from ....plan import Effort, measured_layout
from ...files import load_json_object
from ..config import RunConfig

log = logging.getLogger("thinwire")

LAYOUT_FILE = "layout.json"


def layout_of_run(config: RunConfig, folder: Path, comm: Communicator) -> Layout:
    """The layout that a resumed run has kept for as many workers, else a new one. All workers call it and get the same."""
    file, effort = folder / LAYOUT_FILE, Effort()
    kept = load_json_object(file) if comm.rank == 0 and config.resume and file.exists() else None
    # Rank 0 decides for all, also where others do not see its folder.
    kept = comm.gather_objects(kept)[0]
    if kept is not None and len(kept["order"]) == comm.size:
        return Layout(tuple(kept["order"]), kept["workers_per_node"], tuple(kept["shares"]))
    if comm.rank == 0 and comm.size > 1:
        log.info(f"the measurement {effort.announced(comm.size)}")
    return measured_layout(comm, effort)
