"""From stacks and messages to text: what the parts above see of serving.

Invariants: rows of one batch may name different stacks, and what a row says depends on its own request alone; what is in
use keeps its slot, so a reply ends on the stack that it began with, whatever is published meanwhile; what is attached
under a stack's digest was composed from adapters whose own digests were checked.

Safe to use from any thread; see ``loop`` for who runs what.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.types import Adapter
from personalpeft.backends.base import Backend, Continuation, Row, Score, Tokens
from personalpeft.backends.batch_invariance import BatchInvariance, describe
from personalpeft.backends.error_mapping import model_faults
from personalpeft.clock import SYSTEM, Clock
from personalpeft.engine.metrics import Snapshot
from personalpeft.engine.request import Call, Replies, Request, Ticket
from personalpeft.engine.scheduler import Loop
from personalpeft.errors import BaseMismatch, Cancelled, PromptTooLong
from personalpeft.settings import Serving
from personalpeft.types import Stack

__all__ = ["Engine", "Request"]

log = logging.getLogger(__name__)


class Engine:
    """Serves stacks on one backend. ``read`` brings an adapter by the digest of its packed file.

    Close it before the backend: its threads run until then.
    """

    def __init__(
        self,
        backend: Backend,
        read: Callable[[str], Adapter],
        serving: Serving = Serving(),
        clock: Clock = SYSTEM,
    ) -> None:
        self.backend = backend
        if backend.batch_invariance is not BatchInvariance.HOLDS:
            log.info(
                "batch invariance: %s (%s)", describe(backend.batch_invariance), backend.description
            )
        self._read = read
        self._lent: dict[str, Adapter] = {}
        self._loop = Loop(backend, self.adapter, serving, clock)

    def adapter(self, digest: str) -> Adapter:
        """An adapter by the digest of its packed file, read and checked; or lent."""
        lent = self._lent.get(digest)
        return self._read(digest) if lent is None else lent

    @contextmanager
    def lent(self, adapter: Adapter) -> Iterator[str]:
        """Gives the digest by which stacks may name an adapter that lies in no home, inside."""
        digest = hashlib.sha256(pack(adapter)).hexdigest()
        self._lent[digest] = adapter
        try:
            yield digest
        finally:
            # Somebody else may lend the same one, and will then have to do so again.
            self._lent.pop(digest, None)

    def tokens(self, request: Request) -> Tokens:
        """The prompt as tokens. Raises ``PromptTooLong`` where prompt and reply do not fit the base's context."""
        tokens = (
            self.backend.render(request.messages) + self.backend.encode(request.begun)
            if request.template
            else self.backend.beginning
            + self.backend.encode("".join(message.content for message in request.messages))
        )
        context = min(self.backend.base.card.context, self.backend.longest)
        over = len(tokens) + request.sampling.max_tokens - context
        if over > 0:
            room = context - request.sampling.max_tokens
            raise PromptTooLong(
                f"The prompt has {len(tokens)} tokens; with {request.sampling.max_tokens} for the reply that is {over} more than the "
                f"{context} of {self.backend.base.card.name}.",
                hint=f"Shorten the prompt to {room} tokens, or ask for a shorter reply."
                if room > 0
                else "Ask for a shorter reply.",
            )
        return tokens

    def replies(
        self,
        requests: Sequence[Request],
        *,
        cancelled: Callable[[], bool] | None = None,
        paused: Callable[[], bool] | None = None,
    ) -> Replies:
        """Pieces of all replies as they come, whatever their stacks; there may be more than the batch has rows.

        Everything begins with the first piece that is asked for, which raises ``PromptTooLong``, ``BaseMismatch``, or
        ``QueueFull`` with ``retry_after`` where the queue or the user's share of it is full; then nothing of it is served.
        Later pieces raise ``DeadlineExceeded``, ``ServingFailed``, or what loading the stack raised. ``cancelled`` is
        asked between steps by the engine's thread, so it must be quick; closing the iterator does the same. What ends
        early by either has a last piece that says so. While ``paused`` says so none of them begins, and what has begun is
        written to its end; it is asked as ``cancelled`` is.
        """
        return Replies(lambda: self._submitted(requests, cancelled, paused))

    def texts(
        self,
        requests: Sequence[Request],
        *,
        cancelled: Callable[[], bool] | None = None,
        paused: Callable[[], bool] | None = None,
    ) -> list[str]:
        """Whole replies, in the order of the requests; what there is of them where ``cancelled`` says so. As ``replies``,
        and raises ``Cancelled`` when the engine is closed meanwhile.
        """
        texts = [""] * len(requests)
        if not requests:
            return texts
        replies = self.replies(requests, cancelled=cancelled, paused=paused)
        try:
            for piece in replies:
                texts[piece.row] += piece.text
                # Half a reply must not pass for a whole one, which a learn would judge by.
                if piece.finish == "cancelled" and not (cancelled and cancelled()):
                    raise Cancelled(
                        "The engine was closed while it wrote.", hint="Open the runtime again."
                    )
        finally:
            replies.close()
        return texts

    def score(
        self, items: Sequence[Continuation], stack: Stack, *, kl: bool = False
    ) -> tuple[Score, ...]:
        """How likely the stack finds each continuation, in nats a token. Waits for a slot where the stack has none. Raises as
        ``resident``.
        """
        if not items:
            return ()
        with (
            self.resident(stack) as key,
            model_faults("The model failed while it compared answers."),
        ):
            return self.backend.score(items, key, kl=kl)

    @contextmanager
    def resident(self, stack: Stack) -> Iterator[str | None]:
        """Holds a stack in a slot and gives its key: None for the bare base. Waits for a slot where it has none.

        Inside, ask nothing else of the engine: it could need the slot that is held. Raises ``BaseMismatch``, what
        loading raised, and ``ServingFailed``.
        """
        key = self._key(stack)
        if key is None:
            yield None
            return
        self._loop.hold(key, stack)
        try:
            yield key
        finally:
            self._loop.let_go(key)

    def warm(self, stack: Stack) -> None:
        """Brings a stack into a slot ahead of its first request. Raises as ``resident``."""
        with self.resident(stack):
            pass

    def give_way(self, longest: float) -> None:
        """Waits while people are answered or wait to be, at most so many seconds; background work does not count. Work
        that takes turns with replies asks this first.
        """
        self._loop.give_way(longest)

    def forget(self) -> None:
        """Lets go of all that is kept for later, whoever's it is: stacks that nobody uses now, in slots and in host memory, and
        the keys and values of prompts that were read. What is in use goes as soon as its last reply has ended.
        """
        self._loop.forget()

    def metrics(self) -> Snapshot:
        """All that is counted and measured, as it is now; the names are in ``docs/serving.md``."""
        return self._loop.snapshot()

    def close(self) -> None:
        """Ends what is being written as cancelled, and the engine's threads. Closing twice is fine."""
        self._loop.close()

    def _submitted(
        self,
        requests: Sequence[Request],
        cancelled: Callable[[], bool] | None,
        paused: Callable[[], bool] | None,
    ) -> Call:
        # All are checked before one is queued.
        prompts = [(self.tokens(request), self._key(request.stack)) for request in requests]
        call = Call(cancelled, paused)
        now = self._loop.now()
        for index, (request, (tokens, key)) in enumerate(zip(requests, prompts, strict=True)):
            checked = self._loop.sampled()
            known = request.logprobs or checked
            row = Row(
                tokens,
                key,
                request.sampling,
                request.user,
                logprobs=known,
                top=request.top_logprobs,
            )
            deadline = None if request.timeout is None else now + request.timeout
            call.tickets.append(
                Ticket(call, index, row, request.stack, request.background, now, deadline, checked)
            )
            call.begun[index] = request.begun
        self._loop.submit(call)
        return call

    def _key(self, stack: Stack) -> str | None:
        """What the stack is attached as; None for the bare base."""
        if stack.is_bare:
            return None
        if stack.base != self.backend.base.digest:
            raise BaseMismatch(
                "This stack was built on another base than the one that is open.",
                hint="Open that base.",
            )
        return stack.digest
