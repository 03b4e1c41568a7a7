"""What makes two runs the same run: a hash of everything in their configuration that determines the result.

Left out are the fields that a run may change when it is resumed (`thinwire.lab.train.run_folder.FREE`): where the records
go, how often a row is written, what executes the run. So a finished run is passed over exactly where an unfinished one
would be gone on with. All other fields count, also those that are new; the library's version does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..train.run_folder import binding

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
