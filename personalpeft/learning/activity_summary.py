"""What learning did to a user's model in a period, from what the ledger holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from personalpeft.errors import InvalidInput
from personalpeft.formatting import HasJson, pluralize
from personalpeft.learning.outcomes import MoveCause
from personalpeft.learning.report import (
    LearnReport,
    format_briefly,
    format_report,
    from_json,
    outcome_reports,
    undo_hint,
)
from personalpeft.store.store import Store
from personalpeft.types import HeadMove

_LEARN_CAUSES = (MoveCause.LEARN, MoveCause.ACCEPTED, MoveCause.WITHDRAWN)


@dataclass(frozen=True, slots=True)
class ActivitySummary(HasJson):
    """The activity of a user from ``since`` to ``until``.

    ``signals`` counts them by kind. ``reports`` are those of learns and probations. ``live`` is the
    head of each layer when the summary was made, None for the bare base. ``under`` are the
    revisions that these replaced, one learn after the other.
    """

    json_properties = ("undo",)

    user: str
    since: datetime
    until: datetime
    turns: int
    signals: Mapping[str, int]
    reports: tuple[LearnReport, ...]
    moves: tuple[HeadMove, ...]
    live: Mapping[str, str | None]
    under: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not (self.turns or self.signals or self.reports or self.moves)

    @property
    def undo(self) -> tuple[str, ...]:
        """How to undo each report now, in the same order; empty where there is nothing to undo."""
        return tuple(map(self._undo, self.reports))

    def __str__(self) -> str:
        return self._format(format_briefly, "    ")

    def in_full(self) -> str:
        """Return the summary with each report in full."""
        return self._format(format_report, "  ")

    def _format(self, format_one: Callable[[LearnReport], list[str]], indent: str) -> str:
        kinds = ", ".join(pluralize(count, kind) for kind, count in sorted(self.signals.items()))
        counts = f"turns: {self.turns}, signals: {sum(self.signals.values())}"
        lines = [
            f"{self.user}, {_format_time(self.since)} to {_format_time(self.until)}",
            f"  {counts}{f' ({kinds})' if kinds else ''}",
        ]
        for report, undo in zip(self.reports, self.undo, strict=True):
            lines += ["", *format_one(report)]
            if undo:
                lines.append(f"{indent}{undo}")
        moves = [
            f"  {move.layer}: {move.before or 'the base'} -> {move.after or 'the base'}"
            f" ({move.cause.replace('_', ' ')})"
            for move in self.moves
            if move.cause not in _LEARN_CAUSES
        ]
        heads = [f"  live in {layer}: {head or 'the base'}" for layer, head in self.live.items()]
        for section in (moves, heads):
            lines += ["", *section] if section else []
        return "\n".join(lines)

    def _undo(self, report: LearnReport) -> str:
        """Return how to undo a learn now, or "". The stored hint of its report may be outdated."""
        if not report.live:
            return "".join(undo_hint(report)).strip()
        is_live = self.live.get(report.layer) == report.revision
        if report.outcome.is_event or not (is_live or report.revision in self.under):
            return ""
        what = "undo" if is_live else "undo, with all that came after it"
        to = f"--to {report.previous_head or 'base'} --user {report.user}"
        return f"{what}: personalpeft rollback {report.layer} {to}"


def summarize_activity(
    store: Store,
    user: str,
    since: datetime | timedelta,
    now: datetime,
    until: datetime | None = None,
) -> ActivitySummary:
    """Implement ``User.activity_summary``. ``now`` is the end where ``until`` is None."""
    end = now if until is None else _check_aware(until)
    start = _start_of(since, end)

    def within(at: datetime) -> bool:
        return start < at <= end

    reports = [from_json(report) for report in outcome_reports(store.catalog.reports(user))]
    live = {layer.name: layer.head for layer in store.catalog.layers(user)}
    signals = store.ledger.signals(user, current=False)
    return ActivitySummary(
        user=user,
        since=start,
        until=end,
        turns=sum(within(turn.at) for turn in store.ledger.turns(user)),
        signals=Counter(str(signal.kind) for signal in signals if within(signal.at)),
        reports=tuple(report for report in reports if within(report.at)),
        moves=tuple(move for move in store.catalog.head_moves(user) if within(move.at)),
        live=live,
        under=tuple(each for head in live.values() for each in _replaced_heads(head, reports)),
    )


def _replaced_heads(head: str | None, reports: Sequence[LearnReport]) -> Iterator[str]:
    """Yield the heads before a head, newest first, as far as learns replaced them."""
    before = {
        report.revision: report.previous_head
        for report in reports
        if report.live and not report.outcome.is_event
    }
    seen = {head}
    while (head := before.get(head)) is not None and head not in seen:
        seen.add(head)
        yield head


def _start_of(since: datetime | timedelta, end: datetime) -> datetime:
    if not isinstance(since, datetime | timedelta):
        raise InvalidInput(
            f"The start of a period must be a datetime or a timedelta, got {since!a}.",
            hint="Give an aware datetime, or a timedelta.",
        )
    try:
        start = end - since if isinstance(since, timedelta) else _check_aware(since)
    except OverflowError as error:
        raise InvalidInput("The period is too long.", hint="Give a shorter one.") from error
    if start > end:
        raise InvalidInput("The period ends before it begins.", hint="Give a period in the past.")
    return start


def _check_aware(at: datetime) -> datetime:
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise InvalidInput(
            "The time has no time zone.", hint="Give an aware datetime, or a timedelta."
        )
    return at


def _format_time(at: datetime) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M %Z")
