"""The batch of a remote server: each sequence is a streamed completion, and a step collects chunks.

Invariants: a stack stays registered until its sequences have ended here. What fails for one
sequence ends that sequence alone. Removing a sequence drops its connection, so the server stops.
One thread runs the batch; only the queue of events is shared with the transport's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from personalpeft.backends.attached_stacks import AttachedStacks
from personalpeft.backends.base import Occupancy, OutputChunk, SequenceState
from personalpeft.backends.detokenizer import SequenceOutput
from personalpeft.backends.tokenizer import ChatTokenizer
from personalpeft.backends.vllm.adapter_registry import AdapterRegistry, Registration
from personalpeft.backends.vllm.client import CompletionChunk, VllmClient
from personalpeft.errors import InvalidInput, ServingFailed

# Seconds that a step waits for a token of any sequence. New and removed ones wait as long.
_STEP_SECONDS = 0.05
# vLLM refuses higher temperatures.
_MAX_TEMPERATURE = 2.0

_Event: TypeAlias = tuple[int, CompletionChunk | Exception]


@dataclass(frozen=True, slots=True)
class _Sequence:
    state: SequenceState
    output: SequenceOutput
    reply: Future[Any]


class Batch:
    """Up to ``rows`` sequences of up to ``max_length`` tokens.

    ``salt`` returns the key of the server's prefix cache for an owner.
    """

    def __init__(
        self,
        client: VllmClient,
        registry: AdapterRegistry,
        attached: AttachedStacks[Registration],
        tokenizer: ChatTokenizer,
        salt: Callable[[str], str],
        *,
        rows: int,
        max_length: int,
    ) -> None:
        self._client, self._registry, self._attached = client, registry, attached
        self._tokenizer, self._salt = tokenizer, salt
        self._rows, self._max_length = rows, max_length
        self._sequences: dict[int, _Sequence] = {}
        self._numbers = itertools.count()
        self._events = SimpleQueue[_Event]()

    def admit(self, state: SequenceState) -> int | None:
        """See ``Backend.admit``. Raises ``InvalidInput`` for a temperature that is too high."""
        length = len(state.prompt_tokens) + state.sampling.max_tokens
        if length > self._max_length:
            raise ValueError(f"{length} tokens do not fit on the server: {self._max_length} do")
        if state.sampling.temperature > _MAX_TEMPERATURE:
            raise InvalidInput(
                f"The temperature must be at most {_MAX_TEMPERATURE:g} for vLLM, "
                f"got {state.sampling.temperature:g}.",
                hint=f"Use 0 to {_MAX_TEMPERATURE:g}.",
            )
        if len(self._sequences) >= self._rows:
            return None
        key = state.adapter_key
        registration = self._registry.bare_base if key is None else self._attached.get(key)
        number = next(self._numbers)
        reply = self._client.transport.start(self._read_reply(number, state, registration))
        output = SequenceOutput.of(number, state, self._tokenizer)
        self._sequences[number] = _Sequence(state, output, reply)
        return number

    def step(self) -> Sequence[OutputChunk]:
        """See ``Backend.step``."""
        if not self._sequences:
            return ()
        return [chunk for number, event in self._collect() for chunk in self._handle(number, event)]

    def remove(self, number: int) -> None:
        """See ``Backend.remove``."""
        if number in self._sequences:
            self._remove(number, cancel=True)

    def uses(self, key: str) -> bool:
        """Return whether a sequence of the batch uses a stack."""
        return any(each.state.adapter_key == key for each in self._sequences.values())

    def occupancy(self) -> Occupancy:
        """See ``Backend.occupancy``. The server's cache is not known here."""
        sequences = self._sequences.values()
        used = sum(len(each.state.prompt_tokens) + each.output.num_tokens for each in sequences)
        return Occupancy(len(sequences), used, self._rows * self._max_length, 0)

    def close(self) -> None:
        """Remove all sequences."""
        for number in tuple(self._sequences):
            self._remove(number, cancel=True)

    async def _read_reply(
        self, number: int, state: SequenceState, registration: Registration
    ) -> None:
        async def stream(name: str) -> None:
            salt = self._salt(state.owner)
            stop = sorted(self._tokenizer.stop_tokens | state.stop_tokens)
            async with aclosing(self._client.stream_completion(state, name, salt, stop)) as chunks:
                async for chunk in chunks:
                    self._events.put((number, chunk))
            # Ignored if the sequence has ended; else the reply may be incomplete.
            error = ServingFailed("vLLM ended a reply without a reason.", hint="Try again.")
            self._events.put((number, error))

        try:
            await self._registry.call_with_name(registration, stream)
        except Exception as error:  # noqa: BLE001 - the caller gets it from step()
            self._events.put((number, error))

    def _collect(self) -> Iterator[_Event]:
        """Yield the events since the last step; wait a moment for the first."""
        try:
            yield self._events.get(timeout=_STEP_SECONDS)
            while True:
                yield self._events.get_nowait()
        except Empty:
            return

    def _handle(self, number: int, event: CompletionChunk | Exception) -> Iterator[OutputChunk]:
        sequence = self._sequences.get(number)
        if sequence is None:
            # It was removed after the event was sent.
            return
        if isinstance(event, Exception):
            yield OutputChunk(number, "", (), error=event)
            return
        for token, logprobs in itertools.zip_longest(event.tokens, event.logprobs):
            chunk = sequence.output.append(token, logprobs)
            if chunk.finish is not None:
                self._remove(number, cancel=event.finish is None)
                yield chunk
                return
            yield chunk
        if event.finish is not None:
            # By a stop token that the base's card does not list, or at the end of the context.
            self._remove(number, cancel=False)
            yield sequence.output.end(event.finish)

    def _remove(self, number: int, *, cancel: bool) -> None:
        """Remove a sequence; ``cancel`` its reply if the server still generates it."""
        sequence = self._sequences.pop(number)
        if cancel and sequence.reply.cancel():
            self._registry.note_cancelled_request()
