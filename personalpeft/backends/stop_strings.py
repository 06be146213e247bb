"""Stop strings: noticed in text that comes in pieces, and never shown, not even their beginnings.

Invariant: what was let through, joined, is the whole text up to where the first stop string to be complete begins.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through until a stop string stands in it, and keeps back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(s for s in stop if s)
        self._pending = ""
        self.met = ""

    def push(self, text: str) -> str:
        """What of the text so far is certain to belong to the reply; ``met`` is the stop string that was met, once one was."""
        self._pending += text
        cuts = [(at, s) for at, s in ((self._pending.find(s), s) for s in self._stop) if at >= 0]
        if cuts:
            at, self.met = min(cuts)
            ready, self._pending = self._pending[:at], ""
            return ready
        held = max((_overlap(self._pending, s) for s in self._stop), default=0)
        ready, self._pending = (
            self._pending[: len(self._pending) - held],
            self._pending[len(self._pending) - held :],
        )
        return ready

    def finish(self) -> str:
        """What was kept back, at the end of the reply."""
        ready, self._pending = self._pending, ""
        return ready


def _overlap(text: str, stop: str) -> int:
    """How many letters at the end of ``text`` could be the beginning of ``stop``."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
