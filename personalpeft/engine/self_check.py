"""Whether replies are what they would have been with nobody else there: a share of them is scored again afterwards, cold
and alone, and each token's log-prob compared with the one that it was picked at.

A row that saw another's cache, slot or logits was picked at log-probs that its own stack does not give. What it finds
goes into the metrics and, without a word of anybody's text, into the log.

All of it belongs to the loop's thread, but ``sampled``.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from personalpeft.backends.base import Backend, Continuation
from personalpeft.engine.metrics import Metrics
from personalpeft.errors import where_raised

log = logging.getLogger(__name__)

# Replies that may wait to be checked. They hold their tokens only.
_PATIENCE = 32


@dataclass(frozen=True, slots=True)
class Written:
    """A finished reply: what was asked and said, under which stack, and at which log-probs."""

    said: Continuation
    stack: str | None
    logprobs: tuple[float, ...]


class SelfCheck:
    """``share`` of all replies are checked; ``entropy(n)`` gives n random bytes to draw them by."""

    def __init__(
        self, backend: Backend, share: float, entropy: Callable[[int], bytes], metrics: Metrics
    ) -> None:
        self._backend = backend
        self._share = share
        self._entropy = entropy
        self._metrics = metrics
        self._waiting: deque[Written] = deque()

    def sampled(self) -> bool:
        """Draws whether a reply is one to check. From any thread."""
        return self._share > 0 and int.from_bytes(self._entropy(4), "little") < self._share * 2**32

    def add(self, reply: Written) -> None:
        """Takes in a reply to be checked when there is time."""
        if len(self._waiting) == _PATIENCE:
            self._metrics.count("self_checks_skipped_total")
        else:
            self._waiting.append(reply)

    def forget(self) -> None:
        """Drops what waits to be checked."""
        self._waiting.clear()

    def __bool__(self) -> bool:
        """Whether a reply waits to be checked."""
        return bool(self._waiting)

    def run_one(self, resident: Callable[[str], bool]) -> None:
        """Checks the reply that has waited longest, if its stack is still resident."""
        reply = self._waiting.popleft()
        if reply.stack is not None and not resident(reply.stack):
            self._metrics.count("self_checks_skipped_total")
            return
        try:
            (cold,) = self._backend.score([reply.said], reply.stack)
            apart = sum(abs(a - b) for a, b in zip(cold.tokens, reply.logprobs, strict=True)) / len(
                reply.logprobs
            )
        except Exception as bug:  # noqa: BLE001 - a check ends no reply
            log.error("self-check: a reply could not be scored: %s", where_raised(bug))
            self._metrics.count("self_checks_skipped_total")
            return
        self._metrics.count("self_checks_total")
        # Written so that a difference that is no number is a mismatch too.
        if not (math.isfinite(apart) and apart <= self._backend.tolerance):
            log.warning(
                "self-check: a reply of %d tokens was written at log-probs %.4f nats a token from those of its stack %s; "
                "at most %g was expected.",
                len(reply.logprobs),
                apart,
                (reply.stack or "none")[:12],
                self._backend.tolerance,
            )
            self._metrics.count("self_check_mismatches_total")
