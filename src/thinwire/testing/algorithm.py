"""What the conformance suites check of every algorithm: what it is, and its notation."""

from __future__ import annotations

from ..algorithm import Algorithm
from ..notation import parse


def check_algorithm(algorithm: object, kind: type[Algorithm], named: bool) -> None:
    """Check that an algorithm is of a kind, and equals what its notation gives.

    Args:
        algorithm: what a suite was given.
        kind: what the suite checks.
        named: whether `parse(repr(algorithm))` must equal it.
    """
    what = kind.__name__.lower()
    assert isinstance(algorithm, kind), (
        f"expected an instance of a {what}, derived from {kind.__name__}, got {algorithm!r}"
    )
    try:
        number = hash(algorithm)  # because caches have algorithms as keys
    except TypeError as error:
        raise AssertionError(f"{algorithm}: {error}; use tuples and other fields that have a hash") from None
    if not named:
        return
    try:
        again = parse(repr(algorithm))
    except ValueError as error:
        raise AssertionError(
            f"parse({algorithm!r}): {error}; its class must be registered with thinwire.notation.register, and its fields be "
            "literals or algorithms, or pass named=False"
        ) from None
    assert again == algorithm and hash(again) == number, f"parse({algorithm!r}) gives another {what}"
