"""The command that sums up what was learned."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import click

from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit, info

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class _Since(click.ParamType):
    """A time span, such as 24h, or a date."""

    name = "since"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta | datetime | None:
        text = str(value).strip()
        try:
            if match := re.fullmatch(r"(\d+)([mhdw])", text):
                return timedelta(**{_UNITS[match[2]]: int(match[1])})
            moment = datetime.fromisoformat(text)
            return (moment if moment.tzinfo else moment.astimezone()).astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(
                f"{text!a} is neither a time span, such as 24h or 7d, nor a date, such as 2026-01-31.",
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
    metavar="SPAN|DATE",
    help="How far back: 90m, 24h, 7d, 2w, or a date.",
)
@click.option("--everyone", is_flag=True, help="All users of the home with any activity.")
def report(common: GlobalOptions, since: timedelta | datetime, everyone: bool) -> None:
    """Sum up what was learned.

    Each learn with its verdict, its reason, its feedback, an answer before and after, and how to
    undo it. Also what was refused or withdrawn and why, and what is live.
    """
    if everyone:
        with session.open_runtime(common, "read") as runtime:
            summaries = [
                runtime.user(each.id, create=False).activity_summary(since)
                for each in session.iterate_users(runtime)
            ]
        summaries = [each for each in summaries if not each.is_empty]
    else:
        with session.open_user(common, "read") as user:
            summaries = [user.activity_summary(since)]
    data = {"users": [each.as_json() for each in summaries]}
    emit(common, data, "\n\n".join(map(str, summaries)))
    if not summaries:
        info(common, "There was no activity in this time.")
