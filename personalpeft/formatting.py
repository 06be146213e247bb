"""Numbers as people say them."""

from __future__ import annotations


def pluralize(number: int, one: str, many: str = "") -> str:
    """Such as "1 turn" or "2 turns"; ``many`` where that is not ``one`` with an s. Thousands have commas."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
