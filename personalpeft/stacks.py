"""The stacks of a user: the live stack, a part of it, or the live stack with another head."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from personalpeft.arguments import check_list
from personalpeft.errors import BaseMismatch, NotFound, ServingFailed
from personalpeft.ids import check_layer_name
from personalpeft.learning.outcomes import MoveCause
from personalpeft.services import Services
from personalpeft.types import HeadMove, Stack, StackEntry

BASE = "base"
"""Stands for the bare base where a revision is named."""


def live_stack(services: Services, user: str) -> Stack:
    """Return all that is live. Raises ``BaseMismatch`` if a head was built on another base."""
    return services.store.catalog.stack(user, services.base.digest)


def enabled_stack(services: Services, user: str) -> Stack:
    """Return what is live without layers of scope "never", for programs that know no scopes."""
    stack = live_stack(services, user)
    off = {each.name for each in services.store.catalog.layers(user) if each.scope == "never"}
    return replace(stack, entries=tuple(entry for entry in stack.entries if entry.layer not in off))


def select_layers(services: Services, user: str, layers: Sequence[str]) -> Stack:
    """Return what is live of some layers. Raises ``NotFound`` for one that the user lacks."""
    check_list("layers", layers)
    layers = [check_layer_name(name) for name in layers]
    stack = live_stack(services, user)
    existing = {layer.name for layer in services.store.catalog.layers(user)}
    for name in layers:
        if name not in existing:
            raise NotFound(
                f"{user} has no layer {name}.",
                hint=f"There is {', '.join(sorted(existing)) or 'none yet'}.",
            )
    return replace(stack, entries=tuple(entry for entry in stack.entries if entry.layer in layers))


def stack_with_head(services: Services, user: str, layer: str, head: str | None) -> Stack:
    """Return the live stack with another head in one layer. None leaves the layer out.

    Raises ``NotFound``, and ``BaseMismatch`` for a revision that was built on another base.
    """
    base, catalog = services.base.digest, services.store.catalog
    entries = []
    for each in catalog.layers(user):
        revision_id = head if each.name == layer else each.head
        if revision_id is not None:
            revision = catalog.revision(user, revision_id)
            if revision.base != base:
                raise BaseMismatch(
                    f"{revision.id} was built on another base.", hint="Open that base."
                )
            entries.append(StackEntry(each.name, revision.id, revision.digest, each.weight))
    return Stack(base, tuple(entries))


def resolve_revision(services: Services, user: str, layer: str, name: str) -> str | None:
    """Return the id of a revision that a user names, None for the bare base.

    Args:
        layer: The layer of the revision.
        name: "live", "previous", "base", or an id or a unique prefix of it.

    Raises:
        NotFound: There is no such revision, or the layer has never changed.
    """
    moves = _history(services, user, layer)
    if name in ("live", "previous"):
        return moves[-1].after if name == "live" else moves[-1].before
    if name == BASE:
        return None
    revision = services.store.catalog.revision(user, name)
    if revision.layer != layer:
        raise NotFound(
            f"{revision.id} is a revision of {revision.layer}, not of {layer}.",
            hint="Name a revision of this layer.",
        )
    return revision.id


def rollback(services: Services, user: str, layer: str, to: str | None) -> HeadMove:
    """Implement ``User.rollback``, which documents the arguments."""
    cause = MoveCause.ROLLBACK
    if to == BASE:
        to = None
    elif to == "previous":
        last = _history(services, user, layer)[-1]
        to = last.before
        if last.cause == MoveCause.ROLLBACK:
            cause = MoveCause.ROLLBACK_UNDONE
    # Load it before the head moves, so that the next reply does not wait. Errors are ignored:
    # rolling back must work when serving does not.
    with (
        suppress(BaseMismatch, ServingFailed),
        services.model.preloaded(stack_with_head(services, user, layer, to)),
    ):
        pass
    base = services.base.digest
    return services.store.catalog.move_head(user, layer, to, base=base, cause=cause)


def _history(services: Services, user: str, layer: str) -> Sequence[HeadMove]:
    moves = services.store.catalog.head_moves(user, layer=layer)
    if not moves:
        raise NotFound(f"The layer {layer} has never changed.", hint="Learn first.")
    return moves
