"""The layout of a run's workers: measured at its start, and kept in its folder, because saved states belong to its ranks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....comm import Communicator, Layout
from ....messages import error_text, log
from ....plan import Effort, measured_layout
from ...files import load_json_object
from ..config import RunConfig
from ..shared_errors import run_on_all

LAYOUT_FILE = "layout.json"


def layout_of_run(config: RunConfig, folder: Path, comm: Communicator) -> Layout:
    """The layout that a resumed run has kept for as many workers, else a new one. All workers call it and get the same.

    Raises:
        SharedError: on all workers, if the kept one is damaged.
    """
    effort = Effort()
    # Rank 0 decides for all, also where others do not see its folder.
    kept = comm.gather_objects(run_on_all(comm, lambda: _kept(config, folder) if comm.rank == 0 else None))[0]
    if kept is not None and len(kept["order"]) == comm.size:
        return _layout(kept)
    if comm.rank == 0 and comm.size > 1:
        log.info(f"the measurement {effort.announced(comm.size)}")
    return measured_layout(comm, effort)


def _kept(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    file = folder / LAYOUT_FILE
    if not (config.resume and file.exists()):
        return None
    kept = load_json_object(file)
    try:
        return asdict(_layout(kept))
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error_text(error)}); restore the file, or remove its run") from None


def _layout(kept: dict[str, Any]) -> Layout:
    return Layout(tuple(kept["order"]), kept["workers_per_node"], tuple(kept["shares"]))
