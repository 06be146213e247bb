"""Deprecated names of public attributes. Each works for one release and warns."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

_T = TypeVar("_T")


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


def accept_renamed_arguments(**renamed: str) -> Callable[[type[_T]], type[_T]]:
    """Return a class decorator with which a constructor takes old keyword names, with a warning.

    Args:
        renamed: The new name of each old one.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        construct = cls.__init__

        @functools.wraps(construct)
        def init(self: _T, *args: Any, **kwargs: Any) -> None:
            for old in renamed.keys() & kwargs.keys():
                warn_renamed(f"{cls.__name__}({old}=)", renamed[old])
                kwargs.setdefault(renamed[old], kwargs.pop(old))
            construct(self, *args, **kwargs)

        cls.__init__ = init  # type: ignore[assignment]
        return cls

    return decorate
