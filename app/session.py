"""Opens the home that the options mean, in the way that a command needs.

Invariant: only a command that has something to keep makes a home or a user; and what it keeps was checked before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

from personalpeft_app.options import GlobalOptions
from personalpeft_app.output import info
from personalpeft_app.progress import Display

if TYPE_CHECKING:
    from personalpeft import Runtime, Serving, User
    from personalpeft.settings import Observing
    from personalpeft.types import HeadMove

Mode: TypeAlias = Literal["read", "change", "make"]


@contextmanager
def open_runtime(
    common: GlobalOptions,
    mode: Mode,
    display: Callable[[str, float], None] | None = None,
    serving: Serving | None = None,
    observing: Observing = "off",
) -> Iterator[Runtime]:
    """The runtime: "read" changes nothing, "change" needs a home that is there, "make" makes one."""
    import personalpeft
    from personalpeft.store.home import DATABASE

    home, _ = common.paths()
    there = (home / DATABASE).exists()
    with personalpeft.open(
        home,
        common.base_name(),
        common.backend or "torch",
        progress=display or (lambda stage, done: None),
        # A home that is not there is looked at without writing: that says what is wrong with it and makes none.
        read_only=mode == "read" or (mode == "change" and not there),
        serving=serving,
        observing=observing,
    ) as runtime:
        yield runtime


@contextmanager
def open_user(common: GlobalOptions, mode: Mode, display: Display | None = None) -> Iterator[User]:
    """The user that the options name; made on first use with "make" alone."""
    from personalpeft.ids import check_user_id

    name = check_user_id(common.user_id())
    with open_runtime(common, mode, display) as runtime:
        opened_user = runtime.user(name, create=mode == "make")
        told = _report_withdrawn(common, opened_user, set())
        yield opened_user
        _report_withdrawn(common, opened_user, told)


def _report_withdrawn(common: GlobalOptions, user: User, told: set[HeadMove]) -> set[HeadMove]:
    """Says what was withdrawn since the last turn, but for what was told already; gives all of it."""
    if common.json or common.quiet:
        return told
    newest = user.turns(limit=1)
    withdrawn = {move for move in user.history() if move.cause == "withdrawn"}
    news = {move for move in withdrawn if not newest or move.at > newest[0].at}
    for move in news - told:
        reason = next(
            (each.reason for each in user.revisions(move.layer) if each.id == move.before), ""
        )
        back = move.after or "the bare base"
        info(
            common,
            f"{move.layer}: {move.before} was live on probation and is no longer ({reason}); {back} answers again.",
        )
    return news | told
