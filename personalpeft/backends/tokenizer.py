"""Text to tokens and back, for backends that read a base's ``tokenizer.json``.

Invariant: control tokens come from the chat template alone, never from text of a user or a model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tokenizers import Tokenizer

from personalpeft.base_models.chat_template import render_chat
from personalpeft.base_models.types import Base
from personalpeft.errors import CardError, suggest_nearest
from personalpeft.types import Message


class ChatTokenizer:
    """One base's tokenizer and chat template. Safe to use from several threads.

    Raises ``CardError`` where a stop token of the card is no single token.

    Attributes:
        bos_tokens: The tokens that a text without the template begins with.
        stop_tokens: The tokens that end a reply.
        end_of_turn: The first of them, which is appended to a completion that is learned.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self._tokenizer = Tokenizer.from_file(str(base.folder / "tokenizer.json"))
        self._lock = threading.Lock()
        self.bos_tokens = _find_bos_tokens(self._tokenizer)
        ids = {text: self._find_token(text) for text in base.stop_tokens}
        unknown = [text for text in base.card.stop_tokens if ids[text] is None]
        if unknown:
            raise CardError(
                f"stop_tokens of {base.card.name} name {unknown[0]!r}, "
                "which is not one token of its tokenizer.",
                hint=suggest_nearest(
                    unknown[0], set(base.control) - set(unknown), what="control token"
                ),
            )
        known = tuple(token for token in ids.values() if token is not None)
        self.stop_tokens, self.end_of_turn = frozenset(known), known[:1]

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """See ``Backend.render``."""
        return self.encode(render_chat(self._base, messages), control=True)

    def encode(self, text: str, *, control: bool = False) -> tuple[int, ...]:
        """See ``Backend.encode``. With ``control``, names of control tokens become these tokens."""
        # The switch belongs to the tokenizer, which all threads share.
        with self._lock:
            self._tokenizer.encode_special_tokens = not control
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without control tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _find_token(self, text: str) -> int | None:
        """Return the one token of a text, or None."""
        token: int | None = self._tokenizer.token_to_id(text)
        if token is not None:
            return token
        # A vocabulary of bytes has names of its own for spaces and line ends.
        tokens = self.encode(text)
        return tokens[0] if len(tokens) == 1 else None


def _find_bos_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    starts = (at for at in range(len(full)) if full[at : at + len(plain)] == plain)
    return tuple(full[: next(starts, 0)])
