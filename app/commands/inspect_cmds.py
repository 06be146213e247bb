"""Commands that show the state. They create no home or user, and load no model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import click

from personalpeft.formatting import to_json
from personalpeft.ids import LAST
from personalpeft.learning.report import signal_text
from personalpeft.types import Revision, Signal
from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, Group, command, flag, option
from personalpeft_app.output import emit, format_table, format_time, info

_BASE = "(the base)"
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_STALE: Mapping[str, str] = {
    "stack_below_changed": "is trained on a layer that changed; the next learn judges it again",
    "lessons_retracted": "is trained on feedback that no longer counts; the next learn builds it "
    "without that",
}


@command("stack", examples=("stack", "stack --user ada --json"))
def stack(common: GlobalOptions) -> None:
    """Show the user's layers, the lowest first.

    Each with its live revision, weight, scope and verdict.

    To change one: personalpeft rollback, personalpeft set-weight, personalpeft scope.
    """
    with session.open_user(common, "read") as user:
        layers = user.layers()
        revisions = {revision.id: revision for revision in user.revisions()}
        pending = user.pending().triggers
    listed, rows = [], []
    for layer in layers:
        head = revisions.get(layer.head or "")
        listed.append({**to_json(layer), "revision": to_json(head)})
        rows.append(
            (
                layer.name,
                layer.head or _BASE,
                f"{layer.weight:g}",
                layer.scope,
                _verdict(head) if head else "",
                format_time(head.at) if head else "",
                head.reason if head else "",
            )
        )
    headings = ("LAYER", "LIVE", "WEIGHT", "ATTACHED", "VERDICT", "BUILT", "REASON")
    empty = f"{user.id} has no layer yet: the bare base answers."
    data = {"user": user.id, "layers": listed, "pending": pending}
    emit(common, data, format_table(headings, rows, flexible=(6,)), empty=empty)
    for each in pending:
        if each.kind in _STALE:
            info(common, f"{each.layer} {_STALE[each.kind]}.")


@command(
    "revisions",
    examples=("revisions", "revisions --layer style --json"),
    surplus="Did you mean --layer {}?",
)
@click.option("--layer", help="Only of this layer.  [default: all]")
def revisions(common: GlobalOptions, layer: str | None) -> None:
    """List all revisions, the oldest first.

    Refused ones too; '*' marks the live ones.
    """
    with session.open_user(common, "read") as user:
        items = user.revisions(layer)
        live = {each.head for each in user.layers()}
    rows = [
        (
            "*" if each.id in live else "",
            each.id,
            _verdict(each),
            format_time(each.at),
            str(sum(role == "trained" for role in each.signals.values())),
            each.parent or "nothing",
            each.reason,
        )
        for each in items
    ]
    headings = ("", "REVISION", "VERDICT", "BUILT", "LESSONS", "ON", "REASON")
    listed = [{**to_json(each), "live": each.id in live} for each in items]
    data = {"user": user.id, "revisions": listed}
    empty = (
        f"{user.id} has no revision yet. Give feedback, then: personalpeft learn --user {user.id}"
    )
    emit(common, data, format_table(headings, rows, flexible=(6,)), empty=empty)


@command("turns", examples=("turns", "turns -n 50 --json"))
@option("-n", "--limit", type=click.IntRange(1), default=10, help="How many.")
def turns(common: GlobalOptions, limit: int) -> None:
    """List the last questions and replies, the newest first.

    Each with its id and your feedback on it.
    """
    with session.open_user(common, "read") as user:
        newest = user.turns(limit)
        signals = user.signals()
    listed, rows = [], []
    for turn in newest:
        feedback = [signal for signal in signals if signal.turn == turn.id]
        kinds = ", ".join(dict.fromkeys(str(signal.kind) for signal in feedback))
        prompt = turn.messages[-1].content
        listed.append({**to_json(turn), "signals": to_json(feedback)})
        rows.append((turn.id, format_time(turn.at), kinds or "-", prompt, turn.reply))
    headings = ("TURN", "WHEN", "FEEDBACK", "PROMPT", "REPLY")
    data = {"user": user.id, "turns": listed}
    empty = f"{user.id} has no turn yet."
    emit(common, data, format_table(headings, rows, flexible=(3, 4)), empty=empty)


@command("signals", examples=("signals", "signals --all --json"))
@flag("--all", "everything", help="Also superseded and retracted signals.")
def signals(common: GlobalOptions, everything: bool) -> None:
    """Show the use of each signal and why, the oldest first.

    Each with its source, its kind, where it is placed, its use so far, and its revision. The use
    names personal data that was replaced in it.
    """
    with session.open_user(common, "read") as user:
        statuses = user.signal_statuses(current=not everything)
        training = user.summary().training
    rows = [
        (
            each.signal.id,
            format_time(each.signal.at),
            _format_source(each.signal),
            str(each.signal.kind),
            each.layer or str(each.place),
            ", ".join([each.use, *dict.fromkeys(f"{one.kind} replaced" for one in each.removed)]),
            each.revision or "",
            each.why,
            signal_text(each.signal),
        )
        for each in statuses
    ]
    headings = ("SIGNAL", "TIME", "SOURCE", "KIND", "PLACE", "USE", "REVISION", "WHY", "TEXT")
    data = {"user": user.id, "training": training, "signals": statuses}
    empty, renamed = f"{user.id} has given no feedback yet.", {"lessons": "signals"}
    emit(common, data, format_table(headings, rows, flexible=(7, 8)), empty=empty, renamed=renamed)
    if not training:
        info(common, "New feedback is not trained on. To change that: personalpeft set-training on")


@command("why", examples=("why", "why t_01m7yhn42w --json"))
@click.argument("turn", default="last", metavar="[TURN|last]")
def why(common: GlobalOptions, turn: str) -> None:
    """Show what a reply was based on.

    Names its revisions, the feedback that each was trained on, and what is in the prompt.

    TURN is an id that ask or turns printed, or its beginning.  [default: last]
    """
    with session.open_user(common, "read") as user:
        provenance = user.why(turn)
    emit(common, provenance, str(provenance))


def _since(text: str) -> timedelta | datetime:
    """Return a time span, such as 24h, or a date."""
    text = text.strip()
    try:
        if match := re.fullmatch(r"(\d+)([mhdw])", text):
            return timedelta(**{_UNITS[match[2]]: int(match[1])})
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.astimezone()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!a} is neither a time span, such as 24h or 7d, nor a date, such as 2026-01-31."
        ) from None


@command(
    "activity",
    examples=("activity", "activity --since 7d --json", "activity --everyone"),
    surplus="Did you mean --since {}?",
)
@option(
    "--since",
    type=_since,
    default="24h",
    metavar="SPAN|DATE",
    help="How far back: 90m, 24h, 7d, 2w, or a date.",
)
@flag("--everyone", help="All users of the home with any activity.")
def activity(common: GlobalOptions, since: timedelta | datetime, everyone: bool) -> None:
    """Summarize the learns of a period.

    Shows each learn with its verdict, its reason, its feedback, an answer before and after, and how
    to undo it. Shows refusals and withdrawals with their reasons, and the live revisions.
    """
    if everyone:
        with session.open_runtime(common, "read") as runtime:
            summaries = runtime.activity_summaries(since)
    else:
        with session.open_user(common, "read") as user:
            summaries = (user.activity_summary(since),)
    text, empty = "\n\n".join(map(str, summaries)), "There was no activity in this time."
    emit(common, {"users": summaries}, text, empty=empty)


@click.group(
    "memory",
    cls=Group,
    default="list",
    examples=(
        "memory",
        'memory edit s_01m7yhn42w "My dog is called Crumpet."',
        "memory retract s_01m7yhn42w",
    ),
    renamed={"remove": "retract"},
)
def memory() -> None:
    """List, edit or retract rules and facts.

    Without a command it lists them.
    """


@command("list", examples=("memory list", "memory list --json"))
def memory_list(common: GlobalOptions) -> None:
    """List the current rules and facts, the oldest first."""
    with session.open_user(common, "read") as user:
        items = user.items()
    rows = [(item.id, item.kind, format_time(item.at), item.text) for item in items]
    data, headings = {"user": user.id, "items": items}, ("ITEM", "KIND", "SINCE", "TEXT")
    empty = f"{user.id} has no rules and facts yet."
    emit(common, data, format_table(headings, rows, flexible=(3,)), empty=empty)


@command(
    "edit",
    examples=(
        'memory edit s_01m7yhn42w "My dog is called Crumpet."',
        'memory edit s_01m7yhn42w "My dog is called Crumpet." --answer Crumpet',
    ),
)
@click.argument("item")
@click.argument("text")
@click.option(
    "--question",
    "questions",
    multiple=True,
    help="A question that the fact answers now; can be repeated.",
)
@click.option("--answer", help="The short answer, to the old questions without --question.")
def memory_edit(
    common: GlobalOptions, item: str, text: str, questions: tuple[str, ...], answer: str | None
) -> None:
    """Replace a rule or fact and print the new id. ITEM is its id, the beginning of it or "last"."""
    with session.open_user(common, "change") as user:
        new = user.edit_item(item, text, questions=questions or None, answer=answer)
    emit(common, new, new.id)


@command("retract", examples=("memory retract s_01m7yhn42w",))
@click.argument("item")
def memory_retract(common: GlobalOptions, item: str) -> None:
    """Retract a rule or fact, so that it no longer applies. The ledger keeps it.

    ITEM is its id, the beginning of it or "last".
    """
    with session.open_user(common, "change") as user:
        items = user.items()
        item = items[-1].id if item == LAST and items else item
        user.retract_item(item)
    emit(common, {"retracted": item, "user": user.id}, "", renamed={"removed": "retracted"})
    info(common, "Retracted.")


memory.add_section("Commands", (memory_list, memory_edit, memory_retract))


@command("users", examples=("users", "users --after eve --limit 1000 --json"))
@click.option("--after", metavar="ID", help="Only users whose id sorts after this one.")
@option("--limit", type=click.IntRange(1), default=100, help="How many.")
def users(common: GlobalOptions, after: str | None, limit: int) -> None:
    """List the users of this home by id.

    Each with the time of creation and counts. A note says if there are more; in JSON, "next" is
    then the id to continue after.
    """
    with session.open_runtime(common, "read") as runtime:
        found = runtime.users(after=after, limit=limit + 1)
    page, more = found[:limit], len(found) > limit
    rows = [
        (
            each.id,
            format_time(each.since),
            str(each.turns),
            str(each.signals),
            str(each.revisions),
            "on" if each.training else "off",
        )
        for each in page
    ]
    data = {"users": page, "next": page[-1].id if more else None}
    headings = ("USER", "SINCE", "TURNS", "SIGNALS", "REVISIONS", "TRAINING")
    empty = f"No user follows {after}." if after else "This home has no user yet."
    emit(common, data, format_table(headings, rows), empty=empty)
    if more:
        info(common, f"There are more: personalpeft users --after {page[-1].id}")


def _format_source(signal: Signal) -> str:
    how = signal.payload.get("how")
    return f"{signal.source} ({how})" if how else signal.source


def _verdict(revision: Revision) -> str:
    return f"{revision.verdict}{', on probation' if revision.probation else ''}"


INSPECT = (stack, revisions, activity, turns, signals, why, memory, users)
"""The commands in the order of the help."""
