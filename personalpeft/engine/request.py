"""A request from submission to its last chunk, its group, and the stream that the caller reads.

After submission a ``RequestState`` belongs to the engine's thread alone. A ``RequestGroup`` is
shared. Its queue of outputs is unbounded, so a slow reader never blocks the engine. Its flag
``closed`` is set without a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from queue import SimpleQueue
from typing import Self, TypeAlias

from personalpeft.backends.sequence import OutputChunk, SequenceState, Tokens
from personalpeft.types import FinishReason, Stack, ToolFormat

Predicate: TypeAlias = Callable[[], bool]


class RequestStatus(Enum):
    """Where a request is. A running request has a sequence in the backend and pins its adapter."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class RequestGroup:
    """The requests of one call, and the queue of their chunks and errors.

    ``cancelled`` and ``paused`` are called by the engine's thread between steps. A request that
    has not started does not start while the group ``is_paused``.
    """

    cancelled: Predicate | None = None
    paused: Predicate | None = None
    requests: list[RequestState] = field(default_factory=list)
    outputs: SimpleQueue[OutputChunk | Exception] = field(default_factory=SimpleQueue)
    closed: bool = False
    is_paused: bool = False

    def poll(self) -> bool | Exception:
        """Ask the caller's functions. Return whether to cancel, or what one of them raised."""
        try:
            self.is_paused = self.paused is not None and self.paused()
            return self.closed or (self.cancelled is not None and self.cancelled())
        except Exception as error:  # noqa: BLE001 - the caller's own error goes back to the caller
            return error


@dataclass(eq=False, slots=True, kw_only=True)
class RequestState(SequenceState):
    """One request as the engine sees it: its group and its status.

    Times are in seconds on the engine's clock. ``order`` is the number of its first start and
    decides who is preempted.
    """

    group: RequestGroup
    index: int
    status: RequestStatus = RequestStatus.WAITING
    arrived: float = 0.0
    deadline: float | None = None
    started: float = 0.0
    last_token: float | None = None
    order: int = -1
    is_checked: bool = False
    output_logprobs: list[float] = field(default_factory=list)

    @property
    def background(self) -> bool:
        return self.request.background

    @property
    def stack(self) -> Stack:
        """The stack that ``adapter_key`` names."""
        return self.request.stack


@dataclass(slots=True)
class Completion:
    """One whole reply: its prompt in tokens, its text and tokens, and how it ended."""

    prompt: Tokens
    text: str = ""
    tokens: Tokens = ()
    finish: FinishReason = "cancelled"


class OutputStream(Iterator[OutputChunk]):
    """The chunks of one group as they come; ``index`` is that of the request in the call.

    The requests are submitted with the first chunk that is read, or by ``begin``. ``close`` may be
    called from any thread and frees the group's sequences within a step.
    """

    def __init__(
        self,
        group: RequestGroup,
        submit: Callable[[RequestGroup], None],
        tool_format: ToolFormat,
    ) -> None:
        self._group = group
        self._submit = submit
        self._submitted = False
        self._unfinished = len(group.requests)
        prefixes = {each.index: each.request.reply_prefix(tool_format) for each in group.requests}
        self._prefixes = {index: prefix for index, prefix in prefixes.items() if prefix}

    @property
    def prompts(self) -> tuple[Tokens, ...]:
        """The prompt of each request as the model reads it, in tokens."""
        return tuple(request.prompt_tokens for request in self._group.requests)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> OutputChunk:
        if self._group.closed or not self._unfinished:
            raise StopIteration
        self.begin()
        output = self._group.outputs.get()
        if isinstance(output, Exception):
            self.close()
            raise output
        if output.finish is not None:
            self._unfinished -= 1
        # A request that was cancelled before it started has no output, so it gets no prefix.
        if output.finish != "cancelled" and (prefix := self._prefixes.pop(output.index, "")):
            return replace(output, text=prefix + output.text)
        return output

    def read(self) -> list[Completion]:
        """Read to the end, and return the reply of each request."""
        replies = [Completion(prompt) for prompt in self.prompts]
        try:
            for chunk in self:
                reply = replies[chunk.index]
                reply.text += chunk.text
                reply.tokens += chunk.tokens
                reply.finish = chunk.finish or reply.finish
        finally:
            self.close()
        return replies

    def begin(self) -> None:
        """Submit the requests. Raise what the first chunk would. Later calls do nothing."""
        if self._submitted or self._group.closed or not self._unfinished:
            return
        self._submitted = True
        try:
            self._submit(self._group)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what has not finished. Closing twice is fine."""
        self._group.closed = True

    def __del__(self) -> None:
        # The garbage collector may run this in any thread under any lock, so closing takes none.
        self.close()
