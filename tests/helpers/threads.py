"""Threads that cannot be started."""

from __future__ import annotations

import threading

import pytest


def failing_once(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Let the next start of a thread of this name fail; the list that is returned is empty afterwards."""
    left, start = [name], threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name in left:
            left.clear()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    return left
