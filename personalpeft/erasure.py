"""Forget one item: erase it with everything derived from it, and rebuild the layers it was in.

Invariant: all erasing happens in one step, before anything is built. Whatever stops it later (the
caller, a kill, a refusal of the gate), no revision that saw the item is live or in the home, and
the next learn builds what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from personalpeft.errors import Cancelled, NothingToLearn, PersonalPeftError
from personalpeft.formatting import pluralize
from personalpeft.learning.erasure_plan import (
    ErasurePlan,
    RemainingMention,
    find_item,
    plan_erasure,
)
from personalpeft.learning.layers import layer_order
from personalpeft.learning.learner import Learner
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.report import LearnReport
from personalpeft.publishing import unpublishing
from personalpeft.services import Services
from personalpeft.store.erasure import erase
from personalpeft.store.types import Erasure
from personalpeft.types import Progress


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """What one ``forget`` erased and rebuilt.

    Attributes:
        user: Id of the user.
        item: The full id of the item.
        at: When it began.
        seconds: How long it took, rebuilding included.
        turns: Ids of the erased turns.
        signals: Ids of the erased signals.
        emptied: Ids of turns that lost their reply, which was given with the item in the prompt.
        revisions: Ids of the erased revisions.
        reports: How many reports of learns were erased.
        files: How many adapter files were erased.
        heads: By layer, the head that replaced an erased one; None is the bare base.
        rebuilt: The report of each layer that was built again.
        waiting: By layer, why it was not built again.
        stands: Other items that contain the same words and remain.
        complete: False while another program reads an older snapshot of the home. The next program
            that opens the home completes the erasure.
        dry_run: Whether nothing was done.
    """

    user: str
    item: str
    at: datetime
    seconds: float
    turns: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    emptied: tuple[str, ...] = ()
    revisions: tuple[str, ...] = ()
    reports: int = 0
    files: int = 0
    heads: Mapping[str, str | None] = field(default_factory=dict)
    rebuilt: tuple[LearnReport, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)
    stands: tuple[RemainingMention, ...] = ()
    complete: bool = True
    dry_run: bool = False

    def __str__(self) -> str:
        would = "would be " if self.dry_run else ""
        lines = [f"{self.item}: {'a dry run, nothing was done' if self.dry_run else 'FORGOTTEN'}"]
        for what, ids in (
            ("turns", self.turns),
            ("signals", self.signals),
            ("revisions", self.revisions),
        ):
            if ids:
                lines.append(f"  {what} {would}destroyed: {', '.join(ids)}")
        if self.emptied:
            emptied = ", ".join(self.emptied)
            lines.append(f"  replies {would}emptied, given with it in the prompt: {emptied}")
        if self.reports or self.files:
            reports, files = pluralize(self.reports, "report"), pluralize(self.files, "file")
            lines.append(f"  destroyed with them: {reports}, {files} of adapters")
        for layer, head in self.heads.items():
            lines.append(f"  {layer}: back to {head or 'the base'}")
        for report in self.rebuilt:
            for each in (report, *report.above):
                built = f"{each.revision or 'nothing'} built, {each.verdict}"
                lines.append(f"  {each.layer}: {built}: {each.reason}")
        lines += [f"  {layer}: not rebuilt: {why}" for layer, why in self.waiting.items()]
        if self.stands:
            lines.append("  the same words remain elsewhere; forget these too if you wish:")
            lines += [f"    {each.id}: {each.why}" for each in self.stands]
        if not self.complete:
            lines.append(
                "  another program reads an older snapshot of this home; the next command that "
                "opens it completes the erasure"
            )
        if not self.dry_run:
            lines.append(
                "  not reached: backups, exports, copies of published adapters, and the memory of "
                "other programs"
            )
            lines.append(f"  {self.seconds:.1f} s")
        return "\n".join(lines)


def forget(
    services: Services,
    user: str,
    item: str,
    *,
    rebuild: bool,
    dry_run: bool,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> ForgetReport:
    """Implement ``User.forget``."""
    store, clock = services.store, services.clock
    began, at = clock.timer(), clock.now()
    progress("Reading", 0.0)
    full_id = find_item(store, user, item).id

    def report(plan: ErasurePlan, **outcome: Any) -> ForgetReport:
        removal = plan.removal
        return ForgetReport(
            user=user,
            item=full_id,
            at=at,
            seconds=round(clock.timer() - began, 3),
            turns=tuple(sorted(removal.turns)),
            signals=tuple(sorted(removal.signals)),
            emptied=tuple(sorted(removal.redacted)),
            revisions=tuple(sorted(removal.revisions)),
            stands=plan.remaining,
            **outcome,
        )

    if dry_run:
        return report(plan_erasure(store, user, full_id), dry_run=True)
    plans: list[ErasurePlan] = []

    def removal() -> Erasure:
        plans.append(plan_erasure(store, user, full_id))
        if cancelled():
            raise Cancelled("Cancelled before anything was erased.", hint="Nothing has changed.")
        progress("Destroying", 0.0)
        if plans[0].removal.revisions:
            # Unpublish before erasing: after a kill in between, no record would name the copies.
            unpublish()
        return plans[0].removal

    # Under the lease, since a running learn would write again what is being erased.
    with store.leases.acquire(f"learn-{user}"), unpublishing(services, user) as unpublish:
        erased = erase(store, user, removal)
        services.drop_user_caches(user)
    progress("Destroying", 1.0)
    rebuilt: list[LearnReport] = []
    waiting: dict[str, str] = {}
    for layer in sorted(erased.heads, key=layer_order):
        if not rebuild or cancelled():
            waiting[layer] = (
                f"{'cancelled' if rebuild else 'not requested'}; the next learn does it"
            )
            continue
        options = LearnOptions(progress=progress, cancelled=cancelled)
        try:
            rebuilt.append(Learner.from_services(services).learn(user, layer, options))
        except NothingToLearn:
            waiting[layer] = "no lesson for it is left"
        except PersonalPeftError as error:
            waiting[layer] = error.message
    return report(
        plans[0],
        reports=erased.reports,
        files=erased.files,
        heads=erased.heads,
        rebuilt=tuple(rebuilt),
        waiting=waiting,
        complete=erased.complete,
    )
