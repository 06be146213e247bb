"""Screens of the terminal chat at three sizes match those stored in ``screens``.

After an intended change run ``UPDATE_SCREENS=1 pytest tests/fast/tui`` and review the difference.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable
from itertools import product
from pathlib import Path

import pytest
from example_counts import all_cases
from runtime_makers import FakeTime, correct, open_runtime
from tui_makers import TuiDriver, run_tui

SCREENS = Path(__file__).with_name("screens")
# Ids and times vary; times also depend on the time zone. On a busy machine Textual does not always
# draw the line under the active tab.
VOLATILE = re.compile(r"\b[0-9a-f]{8,12}\b|\b\d\d-\d\d \d\d:\d\d\b|[━╸╺]+")
# The number of successive polls that must show the same screen.
REST = 4
SIZES = {"small": (50, 18), "usual": (80, 24), "wide": (140, 40)}


def without_volatile(screen: str) -> str:
    return VOLATILE.sub(lambda match: "x" * len(match[0]), screen)


async def empty(ui: TuiDriver) -> None:
    await ui.wait_for_text("Ask something")


async def conversation(ui: TuiDriver) -> None:
    await ui.ask("How do I boil an egg?")
    await ui.ask("And a hard one?")
    await ui.press("up", "+")
    await ui.wait_until(lambda: any(s.payload.get("value") for s in ui.user.signals()), "a rating")
    await ui.press("e")
    await ui.wait_for_text("^S save")
    await ui.press("ctrl+a", "ctrl+k")
    await ui.type("Ten minutes.")
    notes = len(ui.messages)
    await ui.press("ctrl+s")
    await ui.wait_until(lambda: len(ui.messages) > notes, "a note that the edit is stored")
    await ui.wait_for_text("Ten minutes.")


async def stack(ui: TuiDriver) -> None:
    if "always" not in ui.screen:
        await ui.press("f3")
    await ui.wait_for_text("always")


async def commands(ui: TuiDriver) -> None:
    await ui.press("f1")


STATES: dict[str, Callable[[TuiDriver], Awaitable[None]]] = {
    "empty": empty,
    "conversation": conversation,
    "stack": stack,
    "keys": commands,
}


# The usual ones: each size, and the two states that fill the screen most.
@pytest.mark.parametrize(
    ("state", "size"),
    all_cases(
        product(STATES, SIZES),
        usual=[("conversation", "small"), ("conversation", "wide"), ("stack", "usual")],
    ),
)
def test_the_screen_matches_the_stored_one(tmp_path: Path, state: str, size: str) -> None:
    seen: list[str] = []

    async def scenario(ui: TuiDriver) -> None:
        await STATES[state](ui)
        await ui.app.workers.wait_for_complete()
        # On a busy machine the last notification or row is drawn late: wait until the screen is
        # stable.
        end = time.monotonic() + 20
        while time.monotonic() < end and (
            ui.app.query("Toast") or seen[-REST:] != [ui.screen] * REST
        ):
            ui.app.clear_notifications()
            await ui.pilot.wait_for_scheduled_animations()
            await ui.pilot.pause(0.1)
            seen.append(ui.screen)

    with open_runtime(tmp_path / "home", clock=FakeTime().clock()) as runtime:
        if state == "stack":
            ada = runtime.user("ada")
            correct(ada, 5)
            assert ada.learn().live
        run_tui(runtime, scenario, size=SIZES[size])
    screen = without_volatile(seen[-1]) + "\n"
    stored = SCREENS / f"{state}-{size}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        stored.write_text(screen, "utf-8")
    assert screen == without_volatile(stored.read_text("utf-8"))
