"""A conversation on the screen: the turns of the ledger, and prompts that it does not have yet.

Invariant: at most one exchange of a conversation streams in: each is a reply to those before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from personalpeft import Conversation as RecordedConversation
from personalpeft import TurnFeedback
from personalpeft.types import Turn
from personalpeft_app.tui.user_session import TaskHandle

Status: TypeAlias = Literal["waiting", "writing", "done", "stopped", "failed"]


@dataclass
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


@dataclass
class Conversation:
    """The exchanges of one conversation. ``id`` is None until the ledger has a turn of it.

    Attributes:
        task: The reply that streams in.
        chosen: The number of the exchange that the user selected.
    """

    id: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    task: TaskHandle | None = None
    chosen: int | None = None

    @property
    def selected(self) -> Exchange | None:
        """The selected exchange: the newest unless the user chose another."""
        newest = self.exchanges[-1] if self.exchanges else None
        return next((each for each in self.exchanges if each.number == self.chosen), newest)

    def first(self, status: Status) -> Exchange | None:
        """Return the first exchange with a status."""
        return next((each for each in self.exchanges if each.status == status), None)

    def ask(self, prompt: str) -> None:
        self.exchanges.append(Exchange(self._next_number(), prompt))

    def retry(self, exchange: Exchange) -> None:
        """Let the prompt of an exchange wait again, in its place."""
        replaced = exchange if exchange.turn is not None else None
        self.replace(exchange, Exchange(exchange.number, exchange.prompt, replaced=replaced))

    def replace(self, exchange: Exchange, other: Exchange) -> None:
        self.exchanges[self.exchanges.index(exchange)] = other

    def update(self, recorded: RecordedConversation | None) -> None:
        """Take what the ledger has, then the prompts that the ledger lacks."""
        numbers = {each.turn: each.number for each in self.exchanges if each.turn is not None}
        unrecorded = [each for each in self.exchanges if each.turn is None]
        if recorded is None:
            self.id, self.exchanges = None, unrecorded
            return
        following = self._next_number()
        exchanges = [
            _read_exchange(
                numbers.get(turn.id, following + at),
                turn,
                recorded.feedback.get(turn.id, TurnFeedback()),
            )
            for at, turn in enumerate(recorded.turns)
        ]
        self.id, self.exchanges = recorded.id, exchanges + unrecorded

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
