"""Deprecated names of public attributes. Each works for one release and warns."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

_OWN = ("personalpeft", "personalpeft_app")
_F = TypeVar("_F", bound=Callable[..., Any])


def warn_renamed(old: str, new: str) -> None:
    """Warn the first caller outside of our packages that ``old`` is now called ``new``."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{old} is now called {new}; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=level,
    )


class RenamedAttributes:
    """Redirects the old names of a subclass's attributes to the new ones, with a warning.

    JSON of a dataclass has its values under both names.
    """

    __slots__ = ()
    _renamed: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, renamed: Mapping[str, str] | None = None) -> None:
        # A dataclass with slots makes its class a second time, without the keyword.
        if renamed is not None:
            cls._renamed = renamed

    # Hidden from type checkers, which would otherwise accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            new = self._renamed.get(name)
            if new is None:
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            warn_renamed(f"{type(self).__name__}.{name}", new)
            return getattr(self, new)


def former_names(kind: type) -> Mapping[str, str]:
    """Return the current name of each old attribute of a class."""
    return getattr(kind, "_renamed", {})


def accept_renamed_arguments(**renamed: str) -> Callable[[_F], _F]:
    """Return a decorator with which a function or constructor takes old keyword names and warns.

    Args:
        renamed: The new name of each old one.
    """

    def decorate(target: _F) -> _F:
        function: Callable[..., Any] = (
            vars(target)["__init__"] if isinstance(target, type) else target
        )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in renamed.keys() & kwargs.keys():
                warn_renamed(f"{target.__qualname__}({old}=)", renamed[old])
                kwargs.setdefault(renamed[old], kwargs.pop(old))
            return function(*args, **kwargs)

        if isinstance(target, type):
            target.__init__ = call  # type: ignore[misc]
            return target
        return call  # type: ignore[return-value]

    return decorate
