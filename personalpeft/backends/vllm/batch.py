"""The batch of a remote server: each sequence is a streamed completion, and a step collects chunks.

Invariants: a stack stays registered until its sequences have ended here. What fails for one
sequence ends that sequence alone. Removing a sequence drops its connection, so the server stops.
One thread runs the batch; only the queue of events is shared with the transport's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from personalpeft.backends.base import Occupancy
from personalpeft.backends.batch_backend import SequenceBatch
from personalpeft.backends.sequence import OutputChunk, SequenceState
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
class _StreamedSequence:
    state: SequenceState
    reply: Future[Any]


class Batch(SequenceBatch[_StreamedSequence]):
    """The batch. ``attached`` are the attached stacks by key.

    ``salt`` returns the key of the server's prefix cache for an owner.
    """

    def __init__(
        self,
        client: VllmClient,
        registry: AdapterRegistry,
        attached: Mapping[str, Registration],
        tokenizer: ChatTokenizer,
        salt: Callable[[str], str],
        *,
        rows: int,
        max_length: int,
    ) -> None:
        super().__init__(tokenizer, rows=rows, max_length=max_length)
        self._client, self._registry, self._attached = client, registry, attached
        self._tokenizer, self._salt = tokenizer, salt
        self._events = SimpleQueue[_Event]()

    def _allocate(self, sequence: SequenceState) -> _StreamedSequence:
        temperature = sequence.request.sampling.temperature
        if temperature > _MAX_TEMPERATURE:
            raise InvalidInput(
                f"The temperature must be at most {_MAX_TEMPERATURE:g} for vLLM, "
                f"got {temperature:g}.",
                hint=f"Use 0 to {_MAX_TEMPERATURE:g}.",
            )
        key = sequence.adapter_key
        registration = self._registry.bare_base if key is None else self._attached[key]
        reply = self._read_reply(sequence.number, sequence, registration)
        return _StreamedSequence(sequence, self._client.transport.start(reply))

    def step(self) -> Sequence[OutputChunk]:
        if not self._running:
            return ()
        return [chunk for number, event in self._collect() for chunk in self._handle(number, event)]

    def _release(self, running: _StreamedSequence) -> None:
        """Cancel its reply if the server still generates it."""
        if running.reply.cancel():
            self._registry.note_cancelled_request()

    def occupancy(self) -> Occupancy:
        """See ``Backend.occupancy``. The server's cache is not known here."""
        used = [len(each.state.token_ids) for each in tuple(self._running.values())]
        return Occupancy(len(used), sum(used), self.rows * self.max_length, 0)

    def close(self) -> None:
        """Remove all sequences."""
        for number in tuple(self._running):
            self.remove(number)

    async def _read_reply(
        self, number: int, state: SequenceState, registration: Registration
    ) -> None:
        async def stream(name: str) -> None:
            salt = self._salt(state.owner)
            stop = sorted(self._tokenizer.stop_tokens | state.request.stop_tokens)
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
        running = self._running.get(number)
        if running is None:
            # It was removed after the event was sent.
            return
        if isinstance(event, Exception):
            yield OutputChunk(number, "", (), error=event)
            return
        if event.finish is not None:
            # The server has ended the reply, so it is not cancelled.
            del self._running[number]
        for token, logprobs in itertools.zip_longest(event.tokens, event.logprobs):
            chunk = running.state.append(token, logprobs)
            if chunk.finish is not None:
                self.remove(number)
                yield chunk
                return
            yield chunk
        if event.finish is not None:
            # By a stop token that the base's card does not list, or at the end of the context.
            yield running.state.finish(event.finish)
