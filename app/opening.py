"""Opens the home that the options mean, in the way that a command needs.

Invariant: only a command that has something to keep makes a home or a user; and what it keeps was checked before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

from personalpeft_app.options import Common
from personalpeft_app.progress import Display

if TYPE_CHECKING:
    from personalpeft import Runtime, User

Mode: TypeAlias = Literal["read", "change", "make"]


@contextmanager
def opened(common: Common, mode: Mode, display: Display | None = None) -> Iterator[Runtime]:
    """The runtime: "read" changes nothing, "change" needs a home that is there, "make" makes one."""
    import personalpeft
    from personalpeft.store.home import DATABASE

    home, _ = common.places()
    there = (home / DATABASE).exists()
    with personalpeft.open(
        home,
        common.base_name(),
        common.backend or "torch",
        progress=display or (lambda stage, done: None),
        # A home that is not there is looked at without writing: that says what is wrong with it and makes none.
        read_only=mode == "read" or (mode == "change" and not there),
    ) as runtime:
        yield runtime


@contextmanager
def user(common: Common, mode: Mode, display: Display | None = None) -> Iterator[User]:
    """The user that the options name; made on first use with "make" alone."""
    from personalpeft.ids import check_user_id

    name = check_user_id(common.user_id())
    with opened(common, mode, display) as runtime:
        yield runtime.user(name, create=mode == "make")
