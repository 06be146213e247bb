"""Open the home and the user that the global options name.

Invariant: only a command that stores something creates a home or a user, after checking its input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

import click

import personalpeft
from personalpeft.types import Progress
from personalpeft_app.options import GlobalOptions
from personalpeft_app.output import info

Mode: TypeAlias = Literal["read", "change", "make"]


def open_runtime(
    common: GlobalOptions,
    mode: Mode,
    progress: Progress | None = None,
    **options: Any,
) -> personalpeft.Runtime:
    """Open the runtime: to "read", to "change" an existing home, or to "make" one if needed.

    Progress goes to ``progress``, or else to the display of ``common``. ``options`` are more of
    ``personalpeft.open``.
    """
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
) -> Iterator[personalpeft.User]:
    """Open the user that the options name. Only "make" creates one."""
    from personalpeft.ids import check_user_id

    name = check_user_id(common.user_id())
    with open_runtime(common, mode, progress, **options) as runtime:
        user = runtime.user(name, create=mode == "make")
        newest = user.turns(limit=1)
        yield user
        if not (common.json or common.quiet):
            _report_withdrawn(common, user, newest[0].at if newest else None)


def _report_withdrawn(
    common: GlobalOptions, user: personalpeft.User, last_turn: datetime | None
) -> None:
    """Report revisions that were withdrawn since the last turn before the command."""
    from personalpeft.learning.outcomes import MoveCause

    for move in user.history():
        if move.cause != MoveCause.WITHDRAWN or (last_turn and move.at <= last_turn):
            continue
        reason = next(
            (each.reason for each in user.revisions(move.layer) if each.id == move.before), ""
        )
        back = move.after or "the bare base"
        info(
            common,
            f"{move.layer}: {move.before} was live on probation and was withdrawn ({reason}); "
            f"{back} answers again.",
        )
