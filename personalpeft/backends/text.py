"""Text to tokens and back, for every backend that reads a base's ``tokenizer.json``.

Invariants: control tokens come from the chat template alone, never from text that a person or a model wrote; pieces of
a stream joined together are the text that decoding all its tokens at once would give, cut at a stop string.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tokenizers import Tokenizer

from personalpeft.bases.base import Base
from personalpeft.bases.template import chat_text
from personalpeft.types import Message

_UNFINISHED = "\ufffd"
_CONTEXT = 6


class Text:
    """One base's tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._tokenizer = Tokenizer.from_file(str(base.folder / "tokenizer.json"))
        self._turns = threading.Lock()
        self.stop_tokens = frozenset(
            token for token in map(self._tokenizer.token_to_id, base.stop_tokens) if token is not None
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


class TextStream:
    """Turns the tokens of one reply into pieces of text as they come, and notices stop strings.

    Text that may still change (half a character) or may be the beginning of a stop string is held back until it is
    certain.
    """

    def __init__(self, text: Text, stop: Sequence[str] = ()) -> None:
        self._text = text
        self._stop = tuple(s for s in stop if s)
        self._tokens: list[int] = []
        self._settled = 0
        self._pending = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that became certain with this token; sets ``stopped`` once a stop string was met."""
        self._tokens.append(token)
        # A few tokens of context before the new ones: a token's text can depend on the one before it (leading spaces).
        start = max(0, self._settled - _CONTEXT)
        before = self._text.decode(self._tokens[start : self._settled])
        after = self._text.decode(self._tokens[start:])
        if after.endswith(_UNFINISHED) and len(self._tokens) - self._settled < _CONTEXT:
            return ""
        self._settled = len(self._tokens)
        self._pending += after[len(before) :]
        return self._release()

    def finish(self) -> str:
        """What was held back, at the end of the reply."""
        if self.stopped:
            return ""
        start = max(0, self._settled - _CONTEXT)
        before = self._text.decode(self._tokens[start : self._settled])
        rest = self._pending + self._text.decode(self._tokens[start:])[len(before) :]
        self._pending = ""
        return rest

    def _release(self) -> str:
        cuts = [at for at in (self._pending.find(s) for s in self._stop) if at >= 0]
        if cuts:
            self.stopped = True
            return self._pending[: min(cuts)]
        held = max((_overlap(self._pending, s) for s in self._stop), default=0)
        ready, self._pending = self._pending[: len(self._pending) - held], self._pending[len(self._pending) - held :]
        return ready


def _overlap(text: str, stop: str) -> int:
    """How many letters at the end of ``text`` could be the beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
