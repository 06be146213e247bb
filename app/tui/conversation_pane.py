"""The middle of the screen: the conversation that is shown, and where one types. It owns which conversation that is, and what
becomes of what is typed.

Invariant: a text that a person typed stands where they can see it until the ledger has it.
"""

from __future__ import annotations

from functools import partial
from urllib.parse import unquote

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Markdown

from personalpeft_app.tui.background_tasks import BackgroundTasks
from personalpeft_app.tui.chat_controller import ChatController
from personalpeft_app.tui.composer import Composer, Mode
from personalpeft_app.tui.conversation import Conversation, Exchange
from personalpeft_app.tui.dialogs import LinkPicker
from personalpeft_app.tui.exchange import ExchangeView
from personalpeft_app.tui.feedback_controller import FeedbackController
from personalpeft_app.tui.markdown import links
from personalpeft_app.tui.notifier import Notifier
from personalpeft_app.tui.transcript import Transcript
from personalpeft_app.tui.user_session import CompletedReply, UserSession


class ConversationPane(Vertical):
    """See above. What it does to a reply it does to the selected one of the conversation that is shown."""

    class Changed(Message):
        """A conversation is not as it was, another is shown, or another reply is selected."""

    class Grew(Message):
        """The ledger has something more, which may change how the model stands."""

    def __init__(self, desk: UserSession, threads: BackgroundTasks, telling: Notifier) -> None:
        super().__init__(id="middle")
        self.speaking = ChatController(desk, threads, telling, self)
        self.replying = FeedbackController(desk.user, threads, telling, self.speaking, self)
        self.at = self.speaking.begin()
        self._desk = desk
        self._threads = threads
        self._telling = telling
        self._due = False

    def compose(self) -> ComposeResult:
        yield Transcript()
        yield Composer()

    @property
    def talk(self) -> Conversation:
        """The conversation that is shown."""
        return self.speaking.talks[self.at]

    @property
    def selected(self) -> Exchange | None:
        """The exchange that is selected, where there is any."""
        return self.replying.selected(self.at)

    @property
    def _transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def _composer(self) -> Composer:
        return self.query_one(Composer)

    # Showing it

    def draw(self) -> None:
        """Has the conversation drawn, once for all that changes until then."""
        if not self._due:
            self._due = True
            self.call_next(self._draw)

    async def _draw(self) -> None:
        self._due = False
        if not self.is_running:
            return
        selected = self.selected
        await self._transcript.show(
            self.talk,
            selected=selected.number if selected else None,
            loaded=self._desk.ready,
            drafts=self.replying.drafts(self.at),
        )
        self.post_message(self.Changed())

    # What Speaking says

    def talk_changed(self, key: str) -> None:
        if key == self.at:
            self.draw()
        else:
            self.post_message(self.Changed())

    def talk_written(self, key: str, written: CompletedReply) -> None:
        if written.left_out:
            self._telling.note(
                "The conversation is too long for the base; its beginning is left out from here on."
            )
        if key != self.at:
            self._telling.note(f"There is a reply in: {self.speaking.talks[key].title[:40]}")
        self.post_message(self.Grew())

    def talk_given_back(self, key: str, text: str) -> bool:
        return self._composer.give_back(key, text)

    def talks_remembered(self) -> None:
        self.draw()
        self.post_message(self.Grew())

    # What Replying says

    def reply_changed(self) -> None:
        self.draw()

    def reply_typed(self) -> str | None:
        return self._transcript.typed

    def reply_marked(self) -> None:
        self.post_message(self.Grew())

    def reply_kept(self) -> None:
        self.read()

    # What is typed

    def write(self, mode: Mode | None = None) -> None:
        """Goes where one types; in a mode, where one is named."""
        if mode is not None:
            self._composer.turn(self.at, mode)
        self._composer.focus()

    def comment(self) -> None:
        """Goes where one types a rule, where there is a reply to say it of."""
        if self.replying.answered(self.at) is not None:
            self.write("comment")

    def on_composer_sent(self, event: Composer.Sent) -> None:
        event.stop()
        match event.mode:
            case "ask":
                self._composer.taken(event)
                self.replying.follow(event.key)
                self.speaking.ask(event.key, event.text)
            # The others stand until the ledger has them.
            case "remember":
                note = "Remembered; it is looked up from the next question on."
                work = partial(self._desk.user.remember, event.text)
                self._threads.run(work, lambda _: self._kept(event, note), self._telling.wrong)
            case "comment":
                note = "Kept; it is a rule from the next question on."
                self.replying.comment(event.key, event.text, partial(self._kept, event, note))

    def _kept(self, sent: Composer.Sent, note: str) -> None:
        self._composer.taken(sent)
        if self._composer.mode == sent.mode and not self._composer.text.strip():
            self._composer.turn(self.at, "ask")
        self._telling.note(note)
        self.post_message(self.Grew())

    def step_back(self) -> bool:
        """Leaves a rule or a fact to be typed later, or stops the reply that is being written; false where there is neither."""
        if self._composer.has_focus and self._composer.mode != "ask":
            self.write("ask")
            return True
        return self.speaking.stop(self.at)

    def take_back(self) -> None:
        """Has the question of the selected exchange, which failed, where one types."""
        exchange = self.selected
        if exchange is None or exchange.status != "failed":
            return
        if self._composer.give_back(self.at, exchange.prompt):
            self.speaking.take_back(self.at, exchange.number)
            self.write()
        else:
            self._telling.note("Send or clear what you have typed first.")

    def unsent(self) -> list[str]:
        """Everything that was typed and that the ledger does not have."""
        return [*self.speaking.unsent(), *self._composer.unsent(), *self.replying.unsent()]

    # Conversations

    def go_to(self, key: str) -> None:
        """Shows a conversation; what is typed in this one is there again when one comes back."""
        self.replying.leave()
        self.at = key
        self.write("ask")
        self.draw()

    # Replies

    def read(self) -> None:
        """Goes to the replies."""
        if self.talk.exchanges:
            self._transcript.focus()

    def choose(self, number: int) -> None:
        """Selects a reply."""
        self.replying.select(self.at, number)
        self._transcript.bring(number)

    def on_exchange_view_selected(self, event: ExchangeView.Selected) -> None:
        event.stop()
        self.choose(event.number)

    def step(self, steps: int) -> None:
        """Selects another reply, so many further down; below the last one types."""
        if not self.replying.step(self.at, steps):
            self.write()
        elif (now := self.selected) is not None:
            self._transcript.bring(now.number)

    def edit(self) -> None:
        """Opens the editor of the selected reply; of a question that failed, that is where it was typed."""
        if self.selected is not None and self.selected.status == "failed":
            self.take_back()
        else:
            self.replying.edit(self.at)

    def leave_edit(self) -> None:
        """Closes the editor."""
        self.replying.leave()
        self.read()

    def copy_reply(self) -> None:
        """Puts the selected reply where the terminal keeps what was copied."""
        exchange = self.selected
        if exchange is not None and exchange.text:
            self.app.copy_to_clipboard(exchange.text)
            self._telling.note("Copied.")

    def show_links(self) -> None:
        """Asks which of the selected reply's links to open."""
        addresses = links(self.selected.text) if self.selected is not None else ()
        if addresses:
            self.follow(*addresses)
        else:
            self._telling.note("There is no link in that reply.")

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        # Only addresses on the web are links, whatever else a model wrote.
        self.follow(
            *[each for each in links(event.markdown.source) if unquote(each) == event.href][:1]
        )

    def follow(self, *addresses: str) -> None:
        """Ask which of the links to open, if any."""
        if not addresses:
            return

        def open_it(address: str | None) -> None:
            if address is not None:
                self.app.open_url(address)

        self.app.push_screen(LinkPicker(addresses), open_it)
