"""A conversation as a value. Every change gives a new one; nothing here knows a screen, a thread or a ledger.

Invariant: at most one exchange of a conversation is being written, since each is told what came before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, TypeAlias

from personalpeft.types import Message

Status: TypeAlias = Literal["waiting", "writing", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and what became of it. ``number`` names it within its conversation; ``turn`` is None until the ledger has
    it, ``problem`` is there where it failed, ``rating`` 0 where nobody said anything.
    """

    number: int
    prompt: str
    reply: str = ""
    status: Status = "waiting"
    turn: str | None = None
    stack: str = ""
    rating: int = 0
    edited: str | None = None
    comments: int = 0
    problem: str = ""

    @property
    def text(self) -> str:
        """The reply as it counts from now on."""
        return self.reply if self.edited is None else self.edited

    @property
    def is_finished(self) -> bool:
        """Whether nothing more comes by itself."""
        return self.status in ("done", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, named by ``key``. ``at`` is when it was last spoken in, None before the ledger has any of it."""

    key: str
    exchanges: tuple[Exchange, ...] = ()
    system: tuple[Message, ...] = ()
    at: datetime | None = None

    @property
    def title(self) -> str:
        """The first question, on one line."""
        return (
            " ".join(self.exchanges[0].prompt.split()) if self.exchanges else "A new conversation"
        )

    @property
    def last(self) -> Exchange | None:
        """The newest exchange."""
        return self.exchanges[-1] if self.exchanges else None

    def __getitem__(self, number: int) -> Exchange:
        return next(each for each in self.exchanges if each.number == number)

    def has(self, number: int) -> bool:
        """Whether there is an exchange of that number."""
        return any(each.number == number for each in self.exchanges)

    def ask(self, text: str) -> Conversation:
        """With one more question, which waits."""
        number = max((each.number for each in self.exchanges), default=-1) + 1
        return replace(self, exchanges=(*self.exchanges, Exchange(number, text)))

    def without(self, number: int) -> Conversation:
        """As if that had never been asked."""
        return replace(
            self, exchanges=tuple(each for each in self.exchanges if each.number != number)
        )

    def change(self, number: int, **changes: Any) -> Conversation:
        """With something else about one exchange; as it is where that has gone meanwhile."""
        return self._each(lambda each: each.number == number, lambda each: replace(each, **changes))

    def change_turn(self, turn: str, **changes: Any) -> Conversation:
        """As ``change``, of the exchange that the ledger knows by that id."""
        return self._each(lambda each: each.turn == turn, lambda each: replace(each, **changes))

    def put(self, exchange: Exchange) -> Conversation:
        """With an exchange in the place of the one of its number."""
        return self._each(lambda each: each.number == exchange.number, lambda each: exchange)

    def again(self, number: int) -> Conversation:
        """With the question of an exchange waiting anew, in its place and with nothing said about it."""
        return self._each(
            lambda each: each.number == number, lambda each: Exchange(each.number, each.prompt)
        )

    def catch_up(self, found: Conversation) -> Conversation:
        """With what the ledger knows of the same conversation: what was said about its replies, and what follows the last turn
        that both have.
        """
        known = {each.turn: each for each in found.exchanges if each.turn is not None}
        own = [_said_of(each, known.get(each.turn or "")) for each in self.exchanges]
        shared = [at for at, each in enumerate(own) if each.turn in known]
        turns = [each.turn for each in found.exchanges]
        new = found.exchanges[turns.index(own[shared[-1]].turn) + 1 :] if shared else ()
        if not new:
            return replace(self, exchanges=tuple(own))
        rest = [each for each in own[shared[-1] + 1 :] if each.turn is None]
        first = max(each.number for each in own) + 1
        numbered = [replace(each, number=first + n) for n, each in enumerate(new)]
        return replace(self, exchanges=(*own[: shared[-1] + 1], *numbered, *rest), at=found.at)

    def forget(self, turns: Collection[str], emptied: Collection[str]) -> Conversation:
        """Without turns that were destroyed, and with nothing in place of replies that were."""
        left = (each for each in self.exchanges if each.turn not in turns)
        return replace(
            self,
            exchanges=tuple(
                replace(each, reply="", edited=None) if each.turn in emptied else each
                for each in left
            ),
        )

    def next(self) -> Exchange | None:
        """The exchange to write now: the first that waits, unless one is being written."""
        if any(each.status == "writing" for each in self.exchanges):
            return None
        return next((each for each in self.exchanges if each.status == "waiting"), None)

    def unfinished(self) -> Exchange | None:
        """The first exchange of which more is to come."""
        return next((each for each in self.exchanges if not each.is_finished), None)

    def messages(self, number: int) -> list[dict[str, str]]:
        """What the model is told for an exchange: what was said before it, with edited replies as they were edited and
        without what nothing was answered to, and its question.
        """
        told = [{"role": message.role, "content": message.content} for message in self.system]
        for each in self.exchanges:
            if each.number == number:
                return [*told, {"role": "user", "content": each.prompt}]
            if each.turn is not None and each.text.strip():
                told += [
                    {"role": "user", "content": each.prompt},
                    {"role": "assistant", "content": each.text},
                ]
        raise KeyError(number)

    def _each(
        self, which: Callable[[Exchange], bool], change: Callable[[Exchange], Exchange]
    ) -> Conversation:
        return replace(
            self, exchanges=tuple(change(each) if which(each) else each for each in self.exchanges)
        )


def _said_of(own: Exchange, found: Exchange | None) -> Exchange:
    if found is None:
        return own
    return replace(own, rating=found.rating, edited=found.edited, comments=found.comments)


def shorten(messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """The messages without the oldest question and reply; None where there is but the last question."""
    system = [each for each in messages if each["role"] == "system"]
    rest = messages[len(system) :]
    return [*system, *rest[2:]] if len(rest) >= 3 else None
