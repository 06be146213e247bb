"""What is said of the replies: which one of each conversation is selected, and what is typed where one is edited.

Invariant: what was typed into a reply's editor is there until the ledger has it, also while the editor is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from personalpeft_app.tui.background_tasks import BackgroundTasks
from personalpeft_app.tui.chat_controller import ChatController
from personalpeft_app.tui.conversation import Exchange
from personalpeft_app.tui.notifier import Notifier

if TYPE_CHECKING:
    from personalpeft import User


class Listener(Protocol):
    """What hears of it, in the screen's thread."""

    def reply_changed(self) -> None:
        """Another one is selected or edited."""

    def reply_typed(self) -> str | None:
        """Asks what stands in the open editor; None where none is on the screen."""

    def reply_marked(self) -> None:
        """The ledger has something that was said of one."""

    def reply_kept(self) -> None:
        """The ledger has what was typed into the open editor, which is closed now."""


class FeedbackController:
    """See above. A conversation is named by its key; what is asked of it is about the selected reply."""

    def __init__(
        self,
        user: User,
        threads: BackgroundTasks,
        telling: Notifier,
        speaking: ChatController,
        listener: Listener,
    ) -> None:
        self._user = user
        self._threads = threads
        self._telling = telling
        self._speaking = speaking
        self._listener = listener
        self._selected: dict[str, int] = {}
        # By turn, what is typed into its editor; and the turn whose editor is open.
        self._edits: dict[str, str] = {}
        self._editing: str | None = None

    def selected(self, key: str) -> Exchange | None:
        """The exchange that is selected: the last where nobody chose another."""
        talk, chosen = self._speaking.talks[key], self._selected.get(key)
        return talk[chosen] if chosen is not None and talk.has(chosen) else talk.last

    def answered(self, key: str) -> str | None:
        """The turn of the selected reply; where there is none, a line says so."""
        exchange = self.selected(key)
        if exchange is None or exchange.turn is None:
            self._telling.note(
                "There is no reply to say that of."
                if exchange is None
                else "That reply is not finished."
            )
            return None
        return exchange.turn

    def select(self, key: str, number: int) -> None:
        """Selects another."""
        self._selected[key] = number
        self._listener.reply_changed()

    def step(self, key: str, steps: int) -> bool:
        """Selects the one that stands some steps further down, or up where ``steps`` is negative; false at the lower end."""
        exchanges, now = self._speaking.talks[key].exchanges, self.selected(key)
        at = exchanges.index(now) + steps if now is not None else 0
        if at >= len(exchanges):
            return False
        if at >= 0:
            self.select(key, exchanges[at].number)
        return True

    def follow(self, key: str) -> None:
        """Selects whatever is the newest."""
        self._selected.pop(key, None)

    def rate(self, key: str, rating: int) -> None:
        """A thumb up (1) or down (-1)."""
        turn = self.answered(key)
        if turn is not None:

            def rated(_: object) -> None:
                self._speaking.said(key, turn, rating=rating)
                self._listener.reply_marked()

            self._do(partial(self._user.feedback, turn, rating=rating), rated)

    def comment(self, key: str, text: str, then: Callable[[], None]) -> None:
        """A rule to follow from now on; ``then`` hears that the ledger has it."""
        exchange = self.selected(key)
        if exchange is not None and exchange.turn is not None:
            turn, comments = exchange.turn, exchange.comments + 1

            def commented(_: object) -> None:
                self._speaking.said(key, turn, comments=comments)
                self._listener.reply_marked()
                then()

            self._do(partial(self._user.feedback, turn, comment=text), commented)

    def again(self, key: str) -> None:
        """Asks for the last reply again."""
        exchange = self.selected(key)
        if exchange is None or not exchange.is_finished:
            self._telling.note("There is nothing to ask again.")
        elif exchange != self._speaking.talks[key].last:
            self._telling.note("Only the last question can be asked again.")
        else:
            # Its editor goes with the reply.
            self.leave()
            self._speaking.again(key, exchange.number)

    def edit(self, key: str) -> None:
        """Opens its editor; one that was open until now is closed."""
        turn = self.answered(key)
        if turn is not None and turn != self._editing:
            self.leave()
            self._editing = turn
            self._listener.reply_changed()

    def leave(self) -> None:
        """Closes the open editor; what was typed is there again when it is opened."""
        typed = self._listener.reply_typed()
        if self._editing is not None:
            if typed is not None:
                self._edits[self._editing] = typed
            self._editing = None
            self._listener.reply_changed()

    def drafts(self, key: str) -> dict[int, str]:
        """What stands in the editors that are open in a conversation, by exchange."""
        exchanges = self._speaking.talks[key].exchanges
        open_ones = [
            each for each in exchanges if each.turn is not None and each.turn == self._editing
        ]
        return {each.number: self._edits.get(each.turn or "", each.text) for each in open_ones}

    def keep(self, key: str) -> None:
        """What was typed is how the reply should have been."""
        turn, typed = self._editing, self._listener.reply_typed()
        if turn is not None and typed is not None:

            def kept(_: object) -> None:
                self._edits.pop(turn, None)
                self._speaking.said(key, turn, edited=typed)
                self._telling.note("Kept: that is how it should have been.")
                self._listener.reply_marked()
                if self._editing == turn:
                    self._editing = None
                    self._listener.reply_kept()

            self._do(partial(self._user.feedback, turn, edit=typed), kept)

    def unsent(self) -> list[str]:
        """What was typed into editors and is not in the ledger. Closes the one that is open."""
        self.leave()
        texts = {
            each.turn: each.text
            for talk in self._speaking.talks.values()
            for each in talk.exchanges
        }
        return [typed.strip() for turn, typed in self._edits.items() if typed != texts.get(turn)]

    def _do(self, work: Callable[[], object], then: Callable[[object], None]) -> None:
        self._threads.run(work, then, self._telling.wrong)
