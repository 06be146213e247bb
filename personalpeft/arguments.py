"""Check the arguments of public functions. Each check raises ``InvalidInput``."""

from __future__ import annotations

import math
from types import NoneType, UnionType
from typing import Any, get_args

from personalpeft.errors import InvalidInput
from personalpeft.types import is_number


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


def check_choice(name: str, value: object, literal: Any) -> None:
    """Raise ``InvalidInput`` unless the value of an argument is one of a ``Literal``."""
    if value not in get_args(literal):
        allowed = ", ".join(map(str, get_args(literal)))
        raise InvalidInput(
            f"{name} must be one of {allowed}, got {value!a:.40}.", hint=f"Give one of {allowed}."
        )


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
    allowed += f" above {low}" if above else f" of {low} or more"
    if high < math.inf:
        allowed += f", at most {high}"
    if (
        not is_number(value)
        or (whole and not isinstance(value, int))
        or not low <= value <= high
        or (above and value == low)
    ):
        raise InvalidInput(f"{name} must be {allowed}, got {value!a:.40}.", hint=f"Give {allowed}.")
