"""Checkpoints: one folder each, which appears complete or not at all.

    checkpoints/step-000330/
        checkpoint.json    number of steps, the rounds that were committed, the numbers of the workers, the last row of
                           metrics, the configuration; where this number of workers began
        shared.pt          equal on all workers: model and optimizer; if models differ, only the mean model
        worker-0.pt ...    different on each worker: the strategy's state, buffers (running statistics), the loss scaler, the
                           state of a recurrent model, random states, sums and bytes so far; if models differ, also model
                           and optimizer
    checkpoints/best       a link to the checkpoint with the best test result

Every file loads with `torch.load(weights_only=True)`, and the model in `shared.pt` has the keys of the plain model. A
checkpoint is written to a temporary name and renamed once all parts are on disk, so that a crash leaves the previous one
intact.

Workers write to a folder of their own machine, or one that machines share; the first worker of each folder writes
`shared.pt`. A fixed number of workers goes on from the newest checkpoint that all folders have. In an elastic run, folders may
have different checkpoints, and a worker shares a folder with those whose parts it sees there. Each worker loads the newest one
that it has, and the workers with the newest of all heal the others (`comm/elastic/healing.py`).

If the last checkpoint is damaged, a run goes on from the newest whole one and says so. The damaged one is renamed to
`damaged-step-000330`.

Another number of workers may go on from a checkpoint. Each of them then reads the parts of all workers that there were, and
takes over its share of them; see `Training.redistribute` and `thinwire.membership`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....algorithm import require
from ....comm import Communicator, ElasticCommunicator
from ....messages import error_text, log
from ...files import check_row, naming, write_json
from ..config import RunConfig
from ..results.meter import Meter
from ..shared_errors import SharedError, run_on_all
from ..state_files import damaged_file, read_state
from ..step.steps import START, Position
from ..step.training import Training


def save(
    folder: Path,
    step: int,
    training: Training,
    meter: Meter,
    row: dict[str, Any],
    comm: Communicator,
    keeps_folder: bool,
    origin: Position = START,
    position: dict[str, Any] | None = None,
    shared: dict[str, Any] | None = None,
) -> bool:
    """Write the checkpoint of a step, unless it exists. All workers call this together, between two steps.

    Args:
        folder: the run's `checkpoints`.
        step: number of steps so far.
        training, meter: the state to save.
        row: the last row of metrics.
        comm: connects the workers.
        keeps_folder: whether this worker is the first of those that share its folder; an elastic one finds it out.
        origin: where this number of workers began.
        position: of an elastic run in its data; plain values.
        shared: the shared state of this step, where a test has computed the mean already.

    Returns:
        Whether this worker is the first of those that share its folder.
    """
    elastic = comm if isinstance(comm, ElasticCommunicator) else None
    number = comm.rank if elastic is None else elastic.number
    unfinished, finished = folder / f".{name_of(step)}", folder / name_of(step)
    numbers, exist = zip(*comm.gather_objects((number, finished.is_dir())), strict=True)
    place = finished if all(exist) else unfinished
    if place is unfinished:
        for path in (folder, unfinished):  # does not create the run's own folder again if somebody removed it
            path.mkdir(exist_ok=True)
        _write(_part(unfinished, number), training.own_state() | {"meter": meter.state_dict()})
        # All parts are there from now on; by them workers find who is first in a folder.
        comm.barrier()
    # Where a file system shows late what others have written, two workers write the same.
    is_first = keeps_folder
    if elastic is not None:
        is_first = number == next(n for n in numbers if n == number or _part(place, n).exists())
    if place is finished:
        return is_first
    with training.strategy.average_model(comm) if shared is None else contextlib.nullcontext():
        if is_first:
            _write(unfinished / "shared.pt", shared or training.shared_state())
            rounds = {"rounds": step} if elastic is None else elastic.state_dict()
            description = {"step": step, "row": row, "config": training.config.as_dict(), "workers": list(numbers)}
            write_json(unfinished / "checkpoint.json", description | {"origin": origin, "position": position} | rounds)
    comm.barrier()
    if is_first:
        # The entries of the folder must be on disk before its new name is.
        _to_disk(unfinished)
        if elastic is None and finished.is_dir():  # from before a restart, at which another folder lacked it
            shutil.rmtree(_hidden(finished))
        _rename(unfinished, finished)
        _to_disk(folder)
    return is_first


def _part(folder: Path, number: int) -> Path:
    return folder / f"worker-{number}.pt"


def _rename(unfinished: Path, finished: Path) -> None:
    try:
        os.replace(unfinished, finished)
    except OSError:
        if not finished.is_dir():
            raise
        shutil.rmtree(unfinished, ignore_errors=True)  # this folder has had the checkpoint already, and others had not


def _write(path: Path, state: dict[str, Any]) -> None:
    with naming(path), path.open("wb") as file:
        try:
            torch.save(state, file)
            file.flush()
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # PyTorch's writer hides that of a full disk behind its own
                raise error.__context__ from None
            raise
    _to_disk(path)


def _to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def tidy(folder: Path, step: int, config: RunConfig, metric: str, lower_is_better: bool) -> None:
    """Remove all checkpoints but the last `config.keep` and the best, and link to the best. Only one worker calls this.

    Newer ones than the run's own last are left alone and do not count: the run has not written them.

    Args:
        folder: the run's `checkpoints`.
        step: of the run's last checkpoint.
        config: of the run.
        metric: the metric that decides which is best, such as "accuracy".
        lower_is_better: whether a lower value of it is better.
    """
    found = _finished(folder, step)
    best = _best(found, metric, lower_is_better)
    if best is not None:
        link = folder / ".best"
        # A run that was killed here may have left it.
        link.unlink(missing_ok=True)
        link.symlink_to(best.name)
        if (folder / "best").is_dir() and not (folder / "best").is_symlink():
            # Of a copied run: `scp -r` makes a folder of a link.
            shutil.rmtree(folder / "best")
        # In one step: a reader always finds a link.
        os.replace(link, folder / "best")
    kept = {best, *found[-config.keep :]}
    remove_unfinished(folder, step)
    for path in found:
        if path not in kept:
            shutil.rmtree(_hidden(path))


def remove_unfinished(folder: Path, before: float = math.inf) -> None:
    """Remove what is left of a run that ended while it saved or removed a checkpoint; of those begun, before this step."""
    begun = [path for path in folder.glob(".step-*") if (at := _step_of(path)) is not None and at < before]
    for path in (*begun, *folder.glob(".old-*")):
        shutil.rmtree(path, ignore_errors=True)


def _hidden(path: Path) -> Path:
    """The checkpoint under a name that is not taken for one, so that it can be removed file by file."""
    return path.rename(path.with_name(f".old-{path.name}"))


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


def _best(found: list[Path], metric: str, lower_is_better: bool) -> Path | None:
    """The checkpoint with the best test result; ties go to the first."""
    tested = {path: result for path in found if (result := _tested(path, metric)) is not None}
    return (min if lower_is_better else max)(tested, key=lambda path: tested[path], default=None)


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
    """The checkpoint with the most steps; None if there is none."""
    return next(reversed(_finished(folder)), None)


def name_of(step: int) -> str:
    """Name of a step's checkpoint.

    Example:
        >>> name_of(330)
        'step-000330'
    """
    return f"step-{step:06d}"


def describe(path: Path) -> dict[str, Any]:
    """The contents of `checkpoint.json`: `step`, `row`, `config`, `workers`, `origin`, `rounds`, `digests` and `position`.

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
        workers = description["workers"]
        require(
            isinstance(workers, list) and bool(workers) and all(_is_count(number) for number in workers),
            f"its workers are {workers!r}, expected their numbers",
        )
        require(_is_count(description["rounds"]), f"its rounds are {description['rounds']!r}, expected a number")
        origin = Position(*description["origin"])
        require(all(_is_count(n) for n in origin), f"its origin is {description['origin']!r}, expected three numbers")
        return {"digests": None} | description | {"origin": origin}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error_text(error)
        raise damaged_file(path / "checkpoint.json", reason) from error


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
        workers: how many workers saved it; as many as now without a checkpoint.
        damaged: in elastic runs, newer checkpoints that are damaged, by name, and why.
        step: number of steps so far.
        row: the last row of metrics.
        origin: where these workers began.
        rounds: committed by then, which order the states of elastic workers.
        digests: of the last of these, as `ElasticCommunicator.state_dict` has them; None in other runs.
        position: of an elastic run in its data; None in other runs.
    """

    workers: int
    damaged: dict[str, str] = {}
    step: int = 0
    row: dict[str, Any] = {}
    origin: Position = START
    rounds: int = 0
    digests: list[str] | None = None
    position: dict[str, Any] | None = None


def load_latest(
    folder: Path,
    training: Training,
    meter: Meter,
    comm: Communicator,
    keeps_folder: bool,
    started: Sequence[int] = (),
) -> Loaded:
    """Restore the newest whole checkpoint in place, if there is one. All workers call this together, before the first step.

    A worker of an elastic run loads alone, before it has met the others. If all checkpoints that it has are damaged, others
    may have whole ones.

    Args:
        folder: the run's `checkpoints`.
        training, meter: the state to restore.
        comm: connects the workers.
        keeps_folder: whether this worker is the first of those that share its folder.
        started: in elastic runs, the numbers of the workers that were started with this one, itself among them.

    Raises:
        ValueError: on all workers, if all checkpoints are damaged, or the newest whole one is of another model or strategy.
    """
    mistakes: dict[str, str] = {}
    while name := _newest_of_all(folder, mistakes, comm, keeps_folder):
        path = folder / name
        try:
            found = run_on_all(comm, partial(_read_all, path, comm, started))
        except SharedError as error:
            if comm.gather_objects(path.is_dir())[0]:  # else another worker of an elastic run has removed it meanwhile
                mistakes[name] = str(error)
            continue
        run_on_all(comm, partial(_restore, path, found, training, meter, comm))
        if mistakes and keeps_folder and not comm.is_elastic:
            set_aside(folder, mistakes, path.name)
        values = found.description | {"workers": len(found.description["workers"]), "damaged": mistakes}
        return Loaded(*(values[name] for name in Loaded._fields))
    if mistakes and not comm.is_elastic:
        raise none_is_whole(folder, mistakes)
    return Loaded(comm.size, mistakes)


def _newest_of_all(folder: Path, without: Collection[str], comm: Communicator, keeps_folder: bool) -> str:
    """The name of the newest checkpoint that all folders have; "" if none has any."""
    own = (
        [path.name for path in _finished(folder) if path.name not in without]
        if keeps_folder or comm.is_elastic
        else None
    )
    found = {rank: names for rank, names in enumerate(comm.gather_objects(own)) if names is not None}
    common = [name for name in found[0] if all(name in names for names in found.values())]
    if common or not any(found.values()):
        return common[-1] if common else ""
    newest = ", ".join(f"worker {rank}: {names[-1] if names else 'none'}" for rank, names in found.items())
    raise SharedError(
        f"machines have no checkpoint in common (the newest in {folder}, {newest}); copy one to all of them, each with the "
        "parts of its own workers, or remove the folders to begin again"
    )


def none_is_whole(folder: Path, mistakes: dict[str, str]) -> SharedError:
    """The error of a run that has damaged checkpoints alone."""
    first = next(iter(mistakes.values()))
    return SharedError(
        f"{first}; no other checkpoint is whole. Restore it, or remove the folder {folder} to begin again"
    )


class _Found(NamedTuple):
    """What a worker reads of a checkpoint.

    Args:
        description: the contents of `checkpoint.json`.
        shared: of `shared.pt`.
        parts: of the workers whose state it takes over: its own, or several.
        among: its place among those that take over these parts, and their number; None to go on as the same worker.
    """

    description: dict[str, Any]
    shared: dict[str, Any]
    parts: list[dict[str, Any]]
    among: tuple[int, int] | None


def _read_all(path: Path, comm: Communicator, started: Sequence[int]) -> _Found:
    description = describe(path)
    numbers: list[int] = description["workers"]
    among: tuple[int, int] | None
    if isinstance(comm, ElasticCommunicator):
        here = [number for number in numbers if _part(path, number).exists()]
        # Under a launcher, `started` has the workers of all machines.
        stays = comm.number in here and (set(here) == set(started) or len(numbers) == len(started))
        owners, among = ([comm.number], (0, 1)) if stays else (here, (started.index(comm.number), len(started)))
        if not here:
            raise damaged_file(_part(path, comm.number), "the part of no worker is there")
    elif len(numbers) == comm.size:
        owners, among = [numbers[comm.rank]], None
    else:
        owners, among = numbers, (comm.rank, comm.size)
        missing = next((owner for owner in owners if not _part(path, owner).exists()), None)
        if missing is not None:
            remedy = "needs the parts of all in each folder; copy those of other machines, or start as many as before"
            raise damaged_file(_part(path, missing), f"another number of workers {remedy}")
    return _Found(
        description, read_state(path / "shared.pt"), [read_state(_part(path, owner)) for owner in owners], among
    )


def _restore(path: Path, found: _Found, training: Training, meter: Meter, comm: Communicator) -> None:
    among, parts = found.among, found.parts
    try:
        own = parts[0] if among is None else training.redistribute(found.shared, parts, *among)
        meters = [part["meter"] for part in parts]
        together = not training.strategy.models_differ
        meter.load_state_dict(meters[0] if among is None else meter.redistribute(meters, *among, together))
        training.load_state(found.shared, own, among if comm.is_elastic and among else (0, 1))
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        reason = " ".join(error_text(error).split())[:300]
        raise ValueError(
            f"{path} does not fit this run; it is damaged, or of another model, optimizer or strategy ({reason}). Remove "
            "this folder to go on from the checkpoint before it, or choose another --name"
        ) from error


def set_aside(folder: Path, mistakes: dict[str, str], used: str) -> None:
    """Rename damaged checkpoints, so that their steps can be saved again, and say so.

    The workers of an elastic run may all try. One of them does it: a rename succeeds for one, and the others find nothing.

    Args:
        folder: the run's `checkpoints`.
        mistakes: what is wrong with each, by name.
        used: what the run goes on from instead.
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
            f"{mistakes[names[0]]}; the run goes on from {used}, and {', '.join(names)} "
            f"{'is' if len(names) == 1 else 'are'} kept as damaged-..."
        )
