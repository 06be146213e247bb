"""All conversations and the replies that are being written in them; several can be at once, one in each conversation. What
other programs say with the same user comes in here too.

Invariant: a question is in a conversation or back where it was typed, whatever goes wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

from personalpeft.errors import PersonalPeftError
from personalpeft_app.tui.background_tasks import BackgroundTasks
from personalpeft_app.tui.conversation import Conversation, Exchange
from personalpeft_app.tui.notifier import Notifier
from personalpeft_app.tui.user_session import (
    CompletedReply,
    TaskHandle,
    UserSession,
    describe_error,
)


class Listener(Protocol):
    """What hears of it, in the screen's thread."""

    def talk_changed(self, key: str) -> None:
        """A conversation is not as it was."""

    def talk_written(self, key: str, written: CompletedReply) -> None:
        """A reply is there."""

    def talks_remembered(self) -> None:
        """The ledger had more than was known here."""

    def talk_given_back(self, key: str, text: str) -> bool:
        """A question is to go back to where it was typed; false where that cannot be."""


class ChatController:
    """See above. ``talks`` are in the order in which they were last spoken in, the newest first."""

    def __init__(
        self, desk: UserSession, threads: BackgroundTasks, telling: Notifier, listener: Listener
    ) -> None:
        self._desk = desk
        self._threads = threads
        self._telling = telling
        self._listener = listener
        self._looking = False
        self._numbers = itertools.count(1)
        self._jobs: dict[str, tuple[int, TaskHandle]] = {}
        # What stood where something is being tried again.
        self._stood: dict[tuple[str, int], Exchange] = {}
        self.talks: dict[str, Conversation] = {}

    @property
    def busy(self) -> bool:
        """Whether a reply is being written anywhere."""
        return bool(self._jobs)

    def begin(self) -> str:
        """The key of an empty conversation, a new one where there is none."""
        for key, talk in self.talks.items():
            if not talk.exchanges:
                return key
        key = f"new-{next(self._numbers)}"
        self.talks = {key: Conversation(key), **self.talks}
        return key

    def recall(self) -> None:
        """Has what the ledger knows of conversations looked up."""
        self._threads.run(self._desk.talks, self._recalled, self._telling.wrong)

    def watch(self) -> None:
        """Has a look at what other programs did with the same user, unless one is under way or a reply is being written."""
        if not self.busy and not self._looking:
            self._looking = True
            self._threads.run(self._desk.talks, self._recalled, self._not_recalled)

    def _recalled(self, talks: tuple[Conversation, ...] | None) -> None:
        self._looking = False
        if talks is None:
            return
        if self.busy:
            # What is being written here may be among them, and nobody could tell yet that it is the same.
            self._desk.forget_talks()
            return
        self._take_over(talks)
        self._listener.talks_remembered()

    def _not_recalled(self, error: PersonalPeftError) -> None:
        # Whatever one does next says so; a message every other second helps nobody.
        self._looking = False

    def _take_over(self, talks: Iterable[Conversation]) -> None:
        """One in which something waits stays as it is."""
        places = {
            each.turn: key
            for key, talk in self.talks.items()
            for each in talk.exchanges
            if each.turn
        }
        for found in talks:
            key = next(
                (places[each.turn] for each in reversed(found.exchanges) if each.turn in places),
                None,
            )
            if key is None:
                self.talks[found.key] = found
            elif self.talks[key].unfinished() is None:
                self.talks[key] = self.talks[key].catch_up(found)
        far = datetime.max.replace(tzinfo=UTC)
        newest = sorted(self.talks.values(), key=lambda talk: talk.at or far, reverse=True)
        self.talks = {talk.key: talk for talk in newest}

    def forget(self, turns: Collection[str], emptied: Collection[str]) -> None:
        """Turns were destroyed, and the replies of others."""
        for talk in self.talks.values():
            self._set(talk.forget(turns, emptied))

    def ask(self, key: str, text: str) -> int:
        """Asks in a conversation; the number of the exchange."""
        talk = self.talks[key].ask(text)
        self.talks = {
            key: talk,
            **{other: each for other, each in self.talks.items() if other != key},
        }
        self._go_on(key)
        return talk.exchanges[-1].number

    def again(self, key: str, number: int) -> None:
        """Asks for the last reply again. The one that stood there stays in the ledger, and comes back if this fails."""
        self._stood[key, number] = self.talks[key][number]
        self._set(self.talks[key].again(number))
        self._go_on(key)

    def stop(self, key: str) -> bool:
        """Ends the reply that is being written in a conversation; false where there is none."""
        if key not in self._jobs:
            return False
        self._jobs[key][1].stop()
        return True

    def stop_all(self) -> None:
        """Ends them all."""
        for _, job in self._jobs.values():
            job.stop()

    def unsent(self) -> list[str]:
        """The questions of which the ledger knows nothing, and of which no piece of a reply came that it will keep."""
        return [
            each.prompt
            for key, talk in self.talks.items()
            for each in talk.exchanges
            if each.turn is None and not each.reply and (key, each.number) not in self._stood
        ]

    def take_back(self, key: str, number: int) -> None:
        """Takes a question that failed out of its conversation."""
        self._set(self.talks[key].without(number))

    def said(self, key: str, turn: str, **said: object) -> None:
        """Something was said about a reply, and the ledger has it."""
        self._set(self.talks[key].change_turn(turn, **said))

    def poll(self) -> None:
        """Takes over what was written since the last look."""
        for key, (number, job) in tuple(self._jobs.items()):
            if job.text != self.talks[key][number].reply:
                self._set(self.talks[key].change(number, reply=job.text))

    def _go_on(self, key: str) -> None:
        talk = self.talks[key]
        exchange = talk.next()
        if exchange is not None:
            job = TaskHandle()
            self._jobs[key] = exchange.number, job
            self._set(talk.change(exchange.number, status="writing"))
            self._threads.run(
                partial(self._desk.write, talk.messages(exchange.number), job),
                partial(self._written, key, exchange.number),
                partial(self._failed, key, exchange.number),
            )
        else:
            self._listener.talk_changed(key)

    def _written(self, key: str, number: int, written: CompletedReply) -> None:
        del self._jobs[key]
        self._stood.pop((key, number), None)
        reply = written.reply
        status = "stopped" if reply.finish_reason == "cancelled" else "done"
        talk = self.talks[key].change(
            number, reply=reply.text, status=status, turn=reply.turn_id, stack=reply.stack.digest
        )
        self._set(replace(talk, at=written.at))
        self._listener.talk_written(key, written)
        self._go_on(key)

    def _failed(self, key: str, number: int, error: PersonalPeftError) -> None:
        del self._jobs[key]
        talk = self.talks[key]
        stood = self._stood.pop((key, number), None)
        if stood is not None:
            self._set(talk.put(stood))
        elif self._listener.talk_given_back(key, talk[number].prompt):
            self._set(talk.without(number))
        else:
            self._set(talk.change(number, status="failed", problem=describe_error(error)))
        self._telling.wrong(error)
        self._go_on(key)

    def _set(self, talk: Conversation) -> None:
        self.talks[talk.key] = talk
        self._listener.talk_changed(talk.key)
