"""What learning did in a while."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit, info

if TYPE_CHECKING:
    from personalpeft import Runtime

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_PAGE = 1000


class _Since(click.ParamType):
    """A while, such as 24h, or a moment."""

    name = "since"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta | datetime | None:
        text = str(value).strip()
        try:
            if found := re.fullmatch(r"(\d+)([mhdw])", text):
                return timedelta(**{_UNITS[found[2]]: int(found[1])})
            moment = datetime.fromisoformat(text)
            return (moment if moment.tzinfo else moment.astimezone()).astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(
                f"{text!a} is neither a while, such as 24h or 7d, nor a date, such as 2026-01-31.",
                param,
                ctx,
            )


@command(
    "report",
    examples=(
        "personalpeft report",
        "personalpeft report --since 7d --json",
        "personalpeft report --everyone",
    ),
)
@click.option(
    "--since",
    type=_Since(),
    default="24h",
    show_default=True,
    metavar="WHILE|DATE",
    help="How far back: minutes, hours, days or weeks as in 90m, 24h, 7d, 2w, or a date.",
)
@click.option(
    "--everyone", is_flag=True, help="All users of the home of whom there is something to say."
)
def report(common: GlobalOptions, since: timedelta | datetime, everyone: bool) -> None:
    """Sum up what was learned.

    Each learn with its verdict and reason, from which feedback, an answer before and after, and how to undo it; what was
    refused or withdrawn and why; what is live.
    """
    if everyone:
        with session.open_runtime(common, "read") as runtime:
            digests = [
                runtime.user(name, create=False).activity_summary(since) for name in _names(runtime)
            ]
        digests = [each for each in digests if not each.is_empty]
    else:
        with session.open_user(common, "read") as user:
            digests = [user.activity_summary(since)]
    emit(common, {"users": [each.as_json() for each in digests]}, "\n\n".join(map(str, digests)))
    if not digests:
        info(common, "Nobody said or learned anything in this while.")


def _names(runtime: Runtime) -> Iterator[str]:
    after = None
    while page := runtime.users(after=after, limit=_PAGE):
        yield from (each.id for each in page)
        after = page[-1].id
