"""The folder of a run: created, or reused by `resume` for the same configuration; locked while in use."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....algorithm import able_to, require
from ....comm import Communicator
from ....messages import log
from ...fields import OF_CONNECTIONS, OF_THE_FOLDER, flat
from ...files import check_summary, load_json_object, write_json
from ..config import RunConfig
from ..shared_errors import run_on_all
from .checkpoint import last_described
from .lock import LOCK, locked

FREE = {
    *(*OF_THE_FOLDER, *OF_CONNECTIONS, "checkpoint_every", "evaluate_every", "log_every", "variance"),
    *("test_batch_size", "threads", "device", "check_every", "data.num_loaders"),
}
"""Fields that may change in a resumed run, because they change its result only by rounding."""

KEPT = ("config.json", LOCK)  # files that stay in an overwritten run


def folder_of(config: RunConfig) -> Path:
    """The folder of the run's name, or of its default name without a number, with the suffix."""
    return config.output / f"{config.name or config.default_name}{config.suffix}"


@contextmanager
def held_folder(config: RunConfig) -> Iterator[Path]:
    """Context in which this process owns the run's folder, which `make_folder` makes or finds.

    After a user error in it, the folder of a run that never began is removed, so that its name is free again.

    Raises:
        ValueError: another process owns it, or as `make_folder` says.
    """
    with ExitStack() as lock:
        folder = folder_of(config)
        exists = (config.resume or config.overwrite) and folder.is_dir()
        with _writing(config):
            if exists:  # before anything in it is touched
                lock.enter_context(locked(folder))
            made = make_folder(config)
            if not exists:
                lock.enter_context(locked(made))
            if not (made / "config.json").exists():
                write_json(made / "config.json", config.as_dict())
        try:
            yield made
        except ValueError:
            if {path.name for path in made.iterdir()} <= {*KEPT}:
                shutil.rmtree(made)
            raise


def held_by_first(config: RunConfig, comm: Communicator, until: ExitStack) -> tuple[Path, bool]:
    """Let the first worker of each machine, or of those that share the output folder, hold the run's folder there.

    Worker 0 chooses the name. To find out who shares a folder, each worker leaves a file in its own, and looks for those of the
    workers before it. All workers call this together.

    Args:
        config: of the run.
        comm: connects the workers.
        until: holds the folder, as `held_folder` does.

    Returns:
        The folder, and whether this worker is the first one there.

    Raises:
        SharedError: on all workers, if one cannot hold its folder.
    """

    def mark(rank: int) -> Path:
        return config.output / f".{token}-{rank}"

    def leave_mark() -> None:
        with _writing(config):
            config.output.mkdir(parents=True, exist_ok=True)
            mark(comm.rank).touch()

    def hold(named: RunConfig, is_holder: bool) -> Path | None:
        return until.enter_context(held_folder(named)) if is_holder else None

    made = run_on_all(comm, lambda: hold(config, comm.rank == 0))
    name, token = comm.gather_objects(None if made is None else (made.name, uuid.uuid4().hex))[0]
    try:
        run_on_all(comm, leave_mark)
        is_first = not any(mark(rank).exists() for rank in range(comm.rank))
        named = replace(config, name=name.removesuffix(config.suffix))
        run_on_all(comm, lambda: hold(named, is_first and comm.rank > 0))
    finally:
        mark(comm.rank).unlink(missing_ok=True)
    return config.output / name, is_first


def make_folder(config: RunConfig) -> Path:
    """Create the run's folder, or with `resume` or `overwrite` return the existing one.

    A given name must be free; the default name gets a number if it is taken. A new folder is empty. `begin` removes an
    overwritten run, not this. With `resume` the run in the folder must have the same configuration, but for the number of
    workers.

    Raises:
        ValueError: the folder is taken, belongs to another run, or cannot be created or written.
    """
    folder = folder_of(config)
    with _writing(config):
        if (config.resume or config.overwrite) and folder.exists():
            is_run = (folder / "config.json").is_file() or _is_empty(folder)
            require(config.resume or is_run, f"{str(folder)!r} is not a run; --overwrite leaves it alone")
            if config.resume:
                check_same_run(config, folder)
            for report in folder.glob("worker-*-error.txt"):  # errors of an earlier attempt
                report.unlink(missing_ok=True)
            return folder
        if config.resume:  # several tasks of an elastic run may make it at once
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "config.json", config.as_dict())
            return folder
        # It stays empty until it is locked: of several that overwrite one name at once, any may get the lock.
        return _claim(folder, config.suffix, numbered=config.name is None)


def begin(config: RunConfig, folder: Path) -> None:
    """Write the configuration, and remove an overwritten run. Call it once data, model and strategy have been checked.

    Raises:
        ValueError: the folder cannot be written.
    """
    with _writing(config):
        if config.overwrite:
            (folder / "summary.json").unlink(missing_ok=True)  # from now on it is not finished
            for path in [path for path in folder.iterdir() if path.name not in KEPT]:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        write_json(folder / "config.json", config.as_dict())


def _writing(config: RunConfig) -> AbstractContextManager[None]:
    return able_to(f"write to the output folder {str(config.output)!r}", "choose another with --output")


def _is_empty(folder: Path) -> bool:
    """Whether it holds nothing but what a run that has just begun leaves there for a moment."""
    return all(path.name == LOCK or path.name.endswith(".tmp") for path in folder.iterdir())


def _claim(folder: Path, suffix: str, numbered: bool) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    name = folder.name.removesuffix(suffix)
    for number in range(1, 10_000):
        candidate = folder if number == 1 else folder.with_name(f"{name}-{number}{suffix}")
        try:
            candidate.mkdir()  # fails where it exists: of two runs that start at once, one takes the next number
            return candidate
        except FileExistsError:
            advice = "go on with --resume, replace it with --overwrite, or choose another --name"
            require(numbered, f"{str(folder)!r} exists; {advice}")
    raise ValueError(f"{str(folder)!r} and 9999 numbered ones exist; choose a --name")


def finished_run(config: RunConfig) -> Path | None:
    """With `resume`, the folder of the run if it is finished; else None. A run with a damaged summary is not finished.

    Raises:
        ValueError: the folder holds a run with another configuration.
    """
    folder = folder_of(config)
    if not (config.resume and (folder / "summary.json").is_file()):
        return None
    check_same_run(config, folder)
    try:
        check_summary(load_json_object(folder / "summary.json"))
    except ValueError:  # the last checkpoint has all that it says
        log.warning(f"{folder / 'summary.json'} is damaged; it is written anew from the last checkpoint")
        return None
    return folder


def is_finished_on_all(config: RunConfig, comm: Communicator) -> bool:
    """Whether `finished_run` finds a finished run in the folders of all workers, which may be several. All call it together."""
    return comm.all_true(run_on_all(comm, lambda: finished_run(config)) is not None)


def check_same_run(config: RunConfig, folder: Path) -> None:
    """Check that a folder's run, and its last checkpoint, have this configuration.

    A run with no logged metrics may be reconfigured.

    Raises:
        ValueError: a field differs, or the folder is no run.
    """
    is_run = (folder / "config.json").is_file() or _is_empty(folder)
    missing = f"{str(folder)!r} is not a run: config.json is missing"
    require(is_run, f"{missing}; restore the file, remove the folder, or choose another --name")
    if (folder / "metrics.jsonl").exists():
        check_same(config, load_json_object(folder / "config.json"), folder)
    described = last_described(folder / "checkpoints")
    if described is not None:
        checkpoint, saved = described
        check_same(config, saved["config"], checkpoint)


def check_same(config: RunConfig, saved: dict[str, Any], where: Path) -> None:
    """Check that a resumed configuration matches the saved one.

    Raises:
        ValueError: it names the fields that differ, with both values.
    """
    before, now = ({**binding(each), "workers": None} for each in (saved, config.as_dict()))  # any number goes on
    differing = [
        f"{name} {before.get(name, 'nothing')!r}, not {now.get(name, 'nothing')!r}"
        for name in {**now, **before}
        if before.get(name, "nothing") != now.get(name, "nothing")
    ]
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    require(
        not differing,
        f"{where} has {'; '.join(differing[:3])}{more}. A run goes on as it began; give it the same options, or another --name",
    )


def binding(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that determine a run's result, by path: all except `FREE`."""
    return {path: value for path, value in flat(config) if path not in FREE and path.split(".")[0] not in FREE}
