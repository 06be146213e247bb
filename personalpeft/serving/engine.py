"""Serves stacks on one backend: makes what a request needs resident, keeps it there while it is used, and passes pieces
up.

Invariants: what is in use is pinned, so it cannot leave its slot; what is attached under a stack's digest was composed
from files whose own digests were checked; nothing of one request is kept for another but the attached stack itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from personalpeft.adapters.base import Adapter
from personalpeft.adapters.compose import compose
from personalpeft.backends.base import Backend, Continuation, Piece, Row, Score, Tokens
from personalpeft.errors import BaseMismatch, Busy, PromptTooLong
from personalpeft.serving.residency import Residency
from personalpeft.types import Message, Sampling, Stack


@dataclass(frozen=True, slots=True)
class Request:
    """Messages as the base will read them, for a stack, with how to pick tokens."""

    messages: tuple[Message, ...]
    stack: Stack
    sampling: Sampling


class Engine:
    """The way from a stack and messages to text. ``read`` brings an adapter by the digest of its packed file."""

    def __init__(self, backend: Backend, read: Callable[[str], Adapter]) -> None:
        self.backend = backend
        self._read = read
        self._residency = Residency(backend.slots)
        self._turn = threading.Lock()

    def adapter(self, digest: str) -> Adapter:
        """An adapter by the digest of its packed file, read and checked."""
        return self._read(digest)

    def tokens(self, request: Request) -> Tokens:
        """The prompt as tokens. Raises ``PromptTooLong`` where prompt and reply do not fit the base's context."""
        tokens = self.backend.render(request.messages)
        context = self.backend.base.card.context
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

    def replies(self, requests: Sequence[Request], *, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        """Pieces of all replies as they come; requests of one call run as one batch, whatever their stacks."""
        rows_tokens = [self.tokens(request) for request in requests]
        with ExitStack() as held:
            rows = [
                Row(tokens, held.enter_context(self.resident(request.stack)), request.sampling)
                for tokens, request in zip(rows_tokens, requests, strict=True)
            ]
            yield from self.backend.generate(rows, cancelled=cancelled)

    def texts(self, requests: Sequence[Request], *, cancelled: Callable[[], bool] = lambda: False) -> list[str]:
        """Whole replies, in the order of the requests."""
        texts = [""] * len(requests)
        if requests:
            for piece in self.replies(requests, cancelled=cancelled):
                texts[piece.row] += piece.text
        return texts

    def score(self, items: Sequence[Continuation], stack: Stack, *, kl: bool = False) -> tuple[Score, ...]:
        """How likely the stack finds each continuation, in nats a token."""
        with self.resident(stack) as key:
            return self.backend.score(items, key, kl=kl) if items else ()

    @contextmanager
    def resident(self, stack: Stack) -> Iterator[str | None]:
        """Holds a stack in a slot and gives its key: None for the bare base. Raises ``Busy`` when all slots are in use."""
        entries = [entry for entry in stack.entries if entry.weight != 0]
        if not entries:
            yield None
            return
        if stack.base != self.backend.base.digest:
            raise BaseMismatch(
                "This stack was built on another base than the one that is open.", hint="Open that base."
            )
        key = stack.digest
        with self._turn:
            if key not in self._residency:
                adapter = compose([(self._read(entry.digest), entry.weight) for entry in entries])
                try:
                    leaving = self._residency.make_room()
                except LookupError as full:
                    raise Busy(f"{str(full).capitalize()}.", hint="Try again when a reply has ended.") from full
                if leaving is not None:
                    self.backend.detach(leaving)
                    self._residency.forget(leaving)
                self.backend.attach(key, adapter)
            self._residency.pin(key)
        try:
            yield key
        finally:
            with self._turn:
                self._residency.let_go(key)
