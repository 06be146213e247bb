"""The one owner of the home folder: the ledger of what was said, the catalog of what was built from it, and the blobs.

Layout of a home: ``personalpeft.db`` (SQLite), ``blobs/<2 hex>/<64 hex>`` (packed adapters by SHA-256),
``sessions/<user>/<layer>.session`` (training state, disposable), ``notes/`` (what upkeep did),
``write.lock`` and ``write.holder``, ``locks/``, ``models/`` (the user's own cards). Mode 0700.

Invariants:

- The ledger only grows, but where its user forgets something: a tombstone stands there then. A later signal may supersede
  an earlier one, a retraction may switch one off; neither is overwritten.
- What returned is durable: it survives a kill and a power cut.
- A blob is durable and verified before any row names it; a head names only complete revisions of its own user and
  layer.
- All writes happen under one writer's lock, in one transaction each; readers see all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import numpy.typing as npt

from personalpeft.types import (
    FinishReason,
    HeadMove,
    Json,
    Layer,
    Message,
    Revision,
    Sampling,
    Scope,
    Signal,
    SignalKind,
    Stack,
    Turn,
    Usage,
)

if TYPE_CHECKING:
    from personalpeft.store.locks import Holder
    from personalpeft.store.maintenance import Upkeep
    from personalpeft.store.user_export import Portable

ANY_HEAD = "*"
"""Where a head may be moved from, whatever it is."""


@dataclass(frozen=True, slots=True)
class UserSummary:
    """One line of ``users``: who, since when, and how much there is of them."""

    id: str
    since: datetime
    turns: int
    signals: int
    revisions: int


@dataclass(frozen=True, slots=True)
class Build:
    """A revision on its way into the catalog: its packed file, what its learn reported, whether it becomes the head, and why."""

    revision: Revision
    blob: bytes
    report: Json
    promote: bool = True
    cause: str = "import"


@dataclass(frozen=True, slots=True)
class Collected:
    """What ``collect`` took away, or with ``dry_run`` would take: blobs that no revision names, halves of files and old
    sessions, counted, and the bytes of all of them.
    """

    blobs: int = 0
    parts: int = 0
    sessions: int = 0
    bytes: int = 0
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be destroyed of a user: turns, signals and revisions by their full ids. ``emptied`` are turns that lose their
    reply, with the messages that each keeps. ``rewritten`` makes of a report that stands, or of the scores of a judgement,
    what may be kept of it. What refers to a revision goes with it; a child of one must be named too.
    """

    turns: frozenset[str] = frozenset()
    signals: frozenset[str] = frozenset()
    revisions: frozenset[str] = frozenset()
    emptied: Mapping[str, tuple[Message, ...]] = field(default_factory=dict)
    rewritten: Callable[[Json], Json] = lambda said: said


@dataclass(frozen=True, slots=True)
class Destroyed:
    """What a removal has destroyed, counted; ``files`` are adapters that nobody else names. ``heads`` has the new head of each
    layer whose head was destroyed. ``complete`` says whether it is out of the database's journal too: where a reader
    kept that from being cleared, whoever opens the home next clears it.
    """

    turns: int = 0
    signals: int = 0
    revisions: int = 0
    reports: int = 0
    files: int = 0
    emptied: int = 0
    heads: Mapping[str, str | None] = field(default_factory=dict)
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that ``verify`` found: where, what is wrong with it, and what one can do."""

    where: str
    fault: str
    remedy: str


class Ledger(Protocol):
    """All turns and signals of all users, append-only. Lookups raise ``NotFound`` with the nearest id in the hint."""

    def add_turn(
        self,
        user: str,
        *,
        messages: Sequence[Message],
        reply: str,
        stack: Stack,
        sampling: Sampling,
        usage: Usage,
        finish_reason: FinishReason,
        used: Sequence[str] = (),
        removed: int | None = None,
    ) -> Turn:
        """Append one turn. Raise ``Forgotten`` where ``removed`` is no longer what ``count_removed`` returns."""
        ...

    def count_removed(self, user: str) -> int:
        """Return how many entries of a user were forgotten; 0 for an unknown user."""
        ...

    def turn(self, user: str, turn_id: str) -> Turn:
        """One turn; an unambiguous prefix of the id will do."""
        ...

    def turns(
        self,
        user: str,
        *,
        limit: int | None = None,
        using: Collection[str] | None = None,
        before: str | None = None,
    ) -> tuple[Turn, ...]:
        """Newest first; with ``using`` only those in whose prompt one of these signals was, with ``before`` only those that are older
        than this turn. Raises as ``turn`` for that.
        """
        ...

    def add_signal(
        self,
        user: str,
        kind: SignalKind,
        payload: Json,
        *,
        turn: str | None = None,
        source: str = "person",
        supersedes: str | None = None,
        removed: int | None = None,
    ) -> Signal:
        """Appends one signal. ``source`` is who gave it. ``supersedes`` defaults to what the same source last said of the
        same turn in the same kind, where there is one (ratings, edits, preferences, rewards); comments add up. ``removed`` is as
        for ``add_turn``.
        """
        ...

    def signal(self, user: str, signal_id: str) -> Signal:
        """One signal; an unambiguous prefix of the id will do."""
        ...

    def signals(
        self,
        user: str,
        *,
        kinds: Sequence[SignalKind] | None = None,
        turn: str | None = None,
        current: bool = True,
    ) -> tuple[Signal, ...]:
        """Oldest first; of one ``turn`` where that is given. ``current`` leaves out what was superseded or retracted."""
        ...

    def retract(self, user: str, *signals: str) -> None:
        """Switches signals off from now on, all or none; the history keeps them."""
        ...


class Catalog(Protocol):
    """Users, layers, revisions, heads, pinned questions and reports. Lookups raise ``NotFound`` with the nearest name."""

    def ensure_user(self, user: str) -> None: ...

    def users(self, *, after: str | None = None, limit: int = 100) -> tuple[UserSummary, ...]:
        """The users after ``after`` by id, at most ``limit``: a page that is shorter is the last one."""
        ...

    def user(self, user: str) -> UserSummary: ...

    def layers(self, user: str) -> tuple[Layer, ...]:
        """Lowest first. The order is: style, skills by age, memory; positions 0, 1, 2, …"""
        ...

    def stack(self, user: str, base: str) -> Stack:
        """The live stack: one entry for each layer with a head. Raises ``BaseMismatch`` when a head was built on
        another base.
        """
        ...

    def revision(self, user: str, revision_id: str) -> Revision:
        """One revision by its id, an unambiguous prefix of it or of its digest."""
        ...

    def revisions(self, user: str, *, layer: str | None = None) -> tuple[Revision, ...]:
        """Oldest first, refused ones too."""
        ...

    def add_revision(
        self,
        revision: Revision,
        blob: bytes,
        report: Json,
        *,
        promote: bool,
        cause: str,
        over: str | None = ANY_HEAD,
    ) -> bool:
        """Makes the blob durable, checks its digest, then in one transaction records revision, provenance, pins and
        report and, if ``promote``, moves the head. An identical revision that is already there is judged anew: its
        verdict is replaced. False, and nothing is recorded, where it is to be the head in the place of another than
        ``over`` (None: the bare base).
        """
        ...

    def add_revisions(
        self,
        given: Iterable[Build],
        *,
        batch: int = 1000,
        progress: Callable[[int], None] = lambda done: None,
    ) -> int:
        """The bulk path: as ``add_revision`` for very many, in order, each ``batch`` one transaction; makes users, and skips
        what is there, so that it can be run again after a kill. ``progress`` hears how many were gone through. Returns
        how many were added.
        """
        ...

    def judge_again(self, revision: Revision, report: Json, *, move: HeadMove) -> bool:
        """Adds a judgement of a revision that is there, with its report, and moves the head, in one transaction; ``after``
        may be where it is. False, and nothing is recorded, where the head is no longer at ``move.before``.
        """
        ...

    def add_report(self, user: str, report: Json) -> None:
        """Records a learn that made no revision."""
        ...

    def reports(self, user: str) -> tuple[Json, ...]:
        """Oldest first."""
        ...

    def move_head(
        self, user: str, layer: str, to: str | None, *, base: str, cause: str
    ) -> HeadMove:
        """Makes another revision (None: the bare base) the head. Raises ``BaseMismatch`` when it was built on another
        base than ``base``, ``Damaged`` when its blob is gone or is not what its digest says.
        """
        ...

    def history(self, user: str, *, layer: str | None = None) -> tuple[HeadMove, ...]:
        """Every move of a head, oldest first."""
        ...

    def set_weight(self, user: str, layer: str, weight: float) -> None: ...

    def set_scope(self, user: str, layer: str, scope: Scope) -> None:
        """Says when the layer is attached; before that a style is "always", a skill and the memory "near"."""
        ...

    def pinned(self, user: str, layer: str) -> tuple[str, ...]:
        """Signals held back as questions for this layer for ever, oldest first; never trained on."""
        ...

    def considered(self, user: str, layer: str) -> frozenset[str]:
        """Signals that an earlier learn of this layer has used or pinned, whatever its verdict."""
        ...

    def vectors(self, user: str, embedder: str) -> Mapping[str, npt.NDArray[np.float32]]:
        """Known embeddings by signal id; a cache."""
        ...

    def add_vectors(
        self, user: str, embedder: str, vectors: Mapping[str, npt.NDArray[np.float32]]
    ) -> None: ...


class Blobs(Protocol):
    """Immutable files named by the SHA-256 of their bytes."""

    def put(self, data: bytes) -> str:
        """Durable before it returns: temporary file, fsync, rename, fsync of the folder. Putting the same bytes twice
        is fine.
        """
        ...

    def path(self, digest: str) -> Path:
        """Where the blob lies; ``Damaged`` if it is not there."""
        ...

    def read(self, digest: str) -> bytes:
        """The bytes, hashed again; ``Damaged`` if they are not what the digest says."""
        ...


class Store(Protocol):
    """An open home. Use it as a context manager, or close it; safe to use from several threads and several processes."""

    @property
    def home(self) -> Path: ...

    @property
    def ledger(self) -> Ledger: ...

    @property
    def catalog(self) -> Catalog: ...

    @property
    def blobs(self) -> Blobs: ...

    @property
    def upkeep(self) -> Upkeep: ...

    def lease(self, name: str) -> AbstractContextManager[None]:
        """Holds a name (``learn-ada``) against every other process and thread, without waiting: ``Busy`` names the
        holder's pid, command and since when. Freed by the system when the holder dies.
        """
        ...

    def say(self, lease: str, doing: str) -> None:
        """Has ``holder`` tell everybody what is done under a lease that this process holds, in one short line. A mark for
        the moment: never durable, and it never fails whoever does it.
        """
        ...

    def holder(self, lease: str) -> Holder | None:
        """Who holds a lease now, in whatever process, and what they said last; None: nobody. Cheap: one small file is read."""
        ...

    def save_session(self, user: str, layer: str, data: bytes) -> None:
        """Keeps what a running learn needs to resume, in place of what was kept before; disposable."""
        ...

    def load_session(self, user: str, layer: str) -> bytes | None:
        """What was last kept, whole; None where there is nothing."""
        ...

    def drop_session(self, user: str, layer: str) -> None:
        """Throws it away; where there is none, that is fine."""
        ...

    def forget(self, user: str, decide: Callable[[], Removal]) -> Destroyed:
        """Destroys what ``decide`` says, which is asked when nobody else can write: rows in one transaction, with a tombstone
        for each, then files, training state and the database's journal. After a kill between the two whoever opens the
        home finishes it. Raises as ``decide``, and ``HomeError``, ``Busy``.
        """
        ...

    def take_out(self, user: str) -> Portable:
        """A user as rows that can leave the home. Raises ``NotFound``."""
        ...

    def put_in(
        self, portable: Portable, user: str, files: Mapping[str, bytes], *, mark: str
    ) -> None:
        """Adds a user who was checked (``portable.check``) under a name that is free, with the files that their revisions
        name, in one transaction. The verdict of each revision is given again with ``mark`` before its reason. Raises
        ``InvalidInput`` where the name is taken, ``PersonalFileError``, ``HomeError``, ``Busy``.
        """
        ...

    def verify(self) -> tuple[Problem, ...]:
        """Derives every digest again and finds every dangling, missing, tampered or leftover thing. Changes nothing."""
        ...

    def collect(
        self, *, dry_run: bool = False, progress: Callable[[float], None] = lambda done: None
    ) -> Collected:
        """Takes away what nothing needs: blobs that no revision has named for a day, halves of files, sessions that nobody
        wrote for a week. Safe beside readers and writers. ``progress`` hears how much is done (0 to 1).
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
