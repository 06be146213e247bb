"""The composer: takes a question, and in other modes a comment or a fact.

Each mode of each conversation keeps its draft until it is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from textual import events
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import TextArea

from personalpeft_app.tui.keys import bindings

Mode: TypeAlias = Literal["ask", "comment", "remember"]

_TITLES: dict[Mode, str] = {
    "ask": "",
    "comment": "a rule to follow from now on",
    "remember": "a fact about you",
}
_HINTS: dict[Mode, str] = {
    "ask": "Ask something. Enter sends, ^J begins a new line.",
    "comment": "Such as: Use metric units. Enter records it, Esc goes back.",
    "remember": "Such as: My dog is called Biscuit. Enter records it, Esc goes back.",
}
# Few terminals send the second apart from Enter.
_NEW_LINE = ("ctrl+j", "shift+enter")


class Composer(TextArea):
    """A text field. Enter sends the text, which stays until ``clear_sent``."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("In the prompt")

    @dataclass
    class Sent(Message):
        """The user sent a text. ``key`` is its conversation."""

        key: str
        mode: Mode
        text: str

    def __init__(self) -> None:
        super().__init__(id="composer", highlight_cursor_line=False, placeholder=_HINTS["ask"])
        self.cursor_blink = False
        self.mode: Mode = "ask"
        self._drafts: dict[tuple[str, Mode], str] = {}
        self._key = ""

    def set_mode(self, key: str, mode: Mode) -> None:
        """Show the draft of a mode of a conversation. A fact has no conversation."""
        self._drafts[self._draft_key(self._key, self.mode)] = self.text
        self._key, self.mode = key, mode
        draft_key = self._draft_key(key, mode)
        self._set_draft(draft_key, self._drafts.get(draft_key, ""))
        self.placeholder = _HINTS[mode]
        self.border_title = _TITLES[mode]
        self.set_class(mode != "ask", "-feedback")

    def clear_sent(self, sent: Sent) -> None:
        """Remove a text that was sent. Text typed after it stays."""
        key = self._draft_key(sent.key, sent.mode)
        self._set_draft(key, self._draft(key).lstrip().removeprefix(sent.text))

    def restore(self, key: str, text: str) -> bool:
        """Restore a question. Returns False if another text was typed in its place."""
        draft_key = self._draft_key(key, "ask")
        if self._draft(draft_key).strip():
            return False
        self._set_draft(draft_key, text)
        return True

    def unsent(self) -> list[str]:
        drafts = {**self._drafts, self._draft_key(self._key, self.mode): self.text}
        return [text.strip() for text in drafts.values() if text.strip()]

    @staticmethod
    def _draft_key(key: str, mode: Mode) -> tuple[str, Mode]:
        return ("" if mode == "remember" else key, mode)

    def _draft(self, draft_key: tuple[str, Mode]) -> str:
        if draft_key == self._draft_key(self._key, self.mode):
            return self.text
        return self._drafts.get(draft_key, "")

    def _set_draft(self, draft_key: tuple[str, Mode], text: str) -> None:
        self._drafts[draft_key] = text
        if draft_key == self._draft_key(self._key, self.mode):
            self.load_text(text)
            self.move_cursor(self.document.end)

    async def _on_key(self, event: events.Key) -> None:
        leaves = event.key == "up" and not self.text
        if not leaves and event.key not in ("enter", *_NEW_LINE):
            return
        event.prevent_default()
        event.stop()
        if leaves:
            await self.run_action("app.read")
        elif event.key in _NEW_LINE:
            self.insert("\n")
        elif self.text.strip():
            self.post_message(self.Sent(self._key, self.mode, self.text.strip()))

    def action_copy(self) -> None:
        """Copy the selection. Without one, Ctrl-C interrupts as everywhere in a terminal."""
        if self.selected_text:
            super().action_copy()
        else:
            self.app.run_worker(self.app.run_action("app.interrupt"))
