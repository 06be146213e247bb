"""What goes on in the server while somebody here waits for it: a reply that is being written, and a job.

Invariant: whoever goes away in the middle, or says so, has it stopped there.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from typing import Self

from personalpeft.chat.reply import Reply
from personalpeft.errors import Busy, NotFound, PersonalPeftError
from personalpeft.learning.options import Condition
from personalpeft.types import Progress
from personalpeft_app.client.transport import Transport, Unreachable, error_of
from personalpeft_app.http.api_v1 import operations as do
from personalpeft_app.http.api_v1 import schemas as v

_POLL_SECONDS = 1.0


class RemoteStream(Iterator[str]):
    """As ``personalpeft.Stream``: iterate for pieces of text, then read ``reply``."""

    def __init__(
        self, line: Transport, user: str, body: v.ChatBody, cancelled: Condition | None
    ) -> None:
        self._line, self._user = line, user
        self._cancelled = cancelled
        self._events = line.events(do.STREAM, body, user=user)
        self._name = ""
        self._reply: Reply | None = None
        self._stopped = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        for event in self._events:
            match event:
                case v.StreamStarted(name):
                    self._name = name
                case v.StreamText(text):
                    if not self._stopped:
                        self._look()
                        return text
                case v.StreamFinished(reply):
                    self._reply = reply
            self._look()
        if self._reply is None and not self._stopped:
            raise Unreachable(
                "The server went away in the middle of a reply.",
                hint="What came is kept as a cancelled turn.",
            )
        raise StopIteration

    def close(self) -> None:
        """Stops writing and keeps what came as a cancelled turn; ``reply`` is there afterwards."""
        if self._reply is None and not self._stopped:
            self._stop()
            for _ in self:
                pass
        self._events.close()

    @property
    def reply(self) -> Reply:
        """The whole reply. Raises ``NotFound`` while it is still being written."""
        if self._reply is None:
            raise NotFound(
                "The reply is not finished.", hint="Iterate over the stream to its end first."
            )
        return self._reply

    def _look(self) -> None:
        if self._cancelled is not None and not self._stopped and self._cancelled():
            self._stop()

    def _stop(self) -> None:
        self._stopped = True
        if self._name:
            self._line.call(do.STOP, user=self._user, stream=self._name)


def follow(line: Transport, job: v.Job, progress: Progress, cancelled: Condition) -> v.Job:
    """The job as it is when it is over. Raises the error that it ended in."""
    stopping = False
    where = {"job": job.id} if job.user is None else {"job": job.id, "user": job.user}
    watch, stop = (do.FOLLOW_ANY, do.CANCEL_ANY) if job.user is None else (do.FOLLOW, do.CANCEL)
    events = _changes(line, job, watch, where)
    try:
        for event in events:
            if event is not None and event != job:
                job = event
                if job.stage and not job.over:
                    progress(job.stage, job.progress)
            if not job.over and not stopping and cancelled():
                stopping = True
                line.call(stop, **where)
    except BaseException:
        with suppress(PersonalPeftError):
            line.call(stop, **where)
        raise
    finally:
        events.close()
    if job.error is not None:
        raise error_of(job.error)
    return job


def _changes(
    line: Transport, job: v.Job, watch: do.Operation, where: Mapping[str, str]
) -> Generator[v.Job | None, None, None]:
    """Yield the job as it changes. Asks for it every second where the server has no stream free."""
    try:
        yield from line.events(watch, **where)
    except Busy:
        while not job.over:
            job = line.call(do.ANY_JOB if job.user is None else do.JOB, **where)
            yield job
            time.sleep(0 if job.over else _POLL_SECONDS)


def connection_lost(what: str) -> Unreachable:
    """The error for a job of which the server said no more."""
    return Unreachable(
        f"The server went away in the middle of {what}.", hint="The next learn goes on from there."
    )
