"""What learning did to one person's model in a while: the morning summary. Made of what the ledger holds already, so it
can be asked for any period, again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from personalpeft.errors import InvalidInput
from personalpeft.learning.report import (
    LEARNED_NOT_LIVE,
    LearnReport,
    excerpt,
    from_json,
    lines,
    recorded,
    way_back,
)
from personalpeft.store.base import Store
from personalpeft.types import HeadMove

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Digest:
    """A period from ``since`` to ``until``: how many turns and signals came, what each learn and each end of a probation
    said, every move of a head, and what was live at the time of asking, by layer (None: the bare base). ``under`` are the
    revisions that what is live came after, one learn after the other.
    """

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
    def empty(self) -> bool:
        """Whether nothing at all happened."""
        return not (self.turns or self.signals or self.reports or self.moves)

    def as_json(self) -> dict[str, Any]:
        """The summary as plain data."""
        return {
            "user": self.user,
            "since": self.since.isoformat(),
            "until": self.until.isoformat(),
            "turns": self.turns,
            "signals": dict(self.signals),
            "reports": [
                {**report.as_json(), "undo": self._undo(report)} for report in self.reports
            ],
            "moves": [{**asdict(move), "at": move.at.isoformat()} for move in self.moves],
            "live": dict(self.live),
            "under": list(self.under),
        }

    def __str__(self) -> str:
        return self._text(_told, "    ")

    def in_full(self) -> str:
        """The summary with each report as it was: all the signals, every score, every example."""
        return self._text(lines, "  ")

    def _text(self, told: Callable[[LearnReport], list[str]], indent: str) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.signals.items()))
        came = f"turns: {self.turns}, signals: {sum(self.signals.values())}{f' ({kinds})' if kinds else ''}"
        text = [f"{self.user}, {_moment(self.since)} to {_moment(self.until)}", f"  {came}"]
        for report in self.reports:
            text += ["", *told(report)]
            if undo := self._undo(report):
                text.append(f"{indent}{undo}")
        by_hand = [
            move for move in self.moves if move.cause not in ("learn", "accepted", "withdrawn")
        ]
        if by_hand:
            text.append("")
        for move in by_hand:
            text.append(
                f"  {move.layer}: {move.before or 'the base'} -> {move.after or 'the base'} ({move.cause})"
            )
        for layer, head in self.live.items():
            text += [] if text[-1].startswith("  live") else [""]
            text.append(f"  live in {layer}: {head or 'the base'}")
        return "\n".join(text)

    def _undo(self, report: LearnReport) -> str:
        """How to undo it now, which is another command than it was then; empty where there is nothing to undo."""
        if not report.live:
            return "".join(way_back(report)).strip()
        is_live = self.live.get(report.layer) == report.revision
        if report.event != "learn" or not (is_live or report.revision in self.under):
            return ""
        what = "undo" if is_live else "undo, with all that came after it"
        return f"{what}: personalpeft rollback {report.layer} --to {report.before or 'base'} --user {report.user}"


def _under(head: str | None, reports: Sequence[LearnReport]) -> Iterator[str]:
    """What was live before a head, and before that, as far as learns went from the one to the other."""
    before = {
        report.revision: report.before
        for report in reports
        if report.live and report.event == "learn"
    }
    seen = {head}
    while (head := before.get(head)) is not None and head not in seen:
        seen.add(head)
        yield head


def digest(
    store: Store,
    user: str,
    since: datetime | timedelta,
    now: datetime,
    until: datetime | None = None,
) -> Digest:
    """The summary of what came after a moment, or in so long a time, until another (None: now). Raises ``InvalidInput`` for
    a moment without a time zone and for a while that ends before it begins, ``NotFound`` for an unknown user.
    """
    end = now if until is None else _aware(until)
    start = _start(since, end)

    def within(at: datetime) -> bool:
        return start < at <= end

    reports = [from_json(report) for report in recorded(store.catalog.reports(user))]
    live = {layer.name: layer.head for layer in store.catalog.layers(user)}
    signals = store.ledger.signals(user, current=False)
    return Digest(
        user=user,
        since=start,
        until=end,
        turns=sum(within(turn.at) for turn in store.ledger.turns(user)),
        signals=Counter(str(signal.kind) for signal in signals if within(signal.at)),
        reports=tuple(report for report in reports if within(report.at)),
        moves=tuple(move for move in store.catalog.history(user) if within(move.at)),
        live=live,
        under=tuple(under for head in live.values() for under in _under(head, reports)),
    )


def _start(since: datetime | timedelta, end: datetime) -> datetime:
    if not isinstance(since, datetime | timedelta):
        raise InvalidInput(
            f"{since!a} is neither a moment nor a while.",
            hint="Give an aware datetime, or a timedelta.",
        )
    try:
        start = end - since if isinstance(since, timedelta) else _aware(since)
    except OverflowError as error:
        raise InvalidInput(
            "There is no time so long ago.", hint="Ask for a shorter while."
        ) from error
    if start > end:
        raise InvalidInput(
            "That while ends before it begins.", hint="Ask for a while that has passed."
        )
    return start


def _aware(at: datetime) -> datetime:
    if at.tzinfo is None:
        raise InvalidInput(
            "The moment has no time zone.", hint="Give an aware datetime, or a timedelta."
        )
    return at


def _told(report: LearnReport) -> list[str]:
    word = (
        report.event
        if report.event != "learn"
        else f"{report.verdict}{', accepted by name' if report.accepted else ''}"
    )
    what = f"  {report.layer}: {word.upper()}{' (on probation)' if report.probation else ''}"
    if report.event == "learn":
        what += f", {report.revision or 'no revision'}, {report.seconds:.1f} s"
    told = [what, f"    {report.reason}"]
    learned = [source for source in report.sources if source.use in ("learned", LEARNED_NOT_LIVE)]
    held = sum(source.use == "held back to judge by" for source in report.sources)
    if learned:
        word = "learned from" if learned[0].use == "learned" else "tried with"
        told.append(f"    {word} {len(learned)}{f', held back {held}' if held else ''}:")
        told += [
            f"      {source.signal[-6:]}  {source.kind:<13} {excerpt(source.text)}"
            for source in learned[:_SHOWN]
        ]
        if len(learned) > _SHOWN:
            told.append(f"      … and {len(learned) - _SHOWN} more")
    for example in report.examples[:1]:
        told.append(f"    > {excerpt(example.prompt, 80)}")
        told += [
            f"      before: {excerpt(example.before, 80)}",
            f"      after:  {excerpt(example.after, 80)}",
        ]
    return told


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
