"""Keys one after another, also where many come at once: over a slow line, or while the machine has much to do.

Textual hands a key to the widget that has the focus and goes on with the next one at once, while the first is still on its way up
to the binding that it is meant for. So of "F4, a fact, Enter" that arrive together the fact would be typed, and asked, before F4 is heard.

Invariant: a key, or a text that is pasted, is handed on only when the one before it has been all the way; and always within ``_PATIENCE``.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from textual import events
from textual.app import App
from textual.message import Message
from textual.widget import Widget

# How long a key is waited for, in seconds: a widget that is taken off the screen loses what is on its way.
_PATIENCE = 2.0


class OrderedKeyInput(App[None]):
    """An app that takes its keys so."""

    class Passed(Message, namespace="key_input"):
        """Goes behind a key, through the same queues, and so arrives when nothing more comes of it."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

    def __init__(self, *, ansi_color: bool | None) -> None:
        super().__init__(ansi_color=ansi_color)
        self._typed: deque[events.Event] = deque()
        self._number = 0
        # Where the key went that is on its way, None where none is.
        self._way: Widget | None = None

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            self._typed.append(event)
            if self._way is None or not self._way.is_attached:
                await self._next()
            else:
                self.set_timer(_PATIENCE, partial(self._passed, self._number))
        else:
            await super().on_event(event)

    def on_key_input_passed(self, event: Passed) -> None:
        event.stop()
        # Whoever wants the focus has asked for it by now, and gets it before this is done.
        self.call_later(self._passed, event.number)

    async def _passed(self, number: int) -> None:
        if number == self._number:
            await self._next()

    async def _next(self) -> None:
        self._way = None
        while self._typed and self._way is None:
            event, way = self._typed.popleft(), self.focused or self.screen
            self._number += 1
            await super().on_event(event)
            self._way = way if way.post_message(self.Passed(self._number)) else None
