"""Checkpoints: one folder each, which appears complete or not at all.

    checkpoints/step-000330/
        checkpoint.json    numbers of steps and of committed rounds, the last row of metrics, the configuration; where this
                           number of workers began
        shared.pt          equal on all workers: model and optimizer; if models differ, only the mean model
        worker-0.pt ...    different on each worker: the strategy's state, buffers (running statistics), the loss scaler, the
                           state of a recurrent model, random states, sums and bytes so far; if models differ, also model
                           and optimizer
    checkpoints/best       a link to the checkpoint with the best test result

Every file loads with `torch.load(weights_only=True)`, and the model in `shared.pt` has the keys of the plain model. A
checkpoint is written to a temporary name and renamed once all parts are on disk, so that a crash leaves the previous one
intact. All workers write to the same folder; on several machines they need a shared file system.

If the last checkpoint is damaged, a run goes on from the newest whole one and says so. The damaged one is renamed to
`damaged-step-000330`.

Another number of workers may go on from a checkpoint. Each of them then reads the parts of all workers that there were, and
takes over its share of them; see `Training.redistribute` and `thinwire.membership`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import uuid
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from ....algorithm import require
from ....comm import Communicator
from ...files import naming, write_json
from ..config import RunConfig
from ..data import LOWER_IS_BETTER
from ..results.meter import Meter
from ..results.metrics_files import check_row
from ..shared_errors import SharedError, run_on_all
from ..step.steps import START, Place
from ..step.training import Training

log = logging.getLogger("thinwire")


def save(
    folder: Path,
    step: int,
    training: Training,
    meter: Meter,
    row: dict[str, Any],
    comm: Communicator,
    origin: Place = START,
    rounds: int | None = None,
    position: dict[str, Any] | None = None,
) -> None:
    """Write the checkpoint of a step, unless it exists. All workers call this together, between two steps.

    Args:
        folder: the run's `checkpoints`.
        step: number of steps so far.
        training, meter: the state to save.
        row: the last row of metrics.
        comm: connects the workers.
        origin: where this number of workers began.
        rounds: committed so far; None for one in each step.
        position: of an elastic run in its data; plain values.
    """
    with _appears_whole(folder, step, comm) as unfinished:
        if unfinished is None:
            return
        own = training.own_state() | {"meter": meter.state_dict()}
        _write(unfinished / f"worker-{comm.rank}.pt", own)
        with training.strategy.average_model(comm):
            if comm.rank == 0:
                _write(unfinished / "shared.pt", training.shared_state())
                description = {"step": step, "row": row, "config": training.config.as_dict(), "workers": comm.size}
                description |= {"origin": origin, "rounds": step if rounds is None else rounds, "position": position}
                write_json(unfinished / "checkpoint.json", description)


@contextmanager
def _appears_whole(folder: Path, step: int, comm: Communicator) -> Iterator[Path | None]:
    """Context that yields a temporary folder and renames it at the end; yields None if the checkpoint exists."""
    unfinished, finished = folder / f".{name_of(step)}", folder / name_of(step)
    if comm.gather_objects(finished.is_dir())[0]:
        yield None
        return
    for path in (folder, unfinished):  # does not create the run's own folder again if somebody removed it
        path.mkdir(exist_ok=True)
    yield unfinished
    comm.barrier()
    if comm.rank == 0:
        _to_disk(unfinished)
        os.replace(unfinished, finished)
        _to_disk(folder)


def _write(path: Path, state: dict[str, Any]) -> None:
    with naming(path), path.open("wb") as file:
        watched = _Watched(file)
        try:
            torch.save(state, cast(BinaryIO, watched))  # it needs `write` and `flush` alone
            file.flush()
        except RuntimeError:  # PyTorch's writer hides the error of a full disk behind one of its own
            if watched.error is None:
                raise
            raise watched.error from None
    _to_disk(path)


class _Watched:
    """A file that remembers why it could not be written."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def tidy(folder: Path, step: int, config: RunConfig, metric: str) -> None:
    """Remove all checkpoints but the last `config.keep` and the best, and link to the best. Only one worker calls this.

    Newer ones than the run's own last are left alone and do not count: the run has not written them.

    Args:
        folder: the run's `checkpoints`.
        step: of the run's last checkpoint.
        config: of the run.
        metric: the metric that decides which is best, such as "accuracy".
    """
    found = _finished(folder, step)
    best = _best(found, metric)
    if best is not None:
        link = folder / ".best"
        link.unlink(missing_ok=True)
        link.symlink_to(best.name)
        os.replace(link, folder / "best")
    kept = {best, *found[-config.keep :]}
    for path in folder.glob(".step-*"):
        if (begun := _step_of(path)) is not None and begun < step:
            shutil.rmtree(path)  # of a run that was killed while it saved
    for path in found:
        if path not in kept:
            hidden = path.rename(folder / f".{path.name}")  # so that a partly removed checkpoint is not taken for one
            shutil.rmtree(hidden)


def _finished(folder: Path, last: float = math.inf) -> list[Path]:
    """All checkpoints up to step `last`, in order. Folders with other names, such as copies, are ignored."""
    found = [(step, path) for path in folder.glob("step-*") if (step := _step_of(path)) is not None and path.is_dir()]
    return [path for step, path in sorted(found) if step <= last]


def _step_of(path: Path) -> int | None:
    """The step of a finished or begun checkpoint; None for a name that `name_of` does not give.

    Example:
        >>> _step_of(Path(".step-000330")), _step_of(Path("step-330")), _step_of(Path("step-\u0663"))
        (330, None, None)
    """
    name = path.name.removeprefix(".")
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and name == name_of(int(digits)) else None


def _best(found: list[Path], metric: str) -> Path | None:
    """The checkpoint with the best test result; ties go to the first."""
    tested = {path: result for path in found if (result := _tested(path, metric)) is not None}
    sign = -1 if metric in LOWER_IS_BETTER else 1
    return max(tested, key=lambda path: sign * tested[path], default=None)


def _tested(path: Path, metric: str) -> float | None:
    """The test result of the mean model if there is one, else of the model.

    None if there was no test, if it diverged, or if the description is damaged.
    """
    try:
        description = describe(path)
    except ValueError:
        return None
    row = description["row"] if description["row"].get("step") == description["step"] else {}
    result: float | None = row.get(f"mean_model_test_{metric}", row.get(f"test_{metric}"))
    return result


def latest(folder: Path) -> Path | None:
    """The checkpoint with the most steps, or None."""
    return next(reversed(_finished(folder)), None)


def name_of(step: int) -> str:
    """Name of a step's checkpoint.

    Example:
        >>> name_of(330)
        'step-000330'
    """
    return f"step-{step:06d}"


def describe(path: Path) -> dict[str, Any]:
    """The contents of `checkpoint.json`: `step`, `row`, `config`, `workers`, `origin`, `rounds` and `position`.

    Raises:
        ValueError: it is missing or damaged.
    """
    try:
        description = json.loads((path / "checkpoint.json").read_text())
        require(isinstance(description, dict), f"expected a JSON object, got {type(description).__name__}")
        named = int(path.name.rpartition("-")[2])
        require(description["step"] == named, f"its step is {description['step']!r}, expected {named}")
        check_row(description["row"])
        require(isinstance(description["config"], dict), f"its config is {description['config']!r}, expected an object")
        require(
            _is_count(description["workers"], 1),
            f"its workers are {description['workers']!r}, expected a number from 1 on",
        )
        require(_is_count(description["rounds"], 0), f"its rounds are {description['rounds']!r}, expected a number")
        origin = Place(*description["origin"])
        require(
            all(_is_count(n, 0) for n in origin), f"its origin is {description['origin']!r}, expected three numbers"
        )
        return description | {"origin": origin}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise _damaged(path / "checkpoint.json", reason) from error


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def last_described(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint whose description is whole, and the description; None if there is no such checkpoint."""
    for path in reversed(_finished(folder)):
        try:
            return path, describe(path)
        except ValueError:
            continue
    return None


class Loaded(NamedTuple):
    """Where a resumed run continues.

    Args:
        step: number of steps so far.
        row: the last row of metrics.
        workers: how many workers saved it; as many as now without a checkpoint.
        origin: where these began.
        rounds: committed by then, which order the states of elastic workers.
        position: of an elastic run in its data; None in other runs.
    """

    step: int
    row: dict[str, Any]
    workers: int
    origin: Place
    rounds: int
    position: dict[str, Any] | None


def load_latest(folder: Path, training: Training, meter: Meter, comm: Communicator) -> Loaded:
    """Restore the newest whole checkpoint in place, if there is one. All workers call this together, before the first step.

    Raises:
        ValueError: on all workers, if all checkpoints are damaged, or the newest whole one is of another model or strategy.
    """
    mistakes: dict[str, str] = {}
    while (name := comm.gather_objects(_newest(folder, mistakes))[0]) is not None:
        path = folder / name
        try:
            description, shared, parts = run_on_all(comm, partial(_read_all, path, comm))
        except SharedError as error:
            if comm.gather_objects(path.is_dir())[0]:  # else another worker of an elastic run has removed it meanwhile
                mistakes[name] = str(error)
            continue
        run_on_all(comm, partial(_restore, path, description["workers"], shared, parts, training, meter, comm))
        if mistakes and comm.rank == 0:
            _set_aside(folder, mistakes, path)
        return Loaded(*(description[name] for name in Loaded._fields))
    if mistakes:
        first = next(iter(mistakes.values()))
        raise SharedError(
            f"{first}; no other checkpoint is whole. Restore it, or remove the folder {folder} to begin again"
        )
    return Loaded(0, {}, comm.size, START, 0, None)


def _newest(folder: Path, without: Collection[str]) -> str | None:
    """The name of the checkpoint with the most steps that is not among those without; None if there is none."""
    return next((path.name for path in reversed(_finished(folder)) if path.name not in without), None)


def _read_all(path: Path, comm: Communicator) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """A checkpoint's description, its shared part, and the parts of workers that this one needs: all if W has changed."""
    description = describe(path)
    workers: int = description["workers"]
    owners = [comm.rank] if workers == comm.size else range(workers)
    return description, _read(path / "shared.pt"), [_read(path / f"worker-{rank}.pt") for rank in owners]


def _restore(
    path: Path,
    workers: int,
    shared: dict[str, Any],
    parts: list[dict[str, Any]],
    training: Training,
    meter: Meter,
    comm: Communicator,
) -> None:
    alike = workers == comm.size
    try:
        own = parts[0] if alike else training.redistribute(shared, parts, comm.rank, comm.size)
        meters = [part["meter"] for part in parts]
        together = not training.strategy.models_differ
        meter.load_state_dict(meters[0] if alike else meter.redistribute(meters, comm.rank, comm.size, together))
        training.load_state(shared, own)
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(
            f"{path} does not fit this run; it is damaged, or of another model, optimizer or strategy ({reason}). Remove "
            "this folder to go on from the checkpoint before it, or choose another --name"
        ) from error


def _set_aside(folder: Path, mistakes: dict[str, str], used: Path) -> None:
    """Rename damaged checkpoints, so that their steps can be saved again, and say so.

    The workers of an elastic run may all try. One of them does it: a rename succeeds for one, and the others find nothing.
    """
    names = []
    for name in mistakes:
        target, own = folder / f"damaged-{name}", folder / f".damaged-{name}-{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            (folder / name).rename(own)
            names.append(name)
            if target.is_dir():  # of an earlier time
                shutil.rmtree(target)
            own.rename(target)
    if names:
        log.warning(
            f"{mistakes[names[0]]}; the run goes on from {used.name}, and {', '.join(names)} "
            f"{'is' if len(names) == 1 else 'are'} kept as damaged-..."
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:  # PyTorch itself compares no checksums
            wrong = archive.testzip()
        require(wrong is None, f"checksum of {wrong}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        require(isinstance(state, dict), f"expected a dictionary, got {type(state).__name__}")
        return state
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, reason: object) -> ValueError:
    return ValueError(f"{path} is missing, truncated or damaged ({' '.join(str(reason).split())[:200]})")
