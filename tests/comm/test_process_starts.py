"""Where workers may be started from: a script from standard input, one without a guard, a daemon, another thread."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from thinwire.comm import ProcessWorld
from thinwire.lab.recipes import recipes
from thinwire.lab.train import train

SCRIPT = """
from operator import attrgetter
from thinwire.comm import ProcessWorld
print(ProcessWorld(2).run(attrgetter("rank")))
"""


def run_script(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600, **options)


def test_a_script_from_standard_input_starts_workers():
    """They looked for a file of the name "<stdin>", and died without a word."""
    done = run_script("-", input=f"{SCRIPT}print(__file__)\n")
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n<stdin>\n"), done.stderr


def test_a_script_without_a_guard_says_what_to_write(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = run_script(str(path))
    assert done.returncode == 1
    assert "ValueError: each worker imports the main script, which starts workers again; put what" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("_inheriting", True, "`if __name__ == '__main__':`"),
        ("_config", {"daemon": True}, "start it with daemon=False"),
    ],
)
def test_a_process_that_may_start_none_is_refused_before_anything_is_written(name, value, said, tmp_path, monkeypatch):
    """A run without a guard said that its folder belonged to another; a daemon had removed the old run by then."""
    config = replace(recipes()["digits"].config, output=tmp_path, name="x")
    monkeypatch.setattr(multiprocessing.current_process(), name, value, raising=False)
    for call in (lambda: train(config), lambda: ProcessWorld(2).run(len)):
        with pytest.raises(ValueError, match=said):
            call()
    assert list(tmp_path.iterdir()) == []


def test_training_in_another_thread_is_refused_before_anything_is_written(tmp_path):
    config, errors = replace(recipes()["digits"].config, output=tmp_path, name="x"), []

    def call():
        try:
            train(config)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert errors == [
        "train() answers signals, which only the main thread can; call it there, or in a process of its own"
    ]
    assert list(tmp_path.iterdir()) == []
