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

from personalpeft.backends.base import OutputChunk, SequenceState, Tokens
from personalpeft.base_models.tool_calls import find_unfinished_call
from personalpeft.types import Message, Sampling, Stack, ToolFormat

Predicate: TypeAlias = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for: messages of one user, the stack that answers, and how to sample.

    Attributes:
        user: The owner of the request. Prompt caches are never shared between users.
        messages: The conversation as the model reads it.
        stack: The adapters to attach.
        sampling: Temperature, length, seed and stop strings.
        timeout: Seconds for the whole reply from submission; None for no limit.
        background: Never refused for a full queue, and never served before foreground requests.
        template: Whether to apply the chat template. Without it the text is read and continued.
        logprobs: Whether chunks carry the log-prob of each token.
        top_logprobs: How many of the likeliest tokens to report in each position.
        tokens: The prompt as tokens, instead of messages.
        stop_tokens: Tokens that end the reply, besides those of the base.
    """

    user: str
    messages: tuple[Message, ...]
    stack: Stack
    sampling: Sampling
    timeout: float | None = None
    background: bool = False
    template: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    tokens: Tokens = ()
    stop_tokens: frozenset[int] = frozenset()

    def reply_prefix(self, tool_format: ToolFormat) -> str:
        """Return the text that the reply starts with, read after the prompt, not generated.

        Args:
            tool_format: How the base writes tool calls.
        """
        if self.tokens or not self.template:
            return ""
        return find_unfinished_call(self.messages[-1], tool_format)


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
    """One request: its prompt and settings, its status, and its output so far.

    Times are in seconds on the engine's clock. ``number`` is the number of its sequence in the
    backend while it runs. ``order`` is the number of its first start and decides who is preempted.
    """

    request: Request
    group: RequestGroup
    index: int
    status: RequestStatus = RequestStatus.WAITING
    arrived: float = 0.0
    deadline: float | None = None
    started: float = 0.0
    last_token: float | None = None
    number: int = -1
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
