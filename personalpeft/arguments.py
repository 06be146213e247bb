"""Check the arguments of public functions. Each check raises ``InvalidInput``."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

from personalpeft.errors import HomeError, InvalidInput
from personalpeft.types import is_number

# Of SQLite, where most of these numbers end.
_MAX_WHOLE = 2**63 - 1


def check_types(where: str, **checked: tuple[object, type | UnionType]) -> None:
    """Raise ``InvalidInput`` unless each argument of a function, ``where``, has its type."""
    for name, (value, kind) in checked.items():
        if not isinstance(value, kind):
            kinds = get_args(kind) or (kind,)
            words = ["None" if each is NoneType else each.__name__ for each in kinds]
            raise InvalidInput(
                f"{name} must be {' or '.join(words)}, got {type(value).__name__}.",
                hint=f"See {where}.",
            )


def check_flags(**flags: object) -> None:
    """Raise ``InvalidInput`` unless each argument is True or False. A text such as "no" is true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise _invalid(name, value, "True or False")


def check_functions(**functions: object) -> None:
    """Raise ``InvalidInput`` unless each argument can be called."""
    for name, value in functions.items():
        if not callable(value):
            raise _invalid(name, value, "a function")


def check_list(name: str, value: object) -> None:
    """Raise ``InvalidInput`` unless the value of an argument is a list or another collection."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidInput(
            f"{name} must be a list, got {type(value).__name__}.",
            hint="Give a list, also for a single item.",
        )


def check_path(name: str, value: object) -> Path:
    """Return the value of an argument as an absolute path.

    Raises:
        InvalidInput: It is no path, or a relative one where the current folder was deleted.
        HomeError: It begins with the home folder of an account that has none.
    """
    if not isinstance(value, str | PathLike):
        raise _invalid(name, value, "a path")
    text = os.fspath(value)
    # An empty path is the current folder, and most often a variable that is not set.
    if not text.strip() or "\0" in text or not _is_encodable(text):
        raise _invalid(name, text, "a path")
    try:
        path = Path(value).expanduser().absolute()
    except RuntimeError as error:
        raise HomeError(
            f"{name} is in an unknown folder: {str(error).rstrip('.')}.", hint="Give a full path."
        ) from error
    except FileNotFoundError as error:
        raise InvalidInput(
            f"{name} must be a full path, got {text!a:.40}: the current folder does not exist.",
            hint="Change to another folder, or give a full path.",
        ) from error
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _invalid(name, text, "a path that is no longer than the system allows") from error
    return path


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ``InvalidInput`` unless an argument is one of a ``Literal`` or another collection."""
    allowed = get_args(choices) or tuple(choices)
    if value not in allowed:
        raise _invalid(name, value, f"one of {', '.join(map(str, allowed))}")


def check_number(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    whole: bool = False,
    above: bool = False,
) -> None:
    """Raise ``InvalidInput`` unless the value of an argument is a number within bounds.

    Args:
        name: The argument.
        value: Its value.
        low: The least value.
        high: The largest value.
        whole: Whether it must be a whole number.
        above: Whether ``low`` itself is refused.
    """
    allowed = "a whole number" if whole else "a number"
    if whole and isinstance(value, int) and value > _MAX_WHOLE:
        high = min(high, _MAX_WHOLE)
    if high == math.inf:
        allowed += f" above {low}" if above else f" of {low} or more"
    else:
        allowed += f" above {low}, at most {high}" if above else f" from {low} to {high}"
    if (
        not is_number(value)
        or (whole and not isinstance(value, int))
        or not low <= value <= high
        or (above and value == low)
    ):
        raise _invalid(name, value, allowed)


def _invalid(name: str, value: object, allowed: str) -> InvalidInput:
    return InvalidInput(f"{name} must be {allowed}, got {value!a:.40}.", hint=f"Give {allowed}.")
