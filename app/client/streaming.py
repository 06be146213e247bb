"""Follow a streamed reply or a job in the server. A caller that leaves early stops it there."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self

from personalpeft.chat.reply import Reply
from personalpeft.errors import Busy, NotFound, PersonalPeftError
from personalpeft.learning.options import Condition
from personalpeft.types import Progress
from personalpeft_app.client.transport import Transport, Unreachable, error_of
from personalpeft_app.http.api_v1 import operations as do
from personalpeft_app.http.api_v1 import schemas as v

_POLL_SECONDS = 1.0


class RemoteStream(Iterator[str]):
    """A ``personalpeft.Stream`` over HTTP: iterate for pieces of text, then read ``reply``."""

    def __init__(
        self, transport: Transport, body: Any, path: Mapping[str, str], cancelled: Condition | None
    ) -> None:
        self._transport, self._path = transport, path
        self._cancelled = cancelled
        self._events = transport.events(do.STREAM, body, **path)
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
                        self._check_cancelled()
                        return text
                case v.StreamFinished(reply):
                    self._reply = reply
            self._check_cancelled()
        if self._reply is None and not self._stopped:
            raise Unreachable(
                "The connection broke off during the reply.",
                hint="The server keeps the text so far as a cancelled turn.",
            )
        raise StopIteration

    def close(self) -> None:
        """Stop the reply. The server records a cancelled turn, and ``reply`` returns it."""
        if self._reply is None and not self._stopped:
            self._stop()
            for _ in self:
                pass
        self._events.close()

    @property
    def reply(self) -> Reply:
        """The whole reply. Raises ``NotFound`` while it is being generated."""
        if self._reply is None:
            raise NotFound(
                "The reply is not finished.", hint="Iterate over the stream to its end first."
            )
        return self._reply

    def _check_cancelled(self) -> None:
        if self._cancelled is not None and not self._stopped and self._cancelled():
            self._stop()

    def _stop(self) -> None:
        self._stopped = True
        if self._name:
            self._transport.call(do.STOP, **self._path, stream=self._name)


def follow(transport: Transport, job: v.Job, progress: Progress, cancelled: Condition) -> v.Job:
    """Return the finished job. Raises the error of a failed one."""
    stopping = False
    where = {"job": job.id} if job.user is None else {"job": job.id, "user": job.user}
    watch, stop = (do.FOLLOW_ANY, do.CANCEL_ANY) if job.user is None else (do.FOLLOW, do.CANCEL)
    events = _changes(transport, job, watch, where)
    try:
        for event in events:
            if event is not None and event != job:
                job = event
                if job.stage and not job.over:
                    progress(job.stage, job.progress)
            if not job.over and not stopping and cancelled():
                stopping = True
                transport.call(stop, **where)
    except BaseException:
        with suppress(PersonalPeftError):
            transport.call(stop, **where)
        raise
    finally:
        events.close()
    if job.error is not None:
        raise error_of(job.error)
    if not job.over:
        raise Unreachable(
            f"The connection broke off during a {job.kind}.",
            hint="The next learn continues from there.",
        )
    return job


def _changes(
    transport: Transport, job: v.Job, watch: do.Operation, where: Mapping[str, str]
) -> Generator[v.Job | None, None, None]:
    """Yield the job as it changes. Poll every second if the server has no free stream."""
    try:
        yield from transport.events(watch, **where)
    except Busy:
        while not job.over:
            job = transport.call(do.ANY_JOB if job.user is None else do.JOB, **where)
            yield job
            time.sleep(0 if job.over else _POLL_SECONDS)
