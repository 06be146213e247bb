"""Build a user's layers on another base, from the ledger.

Layers that the user had on that base before are continued, so going back trains only what is new.
Otherwise each is built from scratch, with the recipe of the base's card.

Invariants: no head moves. A revision whose inputs are those of a recorded one is not trained again.
A training that is interrupted continues from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from personalpeft.errors import NothingToLearn
from personalpeft.learning.candidate import find_candidate, store_candidate
from personalpeft.learning.data.assignment import load_assignments
from personalpeft.learning.layers import inspect_layer, layer_order, trained_on
from personalpeft.learning.learner import Learner
from personalpeft.learning.outcomes import MoveCause
from personalpeft.learning.plan import MIN_LESSONS, Plan, build_plan
from personalpeft.learning.train.config import Start
from personalpeft.learning.train.stage import train_alone
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import Progress, Stack, StackEntry, Verdict

UNJUDGED = "built on another base, and not judged yet"
"""The reason of a revision until its stack is compared."""


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


def last_stack(store: Store, user: str, base: str) -> Stack:
    """Return the heads that a user has on a base, or had when the layers left it.

    Args:
        store: The open home.
        user: The user.
        base: The digest of the base.
    """
    revisions = {each.id: each for each in store.catalog.revisions(user)}
    heads: dict[str, str] = {}
    last: dict[str, str] = {}
    moves = store.catalog.head_moves(user)

    def is_on_base() -> bool:
        return any(revisions[each].base == base for each in heads.values())

    for (cause, _), group in groupby(moves, key=lambda move: (move.cause, move.at)):
        if cause == MoveCause.REBASE and is_on_base():
            last = dict(heads)
        for move in group:
            heads.pop(move.layer, None)
            if move.after is not None:
                heads[move.layer] = move.after
    if is_on_base():
        last = heads
    entries = [
        StackEntry(layer.name, last[layer.name], revisions[last[layer.name]].digest, layer.weight)
        for layer in store.catalog.layers(user)
        if layer.name in last
    ]
    return Stack(base, tuple(entries))


def build_layers(
    services: Services,
    user: str,
    heads: Mapping[str, str],
    former: Stack,
    *,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> tuple[Stack, tuple[RebasedLayer, ...]]:
    """Build the live layers of a user on the open base, lowest first, and record the new revisions.

    Call it inside ``LazyModel.learning``, with the user's lease.

    Args:
        services: The wired parts of the new base.
        user: The user.
        heads: The live revision of each layer, in the order of the stack.
        former: The stack to continue. Without entries all is built from scratch.
        progress: Called with a stage and the share of it that is done.
        cancelled: Called between steps; returns whether to stop.

    Returns:
        The new stack, and each layer before and after.

    Raises:
        Cancelled: ``cancelled`` returned True. What was built stays.
        ServingFailed: The model failed.
    """
    stack = Stack(services.base.digest)
    layers: list[RebasedLayer] = []
    entries = {entry.layer: entry for entry in former.entries}
    for layer in sorted(heads, key=layer_order):
        found = _decide(services, user, layer, stack, entries.get(layer))
        if isinstance(found, str):
            layers.append(RebasedLayer(layer, heads[layer], None, why=found))
            continue
        is_trained = False
        if isinstance(found, Plan):
            found, is_trained = _find_or_build(services, found, progress, cancelled)
        stack = replace(stack, entries=(*stack.entries, found))
        layers.append(RebasedLayer(layer, heads[layer], found.revision, is_trained))
    return stack, tuple(layers)


def _decide(
    services: Services, user: str, layer: str, below: Stack, former: StackEntry | None
) -> Plan | StackEntry | str:
    """Return the build of a layer, or the former head if nothing is new, or why there is none."""
    store = services.store
    live = replace(below, entries=(*below.entries, former)) if former else below
    state = inspect_layer(store, user, layer, live, load_assignments(store, user))
    recipe = Learner.from_services(services).recipes.for_layer(layer)
    start: Start = "auto" if former else "scratch"
    began = services.clock.timer()
    try:
        plan = build_plan(services, state, recipe, start, began, force=former is not None)
    except NothingToLearn as nothing:
        # A head of outdated lessons does not come back.
        return former if former and not state.outdated else nothing.message
    if not plan.has_enough:
        return f"a first build takes {MIN_LESSONS} lessons"
    if former and plan.is_incremental:
        disliked = {each.signal for each in plan.undesirable_examples}
        if not plan.new_examples and disliked <= trained_on(store, state.head):
            return former
    return plan


def _find_or_build(
    services: Services, plan: Plan, progress: Progress, cancelled: Callable[[], bool]
) -> tuple[StackEntry, bool]:
    """Find the recorded revision of a plan's inputs, or train and record it.

    Returns its entry, and whether it was trained.
    """
    store, user, layer = services.store, plan.user, plan.layer
    if known := find_candidate(store, plan):
        return known.entry, False
    weights = train_alone(services, plan, progress=progress, cancelled=cancelled)
    candidate = store_candidate(services, plan, weights)
    revision = candidate.to_revision(
        Verdict.ABSTAINED,
        UNJUDGED,
        candidate.scores,
        at=services.clock.now(),
        seconds=round(services.clock.timer() - plan.began, 3),
    )
    report = {"rebase": {"base": plan.live.base, "revision": revision.id}}
    store.catalog.add_revision(
        revision, candidate.blob, report, promote=False, cause=MoveCause.REBASE
    )
    store.delete_checkpoint(user, layer)
    return candidate.entry, True
