"""Turn the tokens of a reply into text as they come, up to a stop string.

Invariants: the chunks of a stream, joined, are the text of all its tokens. That text ends before
the first complete stop string. No chunk shows half a character or the beginning of a stop string.

``tokenizers.decoders.DecodeStream`` is not used. It raises where later tokens change returned text.
Byte-fallback tokens (Gemma) do that when they are not valid UTF-8. At the end it cannot return the
text that it has held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT_CHARACTER = "\ufffd"
# The most tokens of a character after its first.
_MAX_REST = 3
# The most tokens that are decoded at once. A character and its context have fewer.
_MAX_WINDOW = 16


class Decoder(Protocol):
    """Turns tokens into text. ``stop_tokens`` end a reply."""

    @property
    def stop_tokens(self) -> frozenset[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class StopStrings:
    """Pass text through up to a stop string, and hold back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(s for s in stop if s)
        self._pending = ""
        self.matched = ""

    def push(self, text: str) -> str:
        """Add text, and return the part that certainly belongs to the reply. Sets ``matched``."""
        self._pending += text
        matches = [(at, s) for s in self._stop if (at := self._pending.find(s)) >= 0]
        if matches:
            end, self.matched = min(matches)
            ready, self._pending = self._pending[:end], ""
            return ready
        end = len(self._pending) - max((_overlap(self._pending, s) for s in self._stop), default=0)
        ready, self._pending = self._pending[:end], self._pending[end:]
        return ready

    def finish(self) -> str:
        """Return what was held back, at the end of the reply."""
        ready, self._pending = self._pending, ""
        return ready


class Detokenizer:
    """The text of one reply, and the stop string in it."""

    def __init__(self, decoder: Decoder, stop: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop = StopStrings(stop)
        self._tokens: list[int] = []
        # Tokens are decoded from _context on, since leading spaces depend on the tokens before.
        # Text up to _decoded was returned. Both lie between whole characters: half a character as
        # context would corrupt all that follows.
        self._context = 0
        self._decoded = 0

    @property
    def stop_string(self) -> str:
        """The stop string that was found, empty without one."""
        return self._stop.matched

    def push(self, token: int) -> str:
        """Add a token, and return the text that is certain now. Sets ``stop_string``."""
        new = self._shorten()
        self._tokens.append(token)
        text = self._decoder.decode(self._tokens[self._context :])
        if not text.endswith(_REPLACEMENT_CHARACTER):
            new += self._advance(text)
        return self._stop.push(new)

    def finish(self) -> str:
        """Return what was held back, at the end of the reply."""
        if self.stop_string:
            return ""
        text = self._decoder.decode(self._tokens[self._context :])
        rest = self._stop.push(self._advance(text))
        return rest if self.stop_string else rest + self._stop.finish()

    def _advance(self, text: str) -> str:
        before = self._decoder.decode(self._tokens[self._context : self._decoded])
        new = text[len(before) :]
        if new:
            self._context = self._decoded
        self._decoded = len(self._tokens)
        return new

    def _shorten(self) -> str:
        """Forget the oldest tokens of a long window, and return their text that was held back.

        Otherwise each token of a long run of U+FFFD, or of control tokens, decodes the whole run.
        """
        if len(self._tokens) - self._context <= _MAX_WINDOW:
            return ""
        decode, window = self._decoder.decode, self._tokens[self._context :]
        end = len(window) - _MAX_REST
        text = decode(window[:end])
        # Whole characters, if each later token has only added text.
        for number in range(end + 1, len(window) + 1):
            if text + decode(window[end:number]) != decode(window[:number]):
                return ""
        end += self._context
        if not decode(self._tokens[end : end + 1]):
            del self._tokens[end]
            if self._decoded > end:
                self._decoded -= 1
            return ""
        before = decode(self._tokens[self._context : self._decoded])
        self._context, self._decoded = end, max(self._decoded, end)
        return text[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` could begin ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
