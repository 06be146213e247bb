"""Pages of lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from personalpeft.errors import InvalidInput, NotFound
from personalpeft_app.http.api_v1 import schemas as v

T = TypeVar("T")


def by_id(value: Any) -> str:
    """Return the id of a value."""
    return str(value.id)


def newest_first(read: Callable[..., Sequence[T]], query: Any) -> v.Page[T]:
    """Return a page of what the library itself reads in pages, newest first."""
    # One more than the limit tells whether there is another page.
    found = tuple(read(query.limit + 1, before=query.after))
    part = found[: query.limit]
    return v.Page(part, by_id(part[-1]) if len(found) > len(part) else None)


def page(found: Sequence[T], query: Any, key: Callable[[T], str]) -> v.Page[T]:
    """Return the page of a whole list that follows the value with the key ``query.after``.

    Raises ``NotFound`` if that value is gone.
    """
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
    """Return a page of a list that only grows: ``query.after`` is the number of values before it."""
    if query.after is not None and not (query.after.isdecimal() and query.after.isascii()):
        raise InvalidInput(
            "after is not the next of a page.", hint="Begin again with the first page."
        )
    begin = int(query.after or 0)
    part = tuple(found[begin : begin + query.limit])
    ends = begin + len(part)
    return v.Page(part, str(ends) if ends < len(found) else None)
