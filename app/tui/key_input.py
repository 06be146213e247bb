"""Handle keys in order, even when many arrive at once over a slow line or on a busy machine.

Textual takes the next key while the one before still bubbles up to its binding. Of "F4, a fact,
Enter" that arrive together, it would type the fact and ask it before it handles F4.

Invariant: a key or a paste is dispatched once the one before it has bubbled up, or after
``_TIMEOUT_SECONDS``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

from textual import events
from textual.app import App
from textual.message import Message
from textual.widget import Widget

# A widget that is removed loses the messages in its queue.
_TIMEOUT_SECONDS = 2.0


class OrderedKeyInput(App[None]):
    """An app that handles keys in order."""

    @dataclass
    class KeyHandled(Message, namespace="key_input"):
        """Follows a key through the same queues, so it arrives once the key was handled."""

        number: int

    def __init__(self, *, ansi_color: bool | None) -> None:
        super().__init__(ansi_color=ansi_color)
        self._pending: deque[events.Event] = deque()
        self._number = 0
        # The widget that handles the current key.
        self._target: Widget | None = None

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            self._pending.append(event)
            if self._target is None or not self._target.is_attached:
                await self._dispatch_next()
            else:
                self.set_timer(_TIMEOUT_SECONDS, partial(self._finish, self._number))
        else:
            await super().on_event(event)

    def on_key_input_key_handled(self, event: KeyHandled) -> None:
        event.stop()
        # A widget that asked for the focus gets it before this callback runs.
        self.call_later(self._finish, event.number)

    async def _finish(self, number: int) -> None:
        if number == self._number:
            await self._dispatch_next()

    async def _dispatch_next(self) -> None:
        self._target = None
        while self._pending and self._target is None:
            event, target = self._pending.popleft(), self.focused or self.screen
            self._number += 1
            await super().on_event(event)
            self._target = target if target.post_message(self.KeyHandled(self._number)) else None
