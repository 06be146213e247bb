"""What takes time, over the public surface: called by threads, and knowing no screen.

Invariant: a ``Job`` is written by the thread that does it and read by the screen at any moment; each of its fields is only
ever replaced whole, so that no lock is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from personalpeft.errors import BaseMismatch, Cancelled, NotFound, PersonalPeftError, PromptTooLong
from personalpeft.learning.outcomes import MoveCause, SignalUse
from personalpeft.learning.report import LearnReport, from_json
from personalpeft.learning.triggers import TriggerKind
from personalpeft_app.tui.conversation import Conversation, shorten
from personalpeft_app.tui.conversations import conversations

if TYPE_CHECKING:
    from personalpeft import Reply, Runtime, User
    from personalpeft.chat.compare import Comparison
    from personalpeft.erasure import ForgetReport
    from personalpeft.memory.types import Item
    from personalpeft.types import HeadMove, Layer, Revision

# How often a thread that waits for the model looks whether it is still wanted, in seconds.
_LOOK = 0.05
# How many of the newest turns are gone through for conversations: at the start, and where there are new ones.
_REMEMBERED, _SINCE = 2000, 200


class TaskHandle:
    """Something that is going on: how far it is, and the wish that it ends."""

    def __init__(self) -> None:
        self.text = ""
        self.stage = ""
        self.done = 0.0
        self.stopped = False

    def stop(self) -> None:
        """Asks it to end after the step that is running."""
        self.stopped = True

    def progress(self, stage: str, done: float) -> None:
        """Hears how far it is."""
        self.stage, self.done = stage, done

    def cancelled(self) -> bool:
        """Whether somebody asked it to end."""
        return self.stopped


@dataclass(frozen=True, slots=True)
class CompletedReply:
    """A reply, when the ledger took it in, and how many of the oldest exchanges the model was not told of for want of room."""

    reply: Reply
    at: datetime
    left_out: int


@dataclass(frozen=True, slots=True)
class ModelState:
    """How things are with a user's model: ``stack`` is the digest of what is live, None while the base is not known;
    ``fresh`` counts what the next learn would go by: signals, and layers that are to be built anew; ``problem`` says why
    the stack cannot answer; ``items`` are the rules and facts that act.
    """

    layers: tuple[Layer, ...] = ()
    revisions: tuple[Revision, ...] = ()
    report: LearnReport | None = None
    stack: str | None = None
    fresh: int = 0
    withdrawn: tuple[HeadMove, ...] = ()
    problem: str = ""
    items: tuple[Item, ...] = ()


class UserSession:
    """One user's model at work. Every method may take long and is for a thread of its own."""

    def __init__(self, runtime: Runtime, user: User) -> None:
        self.user = user
        self._runtime = runtime
        self._tried = threading.Event()
        self._known: tuple[object, ...] | None = None

    @property
    def ready(self) -> bool:
        """Whether the model was loaded, or loading it failed, so that nothing need wait for it."""
        return self._tried.is_set()

    def load(self) -> None:
        """Loads the model. Raises as ``Runtime.engine``; what asks later tries again."""
        try:
            self._runtime.engine()
        finally:
            self._tried.set()

    def write(self, messages: Sequence[dict[str, str]], job: TaskHandle) -> CompletedReply:
        """A reply, its text so far in ``job.text``. A conversation that is too long loses its beginning. Raises ``Cancelled``
        where it was stopped before the first piece, and as ``User.stream``.
        """
        while not self._tried.wait(_LOOK):
            if job.stopped:
                raise Cancelled("Stopped before the model was there.")
        heard, left_out = list(messages), 0
        while True:
            try:
                reply = self._stream(heard, job)
                return CompletedReply(reply, self.user.turn(reply).at, left_out)
            except PromptTooLong:
                less = shorten(heard)
                if less is None:
                    raise
                heard, left_out = less, left_out + 1

    def _stream(self, heard: list[dict[str, str]], job: TaskHandle) -> Reply:
        stream = self.user.stream(heard, cancelled=job.cancelled)
        try:
            for piece in stream:
                job.text += piece
        finally:
            stream.close()
        try:
            return stream.reply
        except NotFound:
            raise Cancelled("Stopped before the reply began.") from None

    def learn(self, job: TaskHandle) -> LearnReport:
        """Learns from all that is new. Raises as ``User.learn``."""
        return self.user.learn(progress=job.progress, cancelled=job.cancelled)

    def compare(
        self, messages: Sequence[dict[str, str]], revision: str, layer: str, job: TaskHandle
    ) -> Comparison:
        """What is live and another revision ("previous", "base" or an id) on the same prompt. Raises as ``User.compare``."""
        return self.user.compare(
            list(messages), "live", revision, layer=layer, cancelled=job.cancelled
        )

    def refresh(self) -> ModelState:
        """How things are now. Does not wait for the model."""
        user = self.user
        reports = user.reports()
        stack, problem = None, ""
        if self.ready:
            try:
                stack = user.stack().digest
            except BaseMismatch as error:
                problem = describe_error(error)
            except PersonalPeftError:
                # The base is not there. Loading it has said so already.
                stack = None
        return ModelState(
            user.layers(),
            user.revisions(),
            from_json(reports[-1]) if reports else None,
            stack,
            sum(each.use_code is SignalUse.PENDING for each in user.lessons())
            + sum(
                each.kind in (TriggerKind.STACK_BELOW_CHANGED, TriggerKind.RETRACTED)
                for each in user.pending().news
            ),
            tuple(move for move in user.history() if move.cause == MoveCause.WITHDRAWN),
            problem,
            user.items(),
        )

    def talks(self) -> tuple[Conversation, ...] | None:
        """The newest conversations, where anything has changed since the last time; None where nothing has. What other
        programs do with the same user shows so.
        """
        now = self.user.summary(), self.user.layers()
        if now == self._known:
            return None
        newest = _REMEMBERED if self._known is None else _SINCE
        self._known = now
        return conversations(self.user.turns(newest), self.user.signals())

    def forget_talks(self) -> None:
        """The next look at ``talks`` finds them changed."""
        self._known = () if self._known is not None else None

    def forget(self, item: str, job: TaskHandle) -> ForgetReport:
        """Destroys one thing that was said. Raises as ``User.forget``."""
        return self.user.forget(item, progress=job.progress, cancelled=job.cancelled)


def describe_error(error: PersonalPeftError) -> str:
    """What went wrong and the way out, as one text."""
    return f"{error.message}\n{error.hint}".strip()
