"""Without a GPU, `make test-gpu` and `make bench-gpu` say so in one line and fail."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["test", "bench"])
def test_without_a_gpu(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main = runpy.run_path(str(ROOT / "scripts" / "gpu.py"))["main"]
    with pytest.raises(SystemExit, match="^no GPU: .*$") as exit:
        main(command)
    assert "\n" not in str(exit.value)


def test_make_runs_the_script():
    makefile = (ROOT / "Makefile").read_text()
    assert "scripts/gpu.py test" in makefile and "scripts/gpu.py bench" in makefile


def test_the_benchmark_of_codecs_refuses_a_gpu_that_is_not_there(monkeypatch):
    from thinwire.lab.bench import CodecsBench

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU"):
        CodecsBench(device="cuda")
