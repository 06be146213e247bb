"""The middle of the screen: conversations, streaming replies, feedback on them, the composer.

Several conversations may wait for a reply at once. Feedback is about the selected exchange of the
conversation that is shown.

Invariant: a text that the user typed stays visible until the ledger has it.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from textual import work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Markdown

from personalpeft import ConversationSummary, Reply
from personalpeft.errors import PersonalPeftError
from personalpeft_app.tui import views
from personalpeft_app.tui.composer import Composer, Mode
from personalpeft_app.tui.conversation import Conversation, Exchange
from personalpeft_app.tui.dialogs import Picker
from personalpeft_app.tui.markdown import links
from personalpeft_app.tui.notifier import errors_shown, show_error, show_note
from personalpeft_app.tui.transcript import ExchangeView, Transcript
from personalpeft_app.tui.user_session import TaskHandle, UserSession, describe_error
from personalpeft_app.tui.views import Row


class ConversationPane(Vertical):
    """The conversation of ``key``, and the composer. A key is valid while the program runs."""

    class Changed(Message):
        """The conversation, the selection or the list of conversations changed."""

    class Recorded(Message):
        """The ledger has a new row, so the state of the model may change."""

    def __init__(self, session: UserSession) -> None:
        super().__init__(id="middle")
        self._session = session
        self._new_keys = (f"new-{number}" for number in itertools.count(1))
        self.key = next(self._new_keys)
        self._open: dict[str, Conversation] = {self.key: Conversation()}
        self._summaries: tuple[ConversationSummary, ...] = ()
        self._version: object = None
        self._reading = asyncio.Lock()
        # The text in each reply's editor, by turn, and the turn whose editor is open.
        self._drafts: dict[str, str] = {}
        self._editing: str | None = None
        self._draw_is_due = False

    def compose(self) -> ComposeResult:
        yield Transcript()
        yield Composer()

    @property
    def conversation(self) -> Conversation:
        return self._open[self.key]

    @property
    def is_answering(self) -> bool:
        return any(each.task is not None for each in self._open.values())

    @property
    def rows(self) -> list[Row]:
        """All conversations: those without a turn first, then the one with the newest turn."""

        def row(key: str, title: str, last: ConversationSummary | None = None) -> Row:
            busy = key in self._open and self._open[key].task is not None
            return views.conversation(key, title, last, busy=busy, shown=key == self.key)

        keys = {each.id: key for key, each in self._open.items() if each.id is not None}
        new = [
            row(key, each.exchanges[0].prompt if each.exchanges else "")
            for key, each in self._open.items()
            if each.id is None
        ]
        return new[::-1] + [row(keys.get(e.id, e.id), e.title, e) for e in self._summaries]

    @property
    def _transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def _composer(self) -> Composer:
        return self.query_one(Composer)

    # Drawing

    def draw(self) -> None:
        """Draw soon, once for all changes until then."""
        if not self._draw_is_due:
            self._draw_is_due = True
            self.call_next(self._draw)

    async def _draw(self) -> None:
        self._draw_is_due = False
        if not self.is_running:
            return
        exchanges, selected = self.conversation.exchanges, self.conversation.selected
        editing = next((e for e in exchanges if e.turn and e.turn == self._editing), None)
        await self._transcript.show(
            self.key,
            self.conversation,
            selected=selected.number if selected else None,
            loaded=self._session.ready,
            editing=editing.number if editing else None,
            draft=self._drafts.get(editing.turn or "", editing.text) if editing else "",
        )
        self.post_message(self.Changed())

    # The ledger

    @work
    async def check_for_changes(self) -> None:
        """Show what other programs changed. Errors wait for the user's next act."""
        if not (self.is_answering or self._reading.locked()):
            with suppress(PersonalPeftError):
                await self._refresh(self._version)

    @work
    async def refresh_conversations(self) -> None:
        with errors_shown(self):
            await self._refresh()

    async def _refresh(self, known: object = None) -> None:
        async with self._reading:
            ids = {each.id for each in self._open.values() if each.id is not None}
            found = await self._session.call(self._session.read_chats, ids, known)
            if found is None:
                return
            self._summaries, conversations, self._version = found
            for each in self._open.values():
                # A conversation that was opened or answered meanwhile is read next time.
                if each.id in ids and each.task is None:
                    each.update(conversations.get(each.id))
        self.draw()
        self.post_message(self.Recorded())

    # Asking

    def write(self, mode: Mode | None = None) -> None:
        """Focus the composer, in a mode if one is given."""
        if mode is not None:
            self._composer.set_mode(self.key, mode)
        self._composer.focus()

    def on_composer_sent(self, event: Composer.Sent) -> None:
        event.stop()
        if event.mode == "ask":
            self._composer.clear_sent(event)
            conversation = self._open[event.key]
            conversation.chosen = None
            conversation.ask(event.text)
            self._answer_next(event.key)
            return
        turn = self.answered_turn() if event.mode == "comment" else None
        if turn is not None or event.mode == "remember":
            # What the user types next is a question. The draft stays in its mode until recorded.
            self.write("ask")
            self._record_text(event, turn)

    def _answer_next(self, key: str) -> None:
        """Answer the next prompt of a conversation that waits, unless a reply streams in."""
        conversation = self._open[key]
        waiting = conversation.first("waiting")
        if waiting is not None and conversation.task is None:
            conversation.task = TaskHandle()
            waiting.status = "writing"
            self._answer(key, waiting, conversation.task)
        self.draw()

    @work
    async def _answer(self, key: str, exchange: Exchange, task: TaskHandle) -> None:
        conversation = self._open[key]
        replaces = exchange.replaced.turn if exchange.replaced is not None else None
        try:
            reply = await self._session.call(
                self._session.answer, exchange.prompt, conversation.id, replaces, task
            )
        except PersonalPeftError as error:
            conversation.task = None
            self._return_prompt(key, exchange, error)
        else:
            conversation.task = None
            await self._record_reply(key, exchange, reply)
        self._answer_next(key)

    async def _record_reply(self, key: str, exchange: Exchange, reply: Reply) -> None:
        conversation = self._open[key]
        conversation.id = reply.conversation_id
        exchange.reply, exchange.turn, exchange.replaced = reply.text, reply.turn_id, None
        exchange.status = "stopped" if reply.finish_reason == "cancelled" else "done"
        self.draw()
        if reply.dropped_messages:
            show_note(self, "The conversation exceeds the context; its beginning is left out.")
        if key != self.key:
            show_note(self, f"There is a reply in: {conversation.exchanges[0].prompt[:40]}")
        with errors_shown(self):
            await self._refresh()

    def _return_prompt(self, key: str, exchange: Exchange, error: PersonalPeftError) -> None:
        conversation = self._open[key]
        if exchange.replaced is not None:
            conversation.replace(exchange, exchange.replaced)
        elif self._composer.restore(key, exchange.prompt):
            conversation.exchanges.remove(exchange)
        else:
            exchange.status, exchange.problem = "failed", describe_error(error)
        show_error(self, error)

    def poll(self) -> None:
        """Show what streamed in since the last call."""
        for each in self._open.values():
            writing = each.first("writing")
            if writing is not None and each.task is not None and writing.reply != each.task.text:
                writing.reply = each.task.text
                self.draw()

    def stop(self) -> bool:
        """Stop the reply that streams in here. Returns whether there is one."""
        task = self.conversation.task
        if task is not None:
            task.stop()
        return task is not None

    def stop_all(self) -> None:
        for each in self._open.values():
            if each.task is not None:
                each.task.stop()

    def retry(self) -> None:
        """Ask for the last reply again. The old one comes back if that fails."""
        exchange = self.conversation.selected
        if exchange is None or exchange.status in ("waiting", "writing"):
            show_note(self, "There is nothing to ask again.")
        elif exchange is not self.conversation.exchanges[-1]:
            show_note(self, "Only the last question can be asked again.")
        else:
            self.close_editor()
            self.conversation.retry(exchange)
            self._answer_next(self.key)

    def leave_mode(self) -> bool:
        """Leave a comment or fact for later. Returns whether one was being typed."""
        if self._composer.has_focus and self._composer.mode != "ask":
            self.write("ask")
            return True
        return False

    def unsent(self) -> list[str]:
        """Return every text that was typed and that the ledger lacks. Closes the editor."""
        self.close_editor()
        exchanges = [e for each in self._open.values() for e in each.exchanges]
        texts = {e.turn: e.text for e in exchanges}
        # A reply that has begun is recorded when it is stopped.
        prompts = [e.prompt for e in exchanges if not (e.turn or e.reply or e.replaced)]
        drafts = [d.strip() for turn, d in self._drafts.items() if d != texts.get(turn)]
        return [*prompts, *self._composer.unsent(), *drafts]

    # Conversations

    def new_key(self) -> str:
        """Return the key of an empty conversation. Without one, start a conversation."""
        empty = (k for k, each in self._open.items() if each.id is None and not each.exchanges)
        key = next(empty, None)
        if key is None:
            key = next(self._new_keys)
            self._open[key] = Conversation()
        return key

    def show(self, key: str) -> None:
        """Show a conversation, with the text that was typed in it."""
        self.close_editor()
        self.key = key
        if key not in self._open:
            self._open[key] = Conversation(key)
            self.refresh_conversations()
        self.write("ask")
        self.draw()

    # The selected reply

    def focus_replies(self) -> None:
        if self.conversation.exchanges:
            self._transcript.focus()

    def on_exchange_view_selected(self, event: ExchangeView.Selected) -> None:
        event.stop()
        self._select(event.number)

    def _select(self, number: int) -> None:
        self.conversation.chosen = number
        self._transcript.scroll_to_exchange(number)
        self.draw()

    def step(self, steps: int) -> None:
        """Select the exchange that many further down. Below the last one is the composer."""
        exchanges, selected = self.conversation.exchanges, self.conversation.selected
        at = exchanges.index(selected) + steps if selected is not None else 0
        if at >= len(exchanges):
            self.write()
        elif at >= 0:
            self._select(exchanges[at].number)

    def answered_turn(self) -> str | None:
        """Return the turn of the selected exchange. Shows a note if it has none."""
        exchange = self.conversation.selected
        if exchange is None:
            show_note(self, "There is no reply yet.")
        elif exchange.turn is None:
            show_note(self, "That reply is not finished.")
        return exchange.turn if exchange is not None else None

    @work
    async def rate(self, rating: int) -> None:
        """Record a thumb up (1) or down (-1)."""
        turn = self.answered_turn()
        if turn is not None:
            with errors_shown(self):
                await self._record(turn, rating=rating)

    async def _record(self, turn: str, **feedback: Any) -> None:
        await self._session.call(self._session.user.feedback, turn, **feedback)
        await self._refresh()

    def comment(self) -> None:
        """Focus the composer for a comment on the selected reply."""
        if self.answered_turn() is not None:
            self.write("comment")

    @work
    async def _record_text(self, sent: Composer.Sent, turn: str | None) -> None:
        try:
            if turn is not None:
                await self._record(turn, comment=sent.text)
                note = "Recorded; it is a rule from the next question on."
            else:
                await self._session.call(self._session.user.remember, sent.text)
                self.post_message(self.Recorded())
                note = "Remembered; it is retrieved from the next question on."
        except PersonalPeftError as error:
            show_error(self, error)
            if sent.key == self.key and not self._composer.text.strip():
                self.write(sent.mode)
        else:
            self._composer.clear_sent(sent)
            show_note(self, note)

    def edit(self) -> None:
        """Open the editor of the selected reply; a failed prompt goes to the composer."""
        exchange = self.conversation.selected
        if exchange is not None and exchange.status == "failed":
            if self._composer.restore(self.key, exchange.prompt):
                self.conversation.exchanges.remove(exchange)
                self.write()
                self.draw()
            else:
                show_note(self, "Send or clear what you have typed first.")
        elif (turn := self.answered_turn()) is not None and turn != self._editing:
            self.close_editor()
            self._editing = turn
            self.draw()

    def close_editor(self) -> None:
        """Close the editor and keep its text for the next time."""
        text = self._transcript.editor_text
        if self._editing is not None:
            if text is not None:
                self._drafts[self._editing] = text
            self._editing = None
            self.draw()

    def leave_editor(self) -> None:
        self.close_editor()
        self.focus_replies()

    @work
    async def save_edit(self) -> None:
        """Record the text of the editor as the reply that should have been."""
        turn, text = self._editing, self._transcript.editor_text
        if turn is None or text is None:
            return
        with errors_shown(self):
            await self._record(turn, edit=text)
            self._drafts.pop(turn, None)
            show_note(self, "Recorded as the reply that should have been.")
            if self._editing == turn:
                self._editing = None
                self.draw()
                self.focus_replies()

    @work
    async def copy_reply(self) -> None:
        """Copy the selected reply to the terminal's clipboard."""
        exchange = self.conversation.selected
        if exchange is not None and exchange.text:
            self.app.copy_to_clipboard(exchange.text)
            show_note(self, "Copied.")
            if exchange.turn is not None:
                with errors_shown(self):
                    await self._session.call(
                        self._session.user.record_implicit_feedback, exchange.turn, "copied"
                    )

    def show_links(self) -> None:
        """Ask which link of the selected reply to open."""
        selected = self.conversation.selected
        addresses = links(selected.text) if selected is not None else ()
        if addresses:
            self._offer(*addresses)
        else:
            show_note(self, "There is no link in that reply.")

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        # A link that is not on the web does nothing.
        self._offer(*[a for a in links(event.markdown.source) if unquote(a) == event.href][:1])

    @work
    async def _offer(self, *addresses: str) -> None:
        if addresses:
            options = {each: each for each in addresses}
            dialog = Picker("Open in a browser?", "enter opens it, esc does not", options)
            address = await self.app.push_screen_wait(dialog)
            if address is not None:
                self.app.open_url(address)
