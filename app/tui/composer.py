"""Where one types: a question, and in other modes a comment or a fact. What is typed in a mode stays there until it is kept."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

Mode: TypeAlias = Literal["ask", "comment", "remember"]

_TITLES: dict[Mode, str] = {
    "ask": "",
    "comment": "a rule to follow from now on",
    "remember": "a fact about you",
}
_HINTS: dict[Mode, str] = {
    "ask": "Ask something. Enter sends, ^J begins a new line.",
    "comment": "Such as: Use metric units. Enter keeps it, Esc goes back.",
    "remember": "Such as: My dog is called Biscuit. Enter keeps it, Esc goes back.",
}
# The second comes only from terminals that tell it apart from Enter.
_NEW_LINE = ("ctrl+j", "shift+enter")


class Composer(TextArea):
    """Several lines of text; Enter hands them over and leaves them standing until ``taken`` is called."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+up", "app.read", "To the replies")]

    class Sent(Message):
        """Enter was pressed on a text that is not empty. ``key`` is the conversation that it was typed in."""

        def __init__(self, key: str, mode: Mode, text: str) -> None:
            super().__init__()
            self.key = key
            self.mode = mode
            self.text = text

    def __init__(self) -> None:
        super().__init__(id="composer", highlight_cursor_line=False, placeholder=_HINTS["ask"])
        self.cursor_blink = False
        self.mode: Mode = "ask"
        self._drafts: dict[tuple[str, Mode], str] = {}
        self._key = ""

    def turn(self, key: str, mode: Mode) -> None:
        """Goes to what was typed in a mode of a conversation. Facts are of no conversation."""
        self._drafts[self._place(self._key, self.mode)] = self.text
        self._key, self.mode = key, mode
        self.load_text(self._drafts.get(self._place(key, mode), ""))
        self.move_cursor(self.document.end)
        self.placeholder = _HINTS[mode]
        self.border_title = _TITLES[mode]
        self.set_class(mode != "ask", "-saying")

    def taken(self, sent: Sent) -> None:
        """What was sent is in good hands: nothing of it is needed here. What was typed behind it meanwhile stays."""
        place = self._place(sent.key, sent.mode)
        here = place == self._place(self._key, self.mode)
        left = (self.text if here else self._drafts.get(place, "")).lstrip().removeprefix(sent.text)
        if here:
            self.load_text(left)
            self.move_cursor(self.document.end)
        else:
            self._drafts[place] = left

    def give_back(self, key: str, text: str) -> bool:
        """A question that could not be asked comes back where one typed it; false where something else stands there now."""
        place = self._place(key, "ask")
        here = place == self._place(self._key, self.mode)
        if self.text.strip() if here else self._drafts.get(place, "").strip():
            return False
        if here:
            self.load_text(text)
            self.move_cursor(self.document.end)
        else:
            self._drafts[place] = text
        return True

    def unsent(self) -> list[str]:
        """Everything that was typed and not sent."""
        everything = {**self._drafts, self._place(self._key, self.mode): self.text}
        return [text.strip() for text in everything.values() if text.strip()]

    @staticmethod
    def _place(key: str, mode: Mode) -> tuple[str, Mode]:
        return ("" if mode == "remember" else key, mode)

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.prevent_default()
            event.stop()
            if self.text.strip():
                self.post_message(self.Sent(self._key, self.mode, self.text.strip()))
        elif event.key in _NEW_LINE:
            event.prevent_default()
            event.stop()
            self.insert("\n")
        elif event.key == "up" and not self.text:
            event.prevent_default()
            event.stop()
            await self.run_action("app.read")

    def action_copy(self) -> None:
        """Ctrl-C copies what is selected; with nothing selected it stops, as everywhere in a terminal."""
        if self.selected_text:
            super().action_copy()
        else:
            self.app.run_worker(self.app.run_action("app.interrupt"))
