"""Ctrl-C, or another signal, as a wish that the work can hear: the first asks it to stop where nothing is lost, the second
stops it at once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible(
    stop_requested: Callable[[], None] = lambda: None, number: signal.Signals = signal.SIGINT
) -> Iterator[Callable[[], bool]]:
    """Gives the question whether Ctrl-C was pressed (or the signal ``number`` came); ``asked`` is called at the first, and the
    second raises ``KeyboardInterrupt``.

    Where interrupts are ignored (a job in the background of a shell), they stay ignored.
    """
    pressed = False

    def press(came: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        stop_requested()

    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        yield lambda: False
        return
    signal.signal(number, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(number, before)
