"""Deprecated names of public attributes. Each works for one release and warns."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn the caller's caller that ``old`` is now called ``new``."""
    warnings.warn(
        f"{old} is now called {new}; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


class RenamedAttributes:
    """Redirects the old names of a subclass's attributes to the new ones, with a warning."""

    _renamed: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, renamed: Mapping[str, str] | None = None) -> None:
        cls._renamed = renamed or {}

    # Hidden from type checkers, which would otherwise accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            new = self._renamed.get(name)
            if new is None:
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            warn_renamed(f"{type(self).__name__}.{name}", new)
            return getattr(self, new)
