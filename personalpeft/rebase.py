"""Implement ``Runtime.rebase``: build a user's layers anew on another base, compare, and switch.

Invariants: the live stack answers until the switch, which is one transaction. The former revisions
stay, so the layers can go back. Nothing that judges was trained on by either stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from personalpeft.errors import InvalidInput, NothingCause, NothingToLearn
from personalpeft.formatting import HasJson, pluralize
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.data.lesson_assignment import load_assignments
from personalpeft.learning.data.lesson_selection import MAX_HOLDOUT
from personalpeft.learning.gate.evidence import (
    IMPROVED_FACTOR,
    REGRESSED_FACTOR,
    EvalItem,
    Evidence,
    Leakage,
)
from personalpeft.learning.gate.gate import (
    PROBATION_E_VALUE,
    Margins,
    find_harm,
    find_leakage,
)
from personalpeft.learning.layers import LayerState
from personalpeft.learning.learner import Learner
from personalpeft.learning.outcomes import (
    MoveCause,
    PairedResult,
    Reason,
    ReasonCode,
    Reasons,
    RebaseOutcome,
    reason,
    render_reasons,
)
from personalpeft.learning.rebase_build import (
    BaseComparison,
    RebasedLayer,
    Side,
    build_layers,
    compare_sides,
    last_stack,
    measure_general,
)
from personalpeft.learning.report import Example, excerpt
from personalpeft.services import Services
from personalpeft.store.locks import learn_lease
from personalpeft.types import Json, Progress, Revision, Stack, Verdict


@dataclass(frozen=True, slots=True)
class RebaseQuestion:
    """One held-out question: the log-prob of the wanted answer on both sides, in nats per byte."""

    signal: str
    layer: str
    before: float
    after: float
    result: PairedResult


@dataclass(frozen=True, slots=True)
class RebaseReport(HasJson):
    """How one rebase ended, why, and how long it took.

    Attributes:
        base: Digest of the base of the live stack before.
        to: Digest of the other base; ``name`` is that of its card.
        accepted: Whether the caller switched by name what the gate did not promote.
        switched: Whether the new stack is live.
        layers: Each layer before and after.
        against_bare_base: Whether the former base was not open, so that the questions and the
            examples compare the new stack with its own bare base.
        margin: The largest difference that is a tie, in nats per byte.
        examples: Some of the held-out questions with the generated answers of both stacks.
    """

    json_properties = ("verdict", "reason", "improved", "regressed", "tied")

    user: str
    at: datetime
    base: str
    to: str
    name: str
    outcome: RebaseOutcome
    reasons: Reasons
    accepted: bool
    switched: bool
    against_bare_base: bool = False
    layers: tuple[RebasedLayer, ...] = ()
    questions: tuple[RebaseQuestion, ...] = ()
    margin: float = 0.0
    examples: tuple[Example, ...] = ()
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict | None:
        """The gate's verdict on the new stack; None where it was not judged."""
        return self.outcome.verdict

    @property
    def reason(self) -> str:
        """The reasons in words."""
        return render_reasons(self.reasons)

    @property
    def improved(self) -> int:
        """How many wanted answers are likelier on the new base."""
        return self._count(PairedResult.IMPROVED)

    @property
    def regressed(self) -> int:
        """How many wanted answers are less likely on the new base."""
        return self._count(PairedResult.REGRESSED)

    @property
    def tied(self) -> int:
        """How many wanted answers are as likely."""
        return self._count(PairedResult.TIED)

    def __str__(self) -> str:
        ended = f"LIVE on {self.name} now" if self.switched else "nothing has changed"
        lines = [f"{self.user}: {ended}", f"  {self.outcome.text}: {self.reason}"]
        lines += [f"  {line}" for line in map(_format_layer, self.layers)]
        if self.questions:
            before, after = (
                sum(getattr(each, side) for each in self.questions) / len(self.questions)
                for side in ("before", "after")
            )
            asked = "asked it and its bare base" if self.against_bare_base else "asked both"
            lines.append(
                f"  {asked}: {pluralize(len(self.questions), 'held-out question')};"
                f" {self.improved} improved, {self.regressed} regressed, {self.tied} tied"
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
    compare_only: bool,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> RebaseReport:
    """Implement ``Runtime.rebase``, which documents the arguments.

    ``old`` are the wired parts of the open base, ``new`` those of the other. They may be the same.
    """
    if accept and compare_only:
        raise InvalidInput("accept and compare_only exclude each other.", hint="Give one of them.")
    store, clock = new.store, new.clock
    began = clock.timer()
    with ExitStack() as held:
        held.enter_context(old.store.leases.acquire(learn_lease(user)))
        heads = {each.name: each.head for each in store.catalog.layers(user) if each.head}
        if not heads:
            raise NothingToLearn(
                f"No layer of {user} is live, so there is nothing to build anew.",
                hint="Open the other base and learn there.",
                cause=NothingCause.NO_FEEDBACK,
            )
        live_base = store.catalog.revision(user, next(iter(heads.values()))).base
        is_same = live_base == new.base.digest
        is_open = is_same or live_base == old.base.digest
        former = last_stack(store, user, new.base.digest)
        held.enter_context(new.model.learning())
        stack, layers = build_layers(
            new,
            user,
            heads,
            Stack(former.base) if is_same else former,
            progress=progress,
            cancelled=cancelled,
        )
        is_moved = bool(stack.entries) and any(each.before != each.after for each in layers)
        comparison = general = None
        if is_moved:
            services = old if is_open and not is_same else new
            held.enter_context(services.model.learning())
            progress("Comparing", 0.0)
            live = store.catalog.stack(user, live_base) if is_open else Stack(services.base.digest)
            lessons = _held_out(new, user, (live, stack))
            side = Side(new, user, stack, cancelled)
            comparison = compare_sides(Side(services, user, live, cancelled), side, lessons)
            prompts = [lesson.messages[-1].content for some in lessons.values() for lesson in some]
            general = measure_general(side, prompts)
            progress("Comparing", 1.0)
        outcome, why = judge_rebase(
            layers,
            comparison,
            general,
            Learner.from_services(new).margins,
            is_open=is_open,
            leakages=_leakages(new, user, layers),
        )
        is_promoted = outcome is RebaseOutcome.PROMOTED
        is_live = is_moved and (accept or (is_promoted and not compare_only))
        report = RebaseReport(
            user=user,
            at=clock.now(),
            base=live_base,
            to=new.base.digest,
            name=new.base.card.name,
            outcome=outcome,
            reasons=(why,),
            accepted=is_live and not is_promoted,
            switched=is_live,
            against_bare_base=not is_open,
            layers=layers,
            examples=comparison.examples if comparison else (),
            seconds=round(clock.timer() - began, 3),
            **_questions(comparison),
        )
        return _record(new, report, heads)


def judge_rebase(
    layers: Sequence[RebasedLayer],
    comparison: BaseComparison | None,
    general: Evidence | None,
    margins: Margins,
    *,
    is_open: bool = True,
    leakages: Sequence[Leakage] = (),
) -> tuple[RebaseOutcome, Reason]:
    """Return how the rebase to a stack on another base ends, and why.

    It is refused for harm to general answers, and for leakage above the card's limit. It is also
    refused if more wanted answers lost than the margin allows, unless the others gained more. The
    gate abstains without questions, and where the former base is not open, so that the bare new
    base was asked instead.

    Args:
        layers: The heads before and after.
        comparison: The same questions on both bases; None where they were not asked.
        general: How the new stack answers general probes; None where it was not measured.
        margins: The harm that the gate allows.
        is_open: Whether the former base is open.
        leakages: The leakage of each revision of the new stack.
    """
    if all(each.before == each.after for each in layers):
        return RebaseOutcome.UNCHANGED, reason(ReasonCode.REBASE_UNCHANGED)
    missing = [each.layer for each in layers if not each.after]
    if missing or comparison is None or general is None:
        why = reason(ReasonCode.REBASE_LAYERS_MISSING, layers=", ".join(missing))
        return RebaseOutcome.LAYERS_MISSING, why
    if harm := find_harm(general, margins, check_regressions=False):
        return RebaseOutcome.REFUSED, harm
    for leakage in leakages:
        if leaks := find_leakage(leakage, margins):
            return RebaseOutcome.REFUSED, leaks
    items = comparison.items
    if not items:
        return RebaseOutcome.ABSTAINED, reason(ReasonCode.REBASE_NOTHING_HELD_OUT)
    improved = sum(item.improved for item in items)
    regressed = sum(item.regressed for item in items)
    counts = {"asked": len(items), "improved": improved, "regressed": regressed}
    if not is_open:
        return RebaseOutcome.ABSTAINED, reason(ReasonCode.REBASE_BASE_NOT_OPEN, **counts)
    beyond = sum(item.regressed_beyond_margin for item in items)
    outweighed = (
        IMPROVED_FACTOR**improved * REGRESSED_FACTOR**regressed > PROBATION_E_VALUE
        and sum(item.change for item in items) > 0
    )
    is_better = beyond <= margins.max_regressed * len(items) or outweighed
    outcome = RebaseOutcome.PROMOTED if is_better else RebaseOutcome.REFUSED
    return outcome, reason(ReasonCode.REBASE_COMPARED, **counts)


def _leakages(services: Services, user: str, layers: Sequence[RebasedLayer]) -> list[Leakage]:
    catalog = services.store.catalog
    after = [catalog.revision(user, each.after) for each in layers if each.after]
    return [Leakage(**each.scores.get("leakage", {})) for each in after]


def _held_out(
    services: Services, user: str, stacks: Sequence[Stack]
) -> dict[str, tuple[Lesson, ...]]:
    """Return by layer the lessons that neither stack was trained on."""
    store, assignments = services.store, load_assignments(services.store, user)
    found: dict[str, dict[str, Lesson]] = {}
    for stack in stacks:
        for entry in stack.entries:
            state = LayerState(store, user, entry.layer, stack, assignments)
            lessons = {each.key: each for each in state.holdout}
            found[entry.layer] = found.get(entry.layer, {}) | lessons
    return {layer: tuple(some.values())[-MAX_HOLDOUT:] for layer, some in found.items()}


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
        return PairedResult.IMPROVED
    return PairedResult.REGRESSED if item.regressed else PairedResult.TIED


def _record(services: Services, report: RebaseReport, heads: Mapping[str, str]) -> RebaseReport:
    """Record the verdict on the new revisions, and move the heads where it agrees."""
    catalog = services.store.catalog
    body = {"rebase": report.as_json()}
    judged: list[tuple[Revision, Json]] = []
    for each in report.layers:
        if each.trained and each.after:
            new = catalog.revision(report.user, each.after)
            verdict = report.verdict or new.verdict
            judged.append((replace(new, verdict=verdict, reason=report.reason), body))
    targets = {each.layer: each.after for each in report.layers} if report.switched else {}
    is_recorded = catalog.switch_heads(
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
        outcome=RebaseOutcome.HEAD_MOVED,
        reasons=(reason(ReasonCode.REBASE_HEAD_MOVED),),
        accepted=False,
        switched=False,
    )


def _format_layer(each: RebasedLayer) -> str:
    how = "trained" if each.trained else "found" if each.after else each.why
    return f"{each.layer}: {each.before} -> {each.after or 'nothing'} ({how})"
