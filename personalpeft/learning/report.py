"""What a learn did, as data that also reads well: what was learned from which signals, before and after, the verdict
and why, how to undo it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from personalpeft.formatting import pluralize
from personalpeft.learning.gate.gate import CONFIRMATION_E_VALUE
from personalpeft.types import Json, Signal, Verdict

NO_ROOM = "left out: the layer is full"
LEARNED_NOT_LIVE = "learned, not live"
LEARNED_USES = frozenset({"learned", LEARNED_NOT_LIVE, "learned earlier"})
"""What a source's use says where the build was trained on it, or stands on one that was."""

_ELSEWHERE = ("for ", "acts at once", "only kept")

_WIDTH = 88
_EXCERPT = 60


@dataclass(frozen=True, slots=True)
class Example:
    """One held-back question, answered by the stack before and by the candidate."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Source:
    """One signal and what became of it: "learned", "held back to judge by", or where else it went, and why."""

    signal: str
    kind: str
    text: str
    use: str
    why: str


def is_for_the_layer(use: str) -> bool:
    """Whether a source's use says that the layer had it to learn from, or to be judged by."""
    return not use.startswith(_ELSEWHERE)


@dataclass(frozen=True, slots=True)
class LearnReport:
    """The outcome of one ``learn``. ``revision`` is None where none was built; ``before`` is the head that it was
    judged against; ``room`` is how full a layer is that can be full (see capacity.py). ``accepted``: live although the
    gate said otherwise, since the user said so by name. ``event`` is "withdrawn" or "confirmed" where no learn but later
    signals ended a probation, and "taken back" where all that ``revision`` had learned was; ``before`` is then what came
    back. ``error`` names what kept a user or a layer from
    learning where that fails nobody else; nothing was recorded then, and ``layer`` is empty where none was reached.
    ``moved``: somebody else moved the head while it learned, so nothing has changed and its lessons are there for the next one.
    ``above`` is what the same learn did in the layers over this one, lowest first; each is recorded by itself.
    """

    user: str
    layer: str
    verdict: Verdict
    reason: str
    at: datetime
    seconds: float
    revision: str | None = None
    before: str | None = None
    probation: bool = False
    steps: int = 0
    sources: tuple[Source, ...] = ()
    examples: tuple[Example, ...] = ()
    scores: Mapping[str, Any] = field(default_factory=dict)
    dry_run: bool = False
    room: Mapping[str, int] = field(default_factory=dict)
    accepted: bool = False
    event: Literal["learn", "withdrawn", "confirmed", "taken back"] = "learn"
    error: str = ""
    moved: bool = False
    above: tuple[LearnReport, ...] = ()

    @property
    def live(self) -> bool:
        """Whether it left its revision live."""
        return self.revision is not None and (self.accepted or self.verdict is Verdict.PROMOTED)

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        own = asdict(replace(self, above=()))
        above = [report.as_json() for report in self.above]
        return {**own, "verdict": str(self.verdict), "at": self.at.isoformat(), "above": above}

    def __str__(self) -> str:
        return "\n\n".join(
            "\n".join([*lines(report), *way_back(report)]) for report in (self, *self.above)
        )


def from_json(data: Mapping[str, Any]) -> LearnReport:
    """A report as it was recorded, also by an earlier version: what that did not say is as if it were nothing."""
    known = {key: value for key, value in data.items() if key in LearnReport.__dataclass_fields__}
    parts = {
        "verdict": Verdict(data["verdict"]),
        "at": datetime.fromisoformat(data["at"]),
        "sources": tuple(Source(**source) for source in data.get("sources", ())),
        "examples": tuple(Example(**example) for example in data.get("examples", ())),
        "above": tuple(from_json(report) for report in data.get("above", ())),
    }
    return LearnReport(**{**known, **parts})


def recorded(reports: Iterable[Json]) -> list[Json]:
    """The reports that say how a learn or a probation ended, as they were recorded. What an import leaves says only what came in."""
    return [report for report in reports if "verdict" in report]


def learns(reports: Iterable[Json]) -> list[Json]:
    """Those of learns."""
    return [report for report in recorded(reports) if report.get("event", "learn") == "learn"]


def excerpt(text: str, width: int = _EXCERPT) -> str:
    """The beginning of a text on one line."""
    return textwrap.shorten(" ".join(text.split()), width, placeholder=" …")


def said(signal: Signal) -> str:
    """What a signal says, in words or as a number."""
    payload = signal.payload
    return str(
        next(
            (payload[key] for key in ("text", "answer", "value") if payload.get(key) is not None),
            "",
        )
    )


def lines(report: LearnReport) -> list[str]:
    """All that it says of its own layer, but for the way back, which can be another one later."""
    if report.error:
        where = f"{report.user} · {report.layer}" if report.layer else report.user
        return [f"{where}: NOT LEARNED", *_wrapped(report.reason, "  ")]
    if report.dry_run:
        return [
            f"{report.user} · {report.layer}: a dry run, nothing was trained",
            f"  {report.reason}",
            *_sources(report),
            *_room(report),
        ]
    word = f"{report.verdict.upper()}{' (on probation)' if report.probation else ', ACCEPTED' if report.accepted else ''}"
    if report.event != "learn":
        word = report.event.upper()
    told = [
        f"{report.user} · {report.layer}: {word}",
        *_wrapped(report.reason, "  "),
        *_sources(report),
        *_room(report),
    ]
    if report.scores:
        told += ["", "  scores"] + [f"    {line}" for line in _scores(report.scores)]
    for example in report.examples:
        told += ["", f"  > {excerpt(example.prompt, _WIDTH - 4)}"]
        told += _wrapped(f"before: {excerpt(example.before, 240)}", "    ")
        told += _wrapped(f"after:  {excerpt(example.after, 240)}", "    ")
    if report.event == "learn":
        told += [
            "",
            f"  {report.revision or 'no revision'} · {pluralize(report.steps, 'step')} · {report.seconds:.1f} s",
        ]
    else:
        told += [
            "",
            f"  {report.revision}"
            + (f" -> {report.before or 'the base'}" if report.event != "confirmed" else ""),
        ]
    return told


def way_back(report: LearnReport) -> list[str]:
    """How to take back what it did: nothing where nothing was built."""
    if report.live:
        return [f"  undo: personalpeft rollback {report.layer} --user {report.user}"]
    if report.event == "taken back" and not report.dry_run:
        return [
            f"  undo: personalpeft rollback {report.layer} --to {report.revision} --user {report.user}"
        ]
    if report.revision and report.verdict is Verdict.REFUSED:
        return [
            f"  make it live all the same: personalpeft rollback {report.layer} --to {report.revision} --user {report.user}"
        ]
    return []


def _sources(report: LearnReport) -> list[str]:
    if not report.sources:
        return []
    lines = ["", "  signals"]
    for use in dict.fromkeys(source.use for source in report.sources):
        these = [source for source in report.sources if source.use == use]
        lines.append(f"    {use}: {len(these)}")
        lines += [f"      {s.signal[-6:]}  {s.kind:<13} {excerpt(s.text)}" for s in these[:12]]
        if len(these) > 12:
            lines.append(f"      … and {len(these) - 12} more")
    return lines


def _room(report: LearnReport) -> list[str]:
    if not report.room:
        return []
    room = report.room
    line = f"  room: {room['tokens']:,} of {room['most']:,} tokens in {room['parameters']:,} parameters"
    if room["tokens"] > room["advised"]:
        line += f"; recall is best up to {room['advised']:,}"
    return ["", line]


def _scores(scores: Mapping[str, Any]) -> list[str]:
    lines = []
    names = {"target": "held back", "retention": "older", "trained": "just learned"}
    for key, name in names.items():
        part = scores.get(key, {})
        if part.get("asked"):
            lines.append(
                f"{name:<13} log-prob a token {_figure(part['before'])} -> {_figure(part['after'])}, "
                f"{part['won']} of {part['asked']} better, {part['lost']} worse"
            )
    questions = scores.get("questions", {})
    if questions.get("asked"):
        lines.append(
            f"{'judged by':<13} {pluralize(questions['asked'], 'pinned question')}, version {questions['version']}"
        )
    tasks = scores.get("tasks")
    if tasks:
        lines.append(
            f"{'tasks':<13} passed {tasks['passed_before']} -> {tasks['passed_after']} of {tasks['asked']} held back, "
            f"length {tasks['length_before']:.0%} -> {tasks['length_after']:.0%} of the longest"
        )
    practice = scores.get("practice")
    if practice:
        known = practice["tasks"]
        lines.append(
            f"{'practice':<13} {pluralize(practice['replies'], 'reply', 'replies')} in {pluralize(practice['rounds'], 'round')}; "
            f"tasks solved {known['solved']}, hopeless {known['hopeless']}, open {known['open']}"
        )
    canaries = scores.get("canaries")
    if canaries:
        lines.append(
            f"{'general':<13} {canaries['still_right']} of {canaries['right_before']} right answers stayed right, "
            f"KL from the base {_figure(canaries['kl'])} nats a token"
        )
        if canaries.get("base_right"):
            kept = len(canaries["kept_of_base"])
            lines.append(
                f"{'':<13} {kept} of {canaries['base_right']} that the base has right are right in all"
            )
    if told := len(scores.get("counted", ())):
        stake = f"a stake of {scores['bet']:.1f} from {pluralize(told, 'answer')}"
        lines.append(f"{'evidence':<13} {stake}; {CONFIRMATION_E_VALUE:g} is enough")
    return lines


def _figure(value: float | None) -> str:
    return "no number" if value is None else f"{value:.2f}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent) or [
        indent.rstrip()
    ]
