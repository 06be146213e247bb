"""The last steps of every way to a revision: its file is durable, its rows land in one transaction, and where it becomes
the head its first reply waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime

from personalpeft.adapters.types import Pair
from personalpeft.backends.base import SessionSpec
from personalpeft.engine.engine import Engine
from personalpeft.learning.report import LearnReport
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.store.base import Store
from personalpeft.types import Json, Revision, Stack, StackEntry, Verdict, canonical_digest


def session_spec(
    recipe: TrainingConfig, below: str | None, start: Mapping[str, Pair] | None
) -> SessionSpec:
    """What a session must know of a recipe, of the stack that it stands on and of the numbers that it starts from."""
    return SessionSpec(
        rank=recipe.rank,
        scaling=recipe.scaling,
        targets=recipe.target_modules,
        seed=recipe.seed,
        below=below,
        start=start,
        weight_decay=recipe.weight_decay,
        clip=recipe.max_grad_norm,
    )


def publish_revision(
    store: Store,
    engine: Engine,
    revision: Revision,
    blob: bytes,
    report: LearnReport,
    candidate: Stack,
    *,
    cause: str,
) -> LearnReport:
    """Records a judged revision with its report, and makes it the head where the report says that it is live: in the place of the
    one that it was judged against. Where another is live by now, only that is recorded. The report that was.
    """
    # Held from before the head moves until after, so that the first reply of a new revision waits for nothing.
    with engine.pin(candidate) if report.live else nullcontext():
        done = store.catalog.add_revision(
            revision, blob, report.as_json(), promote=report.live, cause=cause, over=report.before
        )
    if done:
        return report
    moved = head_moved_report(store, report)
    store.catalog.add_report(moved.user, moved.as_json())
    return moved


def head_moved_report(store: Store, report: LearnReport) -> LearnReport:
    """What is said of a learn in whose time somebody else moved the head: it changes nothing, and the next one goes by what is
    live then. Recorded by nobody yet.
    """
    live = next(
        (layer.head for layer in store.catalog.layers(report.user) if layer.name == report.layer),
        None,
    )
    reason = f"meanwhile {live or 'the base'} was made live, so nothing has changed; the next learn goes by that"
    return LearnReport(
        report.user,
        report.layer,
        Verdict.ABSTAINED,
        reason,
        report.at,
        report.seconds,
        before=live,
        moved=True,
    )


def imported_revision(
    user: str,
    layer: str,
    digest: str,
    base: str,
    recipe: Json,
    *,
    reason: str,
    at: datetime,
    below: tuple[StackEntry, ...] = (),
    seconds: float = 0.0,
) -> Revision:
    """A revision that no learn built: live because somebody gave it, of no signals and judged by nobody."""
    return Revision(
        id=f"{layer}@{digest[:12]}",
        user=user,
        layer=layer,
        digest=digest,
        base=base,
        parent=None,
        below=below,
        recipe=recipe,
        inputs=canonical_digest({"imported": digest}),
        signals={},
        scores={},
        verdict=Verdict.PROMOTED,
        reason=reason,
        probation=False,
        at=at,
        seconds=seconds,
    )
