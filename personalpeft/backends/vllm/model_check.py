"""Check that a vLLM server has this base, and not another one of the same shape.

A server does not report its weights. So it generates after a fixed text, and its log-probs are
compared with torch's log-probs of the same tokens. Torch computes them once for each base; the
result is cached.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter

from personalpeft.backends.base import Continuation
from personalpeft.backends.sequence import Request, SequenceState, Tokens
from personalpeft.backends.tokenizer import ChatTokenizer
from personalpeft.backends.vllm.client import ServedModel, VllmClient
from personalpeft.base_models.types import Base
from personalpeft.errors import BaseMismatch, InvalidInput, suggest_nearest
from personalpeft.file_system import write_file_atomically
from personalpeft.types import Sampling, Stack

# Two scripts, digits, spaces and line ends, where tokenizers differ.
_TOKENIZER_TEXT = "It's 1,024 o'clock;  naïve café\n\n\tприветствие."
_PROMPT = (
    "The morning train leaves the old station at a quarter past seven, and on most days it is "
    "late. People stand on the platform with their bags and their paper cups, looking at the clock "
    "as if it could be persuaded."
)
# Tokens of a reply that are compared.
_REPLY_TOKENS = 24
# Mean nats per token. bfloat16 explains a tenth of it. Another model of the family differs by
# several times as much.
MAX_DIFFERENCE = 0.25
LogprobTrace: TypeAlias = tuple[tuple[int, float], ...]
"""Tokens, each with its log-prob (nats)."""

_TRACE: TypeAdapter[LogprobTrace] = TypeAdapter(LogprobTrace)


class ModelCheck:
    """Check one server, each time that it may have been restarted. Runs on the transport's thread.

    Args:
        salt: Returns the key of the server's prefix cache.
        reference: Returns torch's log-probs of a continuation.
        cache_file: The file that keeps the result of ``reference``.
    """

    def __init__(
        self,
        client: VllmClient,
        base: Base,
        tokenizer: ChatTokenizer,
        *,
        salt: Callable[[], str],
        reference: Callable[[Continuation], LogprobTrace],
        cache_file: Path,
    ) -> None:
        self._client, self._base, self._tokenizer = client, base, tokenizer
        self._salt, self._reference, self._cache_file = salt, reference, cache_file

    async def find_base(self) -> ServedModel:
        """Return the server's base of the configured name, after a check of its tokenizer.

        Raises:
            InvalidInput: The server has no such name.
            BaseMismatch: Its tokenizer is another one.
            ServingFailed: The server failed.
        """
        server = self._client.transport.server
        model = _select_base(await self._client.list_models(), server.model, server.url)
        tokens = await self._client.tokenize(model.name, _TOKENIZER_TEXT)
        # Without them, a wrong tokenizer shows in the log-probs.
        if tokens is not None and tokens != self._tokenizer.encode(_TOKENIZER_TEXT):
            raise self._mismatch(model.name, "its tokenizer differs")
        return model

    async def compare_logprobs(self, base_name: str, neutral_name: str) -> None:
        """Check that the server's log-probs are torch's, with a stack that changes nothing.

        Raises:
            BaseMismatch: They differ.
            UnknownModel: The server has no such stack.
            ServingFailed: The server failed. Errors of ``reference`` pass, too.
        """
        trace = await self.generate(neutral_name)
        if not trace:
            raise self._mismatch(base_name, "it generates nothing after a fixed text")
        # In a thread: torch may have to be loaded.
        difference = await asyncio.to_thread(self._compare, trace)
        if difference > MAX_DIFFERENCE:
            raise self._mismatch(
                base_name, f"its log-probs differ by {difference:.2f} nats a token"
            )

    async def generate(self, name: str) -> LogprobTrace:
        """Return a greedy reply to the fixed text. Raises ``UnknownModel``, ``ServingFailed``."""
        sampling = Sampling(temperature=0, max_tokens=_REPLY_TOKENS)
        request = Request("", (), Stack(self._base.digest), sampling, logprobs=True)
        sequence = SequenceState(request, check_prompt(self._tokenizer), None)
        stream = self._client.stream_completion(sequence, name, self._salt(), ())
        return tuple(
            [
                (token, logprobs.logprob)
                async for chunk in stream
                for token, logprobs in zip(chunk.tokens, chunk.logprobs, strict=True)
            ]
        )

    def _compare(self, trace: LogprobTrace) -> float:
        completion = tuple(token for token, _ in trace)
        cached = _read_trace(self._cache_file, completion)
        ours = cached or self._reference(Continuation(check_prompt(self._tokenizer), completion))
        difference = statistics.fmean(
            abs(own - theirs) for (_, own), (_, theirs) in zip(ours, trace, strict=True)
        )
        # Traces of another base would only replace the right one.
        if not cached and difference <= MAX_DIFFERENCE:
            # Without a cache, torch is asked again the next time.
            with suppress(OSError):
                write_file_atomically(self._cache_file, _TRACE.dump_json(ours))
        return difference

    def _mismatch(self, name: str, reason: str) -> BaseMismatch:
        return BaseMismatch(
            f"The vLLM server's {name} must be {self._base.card.name} as it is here: {reason}.",
            hint="Start it on the base's folder, as docs/how-to/engines.md says, or open the base "
            "that it serves.",
        )


def check_prompt(tokenizer: ChatTokenizer) -> Tokens:
    """Return the fixed text that a server continues."""
    return tokenizer.bos_tokens + tokenizer.encode(_PROMPT)


def _select_base(models: Sequence[ServedModel], name: str | None, url: str) -> ServedModel:
    bases = {each.name: each for each in models if each.is_base}
    if name is not None:
        if name not in bases:
            raise InvalidInput(
                f"The vLLM server at {url} has no base called {name!a}.",
                hint=suggest_nearest(name, bases, what="base"),
            )
        return bases[name]
    if len(bases) != 1:
        names = ", ".join(sorted(bases)) or "it lists none"
        raise InvalidInput(
            f"The vLLM server at {url} must have one base, got {len(bases)}.",
            hint=f"Set PERSONALPEFT_VLLM_MODEL to one of them: {names}.",
        )
    return next(iter(bases.values()))


def _read_trace(file: Path, completion: Tokens) -> LogprobTrace | None:
    with suppress(OSError, ValueError):
        trace = _TRACE.validate_json(file.read_bytes())
        return trace if tuple(token for token, _ in trace) == completion else None
    return None
