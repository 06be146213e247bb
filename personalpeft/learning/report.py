"""What a learn did, as data that also reads well: what was learned from which signals, before and after, the verdict
and why, how to undo it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from personalpeft.types import Signal, Verdict

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
    """One signal and what became of it: "trained", "held back", or where else it went, and why."""

    signal: str
    kind: str
    text: str
    use: str
    why: str


@dataclass(frozen=True, slots=True)
class LearnReport:
    """The outcome of one ``learn``. ``revision`` is None where none was built; ``before`` is the head that it was
    judged against.
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

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**asdict(self), "verdict": str(self.verdict), "at": self.at.isoformat()}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def excerpt(text: str, width: int = _EXCERPT) -> str:
    """The beginning of a text on one line."""
    return textwrap.shorten(" ".join(text.split()), width, placeholder=" …")


def said(signal: Signal) -> str:
    """What a signal says, in words or as a number."""
    payload = signal.payload
    return str(next((payload[key] for key in ("text", "answer", "value") if payload.get(key) is not None), ""))


def _lines(report: LearnReport) -> list[str]:
    if report.dry_run:
        return [
            f"{report.user} · {report.layer}: a dry run, nothing was trained",
            f"  {report.reason}",
            *_sources(report),
        ]
    word = f"{report.verdict.upper()}{' (on probation)' if report.probation else ''}"
    lines = [f"{report.user} · {report.layer}: {word}", *_wrapped(report.reason, "  "), *_sources(report)]
    if report.scores:
        lines += ["", "  scores"] + [f"    {line}" for line in _scores(report.scores)]
    for example in report.examples:
        lines += ["", f"  > {excerpt(example.prompt, _WIDTH - 4)}"]
        lines += _wrapped(f"before: {excerpt(example.before, 240)}", "    ")
        lines += _wrapped(f"after:  {excerpt(example.after, 240)}", "    ")
    lines += ["", f"  {report.revision or 'no revision'} · {report.steps} steps · {report.seconds:.1f} s"]
    if report.revision and report.verdict is Verdict.PROMOTED:
        lines.append(f"  undo: personalpeft rollback {report.layer} --user {report.user}")
    return lines


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
    canaries = scores.get("canaries")
    if canaries:
        lines.append(
            f"{'general':<13} {canaries['still_right']} of {canaries['right_before']} right answers stayed right, "
            f"KL from the base {_figure(canaries['kl'])} nats a token"
        )
    return lines


def _figure(value: float | None) -> str:
    return "no number" if value is None else f"{value:.2f}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent) or [indent.rstrip()]
