"""Values that the store takes and returns. This module loads no database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from personalpeft.types import Json, Message

ANY_HEAD = "*"
"""As ``expected_head``: move the head whatever it is."""


@dataclass(frozen=True, slots=True)
class UserSummary:
    """When a user was created, and how many turns, signals and revisions the user has.

    ``training``: whether layers may be trained on new signals; see ``User.set_training``.
    """

    id: str
    since: datetime
    turns: int
    signals: int
    revisions: int
    training: bool = True


@dataclass(frozen=True, slots=True)
class ConversationLink:
    """The place of a turn: its conversation and the turn before it.

    ``conversation`` is None for a turn of an earlier version, "" for one in no conversation.
    """

    turn: str
    at: datetime
    conversation: str | None
    previous: str | None


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """What is recorded of a build beside its revision.

    - ``roles``: the role of each signal in the build. Later judgements may have added others.
    - ``recipe``: as it is stored, with the names of its time. It is a part of the adapter's file.
    - ``moments``: when the build may have read the ledger, likeliest first. A moment is the number
      of the entry before which it read. Turns and signals may arrive while a build is trained.
    """

    roles: Mapping[str, str]
    recipe: Json
    moments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What a collection deleted, or with ``dry_run`` would delete.

    Counts of unnamed blobs, partial files, old training sessions and unused bases of the cache, and
    the bytes of all of them.
    """

    blobs: int = 0
    parts: int = 0
    sessions: int = 0
    bases: int = 0
    bytes: int = 0
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Erasure:
    """What to erase of one user, by full ids.

    Rows that refer to an erased revision are erased too; its children must be named here.

    - ``emptied``: turns that lose their reply, with the messages that each keeps.
    - ``layers``: layers that are erased whole. All their revisions must be named here.
    - ``redact_json``: maps a remaining report, or the scores of a judgement, to what stays of it.
    """

    turns: frozenset[str] = frozenset()
    signals: frozenset[str] = frozenset()
    revisions: frozenset[str] = frozenset()
    emptied: Mapping[str, tuple[Message, ...]] = field(default_factory=dict)
    layers: frozenset[str] = frozenset()
    redact_json: Callable[[Json], Json] = lambda body: body


@dataclass(frozen=True, slots=True)
class ErasureMark:
    """What had been erased of a user when something began to read that user's data.

    A user who was erased and created again has another ``since``.
    """

    since: str
    tombstones: int


@dataclass(frozen=True, slots=True)
class ErasureResult:
    """What an erasure erased beside the named items, counted.

    - ``vectors``: embeddings of erased signals.
    - ``files``: adapter files that no other revision names.
    - ``heads``: the new head of each layer whose head was erased.
    - ``complete``: False if a reader kept the database's journal from being cleared. The next
      opening clears it.
    - ``keys_destroyed``: the ids of the user's data keys that were destroyed, hex.
    """

    reports: int = 0
    vectors: int = 0
    files: int = 0
    heads: Mapping[str, str | None] = field(default_factory=dict)
    complete: bool = True
    keys_destroyed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault that ``verify`` found: where it is, what is wrong, and what to do."""

    where: str
    fault: str
    remedy: str


@dataclass(frozen=True, slots=True)
class LostBlob:
    """A blob that is missing or damaged, and the revisions that name it, as user and id."""

    digest: str
    owners: tuple[tuple[str, str], ...]
