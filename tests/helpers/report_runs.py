"""Folders of runs, written as training writes them, with numbers that tests know."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = {
    "recipe": "digits",
    "strategy": "Gradients(Mean())",
    "workers": 4,
    "seed": 0,
    "epochs": 4,
    "batch_size": 32,
    "split": "even",
    "data": {"test_fraction": 0.3},
    "optimizer": {"learning_rate": 0.05, "schedule": {"shape": "cosine"}},
    "output": "runs",
    "name": None,
}
STEPS = (10, 20, 30, 40)


def rows(accuracy: float, sent: float, rate: float = 1000.0, **more) -> list[dict]:
    """Four rows, at the end of an epoch each; `more` are values of all rows, or functions of the step."""
    return [
        {
            "step": step,
            "epoch": step / 10,
            "loss": 20 / step,
            "test_accuracy": accuracy * step / STEPS[-1],
            "test_loss": 1 - accuracy * step / STEPS[-1],
            "bytes_sent": sent * step / STEPS[-1],
            "examples_per_second": rate,
            "seconds": step / 10,
            "compute_seconds": 0.05,
            "encode_seconds": 0.02,
            "wait_seconds": 0.02,
            "decode_seconds": 0.01,
        }
        | {key: value(step) if callable(value) else value for key, value in more.items()}
        for step in STEPS
    ]


def summary(config: dict, last: dict) -> dict:
    tested = {key: last[key] for key in last if "test_" in key or key == "consensus_distance"}
    return {
        "recipe": config["recipe"],
        "strategy": config["strategy"],
        "workers": config["workers"],
        "seed": config["seed"],
        "final": tested | {"steps": last["step"]},
        "bytes_sent_per_worker": last["bytes_sent"],
        "dense_fp32_bytes": 8e8,
        "dense_bf16_bytes": 4e8,
        "compression_vs_fp32": 8e8 / last["bytes_sent"] if last["bytes_sent"] else None,
        "seconds": last["seconds"],
    }


def write_run(folder: Path, accuracy: float = 0.9, sent: float = 1e8, measured: dict | None = None, **config) -> Path:
    """A finished run."""
    config, logged = CONFIG | config, rows(accuracy, sent, **(measured or {}))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    (folder / "summary.json").write_text(json.dumps(summary(config, logged[-1])))
    return folder
