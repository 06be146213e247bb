"""Implement ``User.forget`` and ``Runtime.forget_user``: plan, erase, rebuild and report.

``learning.erasure_plan`` decides what is derived from an item, ``store.erasure`` erases rows and
files. This module holds the leases, removes published copies, and rebuilds the layers.

Invariant: all erasing happens in one step, before anything is built. A caller, a kill or the gate
may stop the rest. Even then no revision that saw the item is live or in the home. The next learn
builds what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import Any

from personalpeft.certificate import Certificate
from personalpeft.chat.conversation import turns_of_conversation
from personalpeft.deprecation import RenamedAttributes
from personalpeft.erasure_certificate import CertificateDraft, ErasureKind
from personalpeft.errors import Busy, Cancelled, HomeError, PersonalPeftError
from personalpeft.formatting import pluralize
from personalpeft.learning.data.style import drop_cached_texts
from personalpeft.learning.erasure_plan import (
    ErasurePlan,
    ErasureTarget,
    RemainingMention,
    find_target,
    plan_erasure,
)
from personalpeft.learning.layers import layer_order
from personalpeft.learning.learner import Learner, kept_recipe, kept_verifier
from personalpeft.learning.options import LearnOptions, not_cancelled
from personalpeft.learning.outcomes import LearnOutcome
from personalpeft.learning.report import LearnReport
from personalpeft.publishing import publish_lock, unpublish
from personalpeft.services import Services
from personalpeft.store.api_keys import ApiKeys
from personalpeft.store.erasure import delete_pending_files, erase, erase_user
from personalpeft.store.erasure_log import LoggedErasure, read_user_key
from personalpeft.store.hash_chain import read_chain_head
from personalpeft.store.locks import learn_lease
from personalpeft.store.store import Store
from personalpeft.types import Json, Progress

_INCOMPLETE = (
    "  another program reads an older snapshot of this home; the next command that opens it "
    "completes the erasure"
)
_NOT_REACHED = "  not reached: backups, exports, copies of published adapters, and the memory of other programs"


@dataclass(frozen=True, slots=True)
class ForgetReport(
    RenamedAttributes,
    renamed={
        "emptied": "emptied_replies",
        "waiting": "not_rebuilt",
        "stands": "remaining_mentions",
    },
):
    """What one ``forget`` erased and rebuilt.

    Attributes:
        user: Id of the user.
        item: The full id of the item or conversation, or the layer.
        at: When it began.
        seconds: How long it took, rebuilding included.
        turns: Ids of the erased turns.
        signals: Ids of the erased signals.
        emptied_replies: Ids of turns that lost their reply, because its prompt had the item.
        revisions: Ids of the erased revisions.
        reports: How many reports of learns were erased.
        files: How many adapter files were erased.
        heads: By layer, the head that replaced an erased one; None is the bare base.
        rebuilt: The report of each layer that was built again.
        not_rebuilt: By layer, why it was not built again.
        remaining_mentions: Other items that contain the same words and remain.
        complete: False while another program reads an older snapshot of the home. The next program
            that opens the home completes the erasure.
        dry_run: Whether nothing was done.
        certificate: The signed certificate, if asked for.
    """

    user: str
    item: str
    at: datetime
    seconds: float
    turns: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    emptied_replies: tuple[str, ...] = ()
    revisions: tuple[str, ...] = ()
    reports: int = 0
    files: int = 0
    heads: Mapping[str, str | None] = field(default_factory=dict)
    rebuilt: tuple[LearnReport, ...] = ()
    not_rebuilt: Mapping[str, str] = field(default_factory=dict)
    remaining_mentions: tuple[RemainingMention, ...] = ()
    complete: bool = True
    dry_run: bool = False
    certificate: Certificate | None = None

    def __str__(self) -> str:
        would = "would be " if self.dry_run else ""
        lines = [f"{self.item}: {'nothing was erased yet' if self.dry_run else 'FORGOTTEN'}"]
        for what in ("turns", "signals", "revisions"):
            if ids := getattr(self, what):
                lines.append(f"  {what} {would}erased: {', '.join(ids)}")
        if self.emptied_replies:
            emptied = ", ".join(self.emptied_replies)
            lines.append(f"  replies {would}emptied, given with it in the prompt: {emptied}")
        if self.reports or self.files:
            reports, files = pluralize(self.reports, "report"), pluralize(self.files, "file")
            lines.append(f"  erased with them: {reports}, {files} of adapters")
        for layer, head in self.heads.items():
            lines.append(f"  {layer}: back to {head or 'the base'}")
        for report in self.rebuilt:
            built = f"{report.revision or 'nothing'} built, {report.outcome}"
            stayed = report.outcome is LearnOutcome.UNCHANGED
            lines.append(f"  {report.layer}: {'not built' if stayed else built}: {report.reason}")
        lines += [f"  {layer}: not rebuilt: {why}" for layer, why in self.not_rebuilt.items()]
        if self.remaining_mentions:
            lines.append("  the same words remain elsewhere; forget these too if you wish:")
            lines += [f"    {each.id}: {each.why}" for each in self.remaining_mentions]
        if not self.complete:
            lines.append(_INCOMPLETE)
        if not self.dry_run:
            lines += [_NOT_REACHED, f"  {self.seconds:.1f} s"]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ForgetUserReport:
    """What one ``forget_user`` erased.

    Attributes:
        user: Id of the user.
        at: When it began.
        turns: How many turns were erased.
        signals: How many signals were erased.
        revisions: How many revisions were erased.
        api_keys: How many API keys were revoked.
        complete: As in ``ForgetReport``.
        dry_run: Whether nothing was done.
        certificate: The signed certificate, if asked for.
    """

    user: str
    at: datetime
    turns: int
    signals: int
    revisions: int
    api_keys: int
    complete: bool = True
    dry_run: bool = False
    certificate: Certificate | None = None

    def __str__(self) -> str:
        counts = ", ".join(
            pluralize(number, what)
            for number, what in (
                (self.turns, "turn"),
                (self.signals, "signal"),
                (self.revisions, "revision"),
                (self.api_keys, "API key"),
            )
        )
        if self.dry_run:
            return f"{self.user}: nothing was erased yet\n  would be erased: {counts}"
        lines = [f"{self.user}: FORGOTTEN", f"  erased: {counts}"]
        if not self.complete:
            lines.append(_INCOMPLETE)
        return "\n".join([*lines, _NOT_REACHED])


def forget_user(
    services: Services,
    api_keys: ApiKeys,
    user: str,
    *,
    dry_run: bool,
    certificate: bool,
    progress: Progress,
) -> ForgetUserReport:
    """Implement ``Runtime.forget_user``, which documents the arguments.

    ``api_keys`` are those of the home.
    """
    store, at = services.store, services.clock.now()
    owned = sum(key.user == user for key in api_keys.list_keys())

    def count() -> ForgetUserReport:
        summary = store.catalog.user(user)
        counts = summary.turns, summary.signals, summary.revisions
        return ForgetUserReport(user, at, *counts, owned, dry_run=dry_run)

    if dry_run:
        return count()
    draft: CertificateDraft | None = None
    if certificate:
        draft = CertificateDraft(services, user, "user", progress, not_cancelled)
    with store.leases.acquire(learn_lease(user)), publish_lock(store, user):
        if draft is not None:
            draft.measure_user_before()
        with store.database.write_lock():
            report = count()
            # Before the records go: after a kill in between, nothing would name the copies.
            unpublish(services, user)
            if unreachable := store.publications.folders(user):
                raise HomeError(
                    f"Published stacks of {user} in {unreachable[0]} cannot be deleted.",
                    hint="Connect its drive or make it writable. If it is gone for good, create an "
                    "empty folder there. Then forget the user again; nothing has been erased yet.",
                )
            if draft is not None:
                draft.describe_user()
            api_keys.revoke_all(user)
            store.erasures.append(LoggedErasure("user", read_user_key(store.database, user)))
            erase_user(store, user)
        services.drop_user_caches(user)
        drop_cached_texts()
    # After the leases: their files are deleted too. What fails now is done by the next opening.
    complete = False
    with suppress(Busy, HomeError):
        complete = delete_pending_files(store, user)
    signed = draft.finish_user(complete) if draft is not None else None
    return replace(report, complete=complete, certificate=signed)


def forget(
    services: Services,
    user: str,
    item: str,
    *,
    conversation: bool,
    rebuild: bool,
    dry_run: bool,
    certificate: bool,
    reproduce: Callable[[str], Json] | None,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> ForgetReport:
    """Implement ``User.forget``, which documents the arguments.

    ``reproduce`` builds a revision again and returns how that ended.
    """
    store, clock = services.store, services.clock
    began, at = clock.timer(), clock.now()
    progress("Reading", 0.0)

    def find_and_plan() -> tuple[ErasureTarget, ErasurePlan]:
        if conversation:
            name, turns = turns_of_conversation(store, user, item)
            target = ErasureTarget(name, turns=frozenset(turns))
        else:
            target = find_target(store, user, item)
        return target, plan_erasure(store, user, target)

    def report(plan: ErasurePlan, **outcome: Any) -> ForgetReport:
        erasure = plan.erasure
        return ForgetReport(
            user=user,
            item=target.name,
            at=at,
            seconds=round(clock.timer() - began, 3),
            turns=tuple(sorted(erasure.turns)),
            signals=tuple(sorted(erasure.signals)),
            emptied_replies=tuple(sorted(erasure.emptied)),
            revisions=tuple(sorted(erasure.revisions)),
            remaining_mentions=plan.remaining,
            **outcome,
        )

    if dry_run:
        target, plan = find_and_plan()
        return report(plan, dry_run=True)
    # Under the lease, since a running learn would write again what is being erased. It is planned
    # before the write lock is taken, since that takes seconds for a long history.
    with store.leases.acquire(learn_lease(user)), publish_lock(store, user):
        head = read_chain_head(store.database, user)
        target, plan = find_and_plan()
        draft: CertificateDraft | None = None
        if certificate:
            kind: ErasureKind = (
                "conversation" if conversation else "layer" if target.layer else "item"
            )
            draft = CertificateDraft(services, user, kind, progress, cancelled)
            draft.measure_before(plan)
        with store.database.write_lock():
            if head != read_chain_head(store.database, user):
                # Entries were added since the plan was made.
                target, plan = find_and_plan()
            if cancelled():
                raise Cancelled(
                    "Cancelled before anything was erased.", hint="Nothing has changed."
                )
            progress("Erasing", 0.0)
            if draft is not None:
                draft.describe(plan)
            if plan.erasure.revisions:
                # First the copies: after a kill in between, no record would name them.
                unpublish(services, user)
            store.erasures.append(*_to_log(store, user, target, plan))
            # What a layer keeps of its former learns is in the revisions that go.
            erased_heads = {
                each.name: store.catalog.revision(user, each.head)
                for each in store.catalog.layers(user)
                if each.head and each.head in plan.erasure.revisions
            }
            erased = erase(store, user, plan.erasure)
        services.drop_user_caches(user)
        drop_cached_texts()
    progress("Erasing", 1.0)
    rebuilt: list[LearnReport] = []
    not_rebuilt: dict[str, str] = {}
    for layer in sorted(erased.heads.keys() - plan.erasure.layers, key=layer_order):
        if not rebuild or cancelled():
            not_rebuilt[layer] = (
                f"{'cancelled' if rebuild else 'not requested'}; the next learn does it"
            )
            continue
        if layer in {each.layer for each in rebuilt}:
            continue  # With a layer below it.
        try:
            options = LearnOptions(
                recipe=kept_recipe(erased_heads[layer]),
                verifier=kept_verifier(services, erased_heads[layer]),
                progress=progress,
                cancelled=cancelled,
            )
            first = Learner.from_services(services).learn(user, layer, options)
            for each in (replace(first, above=()), *first.above):
                if each.outcome is LearnOutcome.NOTHING_TO_LEARN:
                    not_rebuilt[each.layer] = each.reason
                else:
                    rebuilt.append(each)
        except PersonalPeftError as error:
            not_rebuilt[layer] = error.message
    signed = None
    if draft is not None:
        signed = draft.finish(plan, erased, rebuilt, not_rebuilt, reproduce)
    return report(
        plan,
        reports=erased.reports,
        files=erased.files,
        heads=erased.heads,
        rebuilt=tuple(rebuilt),
        not_rebuilt=not_rebuilt,
        complete=erased.complete,
        certificate=signed,
    )


def _to_log(
    store: Store, user: str, target: ErasureTarget, plan: ErasurePlan
) -> list[LoggedErasure]:
    """Return the lines of the log by which a restore forgets all that was erased again.

    A backup may have an item without the ones that it was erased with. So each has a line.
    """
    key = read_user_key(store.database, user)
    # A layer by the time of its first revision: the log holds no name of a skill. It comes first,
    # since with the items its revisions are erased.
    times = (each.at for each in store.catalog.revisions(user) if each.layer == target.layer)
    layers = [LoggedErasure("layer", f"{key}/{at.isoformat()}") for at in islice(times, 1)]
    # The target next: a restore plans one erasure for it, and finds the others erased.
    others = (plan.erasure.turns | plan.erasure.signals) - target.items
    items = (*sorted(target.items), *sorted(others))
    return [*layers, *(LoggedErasure("item", f"{key}/{item}") for item in items)]
