"""Screens of the terminal chat at three sizes, as they are stored in ``screens``.

After a wanted change write them anew with ``UPDATE_SCREENS=1 pytest tests/fast/tui``, and look at the
difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from runtime_makers import Time, correct, opened
from tui_makers import Seat, sit_down

SCREENS = Path(__file__).with_name("screens")
# Ids, and times, which depend on the time zone.
VOLATILE = re.compile(r"\b[0-9a-f]{8,12}\b|\b\d\d-\d\d \d\d:\d\d\b")
SIZES = {"small": (50, 18), "usual": (80, 24), "wide": (140, 40)}


async def empty(seat: Seat) -> None:
    await seat.sees("Ask something")


async def conversation(seat: Seat) -> None:
    await seat.ask("How do I boil an egg?")
    await seat.ask("And a hard one?")
    await seat.press("up", "+")
    await seat.until(lambda: any(s.payload.get("value") for s in seat.user.signals()), "a rating")
    await seat.press("e")
    await seat.sees("^S save")
    await seat.press("ctrl+a", "ctrl+k")
    await seat.type("Ten minutes.")
    await seat.press("ctrl+s")
    await seat.sees("Ten minutes.")


async def stack(seat: Seat) -> None:
    if "always" not in seat.screen:
        await seat.press("f3")
    await seat.sees("always")


async def commands(seat: Seat) -> None:
    await seat.press("f1")


STATES: dict[str, Callable[[Seat], Awaitable[None]]] = {
    "empty": empty,
    "conversation": conversation,
    "stack": stack,
    "keys": commands,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("state", STATES)
def test_the_screen_is_the_stored_one(tmp_path: Path, state: str, size: str) -> None:
    seen: list[str] = []

    async def play(seat: Seat) -> None:
        await STATES[state](seat)
        seat.app.clear_notifications()
        await seat.pilot.wait_for_scheduled_animations()
        await seat.pilot.pause(0.5)
        seen.append(seat.screen)

    with opened(tmp_path / "home", clock=Time().clock()) as runtime:
        if state == "stack":
            ada = runtime.user("ada")
            correct(ada, 5)
            assert ada.learn().live
        sit_down(runtime, play, size=SIZES[size])
    screen = VOLATILE.sub(lambda match: "x" * len(match[0]), seen[-1]) + "\n"
    stored = SCREENS / f"{state}-{size}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        stored.write_text(screen, "utf-8")
    assert screen == stored.read_text("utf-8")
