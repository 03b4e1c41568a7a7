"""What makes two runs the same run: a hash of everything in their configuration that determines the result.

Left out are the fields of `IMMATERIAL`: where the records go, how often a row is written, what executes the run. All
others count, also those that are new or whose effect is small, so that a sweep rather repeats a run than passes one
off as another. The library's version does not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

IMMATERIAL = {
    *("output", "name", "overwrite", "resume", "keep", "log_every"),  # of a training run
    *("interface", "port", "requeue", "threads"),
    *("json", "figure", "processes"),  # of a consensus experiment
}


def identity(config: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that equal configurations share.

    Args:
        config: plain values, as `config.json` holds them.

    Example:
        >>> identity({"seed": 1, "threads": 1}) == identity({"seed": 1, "threads": 4}) != identity({"seed": 2})
        True
    """
    material = {name: value for name, value in config.items() if name not in IMMATERIAL}
    text = json.dumps(material, sort_keys=True, default=str)  # paths as text; tuples as lists
    return hashlib.sha256(text.encode()).hexdigest()[:16]
