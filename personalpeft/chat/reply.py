"""What comes back from a chat: a whole reply, a stream of one, and the account of why it was so."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

from personalpeft.backends.base import Piece
from personalpeft.base_models.tool_calls import read_calls
from personalpeft.engine.request import Replies
from personalpeft.errors import Forgotten, InvalidInput, NotFound
from personalpeft.store.base import Store
from personalpeft.types import FinishReason, Message, Stack, ToolCall, Turn, Usage

# Tokens before one that its text is read with: alone, some tokenizers give it without its space.
_BEFORE = 4


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """A token that might have been written, with how likely it was (nats, at temperature 1)."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a reply: its text, and how likely it was (nats, at temperature 1). ``top`` are the likeliest in its place,
    likeliest first, where they were asked for.
    """

    text: str
    logprob: float
    top: tuple[LikelyToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. ``turn_id`` is what feedback names it by; ``stack`` is exactly what produced it. ``stop`` is the stop
    string that ended it, empty where none did; ``logprobs`` are there where they were asked for.
    """

    text: str
    turn_id: str
    stack: Stack
    usage: Usage
    finish_reason: FinishReason
    stop: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def message(self) -> Message:
        """The reply as what the assistant said, for the next prompt: with the calls of tools that it holds, and its text without them."""
        text, calls = read_calls(self.text)
        if not calls:
            return Message("assistant", self.text)
        named = (
            replace(call, id=f"call_{self.turn_id}_{number}") for number, call in enumerate(calls)
        )
        return Message("assistant", text, tuple(named))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools in the text, in the order in which they were written. Whether to do what they say is for the app to judge: a
        reply can spell a call of what was never offered.
        """
        return self.message.tool_calls

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[str]):
    """A reply in the making: iterate for pieces of text, then read ``reply``. Closing it early keeps what came as a
    cancelled turn. Where the user forgets something meanwhile, nothing of it is kept and its end raises ``Forgotten``.
    ``stack`` answers; ``prompt_tokens`` is what the model reads first, rules and facts included.
    """

    def __init__(
        self,
        pieces: Replies,
        stack: Stack,
        prompt_tokens: int,
        record: Callable[[Reply], Reply],
        mark: Callable[[], None] = lambda: None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._pieces = pieces
        self._mark = mark
        self._turn = threading.RLock()
        self.stack = stack
        self.prompt_tokens = prompt_tokens
        self._record = record
        self._decode = decode
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._reply: Reply | None = None
        self._refused: Forgotten | None = None
        self._text = self._run()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        with self._turn:
            return next(self._text)

    def begin(self) -> None:
        """Asks now, and not only with the first piece, so that several replies are written side by side. Raises what the
        first piece would.
        """
        self._pieces.begin()

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the tokens so far, where they were asked for."""
        return tuple(self._logprobs)

    def close(self) -> None:
        """Stops writing, frees the row and keeps what came. From another thread than the reader's it waits until that has
        its last piece.
        """
        self._pieces.close()
        with self._turn:
            # Running under our own turn: closed by a signal handler of the thread that waits for a piece.
            if inspect.getgeneratorstate(self._text) != inspect.GEN_RUNNING:
                # The caller has left, so that nothing of it is kept fails nothing here.
                with suppress(Forgotten):
                    self._text.close()

    @property
    def reply(self) -> Reply:
        """The whole reply. Raises ``NotFound`` while it is still being written, ``Forgotten`` where it is not kept."""
        if self._refused is not None:
            raise self._refused
        if self._reply is None:
            raise NotFound(
                "The reply is not finished.", hint="Iterate over the stream to its end first."
            )
        return self._reply

    def _run(self) -> Generator[str, None, None]:
        text: list[str] = []
        written = 0
        begun = False
        finish: FinishReason = "cancelled"
        stop = ""
        try:
            for piece in self._pieces:
                begun = True
                self._mark()
                text.append(piece.text)
                written += len(piece.tokens)
                finish = piece.finish or finish
                stop = piece.stop
                if self._decode is not None:
                    self._note(piece, self._decode)
                if piece.text:
                    yield piece.text
        finally:
            self._pieces.close()
            # Also when the reader went away in the middle: what a person has seen is in the ledger. What could not begin
            # was no reply.
            if begun:
                usage = Usage(self.prompt_tokens, written)
                reply = Reply(
                    "".join(text), "", self.stack, usage, finish, stop, tuple(self._logprobs)
                )
                try:
                    self._reply = self._record(reply)
                except Forgotten as refused:
                    self._refused = refused
                    raise

    def _note(self, piece: Piece, decode: Callable[[Sequence[int]], str]) -> None:
        for number, (token, logprob) in enumerate(zip(piece.tokens, piece.logprobs, strict=False)):
            before = self._tokens[-_BEFORE:]
            likely = piece.top[number] if piece.top else ()
            top = tuple(
                LikelyToken(_text_after(before, each, decode), known) for each, known in likely
            )
            self._logprobs.append(TokenLogprob(_text_after(before, token, decode), logprob, top))
            self._tokens.append(token)


def _text_after(before: Sequence[int], token: int, decode: Callable[[Sequence[int]], str]) -> str:
    return decode([*before, token])[len(decode(before)) :] if before else decode([token])


def turn_of(store: Store, user: str, reply: Reply | Turn | str) -> Turn:
    """The turn that somebody means, as ``User.turn``."""
    if reply == "last":
        newest = store.ledger.turns(user, limit=1)
        if not newest:
            raise NotFound(f"{user} has no turn yet.", hint="Ask something first.")
        return newest[0]
    turn_id = (
        reply.turn_id
        if isinstance(reply, Reply)
        else reply.id
        if isinstance(reply, Turn)
        else reply
    )
    if not isinstance(turn_id, str):
        raise InvalidInput(
            f"{type(reply).__name__} is no reply.", hint="Give a reply, a turn, or the id of one."
        )
    return store.ledger.turn(user, turn_id)
