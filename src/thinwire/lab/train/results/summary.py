"""The summary of a finished run: the test result and the bytes sent."""

from __future__ import annotations

from typing import Any

from ....strategy import AveragerAttachment
from ..config import RunConfig
from ..data import Dataset


def summary(config: RunConfig, data: Dataset, last: dict[str, float], strategy: AveragerAttachment) -> dict[str, Any]:
    """The contents of `summary.json`. Bytes are means over the workers."""
    ledger, bytes_sent = strategy.ledger, last["bytes_sent"]
    tested = {key: value for key, value in last.items() if key.startswith(("test_", "mean_model_", "consensus_"))}
    return {
        "recipe": config.recipe,
        "strategy": repr(strategy.strategy),
        "workers": config.workers,
        "seed": config.seed,
        "metric": f"test_{data.best_metric}",
        "final": tested | {"train_accuracy": last["accuracy"], "train_loss": last["loss"], "steps": last["step"]},
        "skipped_steps": last["skipped_steps"],
        "bytes_sent_per_worker": bytes_sent,
        "dense_fp32_bytes": ledger.dense_fp32_bytes,
        "dense_bf16_bytes": ledger.dense_bf16_bytes,
        "compression_vs_fp32": ledger.dense_fp32_bytes / bytes_sent if bytes_sent else None,  # one worker sends nothing
        "seconds": last["seconds"],
    } | {key: value for key, value in last.items() if key in ("virtual_seconds", "aborted", "healings")}
