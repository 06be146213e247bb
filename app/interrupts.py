"""Handle Ctrl-C and other signals: the first requests a clean stop, the second stops at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from personalpeft_app.options import GlobalOptions


@contextmanager
def interruptible(
    stop_requested: Callable[[], None] = lambda: None, number: signal.Signals = signal.SIGINT
) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the signal was received.

    The second signal raises ``KeyboardInterrupt``. An ignored signal (a background job of a shell)
    stays ignored.

    Args:
        stop_requested: Called at the first signal.
        number: The signal.
    """
    received = False

    def receive(signal_number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received:
            raise KeyboardInterrupt
        received = True
        stop_requested()

    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        yield lambda: False
        return
    signal.signal(number, receive)
    try:
        yield lambda: received
    finally:
        signal.signal(number, before)


@contextmanager
def long_call(
    common: GlobalOptions, note: str = "Stopping after this step; Ctrl-C again stops at once."
) -> Iterator[dict[str, Any]]:
    """Show the bar, and yield ``progress`` and ``cancelled`` for a long call of the library.

    The first Ctrl-C prints the note, and stops the call after its running step.
    """
    with interruptible(lambda: common.display.print(note)) as cancelled, common.display:
        yield {"progress": common.display, "cancelled": cancelled}
