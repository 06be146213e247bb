"""Forgetting one thing: it goes from the ledger with all that came of it, and what was built from it is built anew.

Invariant: what is destroyed is destroyed in one step, before anything is built; so whatever stops it later (the caller, a
kill, a refusal of the gate), no revision that saw the item is live or anywhere in the home, and the next learn builds what
is still missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from personalpeft.errors import Cancelled, NothingToLearn, PersonalPeftError
from personalpeft.formatting import pluralize
from personalpeft.learning.erasure_plan import Decision, Standing, decide, named
from personalpeft.learning.learner import Learner
from personalpeft.learning.options import Order
from personalpeft.learning.plan import rank_of
from personalpeft.learning.report import LearnReport
from personalpeft.publishing import withdrawing
from personalpeft.services import Services
from personalpeft.store.base import Removal


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """What became of a wish to forget ``item`` (its full id). ``turns``, ``signals`` and ``revisions`` are destroyed, ``emptied``
    turns have lost their reply; ``reports`` and ``files`` are counted. ``heads`` has the layers whose live revision was
    destroyed, with what was live before it saw the item (None: the base); ``rebuilt`` what the learn of each came to, and
    ``waiting`` why one was not built. ``stands`` says the same words and was not asked for. ``complete`` is False where a
    program that reads the home keeps an older moment of it: the next one that opens the home ends it then. ``seconds`` is
    how long all of it took; with ``dry_run`` nothing was done.
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
    stands: tuple[Standing, ...] = ()
    complete: bool = True
    dry_run: bool = False

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        said = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return said | {
            "at": self.at.isoformat(),
            **{name: list(said[name]) for name in ("turns", "signals", "emptied", "revisions")},
            "heads": dict(self.heads),
            "waiting": dict(self.waiting),
            "rebuilt": [report.as_json() for report in self.rebuilt],
            "stands": [{"id": each.id, "why": each.why} for each in self.stands],
        }

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
            lines.append(
                f"  replies {would}emptied, which were given with it in view: {', '.join(self.emptied)}"
            )
        if self.reports or self.files:
            lines.append(
                f"  destroyed with them: {pluralize(self.reports, 'report')}, {pluralize(self.files, 'adapter file')}"
            )
        for layer, head in self.heads.items():
            lines.append(f"  {layer}: back to {head or 'the base'}")
        for report in self.rebuilt:
            for each in (report, *report.above):
                lines.append(
                    f"  {each.layer}: {each.revision or 'nothing'} built, {each.verdict}: {each.reason}"
                )
        lines += [f"  {layer}: not built anew: {why}" for layer, why in self.waiting.items()]
        if self.stands:
            lines.append("  it stands elsewhere, in your own words; forget that too if you wish:")
            lines += [f"    {each.id}: {each.why}" for each in self.stands]
        if not self.complete:
            lines.append(
                "  a program that reads this home keeps an older moment of it; the next command ends this"
            )
        if not self.dry_run:
            lines.append(
                "  not reached: backups, exports, copies of what was published, and other programs' memory of what they have already read"
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
    progress: Callable[[str, float], None],
    cancelled: Callable[[], bool],
) -> ForgetReport:
    """As ``User.forget``."""
    store, clock = services.store, services.clock
    began, at = clock.timer(), clock.now()
    progress("Reading", 0.0)
    full = named(store, user, item).id
    if dry_run:
        return _report(
            user, full, at, clock.timer() - began, decide(store, user, full), dry_run=True
        )
    decisions: list[Decision] = []

    def decided() -> Removal:
        decisions.append(decide(store, user, full))
        if cancelled():
            raise Cancelled("Stopped before anything was destroyed.", hint="Nothing has changed.")
        progress("Destroying", 0.0)
        if decisions[0].removal.revisions:
            # Before anything is destroyed: else a kill could leave it where nobody knows of it.
            withdraw()
        return decisions[0].removal

    # A learn that runs would write down again what is being destroyed.
    with store.lease(f"learn-{user}"), withdrawing(services, user) as withdraw:
        destroyed = store.forget(user, decided)
        services.forget(user)
    progress("Destroying", 1.0)
    rebuilt: list[LearnReport] = []
    waiting: dict[str, str] = {}
    for layer in sorted(destroyed.heads, key=rank_of):
        try:
            if not rebuild:
                raise Cancelled("it was not asked for; the next learn does it")
            if cancelled():
                raise Cancelled("stopped; the next learn does it")
            rebuilt.append(
                Learner.from_services(services).learn(
                    user, layer, Order(progress=progress, cancelled=cancelled)
                )
            )
        except NothingToLearn:
            waiting[layer] = "no lesson for it is left"
        except PersonalPeftError as error:
            waiting[layer] = error.message
    return _report(
        user,
        full,
        at,
        clock.timer() - began,
        decisions[0],
        reports=destroyed.reports,
        files=destroyed.files,
        heads=destroyed.heads,
        rebuilt=tuple(rebuilt),
        waiting=waiting,
        complete=destroyed.complete,
    )


def _report(
    user: str, item: str, at: datetime, seconds: float, decision: Decision, **more: Any
) -> ForgetReport:
    removal = decision.removal
    return ForgetReport(
        user=user,
        item=item,
        at=at,
        seconds=round(seconds, 3),
        turns=tuple(sorted(removal.turns)),
        signals=tuple(sorted(removal.signals)),
        emptied=tuple(sorted(removal.emptied)),
        revisions=tuple(sorted(removal.revisions)),
        stands=decision.stands,
        **more,
    )
