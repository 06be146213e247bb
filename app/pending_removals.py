"""What is said to somebody who takes back what a layer has learned."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from personalpeft import User
    from personalpeft.learning.status import TrainingTrigger


def pending_removals(user: User) -> frozenset[TrainingTrigger]:
    """What layers have to unlearn now; asked before something is taken back."""
    return frozenset(news for news in user.pending().news if news.kind == "taken back")


def describe_removals(user: User, before: Collection[TrainingTrigger]) -> str:
    """A sentence on which layers have learned of what was taken back since; empty where none has."""
    known = sorted({news.layer for news in pending_removals(user) if news not in before})
    return f"What {' and '.join(known)} learned of it goes with the next learn." if known else ""
