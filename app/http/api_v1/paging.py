"""A page of a list, for what the library gives whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from personalpeft.errors import InvalidInput, NotFound
from personalpeft_app.http.api_v1 import schemas as v

T = TypeVar("T")


def by_id(value: Any) -> str:
    """The key of what has an id."""
    return str(value.id)


def page(found: Sequence[T], query: Any, key: Callable[[T], str]) -> v.Page[T]:
    """A page of what has ids, after the one of that id. Raises ``NotFound`` where that has gone in between."""
    begin = 0
    if query.after is not None:
        begin = next(
            (number for number, each in enumerate(found, 1) if key(each) == query.after), 0
        )
        if not begin:
            raise NotFound(
                "There is nothing of the id that after names.",
                hint="Begin again with the first page.",
            )
    part = tuple(found[begin : begin + query.limit])
    return v.Page(part, key(part[-1]) if begin + len(part) < len(found) else None)


def page_by_number(found: Sequence[T], query: Any) -> v.Page[T]:
    """A page of what only grows and has no ids: ``after`` is how many came before."""
    if query.after is not None and not (query.after.isdecimal() and query.after.isascii()):
        raise InvalidInput(
            "after is not the next of a page.", hint="Begin again with the first page."
        )
    begin = int(query.after or 0)
    part = tuple(found[begin : begin + query.limit])
    ends = begin + len(part)
    return v.Page(part, str(ends) if ends < len(found) else None)
