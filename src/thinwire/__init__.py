"""Training over a thin wire: compressed and decentralised averaging for PyTorch.

`_public` lists the names. They load when one of them is first used, so that `import thinwire` does not import PyTorch and
`thinwire --help` answers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .messages import install

__version__ = "0.1.0"

install()

if TYPE_CHECKING:
    from ._public import *  # noqa: F403 - the names are there
    from ._public import __all__ as __all__
else:  # type checkers would accept any name of a module with a `__getattr__`

    def __getattr__(name: str) -> object:
        """Import a public name or a module of the package (PEP 562)."""
        from importlib import import_module
        from importlib.util import find_spec

        if name == "__all__" or not name.startswith("_"):
            # Modules first: the library imports its own modules before `_public` is complete.
            if find_spec(f"{__name__}.{name}"):
                return import_module(f"{__name__}.{name}")
            public = import_module(f"{__name__}._public")
            globals().update({known: getattr(public, known) for known in ("__all__", *public.__all__)})
            if name in globals():
                return globals()[name]
        from .suggestion import nearest

        names = globals().get("__all__", [])
        home = next((package for package in names if name in getattr(globals()[package], "__all__", ())), None)
        hint = f"; it is {__name__}.{home}.{name}" if home else nearest(name, names)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
