"""What a learn did, as data and as text.

Invariant: a stored report is never rewritten, since reports are chained by hashes. `from_json`
alone knows what earlier versions stored.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from personalpeft.formatting import HasJson, pluralize
from personalpeft.learning.data.scrubber import LessonPart, PersonalDataKind, RemovedText
from personalpeft.learning.gate.evidence import CONFIRMATION_E_VALUE, Leakage
from personalpeft.learning.outcomes import (
    LearnOutcome,
    Reason,
    ReasonCode,
    Reasons,
    SignalUse,
    render_reasons,
    text_reason,
)
from personalpeft.types import IS_SERVED, PROMPT_EXAMPLES, Json, Signal, SignalKind, Verdict

_WIDTH = 88
_EXCERPT_WIDTH = 60
_ELLIPSIS = " …"
_MAX_SOURCES = 12


@dataclass(frozen=True, slots=True)
class Example:
    """One held-out prompt with the replies of the live stack and of the candidate."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class SignalUsage:
    """One signal, its use in the build, and why. ``layer``: the other layer that it is for."""

    json_properties = ("use", "why")

    signal: str
    kind: str
    text: str
    use_code: SignalUse
    reason: Reason
    layer: str | None = None

    @property
    def use(self) -> str:
        """The use in words."""
        is_other = self.use_code is SignalUse.OTHER_LAYER and self.layer
        return f"for {self.layer}" if is_other else self.use_code.text

    @property
    def why(self) -> str:
        """The reason in words."""
        return str(self.reason)


def signal_usage(signal: Signal, use: SignalUse, why: Reason) -> SignalUsage:
    """Return the use of a signal in a build, without its layer."""
    return SignalUsage(signal.id, str(signal.kind), signal_text(signal), use, why)


@dataclass(frozen=True, slots=True)
class LearnReport(HasJson):
    """How one learn, or one review of a probation, ended.

    ``previous_head`` is the head that the candidate was judged against. For an event it is the
    revision that is live afterwards. ``revision`` is None where none was built. ``sources`` are
    the signals whose use the build decided, and ``source_counts`` how many others there are of
    each use. ``accepted``: live by the user's decision, whatever the gate said. ``removed`` is the
    personal data that was replaced in the lessons of the build. ``capacity`` has the
    ``parameters`` of a memory, the ``tokens`` of its lessons, and ``max_tokens`` and
    ``recommended_tokens`` of them.
    ``error`` is the kind of the error of a FAILED learn. ``layer`` is empty where it reached none.
    ``above`` are the reports of the layers above this one, lowest first, each recorded by itself.
    """

    json_properties = ("live", "reason", "dry_run", "moved", "event", "verdict", "before", "room")

    user: str
    layer: str
    outcome: LearnOutcome
    reasons: Reasons
    at: datetime
    seconds: float = 0.0
    revision: str | None = None
    previous_head: str | None = None
    probation: bool = False
    steps: int = 0
    sources: tuple[SignalUsage, ...] = ()
    source_counts: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    scores: Mapping[str, Any] = field(default_factory=dict)
    removed: tuple[RemovedText, ...] = ()
    capacity: Mapping[str, int] = field(default_factory=dict)
    accepted: bool = False
    error: str = ""
    above: tuple[LearnReport, ...] = ()

    @property
    def live(self) -> bool:
        """Whether this left ``revision`` live."""
        promoted = self.outcome in (LearnOutcome.PROMOTED, LearnOutcome.CONFIRMED)
        return self.revision is not None and (self.accepted or promoted)

    @property
    def other_sources(self) -> tuple[tuple[str, int], ...]:
        """The uses of ``source_counts`` in words, and their counts."""
        return tuple((SignalUse(use).text, count) for use, count in self.source_counts.items())

    @property
    def reason(self) -> str:
        """The reasons in words."""
        return render_reasons(self.reasons)

    @property
    def verdict(self) -> Verdict | None:
        """The gate's verdict, or that of the user's feedback; None where nothing was judged."""
        return self.outcome.verdict

    @property
    def dry_run(self) -> bool:
        """Whether nothing was trained since only a dry run was asked for."""
        return self.outcome is LearnOutcome.DRY_RUN

    @property
    def moved(self) -> bool:
        """Whether another program moved the head meanwhile."""
        return self.outcome is LearnOutcome.HEAD_MOVED

    @property
    def event(self) -> str:
        """ "learn", or "withdrawn", "confirmed", "retracted" where no training ended so."""
        return str(self.outcome) if self.outcome.is_event else "learn"

    @property
    def before(self) -> str | None:
        """The old name of ``previous_head``, for one release."""
        return self.previous_head

    @property
    def room(self) -> Mapping[str, int]:
        """The old form of ``capacity``, for one release."""
        old = {"max_tokens": "most", "recommended_tokens": "advised"}
        return {old.get(name, name): number for name, number in self.capacity.items()}

    @property
    def is_unfinished(self) -> bool:
        """Whether a later learn continues the training of this layer."""
        return self.outcome is LearnOutcome.UNFINISHED and self.steps > 0

    def __str__(self) -> str:
        return "\n\n".join(
            "\n".join([*format_report(report), *undo_hint(report)])
            for report in (self, *self.above)
        )


def from_json(data: Mapping[str, Any]) -> LearnReport:
    """Return a stored report, also one that an earlier version stored."""
    known = {key: value for key, value in data.items() if key in LearnReport.__dataclass_fields__}
    reasons = data.get("reasons")
    return LearnReport(
        **{
            # Earlier versions stored it as "before".
            "previous_head": data.get("before"),
            **known,
            "outcome": LearnOutcome(data["outcome"]) if "outcome" in data else _outcome(data),
            "reasons": tuple(map(_reason, reasons))
            if reasons is not None
            else (text_reason(data["reason"]),),
            "at": datetime.fromisoformat(data["at"]),
            "sources": tuple(map(_source, data.get("sources", ()))),
            "examples": tuple(Example(**example) for example in data.get("examples", ())),
            "removed": tuple(map(_removed, data.get("removed", ()))),
            "above": tuple(from_json(report) for report in data.get("above", ())),
        }
    )


def outcome_reports(reports: Iterable[Json]) -> list[Json]:
    """Return the stored reports of learns and probations, and not those of imports."""
    return [report for report in reports if "verdict" in report]


def learn_reports(reports: Iterable[Json]) -> list[LearnReport]:
    """Return the stored reports of learns."""
    parsed = map(from_json, outcome_reports(reports))
    return [report for report in parsed if not report.outcome.is_event]


def _outcome(data: Mapping[str, Any]) -> LearnOutcome:
    """Return the outcome of a report that an earlier version stored without one."""
    if data.get("error"):
        return LearnOutcome.FAILED
    if data.get("moved"):
        return LearnOutcome.HEAD_MOVED
    if data.get("dry_run"):
        return LearnOutcome.DRY_RUN
    event = data.get("event", "learn")
    if event != "learn":
        return LearnOutcome(event)
    if data["verdict"] != Verdict.ABSTAINED:
        return LearnOutcome(data["verdict"])
    if data.get("revision") is None:
        return LearnOutcome.UNFINISHED if data.get("steps") else LearnOutcome.NOTHING_TO_LEARN
    is_head = data["revision"] == data.get("before")
    return LearnOutcome.UNCHANGED if is_head else LearnOutcome.ABSTAINED


_EARLIER_USES: Mapping[str, SignalUse] = {
    "acts now": SignalUse.IN_PROMPT,
    "to be learned": SignalUse.PENDING,
    "learned": SignalUse.LEARNED,
    "learned, not live": SignalUse.LEARNED_NOT_LIVE,
    "learned earlier": SignalUse.LEARNED_EARLIER,
    "held back to judge by": SignalUse.HELD_OUT,
    "held back earlier": SignalUse.HELD_OUT_EARLIER,
    "to be held back, to judge by": SignalUse.TO_BE_HELD_OUT,
    "left out: the layer is full": SignalUse.NO_CAPACITY,
    "only kept": SignalUse.UNUSED,
    "superseded": SignalUse.SUPERSEDED,
    "taken back": SignalUse.RETRACTED,
    "acts at once (profile)": SignalUse.IN_PROMPT,
    "acts at once (memory)": SignalUse.IN_PROMPT,
}


def _source(data: Mapping[str, Any]) -> SignalUsage:
    signal, kind, text = data["signal"], data["kind"], data["text"]
    if "use_code" in data:
        reason, layer = _reason(data["reason"]), data["layer"]
        return SignalUsage(signal, kind, text, SignalUse(data["use_code"]), reason, layer)
    use, reason = data["use"], text_reason(data["why"])
    if use in _EARLIER_USES:
        return SignalUsage(signal, kind, text, _EARLIER_USES[use], reason)
    return SignalUsage(signal, kind, text, SignalUse.OTHER_LAYER, reason, use.removeprefix("for "))


def _removed(data: Mapping[str, Any]) -> RemovedText:
    part, kind = LessonPart(data["part"]), PersonalDataKind(data["kind"])
    return RemovedText(**{**data, "part": part, "kind": kind})


def _reason(data: Mapping[str, Any]) -> Reason:
    return Reason(ReasonCode(data["code"]), data["data"])


def excerpt(text: str, width: int = _EXCERPT_WIDTH) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    room = width - len(_ELLIPSIS)
    words = line[: room + 1].rpartition(" ")[0]
    # Scripts without spaces have no end of a word there.
    return (words if 2 * len(words) >= room else line[:room]) + _ELLIPSIS


def signal_text(signal: Signal) -> str:
    """Return the words, the rating or the number of a signal."""
    if signal.kind is SignalKind.RATING:
        return "good" if signal.payload["value"] > 0 else "not good"
    values = (signal.payload.get(key) for key in ("text", "answer", "value"))
    return str(next((value for value in values if value is not None), ""))


def format_report(report: LearnReport) -> list[str]:
    """Return the lines of a report's own layer, without how to undo it."""
    title = f"{report.user} · {report.layer}" if report.layer else report.user
    if report.outcome is LearnOutcome.FAILED:
        return [f"{title}: NOT LEARNED", *_wrap(report.reason, "  ")]
    if report.dry_run:
        lines = [f"{title}: a dry run, nothing was trained", f"  {report.reason}"]
        return [*lines, *_format_inputs(report)]
    lines = [f"{title}: {_format_outcome(report)}", *_wrap(report.reason, "  ")]
    lines += _format_inputs(report)
    if report.scores:
        lines += ["", "  scores"] + [f"    {line}" for line in _format_scores(report.scores)]
    for example in report.examples:
        lines += ["", f"  > {excerpt(example.prompt, _WIDTH - 4)}"]
        lines += _wrap(f"before: {excerpt(example.before, 240)}", "    ")
        lines += _wrap(f"after:  {excerpt(example.after, 240)}", "    ")
    if not report.outcome.is_event:
        steps = pluralize(report.steps, "step")
        return [
            *lines,
            "",
            f"  {report.revision or 'no revision'} · {steps} · {report.seconds:.1f} s",
        ]
    is_confirmed = report.outcome is LearnOutcome.CONFIRMED
    now_live = "" if is_confirmed else f" -> {report.previous_head or 'the base'}"
    return [*lines, "", f"  {report.revision}{now_live}"]


def format_briefly(report: LearnReport) -> list[str]:
    """Return the lines of a report as one of several: a few signals, and one example."""
    title = f"  {report.layer}: {_format_outcome(report)}"
    if not report.outcome.is_event:
        title += f", {report.revision or 'no revision'}, {report.seconds:.1f} s"
    lines = [title, f"    {report.reason}"]
    uses = (SignalUse.LEARNED, SignalUse.LEARNED_NOT_LIVE)
    trained = [source for source in report.sources if source.use_code in uses]
    held_out = sum(source.use_code is SignalUse.HELD_OUT for source in report.sources)
    if trained:
        what = "trained on" if trained[0].use_code is SignalUse.LEARNED else "tried with"
        also = f", held out {held_out}" if held_out else ""
        lines += [f"    {what} {len(trained)}{also}:", *_list_sources(trained, 3)]
    for example in report.examples[:1]:
        lines += [
            f"    > {excerpt(example.prompt, 80)}",
            f"      before: {excerpt(example.before, 80)}",
            f"      after:  {excerpt(example.after, 80)}",
        ]
    return lines


def _format_outcome(report: LearnReport) -> str:
    state = " (on probation)" if report.probation else ", ACCEPTED" if report.accepted else ""
    return report.outcome.text.upper() + state


def undo_hint(report: LearnReport) -> list[str]:
    """Return the line on how to undo what a report did, or none."""
    rollback = f"personalpeft rollback {report.layer}"
    if report.live:
        return [f"  undo: {rollback} --user {report.user}"]
    to_revision = f"{rollback} --to {report.revision} --user {report.user}"
    if report.outcome is LearnOutcome.RETRACTED:
        return [f"  undo: {to_revision}"]
    if report.revision and report.verdict is Verdict.REFUSED:
        return [f"  make it live anyway: {to_revision}"]
    return []


def _format_inputs(report: LearnReport) -> list[str]:
    return [*_format_sources(report), *_format_removed(report), *_format_capacity(report)]


def _format_removed(report: LearnReport) -> list[str]:
    lines = [
        f"      {each.signal[-6:]}  {each.kind:<15} {each.part} {each.start}-{each.end}"
        f"  {excerpt(each.text)}"
        for each in report.removed
    ]
    title = f"  replaced before the training: {len(lines)}"
    return ["", title, *_cut(lines, _MAX_SOURCES)] if lines else []


def _format_sources(report: LearnReport) -> list[str]:
    lines = ["", "  signals"] if report.sources or report.source_counts else []
    for use in dict.fromkeys(source.use for source in report.sources):
        sources = [source for source in report.sources if source.use == use]
        lines += [f"    {use}: {len(sources)}", *_list_sources(sources, _MAX_SOURCES)]
    return [*lines, *(f"    {use}: {count}" for use, count in report.other_sources)]


def _list_sources(sources: Sequence[SignalUsage], limit: int) -> list[str]:
    lines = [f"      {each.signal[-6:]}  {each.kind:<13} {excerpt(each.text)}" for each in sources]
    return _cut(lines, limit)


def _cut(lines: Sequence[str], limit: int) -> list[str]:
    more = len(lines) - limit
    return [*lines[:limit], *([f"      … and {more} more"] if more > 0 else [])]


def _format_capacity(report: LearnReport) -> list[str]:
    if not report.capacity:
        return []
    tokens, most, recommended, parameters = (
        report.capacity[name]
        for name in ("tokens", "max_tokens", "recommended_tokens", "parameters")
    )
    line = f"{tokens:,} of {most:,} tokens in {parameters:,} parameters"
    if tokens > recommended:
        line += f"; recall is best up to {recommended:,}"
    return ["", f"  capacity: {line}"]


def _format_scores(scores: Mapping[str, Any]) -> list[str]:
    lines: list[tuple[str, str]] = []
    # Only reports of earlier versions were judged by lessons that were trained on.
    names = {"target": "held out", "retention": "older", "trained": "trained on"}
    for key, name in names.items():
        part = scores.get(key, {})
        if part.get("asked"):
            change = f"{_format_figure(part['before'])} -> {_format_figure(part['after'])}"
            counts = f"{part['improved']} of {part['asked']} better, {part['regressed']} worse"
            lines.append((name, f"log-prob a token {change}, {counts}"))
            if "median_before" in part:
                medians = (_format_figure(part[f"median_{at}"]) for at in ("before", "after"))
                lines.append(("", f"median token {' -> '.join(medians)}"))
    questions = scores.get("questions", {})
    if questions.get("asked"):
        asked = pluralize(questions["asked"], "evaluation question")
        lines.append(("judged by", f"{asked}, version {questions['version']}"))
    if tasks := scores.get("tasks"):
        passed = f"passed {tasks['passed_before']} -> {tasks['passed_after']} of {tasks['asked']}"
        line = f"{passed} held out"
        if "length_before" in tasks:
            length = f"{tasks['length_before']:.0%} -> {tasks['length_after']:.0%} of the limit"
            line += f", length {length}"
        lines.append(("tasks", line))
    if practice := scores.get("practice"):
        tasks = practice["tasks"]
        replies = pluralize(practice["replies"], "reply", "replies")
        counts = f"solved {tasks['solved']}, hopeless {tasks['hopeless']}, open {tasks['open']}"
        rounds = pluralize(practice["rounds"], "round")
        lines.append(("practice", f"{replies} in {rounds}; tasks {counts}"))
    if probes := scores.get("probes"):
        kept = f"{probes['still_right']} of {probes['right_before']} right answers stayed right"
        kl = f"KL from the base {_format_figure(probes['kl'])} nats a token"
        lines.append(("general", f"{kept}, {kl}"))
        if probes.get("base_right"):
            kept = f"{len(probes['kept_of_base'])} of {probes['base_right']}"
            lines.append(("", f"{kept} that the base has right are right in all"))
    examples = scores.get(PROMPT_EXAMPLES, {})
    if examples.get("asked"):
        right = f"{examples['right_without']} -> {examples['right_with']} of {examples['asked']}"
        verb = "served" if examples[IS_SERVED] else "not served"
        lines.append(("examples", f"{verb} with them; general questions like the lessons {right}"))
    rated = scores.get("thumbs", {})
    if rated.get("asked"):
        auc = f"AUC {rated['auc']:.2f} on {rated['liked']} liked and {rated['disliked']} disliked"
        lines.append(("thumbs", f"{auc} replies (chance: 0.50)"))
        preferred = f"{rated['better']} of {rated['asked']} new replies preferred"
        lines.append(("", f"{preferred}, {rated['worse']} of those before"))
    lines += zip(("leakage", ""), format_leakage(scores), strict=False)
    if spent := len(scores.get("spent_items", scores.get("decided_items", ()))):
        value = f"e-value {scores['e_value']:.1f} from {pluralize(spent, 'answer')}"
        lines.append(("evidence", f"{value}; {CONFIRMATION_E_VALUE:g} confirms"))
    return [f"{name:<13} {line}" for name, line in lines]


def format_leakage(scores: Mapping[str, Any]) -> list[str]:
    """Return the lines on the leakage score of a revision, or why it has none.

    There are none for a revision of an earlier version that was not measured.
    """
    leakage = Leakage(**scores.get("leakage", {}))
    if leakage.auc is None:
        return [f"not measured: {leakage.why_missing}"] if leakage.missing else []
    seen = f"{leakage.trained} lessons against {leakage.unseen} held-out ones"
    if leakage.matched:
        facts = pluralize(leakage.trained, "fact")
        seen = f"{facts} against {leakage.unseen} variants each; a memory is to know them"
    if leakage.variants:
        lessons = pluralize(leakage.trained, "lesson")
        seen = f"{lessons} against {leakage.unseen} variants each, as few are held out"
    bits = f"exposure {leakage.exposure:.2f} bits (chance: {leakage.chance_exposure:.2f})"
    auc = f"AUC of membership inference {leakage.auc:.2f} (chance: 0.50)"
    return [auc, f"{bits}; {seen}"]


def _format_figure(value: float | None) -> str:
    return "no number" if value is None else f"{value:.2f}"


def _wrap(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    return lines or [indent.rstrip()]
