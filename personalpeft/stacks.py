"""Which revisions answer: what is live for a user, a part of it, or what would be with another head."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from personalpeft.errors import BaseMismatch, NotFound, ServingFailed
from personalpeft.ids import check_layer_name
from personalpeft.learning.gate.probation import ROLLBACK, UNDONE
from personalpeft.services import Services
from personalpeft.types import HeadMove, Stack, StackEntry

BASE = "base"
"""What stands for the bare base where a revision is named."""


def live(services: Services, user: str) -> Stack:
    """All that is live. Raises ``BaseMismatch`` when a head was built on another base than the open one."""
    return services.store.catalog.stack(user, services.base.digest)


def switched_on(services: Services, user: str) -> Stack:
    """What is live but for layers that are "never" to answer: all that programs have a use for that know of no scopes."""
    stack = live(services, user)
    off = {layer.name for layer in services.store.catalog.layers(user) if layer.scope == "never"}
    return replace(stack, entries=tuple(entry for entry in stack.entries if entry.layer not in off))


def only(services: Services, user: str, layers: Sequence[str]) -> Stack:
    """What is live of these layers. Raises ``NotFound`` for one that the user does not have."""
    stack = live(services, user)
    known = {layer.name for layer in services.store.catalog.layers(user)}
    for name in layers:
        if name not in known:
            check_layer_name(name)
            raise NotFound(
                f"{user} has no layer {name}.",
                hint=f"There is {', '.join(sorted(known)) or 'none yet'}.",
            )
    return replace(stack, entries=tuple(entry for entry in stack.entries if entry.layer in layers))


def with_head(services: Services, user: str, layer: str, to: str | None) -> Stack:
    """The live stack as it would be with another head in one layer. Raises ``NotFound``, ``BaseMismatch``."""
    base = services.base.digest
    entries = []
    for known in services.store.catalog.layers(user):
        head = to if known.name == layer else known.head
        if head is not None:
            revision = services.store.catalog.revision(user, head)
            if revision.base != base:
                raise BaseMismatch(
                    f"{revision.id} was built on another base.", hint="Open that base."
                )
            entries.append(StackEntry(known.name, revision.id, revision.digest, known.weight))
    return Stack(base, tuple(entries))


def revision_named(services: Services, user: str, layer: str, name: str) -> str | None:
    """The id of the revision that a person means; None for the bare base. Raises ``NotFound``."""
    moves = services.store.catalog.history(user, layer=layer)
    if not moves:
        raise NotFound(
            f"The layer {layer} has never changed.",
            hint="There is nothing to compare; learn first.",
        )
    if name in ("live", "previous"):
        return moves[-1].after if name == "live" else moves[-1].before
    if name == BASE:
        return None
    revision = services.store.catalog.revision(user, name)
    if revision.layer != layer:
        raise NotFound(
            f"{revision.id} is no revision of {layer}.", hint=f"It is one of {revision.layer}."
        )
    return revision.id


def roll_back(services: Services, user: str, layer: str, to: str | None) -> HeadMove:
    """As ``User.rollback``."""
    store, base, cause = services.store, services.base, ROLLBACK
    if to == "previous":
        moves = store.catalog.history(user, layer=layer)
        if not moves:
            raise NotFound(
                f"The layer {layer} has never changed.", hint="There is nothing to roll back."
            )
        to = moves[-1].before
        cause = UNDONE if moves[-1].cause == ROLLBACK else ROLLBACK
    # Loaded before the head moves, so that the next reply waits for nothing; undoing must also work where serving does
    # not.
    with suppress(BaseMismatch, ServingFailed):
        services.model.preload(with_head(services, user, layer, to))
    return store.catalog.move_head(user, layer, to, base=base.digest, cause=cause)
