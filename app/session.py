"""Open the home and the user that the global options name.

Invariant: only a command that stores something creates a home or a user, after checking its input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click

from personalpeft_app.options import GlobalOptions
from personalpeft_app.output import info

if TYPE_CHECKING:
    from personalpeft import Runtime, User
    from personalpeft.types import HeadMove, Progress

Mode: TypeAlias = Literal["read", "change", "make"]


def open_runtime(
    common: GlobalOptions,
    mode: Mode,
    progress: Progress | None = None,
    **options: Any,
) -> Runtime:
    """Open the runtime: to "read", to "change" an existing home, or to "make" one if needed.

    Progress goes to ``progress``, or else to the display of ``common``. ``options`` are more of
    ``personalpeft.open``.
    """
    import personalpeft
    from personalpeft.store.home import DATABASE

    home, _ = common.paths()
    exists = (home / DATABASE).exists()
    return personalpeft.open(
        home,
        common.base_name(),
        common.backend or "auto",
        progress=progress or common.display,
        # Opening a missing home read-only raises the error that names it, and creates none.
        read_only=mode == "read" or (mode == "change" and not exists),
        passphrase=ask_passphrase(home),
        **options,
    )


def ask_passphrase(home: Path) -> str | None:
    """Ask for the passphrase of a home that needs one, on a terminal; else return None."""
    from personalpeft.settings import PASSPHRASE
    from personalpeft.store.home_keys import ENCRYPTION, KeySource, read_info

    if os.environ.get(PASSPHRASE) or not sys.stdin.isatty() or not (home / ENCRYPTION).exists():
        return None
    info = read_info(home)
    if info is None or info.source is not KeySource.PASSPHRASE:
        return None
    answer: str = click.prompt("Passphrase", hide_input=True, err=True)
    return answer


@contextmanager
def open_user(
    common: GlobalOptions, mode: Mode, progress: Progress | None = None, **options: Any
) -> Iterator[User]:
    """Open the user that the options name. Only "make" creates one."""
    from personalpeft.ids import check_user_id

    name = check_user_id(common.user_id())
    with open_runtime(common, mode, progress, **options) as runtime:
        user = runtime.user(name, create=mode == "make")
        reported = _report_withdrawn(common, user, set())
        yield user
        _report_withdrawn(common, user, reported)


def _report_withdrawn(common: GlobalOptions, user: User, reported: set[HeadMove]) -> set[HeadMove]:
    """Report revisions that were withdrawn since the last turn. Return all that are reported."""
    from personalpeft.learning.outcomes import MoveCause

    if common.json or common.quiet:
        return reported
    newest = user.turns(limit=1)
    withdrawn = {move for move in user.history() if move.cause == MoveCause.WITHDRAWN}
    news = {move for move in withdrawn if not newest or move.at > newest[0].at}
    for move in news - reported:
        reason = next(
            (each.reason for each in user.revisions(move.layer) if each.id == move.before), ""
        )
        back = move.after or "the bare base"
        info(
            common,
            f"{move.layer}: {move.before} was live on probation and was withdrawn ({reason}); "
            f"{back} answers again.",
        )
    return news | reported
