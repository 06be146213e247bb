"""A conversation on the screen: the turns of the ledger, and prompts that it does not have yet.

Invariant: at most one exchange of a conversation streams in: each is a reply to those before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from personalpeft import Conversation as RecordedConversation
from personalpeft import TurnFeedback
from personalpeft.types import Turn

Status: TypeAlias = Literal["waiting", "writing", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and its reply.

    Attributes:
        number: Names the exchange within its conversation.
        turn: The id of the turn, None until the ledger has it.
        replaced: The exchange that this one answers again, to come back if that fails.
        rating: 1, -1, or 0 for none.
        problem: Why it failed.
    """

    number: int
    prompt: str
    reply: str = ""
    status: Status = "waiting"
    turn: str | None = None
    replaced: Exchange | None = None
    rating: int = 0
    edited: str | None = None
    comments: int = 0
    problem: str = ""

    @property
    def text(self) -> str:
        """The reply, as edited."""
        return self.reply if self.edited is None else self.edited

    @property
    def is_finished(self) -> bool:
        return self.status in ("done", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The exchanges of one conversation. ``id`` is None until the ledger has a turn of it.

    ``ask``, ``retry``, ``put``, ``change``, ``without`` and ``update`` return a changed one.
    """

    id: str | None = None
    exchanges: tuple[Exchange, ...] = ()

    @property
    def last(self) -> Exchange | None:
        return self.exchanges[-1] if self.exchanges else None

    @property
    def is_finished(self) -> bool:
        return all(each.is_finished for each in self.exchanges)

    def get(self, number: int | None) -> Exchange | None:
        return next((each for each in self.exchanges if each.number == number), None)

    def ask(self, prompt: str) -> Conversation:
        return self._with((*self.exchanges, Exchange(self._next_number(), prompt)))

    def retry(self, exchange: Exchange) -> Conversation:
        """Let the prompt of an exchange wait again, in its place."""
        replaced = exchange if exchange.turn is not None else None
        return self.put(Exchange(exchange.number, exchange.prompt, replaced=replaced))

    def put(self, exchange: Exchange) -> Conversation:
        return self._with(
            exchange if each.number == exchange.number else each for each in self.exchanges
        )

    def change(self, number: int, **changes: Any) -> Conversation:
        """Change one exchange, if it is still there."""
        exchange = self.get(number)
        return self if exchange is None else self.put(replace(exchange, **changes))

    def without(self, number: int) -> Conversation:
        return self._with(each for each in self.exchanges if each.number != number)

    def update(self, recorded: RecordedConversation | None) -> Conversation:
        """Take what the ledger has, then the prompts that the ledger lacks."""
        numbers = {each.turn: each.number for each in self.exchanges if each.turn is not None}
        following = self._next_number()
        unrecorded = (each for each in self.exchanges if each.turn is None)
        if recorded is None:
            return Conversation(None, tuple(unrecorded))
        exchanges = (
            _read_exchange(
                numbers.get(turn.id, following + at),
                turn,
                recorded.feedback.get(turn.id, TurnFeedback()),
            )
            for at, turn in enumerate(recorded.turns)
        )
        return Conversation(recorded.id, (*exchanges, *unrecorded))

    def _with(self, exchanges: Iterable[Exchange]) -> Conversation:
        return replace(self, exchanges=tuple(exchanges))

    def _next_number(self) -> int:
        return max((each.number for each in self.exchanges), default=-1) + 1


def _read_exchange(number: int, turn: Turn, feedback: TurnFeedback) -> Exchange:
    return Exchange(
        number,
        turn.messages[-1].content,
        turn.reply,
        "stopped" if turn.finish_reason == "cancelled" else "done",
        turn.id,
        rating=feedback.rating or 0,
        edited=feedback.edit,
        comments=len(feedback.comments),
    )
