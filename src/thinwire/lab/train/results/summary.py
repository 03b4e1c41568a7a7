"""The summary of a finished run: the test result and the bytes sent."""

from __future__ import annotations

from typing import Any

from ....strategy import AveragerAttachment
from ..config import RunConfig
from ..data import Dataset


def summary(config: RunConfig, data: Dataset, last: dict[str, float], strategy: AveragerAttachment) -> dict[str, Any]:
    """The contents of `summary.json`. Bytes are means over the workers; "workers" of an elastic run are those of the end."""
    ledger, bytes_sent = strategy.ledger, last["bytes_sent"]
    tested = {key: value for key, value in last.items() if key.startswith(("test_", "mean_model_", "consensus_"))}
    trained = {f"train_{name}": last[name] for name in ("accuracy", "loss") if name in last}
    return {
        "recipe": config.recipe,
        "strategy": repr(strategy.strategy),
        "workers": last.get("workers", config.workers),
        "seed": config.seed,
        "metric": f"test_{data.best_metric}",
        "lower_is_better": data.best_metric in data.lower_is_better,
        "final": tested | trained | {"steps": last["step"]},
        "skipped_steps": last["skipped_steps"],
        "bytes_sent_per_worker": bytes_sent,
        "dense_fp32_bytes": ledger.dense_fp32_bytes,
        "dense_bf16_bytes": ledger.dense_bf16_bytes,
        "compression_vs_fp32": ledger.dense_fp32_bytes / bytes_sent if bytes_sent else None,  # one worker sends nothing
        "seconds": last["seconds"],
    } | {key: value for key, value in last.items() if key in ("virtual_seconds", "aborted", "healings")}
