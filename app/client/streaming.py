"""Follow a streamed reply or a job in the server. A caller that leaves early stops it there."""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from typing import Any, Self

from personalpeft.chat.reply import Reply, TokenLogprob
from personalpeft.errors import Busy, Forgotten, NotFound, PersonalPeftError
from personalpeft.learning.options import Condition
from personalpeft.types import Progress, Stack
from personalpeft_app.client.transport import Transport, Unreachable, error_of
from personalpeft_app.http.api_v1 import operations as do
from personalpeft_app.http.api_v1 import schemas as v

_POLL_SECONDS = 1.0
# How often a job is followed again where nothing comes: 31 seconds in all.
_RETRIES = 5
_WATCH_SECONDS = 0.05


class RemoteStream(Iterator[str]):
    """A ``personalpeft.Stream`` over HTTP, which documents the methods. Thread-safe."""

    def __init__(
        self, transport: Transport, body: Any, path: Mapping[str, str], cancelled: Condition | None
    ) -> None:
        self._transport, self._path = transport, path
        self._cancelled = cancelled
        self._events = transport.events(do.STREAM, body, **path)
        self._lock = threading.RLock()
        self._started: v.StreamStarted | None = None
        self._logprobs: list[TokenLogprob] = []
        self._outcome: Reply | Forgotten | None = None
        self._stopped = False
        self._fault: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        with self._lock:
            try:
                self.begin()
                # Events that were not begun would send the request.
                for event in self._events if self._started is not None else ():
                    if isinstance(event, v.StreamText):
                        self._logprobs += event.logprobs
                        return event.text
                    self._outcome = event.reply
            except BaseException as error:
                self._stopped = True
                if isinstance(error, Forgotten):
                    self._outcome = error
                raise
            fault, self._fault = self._fault, None
            if fault is not None:
                raise fault
            if self._outcome is None and not self._stopped:
                raise _broken_off()
            raise StopIteration

    def begin(self) -> None:
        """Send the request now. Raises what the first piece would raise."""
        with self._lock:
            if self._started is not None or self._stopped:
                return
            first = next(self._events, None)
            if not isinstance(first, v.StreamStarted):
                raise _broken_off()
            self._started = first
            if self._stopped:  # Another thread closed it meanwhile.
                self._stop()
            elif self._cancelled is not None:
                threading.Thread(
                    target=_watch, args=(weakref.ref(self), self._cancelled), daemon=True
                ).start()

    @property
    def stack(self) -> Stack:
        """The adapters that serve the request. Sends it first."""
        return self._ensure_started().stack

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the model reads first, with what was added. Sends the request first."""
        return self._ensure_started().prompt_tokens

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Log-probs of the tokens so far, if requested."""
        return tuple(self._logprobs)

    def close(self) -> None:
        """Stop the reply. The server records a cancelled turn, and ``reply`` returns it.

        Called before the request is sent, it sends nothing.
        """
        # Without the lock: a reader in another thread holds it until its piece comes.
        is_ending = self._stop()
        with self._lock:
            # The generator runs when a signal handler of the reading thread closes the stream.
            if inspect.getgeneratorstate(self._events) != inspect.GEN_RUNNING:
                with suppress(Forgotten):
                    # Without an answer the server still sees that the connection is closed.
                    for _ in self if is_ending else ():
                        pass
                self._events.close()

    @property
    def reply(self) -> Reply:
        """The whole reply.

        Raises ``NotFound`` while it is being generated, ``Forgotten`` if it was not recorded.
        """
        if isinstance(self._outcome, Forgotten):
            raise self._outcome
        if self._outcome is None:
            raise NotFound(
                "The reply is not finished.", hint="Iterate over the stream to its end first."
            )
        return self._outcome

    @property
    def _over(self) -> bool:
        """Whether no event can come any more."""
        return inspect.getgeneratorstate(self._events) == inspect.GEN_CLOSED

    def _ensure_started(self) -> v.StreamStarted:
        self.begin()
        if self._started is None:
            raise NotFound("The stream was closed before it began.", hint="Chat again.")
        return self._started

    def _stop(self, fault: Exception | None = None) -> bool:
        """Ask the server to end the reply. Return whether it is ending, or never began.

        ``fault`` is raised at the end of the stream.
        """
        self._stopped, self._fault = True, fault
        if self._started is None or self._over:
            return True
        try:
            self._transport.call(do.STOP, **self._path, stream=self._started.stream)
        except PersonalPeftError:
            return False
        return True


def _watch(stream: weakref.ref[RemoteStream], cancelled: Condition) -> None:
    """Stop a reply once ``cancelled`` says so, also while it waits in the server."""
    while (current := stream()) is not None:
        try:
            if current._over or (cancelled() and current._stop()):
                return
        except Exception as error:  # noqa: BLE001 - the caller's own error goes back to the caller
            current._stop(error)
            return
        del current  # An abandoned stream is collected, which closes its connection.
        time.sleep(_WATCH_SECONDS)


def _broken_off() -> Unreachable:
    return Unreachable(
        "The connection broke off during the reply.",
        hint="The server keeps the text so far as a cancelled turn.",
    )


def follow(transport: Transport, job: v.Job, progress: Progress, cancelled: Condition) -> v.Job:
    """Return the finished job. Raises the error of a failed one."""
    where = {"job": job.id} if job.user is None else {"job": job.id, "user": job.user}
    watch, stop = (do.FOLLOW_ANY, do.CANCEL_ANY) if job.user is None else (do.FOLLOW, do.CANCEL)
    try:
        with closing(_changes(transport, job, watch, where)) as events:
            for event in events:
                if event is not None and event != job:
                    job = event
                    if job.stage and not job.over:
                        progress(job.stage, job.progress)
                if job.state == "running" and cancelled():
                    job = transport.call(stop, **where)
    except BaseException:
        with suppress(PersonalPeftError):
            transport.call(stop, **where)
        raise
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
    """Yield the job as it changes, and None as a sign of life.

    Poll every second if the server has no free stream. Follow it again where a connection breaks.
    """
    failures = 0
    while True:
        with suppress(Unreachable):
            try:
                for event in transport.events(watch, **where):
                    job, failures = event or job, 0
                    yield event
            except Busy:
                job = transport.call(do.ANY_JOB if job.user is None else do.JOB, **where)
                failures = 0
                yield job
        if job.over or failures == _RETRIES:
            return
        for _ in range(2**failures):
            time.sleep(_POLL_SECONDS)
            yield None
        failures += 1
