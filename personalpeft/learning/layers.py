"""The order of a user's layers, and the part of a stack that a layer is built on."""

from __future__ import annotations

from dataclasses import replace

from personalpeft.store.store import Store
from personalpeft.types import Revision, Stack, StackEntry

VALID_ON = "holds_on"
"""Key in a revision's scores: digest of the stack below on which it was last found valid."""


def layer_order(layer: str) -> int:
    """Return the height of a layer. Layers of one height are not built on one another."""
    return {"style": 0, "memory": 2}.get(layer, 1)


def live_revision(store: Store, user: str, layer: str, live: Stack) -> Revision | None:
    """Return the live revision of a layer, or None."""
    entry = next((entry for entry in live.entries if entry.layer == layer), None)
    return store.catalog.revision(user, entry.revision) if entry is not None else None


def stack_below(store: Store, user: str, live: Stack, layer: str) -> Stack:
    """Return the part of a stack that a layer is built on.

    Style lies below skills, and skills below memory. A layer that is switched off, or attached to
    some prompts only, is left out: no user would get the stack that was trained on.
    """
    scopes = {each.name: each.scope for each in store.catalog.layers(user)}
    order = layer_order(layer)
    entries = (
        entry
        for entry in live.entries
        if layer_order(entry.layer) < order and scopes[entry.layer] == "always" and entry.weight
    )
    return replace(live, entries=tuple(entries))


def replace_layer(stack: Stack, entry: StackEntry) -> Stack:
    """Return a stack with ``entry`` as its layer, above those that it may be built on."""
    rest = [each for each in stack.entries if each.layer != entry.layer]
    under = sum(layer_order(each.layer) < layer_order(entry.layer) for each in rest)
    return replace(stack, entries=(*rest[:under], entry, *rest[under:]))


def is_valid_on(revision: Revision, below: Stack) -> bool:
    """Return whether a revision was built on a stack, or revalidated on it."""
    built_on = Stack(below.base, revision.below).digest
    return below.digest in (built_on, revision.scores.get(VALID_ON))
