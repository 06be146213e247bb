"""The results of a chat: a whole reply, or a stream of one."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from personalpeft.backends.sequence import OutputChunk
from personalpeft.base_models.tool_calls import assistant_message
from personalpeft.engine.request import OutputStream
from personalpeft.errors import Damaged, Forgotten, HomeError, InvalidInput, NotFound
from personalpeft.ids import LAST
from personalpeft.store.store import Store
from personalpeft.types import FinishReason, Message, Stack, ToolCall, ToolFormat, Turn, Usage

# Tokens decoded with each token: alone, some tokenizers drop its leading space.
_CONTEXT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """An alternative token and its log-prob (nats, at temperature 1)."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a reply and its log-prob (nats, at temperature 1).

    ``top`` holds the likeliest alternatives, likeliest first, if they were requested.
    """

    text: str
    logprob: float
    top: tuple[LikelyToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        text: The whole text, tool calls included.
        turn_id: The id of the recorded turn, which feedback refers to.
        stack: The adapters that produced the reply.
        usage: Tokens read and generated.
        finish_reason: "stop", "length" or "cancelled".
        stop: The stop string that ended the reply, else empty.
        logprobs: One entry a token, if requested.
        conversation_id: The conversation, to continue it.
        dropped_messages: Messages of the conversation that were left out of the prompt, the oldest
            first, since it was too long.
        tool_format: How tool calls are written in the text.
    """

    json_properties = ("tool_calls",)

    text: str
    turn_id: str
    stack: Stack
    usage: Usage
    finish_reason: FinishReason
    stop: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    conversation_id: str | None = None
    dropped_messages: int = 0
    tool_format: ToolFormat = ToolFormat.HERMES

    @property
    def message(self) -> Message:
        """The reply as an assistant message for the next prompt, with its tool calls parsed."""
        return assistant_message(self.text, self.turn_id, self.tool_format)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls in the text, in order. They may name tools that were never offered."""
        return self.message.tool_calls

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[str]):
    """A reply in progress: iterate for pieces of text, then read ``reply``. Thread-safe.

    Closing it early, or leaving its ``with`` block, records a cancelled turn. When the user
    forgets something meanwhile, the turn is not recorded and the end of the stream raises
    ``Forgotten``.

    Attributes:
        turn_id: The id of the turn, which is recorded at the end of the reply.
        stack: The adapters that serve the request.
        prompt_tokens: Tokens that the model reads first, with rules, facts and examples.
    """

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader
        self._lock = threading.RLock()
        self.turn_id, self.stack = reader.turn_id, reader.stack
        self.prompt_tokens = reader.prompt_tokens
        # It holds no reference to the stream. In a cycle a stream that its reader left would wait
        # for the garbage collector, which may record the turn inside another thread's transaction.
        self._text = reader.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        if self._reader.is_forked:
            raise HomeError(
                "The reply is generated in the process that this one was forked from.",
                hint="Read it there, or open the home again.",
            )
        with self._lock:
            return next(self._text)

    def begin(self) -> None:
        """Submit the request now, so that several replies are generated side by side.

        Raises what the first piece would raise.
        """
        self._reader.outputs.begin()

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Log-probs of the tokens so far, if requested."""
        return tuple(self._reader.logprobs)

    def close(self) -> None:
        """Stop generating and record what came.

        Called from another thread than the reader's, it waits for the reader's current piece.
        """
        self._reader.outputs.close()
        if self._reader.is_forked:
            return
        with self._lock:
            # The generator runs when a signal handler of the reading thread closes the stream.
            if inspect.getgeneratorstate(self._text) != inspect.GEN_RUNNING:
                self._text.close()

    @property
    def reply(self) -> Reply:
        """The whole reply.

        Raises ``NotFound`` while it is being generated, ``Forgotten`` if it was not recorded.
        """
        if isinstance(outcome := self._reader.outcome, Forgotten):
            raise outcome
        if outcome is None:
            raise NotFound(
                "The reply is not finished.", hint="Iterate over the stream to its end first."
            )
        return outcome


@dataclass(slots=True)
class ReplyReader:
    """Reads the chunks of a reply and records it.

    Attributes:
        turn_id: The id of the turn.
        outputs: The engine's chunks of one request.
        stack: The adapters that serve the request.
        record: Appends the turn to the ledger and returns the reply as it was recorded.
        check_stack: Raises ``Forgotten`` if an adapter of the stack was forgotten.
        on_chunk: Called with each chunk that arrives.
        decode: Turns tokens into text, if log-probs were requested.
        tool_format: How the base writes tool calls.
    """

    turn_id: str
    outputs: OutputStream
    stack: Stack
    record: Callable[[Reply], Reply]
    check_stack: Callable[[], None]
    on_chunk: Callable[[], None]
    decode: Callable[[Sequence[int]], str] | None
    tool_format: ToolFormat
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    outcome: Reply | Forgotten | None = None
    pid: int = field(default_factory=os.getpid)

    @property
    def prompt_tokens(self) -> int:
        return len(self.outputs.prompts[0])

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy in a forked child. No thread of the parent exists there."""
        return self.pid != os.getpid()

    def run(self) -> Generator[str, None, None]:
        """Yield the pieces of text, and record the reply at the end, also at an early one."""
        text: list[str] = []
        generated = 0
        is_left = False
        finish: FinishReason = "cancelled"
        stop = ""
        try:
            for chunk in self.outputs:
                self.on_chunk()
                text.append(chunk.text)
                generated += len(chunk.tokens)
                finish = chunk.finish or finish
                stop = chunk.stop_string
                if self.decode is not None:
                    self._add_logprobs(chunk, self.decode)
                if chunk.text:
                    yield chunk.text
        except GeneratorExit:
            is_left = True
            raise
        except Damaged:
            # An adapter is missing, too, if its user forgot it before it was loaded.
            try:
                self.check_stack()
            except Forgotten as error:
                self.outcome = error
                raise
            raise
        finally:
            self.outputs.close()
            # Also when the reader leaves early: the ledger holds all text that a user has seen.
            if text and not self.is_forked:
                reply = Reply(
                    "".join(text),
                    self.turn_id,
                    self.stack,
                    Usage(self.prompt_tokens, generated),
                    finish,
                    stop,
                    tuple(self.logprobs),
                    tool_format=self.tool_format,
                )
                try:
                    self.outcome = self.record(reply)
                except Forgotten as error:
                    self.outcome = error
                    # Nobody reads what a stream raises that its reader left.
                    if not is_left:
                        raise

    def _add_logprobs(self, chunk: OutputChunk, decode: Callable[[Sequence[int]], str]) -> None:
        for number, (token, logprob) in enumerate(zip(chunk.tokens, chunk.logprobs, strict=False)):
            before = self.tokens[-_CONTEXT_TOKENS:]
            top = tuple(
                LikelyToken(_text_after(before, each, decode), likelihood)
                for each, likelihood in (chunk.top_logprobs[number] if chunk.top_logprobs else ())
            )
            self.logprobs.append(TokenLogprob(_text_after(before, token, decode), logprob, top))
            self.tokens.append(token)


def _text_after(before: Sequence[int], token: int, decode: Callable[[Sequence[int]], str]) -> str:
    return decode([*before, token])[len(decode(before)) :] if before else decode([token])


def resolve_turn(store: Store, user: str, reply: Reply | Turn | str) -> Turn:
    """Return the turn that a reply, a turn, an id or a unique prefix of it names, or "last".

    Raises ``NotFound``, and ``InvalidInput`` if it is none of these or several turns fit.
    """
    if reply == LAST:
        newest = store.ledger.turns(user, limit=1)
        if not newest:
            raise NotFound(f"{user} has no turn yet.", hint="Chat first.")
        return newest[0]
    return store.ledger.turn(user, turn_id_of(reply))


def turn_id_of(reply: Reply | Turn | str) -> str:
    """Return the id of a turn, also from its reply. Raises ``InvalidInput``."""
    if isinstance(reply, Reply):
        return reply.turn_id
    if isinstance(reply, Turn):
        return reply.id
    if isinstance(reply, str):
        return reply
    raise InvalidInput(
        f"A reply, a turn or its id is needed, got {type(reply).__name__}.",
        hint="Give what chat returned, its turn_id, or the reply of a stream.",
    )
