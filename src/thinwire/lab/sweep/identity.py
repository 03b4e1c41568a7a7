"""The identity of a run: a hash of all configuration fields that determine its result.

It leaves out the fields that a resumed run may change (`run_folder.FREE`), such as the output folder or
`log_every`. So a sweep skips a finished run in exactly the cases in which it would resume an unfinished one. All other fields
count, also new ones. The version of the library does not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..train.folder.run_folder import binding

OF_CONSENSUS = ("json", "figure", "processes")  # free fields of consensus experiments


def identity(config: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that equal configurations share.

    Args:
        config: plain values, as `config.json` holds them.

    Example:
        >>> identity({"seed": 1, "threads": 1}) == identity({"seed": 1, "threads": 4}) != identity({"seed": 2})
        True
    """
    material = {path: value for path, value in binding(config).items() if path not in OF_CONSENSUS}
    text = json.dumps(material, sort_keys=True, default=str)  # paths as text; tuples as lists
    return hashlib.sha256(text.encode()).hexdigest()[:16]
