"""Handle Ctrl-C and other signals: the first requests a clean stop, the second stops at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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
