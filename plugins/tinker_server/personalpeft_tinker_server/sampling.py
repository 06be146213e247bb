"""Sample from saved weights and the bare base through the engine, beside chats and training."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor

from personalpeft import Runtime
from personalpeft.backends.base import Continuation, Score
from personalpeft.backends.sequence import Tokens
from personalpeft.clock import Clock
from personalpeft.engine.engine import Request
from personalpeft.errors import Cancelled, InvalidInput, NotFound, format_origin
from personalpeft.store.error_mapping import sqlite3
from personalpeft.types import Sampling, Stack
from personalpeft_tinker_server import models
from personalpeft_tinker_server.checkpoints import Checkpoints
from personalpeft_tinker_server.codec import read, read_tokens
from personalpeft_tinker_server.database import Database
from personalpeft_tinker_server.executor import failure
from personalpeft_tinker_server.futures import Futures, Outcome, QueuedCall
from personalpeft_tinker_server.losses import vocabulary_size

log = logging.getLogger(__name__)

# Calls whose samples are in the engine at once. More wait here, not in its queue. An owner without
# such a call may exceed the first number, since a worker may take long to get free.
_WORKERS = 16
MAX_WORKERS = 64
RETRY_SECONDS = 1.0


class Sampler:
    """Executes the sampling calls. Owners take turns; one owner's calls start in order of arrival.

    Args:
        runtime: The open runtime; its engine is loaded with the first call.
        database: Has the samplers.
        futures: Has the calls.
        checkpoints: Has the weights.
        clock: The entropy of samples without a seed.
    """

    def __init__(
        self,
        runtime: Runtime,
        database: Database,
        futures: Futures,
        checkpoints: Checkpoints,
        clock: Clock,
    ) -> None:
        self._runtime, self._db, self._futures = runtime, database, futures
        self._checkpoints, self._clock = checkpoints, clock
        self._stopping = threading.Event()
        self._cancelled: set[str] = set()
        # The order of the owners is the order of their turns. The lock guards both.
        self._waiting: dict[str, deque[QueuedCall]] = {}
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(MAX_WORKERS, "personalpeft-tinker-sampling")

    def start(self) -> None:
        """Execute the calls that a restart left without a result."""
        for call in self._futures.queued(in_runs=False):
            self.submit(call)

    def submit(self, call: QueuedCall) -> None:
        """Execute a call when there is room."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._waiting.setdefault(call.owner, deque()).append(call)
            self._start_waiting()

    def cancel(self, id_: str) -> None:
        """End a call that nobody waits for."""
        self._cancelled.add(id_)

    def pause_reason(self, id_: str) -> str | None:
        """Return why a call has not started; None if it has."""
        with self._lock:
            waits = any(call.id == id_ for calls in self._waiting.values() for call in calls)
            count = self._running.total()
        return f"{count} sampling calls go first on this server" if waits else None

    def close(self) -> None:
        """Stop. Calls without a result stay queued."""
        with self._lock:
            self._stopping.set()
            self._waiting.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _start_waiting(self) -> None:
        """Start the calls that there is room for. The caller holds the lock."""
        while (running := self._running.total()) < MAX_WORKERS:
            owners = (o for o in self._waiting if running < _WORKERS or not self._running[o])
            owner = next(owners, None)
            if owner is None:
                return
            calls = self._waiting.pop(owner)
            call = calls.popleft()
            if calls:
                # Its next turn comes last.
                self._waiting[owner] = calls
            self._running[owner] += 1
            self._executor.submit(self._work, call)

    def _work(self, call: QueuedCall) -> None:
        try:
            self._execute(call)
        finally:
            with self._lock:
                self._running[call.owner] -= 1
                if not self._running[call.owner]:
                    del self._running[call.owner]
                self._start_waiting()

    def _execute(self, call: QueuedCall) -> None:
        try:
            body = self._futures.body(call)
            if call.kind == "interpolate":
                request = read(models.Interpolate, body)
                path = self._checkpoints.interpolate(call.owner, call.id, request)
                result = models.InterpolateResponse(
                    path=path,
                    source_paths=request.source_paths,
                    coefficients=request.coefficients,
                ).model_dump_json()
            else:
                result = self._sample(call, read(models.Sample, body)).model_dump_json()
            self._finish(call, Outcome(result.encode(), None, None))
        except Exception as error:  # noqa: BLE001 - the client gets it
            # A call that a stop interrupted is executed after the restart.
            if not self._stopping.is_set():
                self._finish(call, failure(error))
        finally:
            self._cancelled.discard(call.id)

    def _finish(self, call: QueuedCall, outcome: Outcome) -> None:
        """Store an outcome, later if the disk is full or locked."""
        while True:
            try:
                return self._futures.finish(call, outcome)
            except sqlite3.Error as error:
                log.error("sampling: %s", format_origin(error))
                if self._stopping.wait(RETRY_SECONDS):
                    return None

    def _sample(self, call: QueuedCall, request: models.Sample) -> models.SampleResponse:
        prompt = read_tokens(request.prompt)
        vocabulary = vocabulary_size(self._runtime.base())
        if not prompt or not all(0 <= token < vocabulary for token in prompt):
            raise InvalidInput(
                "A prompt needs at least one token, and only tokens of the base.",
                hint="Encode it with the tokenizer of the base.",
            )
        if len(prompt) > (limit := self._context()):
            raise InvalidInput(
                f"The prompt has {len(prompt)} tokens, and {limit} fit into the context.",
                hint="Shorten the prompt.",
            )
        params = request.sampling_params
        stack = self._checkpoints.stack(call.owner, self._model_path(call.owner, request))
        prompt_logprobs: list[float | None] | None = None
        top_logprobs: list[list[tuple[int, float]] | None] | None = None
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            score = self._score(prompt, stack, request.topk_prompt_logprobs)
            if request.prompt_logprobs:
                prompt_logprobs = [None, *score.token_logprobs]
            if request.topk_prompt_logprobs:
                top_logprobs = [None, *(list(each) for each in score.top_logprobs)]
        return models.SampleResponse(
            sequences=self._sequences(call, prompt, stack, params, request.num_samples),
            prompt_logprobs=prompt_logprobs,
            topk_prompt_logprobs=top_logprobs,
        )

    def _model_path(self, owner: str, request: models.Sample) -> str | None:
        if request.sampling_session_id is None:
            return request.model_path
        row = self._db.row(
            "select model_path from samplers where id = ? and owner = ?",
            *(request.sampling_session_id, owner),
        )
        if row is None:
            raise NotFound("There is no such sampling session.", hint="Create it again.")
        path: str | None = row["model_path"]
        return path

    def _score(self, prompt: Tokens, stack: Stack, top: int) -> Score:
        if len(prompt) < 2:
            return Score(0.0)
        item = Continuation(prompt[:1], prompt[1:])
        (score,) = self._runtime.learning_engine().score([item], stack, top=top)
        return score

    def _context(self) -> int:
        backend = self._runtime.learning_engine().backend
        return min(backend.base.card.context, backend.max_length)

    def _sequences(
        self,
        call: QueuedCall,
        prompt: Tokens,
        stack: Stack,
        params: models.SamplingParams,
        count: int,
    ) -> list[models.SampledSequence]:
        engine = self._runtime.learning_engine()
        room = self._context() - len(prompt)
        seed = params.seed
        if seed is None:
            seed = int.from_bytes(self._clock.entropy(4), "little")
        stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        requests = [
            Request(
                user=call.owner,
                messages=(),
                stack=stack,
                sampling=Sampling(
                    temperature=params.temperature,
                    top_p=params.top_p,
                    top_k=max(0, params.top_k),
                    max_tokens=max(1, room if params.max_tokens is None else params.max_tokens),
                    seed=(seed + index) % 2**63,
                    stop=tuple(text for text in stop if isinstance(text, str)),
                ),
                # Never refused for a full queue, and after the chats of users.
                background=True,
                logprobs=True,
                tokens=prompt,
                stop_tokens=frozenset(token for token in stop if isinstance(token, int)),
            )
            for index in range(count)
        ]
        sequences = [
            models.SampledSequence(stop_reason="length", tokens=[], logprobs=[]) for _ in requests
        ]
        if params.max_tokens == 0:
            return sequences
        stream = engine.stream(
            requests,
            cancelled=lambda: self._stopping.is_set() or call.id in self._cancelled,
        )
        try:
            for chunk in stream:
                own = sequences[chunk.index]
                own.tokens += chunk.tokens
                own.logprobs += chunk.logprobs
                if chunk.finish == "cancelled":
                    raise Cancelled("The call was cancelled.", hint="Post it again.")
                if chunk.stop_token is not None:
                    own.tokens.append(chunk.stop_token)
                    own.logprobs.append(chunk.stop_logprob or 0.0)
                if chunk.finish == "stop":
                    own.stop_reason = "stop"
        finally:
            stream.close()
        return sequences
