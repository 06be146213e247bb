"""Compares the log-probs of a sample of replies with those of scoring them alone afterwards.

A request that read another's cache, slot or logits was written at log-probs that its own stack does
not give. Results go to the metrics and the log. Both never contain text of a user.

The engine's thread owns all of it except ``is_sampled``.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable

from personalpeft.backends.base import Backend, Continuation
from personalpeft.engine.metrics import Metrics
from personalpeft.engine.request import RequestState
from personalpeft.errors import format_origin

log = logging.getLogger(__name__)

_MAX_WAITING = 32
# Rounding moves one token's log-prob by several times the mean that ``logprob_tolerance`` bounds.
# A shorter reply is therefore allowed what a reply of this many tokens is.
_LEAST_TOKENS = 8


class SelfCheck:
    """Checks a share of all replies, drawn with the random bytes of ``entropy(n)``."""

    def __init__(
        self, backend: Backend, share: float, entropy: Callable[[int], bytes], metrics: Metrics
    ) -> None:
        self._backend = backend
        self._share = share
        self._entropy = entropy
        self._metrics = metrics
        self._waiting: deque[RequestState] = deque()

    def is_sampled(self) -> bool:
        """Draw whether to check a reply. May be called from any thread."""
        return self._share > 0 and int.from_bytes(self._entropy(4), "little") < self._share * 2**32

    def add(self, request: RequestState) -> None:
        """Queue a finished reply to be checked when the engine is idle."""
        if not request.output_logprobs:
            return
        if len(self._waiting) == _MAX_WAITING:
            self._metrics.count("self_checks_skipped_total")
        else:
            self._waiting.append(request)

    def clear(self) -> None:
        """Drop the replies that wait to be checked."""
        self._waiting.clear()

    def __bool__(self) -> bool:
        """Whether a reply waits to be checked."""
        return bool(self._waiting)

    def run_one(self, is_ready: Callable[[str], bool]) -> None:
        """Check the reply that waited longest, if its adapter still has a slot."""
        reply = self._waiting.popleft()
        if reply.adapter_key is not None and not is_ready(reply.adapter_key):
            self._metrics.count("self_checks_skipped_total")
            return
        written = reply.output_logprobs
        try:
            item = Continuation(reply.prompt_tokens, reply.output_tokens)
            (score,) = self._backend.score([item], reply.adapter_key)
            difference = sum(
                abs(a - b) for a, b in zip(score.token_logprobs, written, strict=True)
            ) / max(len(written), _LEAST_TOKENS)
        except Exception as error:  # noqa: BLE001 - a failed check must not end serving
            log.error("self-check: a reply could not be scored: %s", format_origin(error))
            self._metrics.count("self_checks_skipped_total")
            return
        # A NaN compares false with everything, so the test is for agreement.
        if not (math.isfinite(difference) and difference <= self._backend.logprob_tolerance):
            log.warning(
                "self-check: the log-probs of a reply of %d tokens differ by %.4f nats a token "
                "from those of its stack %s; at most %g was expected.",
                len(written),
                difference,
                (reply.adapter_key or "none")[:12],
                self._backend.logprob_tolerance,
            )
            self._metrics.count("self_check_mismatches_total")
        # Last: a reader who sees the check sees its mismatch too.
        self._metrics.count("self_checks_total")
