"""What every integration shows in its trainer's log and progress bar."""

from __future__ import annotations

from ..strategy import Attachment

SHORT_NAMES = ("sent MB", "x fp32", "x bf16", "blocked s")


def numbers(*handles: Attachment) -> dict[str, float]:
    """Bytes and waiting time of this worker so far, for a log; the sum over the handles.

    Args:
        handles: what `attach` returned, connected.

    Returns:
        `thinwire/sent_mb`: megabytes (10^6 bytes) sent. `thinwire/fewer_than_fp32` and `thinwire/fewer_than_bf16`: how
        many times more the dense collectives would have sent. `thinwire/blocked_seconds`: seconds that the training waited
        for other workers.
    """
    ledgers = [handle.ledger for handle in handles]
    num_bytes = sum(ledger.bytes_sent for ledger in ledgers)
    return {
        "thinwire/sent_mb": num_bytes / 1e6,
        "thinwire/fewer_than_fp32": sum(ledger.dense_fp32_bytes for ledger in ledgers) / max(num_bytes, 1),
        "thinwire/fewer_than_bf16": sum(ledger.dense_bf16_bytes for ledger in ledgers) / max(num_bytes, 1),
        "thinwire/blocked_seconds": sum(handle.blocked_seconds for handle in handles),
    }


def short_numbers(*handles: Attachment) -> dict[str, float]:
    """The same numbers under names that fit into a progress bar: "sent MB", "x fp32", "x bf16" and "blocked s"."""
    return dict(zip(SHORT_NAMES, numbers(*handles).values(), strict=True))


def summary(*handles: Attachment) -> str:
    """The same numbers in a few words, for a progress bar or a line of a log.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1000, 10, bias=False)
        ...     with tw.compress_gradients(model, tw.Mean(tw.TopK(0.01)), comm=comm) as handle:
        ...         model(torch.ones(1, 1000)).sum().backward()
        ...         return summary(handle).rpartition(" ")[0]
        >>> tw.LocalWorld(2).run(worker)[1]  # rank 0 has also sent the model, once
        'sent 0.0 MB, 44.5 times less than fp32, 22.2 than bf16, blocked'
    """
    sent_mb, fp32, bf16, seconds = numbers(*handles).values()
    return f"sent {sent_mb:.1f} MB, {fp32:.1f} times less than fp32, {bf16:.1f} than bf16, blocked {seconds:.1f}s"
