"""Text to tokens and back, for every backend that reads a base's ``tokenizer.json``.

Invariants: control tokens come from the chat template alone, never from text that a person or a model wrote; pieces of
a stream joined together are the text that decoding all its tokens at once would give, cut at a stop string.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from personalpeft.backends.stop_strings import StopStrings
from personalpeft.base_models.chat_template import chat_text
from personalpeft.base_models.types import Base
from personalpeft.types import Message

_UNFINISHED = "\ufffd"


class Decoder(Protocol):
    """What turns tokens into text."""

    def decode(self, tokens: Sequence[int]) -> str: ...


class Text:
    """One base's tokenizer and chat template. ``beginning`` is what a text without the template begins with. Safe to use from
    several threads.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self._tokenizer = Tokenizer.from_file(str(base.folder / "tokenizer.json"))
        self._turns = threading.Lock()
        self.beginning = _beginning(self._tokenizer)
        self.stop_tokens = frozenset(
            token
            for token in map(self._tokenizer.token_to_id, base.stop_tokens)
            if token is not None
        )

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Messages through the chat template, ready for a reply."""
        return self._encode(chat_text(self._base, messages), control=True)

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text as tokens; what spells a control token is read letter by letter."""
        return self._encode(text, control=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens as text, control tokens left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def end_of_turn(self) -> tuple[int, ...]:
        """The token that ends a reply: the first of the base's stop tokens that its tokenizer knows."""
        for text in self._base.stop_tokens:
            token = self._tokenizer.token_to_id(text)
            if token is not None:
                return (token,)
        return ()

    def _encode(self, text: str, *, control: bool) -> tuple[int, ...]:
        # The switch is a property of the tokenizer, so two threads must not set it under each other.
        with self._turns:
            self._tokenizer.encode_special_tokens = not control
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _beginning(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that the tokenizer itself puts before a text (BOS); its chat template writes them out."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return tuple(whole[: next(starts, 0)])


class Speaks:
    """What a backend says of text: all of it is the tokenizer's. Meant to be inherited."""

    def __init__(self, base: Base) -> None:
        self._text = Text(base)

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """See ``Backend.render``."""
        return self._text.render(messages)

    def encode(self, text: str) -> tuple[int, ...]:
        """See ``Backend.encode``."""
        return self._text.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Backend.decode``."""
        return self._text.decode(tokens)

    @property
    def beginning(self) -> tuple[int, ...]:
        """See ``Backend.beginning``."""
        return self._text.beginning

    @property
    def end_of_turn(self) -> tuple[int, ...]:
        """See ``Backend.end_of_turn``."""
        return self._text.end_of_turn


class TextStream:
    """Turns the tokens of one reply into pieces of text as they come, and notices stop strings.

    Text that may still change (half a letter) or may be the beginning of a stop string is held back until it is
    certain.
    """

    def __init__(self, text: Decoder, stop: Sequence[str] = ()) -> None:
        self._text = text
        self._stop = StopStrings(stop)
        self._tokens: list[int] = []
        # What comes next is decoded from here on: a token's text can depend on those before it (leading spaces). Both
        # places are between two whole letters, since half a letter as context would spoil all that follows it.
        self._context = 0
        self._settled = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return bool(self._stop.met)

    @property
    def stop(self) -> str:
        """The one that was; empty where none was."""
        return self._stop.met

    def push(self, token: int) -> str:
        """The text that became certain with this token; sets ``stopped`` once a stop string was met."""
        self._tokens.append(token)
        after = self._text.decode(self._tokens[self._context :])
        return "" if after.endswith(_UNFINISHED) else self._stop.push(self._settle(after))

    def finish(self) -> str:
        """What was held back, at the end of the reply."""
        if self.stopped:
            return ""
        rest = self._stop.push(self._settle(self._text.decode(self._tokens[self._context :])))
        return rest if self.stopped else rest + self._stop.finish()

    def _settle(self, after: str) -> str:
        new = after[len(self._text.decode(self._tokens[self._context : self._settled])) :]
        if new:
            self._context = self._settled
        self._settled = len(self._tokens)
        return new
