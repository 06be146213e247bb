"""Describe which layers will unlearn a signal that the user retracts."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from personalpeft import User
    from personalpeft.learning.triggers import TrainingTrigger


def pending_removals(user: User) -> frozenset[TrainingTrigger]:
    """Return what layers have to unlearn now."""
    from personalpeft.learning.triggers import TriggerKind

    return frozenset(news for news in user.pending().news if news.kind == TriggerKind.RETRACTED)


def describe_removals(user: User, before: Collection[TrainingTrigger]) -> str:
    """Return a sentence on the layers with new removals since ``before``, empty without any."""
    known = sorted({news.layer for news in pending_removals(user) if news not in before})
    return f"The next learn removes it from {' and '.join(known)}." if known else ""
