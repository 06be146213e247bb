"""Implement ``Runtime.rebase``: build a user's layers anew on another base, compare, and switch.

Invariants: the live stack answers until the switch, which is one transaction. The former revisions
stay, so the layers can go back. Nothing that judges was trained on by either stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from personalpeft.errors import BaseMismatch, NothingCause, NothingToLearn
from personalpeft.formatting import pluralize, to_json
from personalpeft.learning.data.training_examples import Lesson, load_assignments
from personalpeft.learning.evaluate.across_bases import (
    BaseComparison,
    Side,
    compare_sides,
    measure_general,
)
from personalpeft.learning.gate.evidence import (
    IMPROVED_FACTOR,
    REGRESSED_FACTOR,
    EvalItem,
    Evidence,
)
from personalpeft.learning.gate.gate import (
    PROBATION_E_VALUE,
    Margins,
    find_harm,
)
from personalpeft.learning.layers import inspect_layer
from personalpeft.learning.learner import Learner
from personalpeft.learning.outcomes import MoveCause, PairedResult
from personalpeft.learning.plan import MAX_HOLDOUT, holdout_of
from personalpeft.learning.rebase_build import BuiltLayer, build_layers, last_stack, stack_of
from personalpeft.learning.report import Example, excerpt
from personalpeft.services import Services
from personalpeft.store.locks import learn_lease
from personalpeft.types import Json, Progress, Revision, Stack, Verdict


@dataclass(frozen=True, slots=True)
class RebasedLayer:
    """One live layer: its revisions before and after. None: nothing gives it there, and ``why``.

    ``trained``: it was trained by this rebase. Otherwise a recorded revision was found.
    """

    layer: str
    before: str
    after: str | None
    trained: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class RebaseQuestion:
    """One held-out question: the log-prob of the wanted answer on both sides, in nats per byte."""

    signal: str
    layer: str
    before: float
    after: float
    result: PairedResult


@dataclass(frozen=True, slots=True)
class RebaseReport:
    """How one rebase ended.

    Attributes:
        user: The user.
        at: When it ended.
        base: Digest of the base of the live stack before.
        to: Digest of the other base.
        name: Name of its card.
        verdict: The gate's verdict on the new stack.
        reason: Why, in words.
        accepted: Whether the caller switched by name what the gate did not promote.
        switched: Whether the new stack is live.
        layers: Each layer before and after.
        questions: The held-out questions. They are empty where the former base was not open.
        margin: The largest difference that is a tie, in nats per byte.
        examples: Some of the questions with the generated answers of both stacks.
        seconds: How long it took.
    """

    json_properties = ("won", "lost", "tied")

    user: str
    at: datetime
    base: str
    to: str
    name: str
    verdict: Verdict
    reason: str
    accepted: bool
    switched: bool
    layers: tuple[RebasedLayer, ...] = ()
    questions: tuple[RebaseQuestion, ...] = ()
    margin: float = 0.0
    examples: tuple[Example, ...] = ()
    seconds: float = field(default=0.0)

    @property
    def won(self) -> int:
        """How many wanted answers are likelier on the new base."""
        return self._count(PairedResult.WON)

    @property
    def lost(self) -> int:
        """How many wanted answers are less likely on the new base."""
        return self._count(PairedResult.LOST)

    @property
    def tied(self) -> int:
        """How many wanted answers are as likely."""
        return self._count(PairedResult.TIED)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        data: dict[str, Any] = to_json(self)
        return data

    def __str__(self) -> str:
        ended = f"LIVE on {self.name} now" if self.switched else "nothing has changed"
        lines = [f"{self.user}: {ended}", f"  {self.verdict}: {self.reason}"]
        lines += [f"  {line}" for line in map(_format_layer, self.layers)]
        if self.questions:
            before, after = (
                sum(getattr(each, side) for each in self.questions) / len(self.questions)
                for side in ("before", "after")
            )
            lines.append(
                f"  asked both: {pluralize(len(self.questions), 'held-out question')};"
                f" won {self.won}, lost {self.lost}, tied {self.tied}"
                f" (nats a byte {before:.3f} -> {after:.3f}, up to {self.margin:.3f} is a tie)"
            )
        for example in self.examples:
            lines += [
                f"  > {excerpt(example.prompt, 80)}",
                f"    before: {excerpt(example.before, 80)}",
                f"    after:  {excerpt(example.after, 80)}",
            ]
        return "\n".join([*lines, f"  {self.seconds:.1f} s"])

    def _count(self, result: PairedResult) -> int:
        return sum(each.result is result for each in self.questions)


def rebase(
    old: Services,
    new: Services,
    user: str,
    *,
    accept: bool,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> RebaseReport:
    """Implement ``Runtime.rebase``, which documents the arguments.

    ``old`` are the wired parts of the open base, ``new`` those of the other. They may be the same.
    """
    store, clock = new.store, new.clock
    began = clock.timer()
    with ExitStack() as held:
        held.enter_context(old.store.leases.acquire(learn_lease(user)))
        heads = {each.name: each.head for each in store.catalog.layers(user) if each.head}
        live_base = _base_of(new, user, heads)
        is_open = live_base == old.base.digest
        if not is_open and live_base != new.base.digest and not accept:
            raise BaseMismatch(
                f"The layers of {user} are on the base {live_base[:12]}, which is not open, so the"
                " two cannot be compared.",
                hint="Name their base with --base, or switch without a comparison: --accept",
            )
        is_same = live_base == new.base.digest
        former = last_stack(store, user, new.base.digest)
        held.enter_context(new.model.learning())
        built = build_layers(
            new,
            user,
            heads,
            Stack(former.base) if is_same else former,
            progress=progress,
            cancelled=cancelled,
        )
        stack = stack_of(new, user, built)
        layers = _pair_layers(heads, built)
        is_moved = bool(stack.entries) and any(each.before != each.after for each in layers)
        comparison, general = None, None
        if (is_open or is_same) and is_moved:
            services = new if is_same else old
            held.enter_context(services.model.learning())
            progress("Comparing", 0.0)
            live = store.catalog.stack(user, live_base)
            lessons = _held_out(new, user, (live, stack))
            side = _side(new, stack)
            comparison = compare_sides(
                _side(services, live), side, user, lessons, cancelled=cancelled
            )
            general = measure_general(side, user, cancelled=cancelled)
            progress("Comparing", 1.0)
        verdict, reason = judge_rebase(
            layers, comparison, general, Learner.from_services(new).margins
        )
        is_live = is_moved and (accept or verdict is Verdict.PROMOTED)
        report = RebaseReport(
            user=user,
            at=clock.now(),
            base=live_base,
            to=new.base.digest,
            name=new.base.card.name,
            verdict=verdict,
            reason=reason,
            accepted=is_live and verdict is not Verdict.PROMOTED,
            switched=is_live,
            layers=layers,
            examples=comparison.examples if comparison else (),
            **_questions(comparison),
        )
        report = replace(report, seconds=round(clock.timer() - began, 3))
        return _record(new, report, built, heads)


def judge_rebase(
    layers: Sequence[RebasedLayer],
    comparison: BaseComparison | None,
    general: Evidence | None,
    margins: Margins,
) -> tuple[Verdict, str]:
    """Return the verdict on a stack on another base, and why.

    It is refused for harm to general answers, and if more wanted answers lost than the margin
    allows, unless the others gained more. Without questions, and where a layer is left behind, the
    gate abstains.
    """
    if all(each.before == each.after for each in layers):
        return Verdict.ABSTAINED, "the layers came out as they are"
    left = [each.layer for each in layers if not each.after]
    if left:
        return Verdict.ABSTAINED, f"on this base nothing gives {', '.join(left)}"
    if comparison is None or general is None:
        return Verdict.ABSTAINED, "the two could not be compared: the former base is not open"
    if harm := find_harm(general, margins, check_regressions=False):
        return Verdict.REFUSED, str(harm)
    items = comparison.items
    if not items:
        return Verdict.ABSTAINED, "nothing is held out to compare them by"
    won, lost = sum(item.improved for item in items), sum(item.regressed for item in items)
    counts = f"of {len(items)} wanted answers {won} are likelier and {lost} less likely"
    beyond = sum(item.regressed_beyond_margin for item in items)
    outweighed = (
        IMPROVED_FACTOR**won * REGRESSED_FACTOR**lost > PROBATION_E_VALUE
        and sum(item.change for item in items) > 0
    )
    if beyond <= margins.max_regressed * len(items) or outweighed:
        return Verdict.PROMOTED, counts
    return Verdict.REFUSED, counts


def _base_of(services: Services, user: str, heads: Mapping[str, str]) -> str:
    """Return the base of the live layers. Raises ``NothingToLearn`` if none is live."""
    for head in heads.values():
        return services.store.catalog.revision(user, head).base
    raise NothingToLearn(
        f"No layer of {user} is live, so there is nothing to build anew.",
        hint="Open the other base and learn there.",
        cause=NothingCause.NO_FEEDBACK,
    )


def _pair_layers(heads: Mapping[str, str], built: Sequence[BuiltLayer]) -> tuple[RebasedLayer, ...]:
    return tuple(
        RebasedLayer(
            each.layer,
            heads[each.layer],
            each.revision.id if each.revision else None,
            each.is_new,
            "" if each.revision else each.why,
        )
        for each in built
    )


def _held_out(
    services: Services, user: str, stacks: Sequence[Stack]
) -> dict[str, tuple[Lesson, ...]]:
    """Return by layer the lessons that neither stack was trained on."""
    store, assignments = services.store, load_assignments(services.store, user)
    found: dict[str, dict[str, Lesson]] = {}
    for stack in stacks:
        for entry in stack.entries:
            state = inspect_layer(store, user, entry.layer, stack, assignments)
            lessons = {each.key: each for each in holdout_of(store, state, entry.layer)}
            found[entry.layer] = found.get(entry.layer, {}) | lessons
    return {layer: tuple(some.values())[-MAX_HOLDOUT:] for layer, some in found.items()}


def _side(services: Services, stack: Stack) -> Side:
    return Side(services, stack, Learner.from_services(services).margins.tie_margin)


def _questions(comparison: BaseComparison | None) -> dict[str, Any]:
    if comparison is None or not comparison.items:
        return {}
    questions = tuple(
        RebaseQuestion(
            question.lesson.signal,
            question.layer,
            round(item.before, 4),
            round(item.after, 4),
            _result(item),
        )
        for question, item in zip(comparison.questions, comparison.items, strict=True)
    )
    return {"questions": questions, "margin": round(comparison.items[0].tie_margin, 5)}


def _result(item: EvalItem) -> PairedResult:
    if item.improved:
        return PairedResult.WON
    return PairedResult.LOST if item.regressed else PairedResult.TIED


def _record(
    services: Services,
    report: RebaseReport,
    built: Sequence[BuiltLayer],
    heads: Mapping[str, str],
) -> RebaseReport:
    """Record the verdict on the new revisions, and move the heads where it agrees."""
    unjudged = [each.revision for each in built if each.is_new and each.revision is not None]
    judged: list[tuple[Revision, Json]] = [
        (replace(each, verdict=report.verdict, reason=report.reason), {"rebase": report.as_json()})
        for each in unjudged
    ]
    targets = {each.layer: each.after for each in report.layers} if report.switched else {}
    is_recorded = services.store.catalog.switch_heads(
        report.user,
        targets,
        expected=heads,
        judged=judged,
        base=report.to,
        cause=MoveCause.REBASE,
    )
    if is_recorded:
        return report
    return replace(
        report,
        verdict=Verdict.ABSTAINED,
        reason="meanwhile another program moved a head; rebase again, which trains nothing twice",
        accepted=False,
        switched=False,
    )


def _format_layer(each: RebasedLayer) -> str:
    how = "trained" if each.trained else "found" if each.after else each.why
    return f"{each.layer}: {each.before} -> {each.after or 'nothing'} ({how})"
