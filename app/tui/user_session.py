"""One user's model, as the screen calls it.

Invariants: blocking work runs in a thread, and its failures arrive as ``PersonalPeftError``. The
thread that does a task writes its ``TaskHandle``, and the screen reads it. Each field is only
replaced whole, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from personalpeft import Conversation, ConversationSummary, Reply, Runtime, User
from personalpeft.errors import BaseMismatch, Cancelled, NotFound, PersonalPeftError
from personalpeft.learning.outcomes import MoveCause
from personalpeft.learning.report import LearnReport, from_json
from personalpeft.memory.types import Item
from personalpeft.types import HeadMove, Layer, Revision
from personalpeft_app.error_output import wrap_bug

P = ParamSpec("P")
T = TypeVar("T")
# How often a thread that waits for the model checks whether it was cancelled, in seconds.
_POLL_SECONDS = 0.05
_MAX_CONVERSATIONS = 500


class TaskHandle:
    """Progress and cancellation of a task."""

    def __init__(self, stage: str = "") -> None:
        self.text = ""
        self.stage = stage
        self.done = 0.0
        self.stopped = False

    def stop(self) -> None:
        """Ask the task to end after its current step."""
        self.stopped = True

    def progress(self, stage: str, done: float) -> None:
        """Set the progress, 0 to 1."""
        self.stage, self.done = stage, done

    def cancelled(self) -> bool:
        return self.stopped


@dataclass(frozen=True, slots=True)
class ModelState:
    """The known state of the user's model.

    Attributes:
        stack: The digest of the live stack, None while the base is not loaded.
        pending: Signals, and layers to rebuild, that the next learn would use.
        problem: Why the stack cannot answer, else empty.
        items: The rules and facts that apply.
        training: Whether layers may be trained on new feedback.
    """

    layers: tuple[Layer, ...] = ()
    revisions: tuple[Revision, ...] = ()
    report: LearnReport | None = None
    stack: str | None = None
    pending: int = 0
    withdrawn: tuple[HeadMove, ...] = ()
    problem: str = ""
    items: tuple[Item, ...] = ()
    training: bool = True


class UserSession:
    """The user's model. All methods but ``call`` block."""

    def __init__(self, runtime: Runtime, user: User) -> None:
        self.user = user
        self.runtime = runtime
        self._load_ended = threading.Event()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function in a thread. Raises ``PersonalPeftError`` alone."""
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except PersonalPeftError:
            raise
        except Exception as error:
            raise wrap_bug(error) from error

    @property
    def ready(self) -> bool:
        """Whether the model was loaded or failed to load."""
        return self._load_ended.is_set()

    def load(self) -> None:
        """Load the model. Raises as ``Runtime.engine``; later requests try again."""
        try:
            self.runtime.engine()
        finally:
            self._load_ended.set()

    def answer(
        self, prompt: str, conversation_id: str | None, replaces: str | None, task: TaskHandle
    ) -> Reply:
        """Generate a reply, with the text so far in ``task.text``.

        Waits for the model. Raises ``Cancelled`` if stopped before the first token, and as
        ``User.stream``.
        """
        while not self._load_ended.wait(_POLL_SECONDS):
            if task.stopped:
                raise Cancelled("Stopped before the model was loaded.")
        stream = self.user.stream(
            prompt,
            conversation_id=conversation_id,
            replaces=replaces,
            truncation="auto",
            cancelled=task.cancelled,
        )
        try:
            for piece in stream:
                task.text += piece
        finally:
            stream.close()
        try:
            return stream.reply
        except NotFound:
            raise Cancelled("Stopped before the reply began.") from None

    def read_chats(
        self, open_ids: set[str], known: object = None
    ) -> tuple[tuple[ConversationSummary, ...], dict[str, Conversation], object] | None:
        """Return all conversations, those of ``open_ids`` in full, and a version of them.

        Return None if no program changed anything since the version ``known``. An erased
        conversation is missing.
        """
        version = self.user.summary(), self.user.layers()
        if version == known:
            return None
        conversations = {}
        for each in open_ids:
            with suppress(NotFound):
                conversations[each] = self.user.conversation(each)
        return self.user.conversations(_MAX_CONVERSATIONS), conversations, version

    def read_model(self) -> ModelState:
        """Read the state of the model. Does not wait for it to load."""
        user = self.user
        reports = user.reports()
        stack, problem = None, ""
        if self.ready:
            try:
                stack = user.stack().digest
            except BaseMismatch as error:
                problem = describe_error(error)
            except PersonalPeftError:
                pass  # The base is missing. Loading has reported that.
        pending = user.pending()
        return ModelState(
            layers=user.layers(),
            revisions=user.revisions(),
            report=from_json(reports[-1]) if reports else None,
            stack=stack,
            pending=pending.lessons + sum(pending.too_few.values()),
            withdrawn=tuple(m for m in user.history() if m.cause == MoveCause.WITHDRAWN),
            problem=problem,
            items=user.items(),
            training=user.summary().training,
        )


def describe_error(error: PersonalPeftError) -> str:
    return f"{error.message}\n{error.hint}".strip()
