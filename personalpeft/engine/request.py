"""What travels between a caller and the loop: requests in, tickets through the queue and the batch, pieces out.

Who may touch what: a ``Ticket`` belongs to the loop's thread from its submission on. A ``Call`` is shared; its pieces are
a queue without a bound, so that a slow reader never holds up the loop (what it can hold is bounded by its requests'
``max_tokens``), and ``left`` is a flag that is raised without a lock. ``Replies`` belongs to its reader, but for ``close``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Self, TypeAlias

from personalpeft.backends.base import Piece, Row
from personalpeft.base_models.tool_calls import begun_call
from personalpeft.types import Message, Sampling, Stack

Cancelled: TypeAlias = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Request:
    """Messages of one user as the base will read them, for a stack, with how to pick tokens.

    ``timeout`` is how many seconds the whole reply may take, from when its first piece is asked for; None: as long as
    it takes. ``background`` work is never refused for want of room and never served before a person. Without ``template``
    the text of the one message is read as it is, and continued. With ``logprobs`` pieces carry the log-prob of each token, and
    of so many of the likeliest in its place.
    """

    user: str
    messages: tuple[Message, ...]
    stack: Stack
    sampling: Sampling
    timeout: float | None = None
    background: bool = False
    template: bool = True
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def begun(self) -> str:
        """What the reply begins with before the model writes any of it: it reads this after the prompt, and goes on from there."""
        return begun_call(self.messages[-1]) if self.template else ""


@dataclass(eq=False, slots=True)
class Call:
    """The requests of one caller, who reads what becomes of them from ``said``: pieces, or the error that ended one. ``begun`` is what
    replies begin with, by the place of their request. ``resting``: none of them begins now, since the caller asked for a pause.
    """

    cancelled: Cancelled | None
    paused: Cancelled | None = None
    tickets: list[Ticket] = field(default_factory=list)
    begun: dict[int, str] = field(default_factory=dict)
    said: SimpleQueue[Piece | Exception] = field(default_factory=SimpleQueue)
    left: bool = False
    resting: bool = False

    def stopped(self) -> bool:
        """Whether the caller went away or asks to stop. Raises whatever ``cancelled`` raises."""
        return self.left or (self.cancelled is not None and self.cancelled())

    def look(self) -> None:
        """Notes whether the caller asks for a pause. Raises whatever ``paused`` raises."""
        self.resting = self.paused is not None and self.paused()


@dataclass(eq=False, slots=True)
class Ticket:
    """One request on its way. Times are on the engine's clock. ``number`` is that of its row in the batch, None while it
    waits. What is ``checked`` is scored again once it has ended.
    """

    call: Call
    index: int
    row: Row
    stack: Stack
    background: bool
    asked: float
    deadline: float | None
    checked: bool = False
    number: int | None = None
    admitted: float = 0.0
    last_token: float | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def user(self) -> str:
        return self.row.owner

    @property
    def key(self) -> str | None:
        """The stack that must be resident; None for the bare base."""
        return self.row.stack


class Replies(Iterator[Piece]):
    """Pieces of the replies of one call as they come; ``row`` is the place of its request in the call.

    Nothing is asked before the first piece is. ``close`` may be called from any thread, and frees the rows within a step.
    """

    def __init__(self, begin: Callable[[], Call]) -> None:
        self._begin = begin
        self._call: Call | None = None
        self._open = 0
        self._over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        if self._over:
            raise StopIteration
        call = self._call or self._begun()
        said = call.said.get()
        if isinstance(said, Exception):
            self.close()
            raise said
        if said.finish is not None:
            self._open -= 1
            self._over = self._over or self._open == 0
        # Of a reply that ended before it was begun there is nothing.
        if said.finish != "cancelled" and (begun := call.begun.pop(said.row, "")):
            return replace(said, text=begun + said.text)
        return said

    def begin(self) -> None:
        """Asks now, and not only with the first piece. Raises what that piece would. Beginning twice is fine."""
        if self._call is None and not self._over:
            self._begun()

    def close(self) -> None:
        """Ends what is still being written. Closing twice is fine."""
        self._over = True
        if self._call is not None:
            self._call.left = True

    def __del__(self) -> None:
        # Run by the garbage collector in any thread, whatever lock that holds: so leaving takes none.
        self.close()

    def _begun(self) -> Call:
        try:
            call = self._call = self._begin()
        except BaseException:
            self._over = True
            raise
        self._open = len(call.tickets)
        # Another thread that closed this a moment ago may have seen no call to leave.
        call.left = self._over
        return call
