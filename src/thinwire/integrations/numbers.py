"""What every adapter shows in its trainer's log."""

from __future__ import annotations

from ..strategy import Strategy


def numbers(strategy: Strategy) -> dict[str, float]:
    """Bytes and waiting time so far, of this worker.

    Returns:
        `thinwire/sent_mb`: megabytes (10^6 bytes) sent. `thinwire/fewer_than_fp32` and `thinwire/fewer_than_bf16`: how
        many times more a dense ring all-reduce would have sent. `thinwire/blocked_seconds`: seconds that backward waited
        for the network.
    """
    ledger, sent = strategy.ledger, max(strategy.ledger.bytes_sent, 1)
    return {
        "thinwire/sent_mb": ledger.bytes_sent / 1e6,
        "thinwire/fewer_than_fp32": ledger.dense_fp32_bytes / sent,
        "thinwire/fewer_than_bf16": ledger.dense_bf16_bytes / sent,
        "thinwire/blocked_seconds": strategy.seconds.get("blocked", 0.0),
    }
