"""What all tests need: few threads on few cores, Ctrl-C heard by the processes that tests start, and one fork server."""

import gc
import itertools
import os
import signal
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

gc.disable()  # until all modules are imported and all tests collected: what they make stays

# As in a real run, and so that sums do not depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is loaded: threads that are started later read it then

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

from helpers.one_core import one_core  # noqa: E402
from helpers.program import killed_after_an_error  # noqa: E402
from helpers.spawn import PRELOADED  # noqa: E402

from thinwire import messages  # noqa: E402
from thinwire.comm import LocalWorld  # noqa: E402

# A shell has what it starts in the background ignore Ctrl-C, and our children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Test machines are shared: how long one example takes says nothing about the library.
hypothesis.settings.register_profile("thinwire", deadline=None)
hypothesis.settings.load_profile("thinwire")

LocalWorld.run = one_core()(LocalWorld.run)

# What tests read on stderr is what users read: pytest's own handlers are no configuration of logging.
messages.is_configured = lambda: False

FOLDER, ENVIRONMENT = os.getcwd(), dict(os.environ)

# Plugins, of which the first must be imported before PyTorch.
collect_ignore = [f"helpers/{name}.py" for name in ("simulated_gpu", "interpreter", "compile_launches")]


def started_in_place() -> None:
    """Start the fork server here, with this environment, whatever the test has changed that is the first to need it."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        type(server).ensure_running(server)
        return
    with pytest.MonkeyPatch.context() as place, mock.patch.dict(os.environ, ENVIRONMENT, clear=True):
        place.chdir(FOLDER)
        type(server).ensure_running(server)


forkserver._forkserver.ensure_running = started_in_place


# What `make test` leaves out: what lies outside of the library and its command line, and whole runs of several processes.
# A test of these files takes about a second of a processor, or more.
INTEGRATION = (
    "average/test_fitted_steps.py",
    "comm/elastic/test_elastic.py",
    "comm/elastic/test_elastic_joining.py",
    "comm/elastic/test_elastic_relay.py",
    "comm/test_backend.py",
    "comm/test_tcp_lines.py",
    "gpu/test_commands.py",
    "hostile/test_fixed_runs.py",
    "hostile/test_hostile_runs.py",
    "integrations/test_accelerated_optimizer.py",
    "integrations/test_checkpoint_moves.py",
    "integrations/test_strategy_state.py",
    "integrations/test_trainers.py",
    "kernels/test_set_threads.py",
    "lab/bench/test_internet.py",
    "lab/bench/test_netlab.py",
    "lab/bench/test_unlike.py",
    "lab/cli/test_doctor_command.py",
    "lab/cli/test_extras.py",
    "lab/cli/test_new_method.py",
    "lab/sweep/test_sweep_runs.py",
    "lab/sweep/test_sweep_slurm.py",
    "lab/train/folder/test_checkpoint.py",
    "lab/train/run/test_determinism.py",
    "lab/train/run/test_elastic_runs.py",
    "lab/train/run/test_interrupt.py",
    "lab/train/run/test_layout_of_run.py",
    "lab/train/run/test_loop.py",
    "lab/train/run/test_quorum_runs.py",
    "lab/train/run/test_skipped_steps.py",
    "lab/train/start/test_launch.py",
    "lab/train/start/test_launch_examples.py",
    "strategy/test_abandoned_backward.py",
    "strategy/test_elastic_sharded.py",
    "strategy/test_gossip_processes.py",
    "strategy/test_sharded.py",
    "strategy/test_training_features.py",
    "strategy/test_works_with.py",
    "test_docs.py",
    "test_tutorial.py",
    "testing/test_attacks.py",
)


def _dealt(items: list, processes: int) -> list:
    """In as many shares as there are processes: each begins with one, and takes from the others' ends when it has none left.

    Integrations come first in each share, because they wait, and nothing else would be left to run meanwhile. The tests of a
    file stay together, for the sake of what they share.
    """
    files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    files.sort(key=lambda tests: (tests[0].get_closest_marker("integration") is None, -len(tests)))
    shares: list[list] = [[] for _ in range(processes)]
    for tests in files:
        min(shares, key=len).extend(tests)
    return [*itertools.chain(*shares)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    with killed_after_an_error():
        return (yield)


def pytest_collection_modifyitems(items) -> None:
    """Mark the tests of integrations, put the tests in order, and choose what the fork server imports.

    Spare the garbage collector the modules and the tests. The library asks the fork server for less in some tests, and the
    first to ask would win.
    """
    tests = Path(__file__).parent
    for item in items:
        if os.path.relpath(item.path, tests) in INTEGRATION:
            item.add_marker("integration")
    items[:] = _dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    preloaded = list(PRELOADED)
    if any("/tests/lab/" in str(item.path) for item in items):
        from thinwire.lab.train.start.spawn import PRELOADED as FOR_THE_LAB

        preloaded += [*FOR_THE_LAB, "thinwire.lab.cli", "thinwire.lab.recipes", "thinwire.lab.report"]
    forkserver.set_forkserver_preload(preloaded)
    forkserver.set_forkserver_preload = lambda names: None
    gc.freeze()
    gc.enable()
