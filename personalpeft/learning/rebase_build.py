"""Build a user's layers on another base, from the ledger.

Layers that the user had on that base before are continued, so going back trains only what is new.
Otherwise each is built from nothing, with the recipe of the base's card.

Invariants: no head moves. A revision whose inputs are those of a recorded one is not trained again.
A training that is interrupted continues from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import groupby

from personalpeft.errors import NothingToLearn
from personalpeft.learning.candidate import find_candidate, store_candidate
from personalpeft.learning.data.training_examples import load_assignments
from personalpeft.learning.layers import inspect_layer, layer_order, trained_on
from personalpeft.learning.learner import Learner
from personalpeft.learning.outcomes import MoveCause
from personalpeft.learning.plan import MIN_LESSONS, Plan, build_plan
from personalpeft.learning.train.config import Start
from personalpeft.learning.train.loop import CheckpointStore
from personalpeft.learning.train.stage import train_alone
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import Progress, Revision, Stack, StackEntry, Verdict

UNJUDGED = "built on another base, and not judged yet"
"""The reason of a revision until its stack is compared."""


@dataclass(frozen=True, slots=True)
class BuiltLayer:
    """One layer on the new base.

    - ``revision``: None where no lesson gives it; ``why`` says so.
    - ``is_new``: it was recorded by this build.
    """

    layer: str
    revision: Revision | None
    is_new: bool = False
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
    layers: Collection[str],
    former: Stack,
    *,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> tuple[BuiltLayer, ...]:
    """Build layers of a user on the open base, lowest first, and record the new revisions.

    Call it inside ``LazyModel.learning``, with the user's lease.

    Args:
        services: The wired parts of the new base.
        user: The user.
        layers: The layers that are live, in the order of the stack.
        former: The stack to continue. Without entries all is built from nothing.
        progress: Called with a stage and the share of it that is done.
        cancelled: Called between steps; returns whether to stop.

    Raises:
        Cancelled: ``cancelled`` returned True. What was built stays.
        ServingFailed: The model failed.
    """
    store = services.store
    stack = Stack(services.base.digest)
    built: list[BuiltLayer] = []
    entries = {entry.layer: entry for entry in former.entries}
    weights = {known.name: known.weight for known in store.catalog.layers(user)}

    def add(entry: StackEntry | None) -> Stack:
        return replace(stack, entries=(*stack.entries, entry)) if entry else stack

    for layer in sorted(layers, key=layer_order):
        decision = _decide(services, user, layer, add(entries.get(layer)))
        each = (
            _find_or_build(services, decision, progress, cancelled)
            if isinstance(decision, Plan)
            else decision
        )
        built.append(each)
        if (found := each.revision) is not None:
            stack = add(StackEntry(layer, found.id, found.digest, weights[layer]))
    return tuple(built)


def stack_of(services: Services, user: str, built: tuple[BuiltLayer, ...]) -> Stack:
    """Return the stack of built layers, with the weights that the user gave them.

    Args:
        services: The wired parts of the base that they were built on.
        user: The user.
        built: The layers, lowest first.
    """
    weights = {layer.name: layer.weight for layer in services.store.catalog.layers(user)}
    entries = (
        StackEntry(each.layer, each.revision.id, each.revision.digest, weights[each.layer])
        for each in built
        if each.revision is not None
    )
    return Stack(services.base.digest, tuple(entries))


def _decide(services: Services, user: str, layer: str, live: Stack) -> Plan | BuiltLayer:
    """Return the build of a layer, or the former head if nothing is new, or why there is none."""
    store = services.store
    state = inspect_layer(store, user, layer, live, load_assignments(store, user))
    recipe = Learner.from_services(services).recipes.for_layer(layer)
    head = state.head
    start: Start = "auto" if head else "nothing"
    began = services.clock.timer()
    try:
        plan = build_plan(services, state, recipe, start, began, force=head is not None)
    except NothingToLearn as nothing:
        # A head of outdated lessons does not come back.
        return BuiltLayer(layer, None if state.outdated else head, why=nothing.message)
    if not plan.has_enough:
        return BuiltLayer(layer, None, why=f"a first build takes {MIN_LESSONS} lessons")
    if head is not None and plan.is_incremental:
        disliked = {each.signal for each in plan.undesirable_examples}
        if not plan.new_examples and disliked <= trained_on(store, head):
            return BuiltLayer(layer, head)
    return plan


def _find_or_build(
    services: Services, plan: Plan, progress: Progress, cancelled: Callable[[], bool]
) -> BuiltLayer:
    """Return the recorded revision of a plan's inputs, or train and record it."""
    store, user, layer = services.store, plan.user, plan.layer
    if known := find_candidate(store, plan):
        return BuiltLayer(layer, store.catalog.revision(user, known.entry.revision))
    checkpoints = CheckpointStore.of_layer(store, user, layer)
    weights = train_alone(services, plan, checkpoints, progress=progress, cancelled=cancelled)
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
    store.delete_session(user, layer)
    return BuiltLayer(layer, store.catalog.revision(user, revision.id), is_new=True)
