"""Draw the pictures of docs/how-to/terminal-chat.md from the running chat: ``python docs/pictures/make_tui.py``.

The chat runs on the backend without a model, in a temporary home with a fixed clock. So every run draws the same bytes.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before the imports: moments are shown in the time of the place, which must not show in a picture.
os.environ["TZ"] = "UTC"
os.environ.pop("NO_COLOR", None)
time.tzset()

from pace import steady
from textual.screen import Screen

import personalpeft
from personalpeft import Runtime
from personalpeft_app.tui.app import Tui
from personalpeft_app.tui.controls import ForgettableList
from personalpeft_app.tui.dialogs import BlindCompareDialog, ConfirmDialog
from personalpeft_app.tui.user_session import TaskHandle, UserSession

HERE = Path(__file__).parent
_QUESTIONS = (
    ("How do I boil an egg?", "Eight minutes in boiling water, then cold water."),
    ("What shall I cook tonight?", "Lentil soup: forty minutes, one pot."),
    ("How long does rice take?", "Twelve minutes, and ten more with the lid on."),
    ("How much salt in pasta water?", "Ten grams for each litre."),
    ("Can I freeze bread?", "Yes, sliced, for three months."),
    ("Which oil for frying?", "Rapeseed oil; it stands 200 °C."),
    ("Is raw milk safe?", "Not for children; boil it first."),
    ("How do I peel garlic?", "Crush it with the flat of the knife."),
)


_LONG = """\
## Eight minutes

Put it in **boiling** water, wait *eight* minutes, then:

1. Pour the water off
2. Cover it with cold water; that stops the cooking, and the shell comes off in large pieces
   - from the fridge: one minute more

| size | minutes |
| --- | --- |
| M | 7 |
| L | 8 |

> Fresh eggs peel badly. [Why that is](https://example.org/eggs)
"""


def _live(runtime: Runtime) -> None:
    ada = runtime.user("ada")
    for half in (_QUESTIONS[:4], _QUESTIONS[4:]):
        for question, answer in half:
            ada.feedback(ada.chat(question), edit=answer)
        ada.learn()
    ada.feedback(ada.chat("And exactly?"), edit=_LONG)
    ada.feedback(ada.chat("How much is a cup?"), comment="Use metric units.")
    for fact in ("I cook for two.", "My oven has no fan.", "I do not eat fish."):
        ada.remember(fact)


async def _draw(
    runtime: Runtime,
    name: str,
    size: tuple[int, int],
    play: Callable[[Tui], None],
    *keys: str,
    over: type[Screen[Any]] = Screen,
) -> None:
    """``over`` is what comes over the conversation then."""
    app = Tui(UserSession(runtime, runtime.user("ada")), TaskHandle(""))
    async with app.run_test(size=size) as pilot:
        while "load" in app._model.tasks or app._model.state.stack is None:
            await pilot.pause(0.05)
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
            while app._chat.is_answering:
                await pilot.pause(0.05)
        play(app)
        while not isinstance(app.screen, over):
            await pilot.pause(0.05)
        for _ in range(10):
            await pilot.pause(0.1)
        drawn = app.export_screenshot(title="personalpeft tui")
        await app.action_quit()
    # The names inside are drawn by chance for each picture.
    (HERE / f"{name}.svg").write_text(re.sub(r"terminal-\d+", f"{name}", drawn), "utf-8")
    print(f"docs/pictures/{name}.svg")


def _forget(app: Tui) -> None:
    app.action_open("memory")
    memory = app.query_one("#memory", ForgettableList)
    memory.focus()
    memory.action_act("forget")


def _typed(text: str) -> tuple[str, ...]:
    return tuple({" ": "space", "?": "question_mark"}.get(each, each) for each in text)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        personalpeft.open(folder, backend="fake", clock=steady()) as runtime,
    ):
        _live(runtime)

        async def draw() -> None:
            asked = (*_typed("What goes with leeks?"), "enter")
            await _draw(
                runtime,
                "tui",
                (132, 34),
                lambda app: app.action_open("revisions"),
                *asked,
                "f2",
                "down",
                "down",
                "enter",
            )
            again = ("f2", "down", "enter", "up")
            long = ("f2", "down", "down", "down", "enter", "up")
            await _draw(runtime, "tui-reply", (80, 24), lambda app: None, *long)
            await _draw(runtime, "tui-forget", (110, 30), _forget, *long, over=ConfirmDialog)
            await _draw(runtime, "tui-edit", (80, 24), lambda app: app.action_edit_reply(), *again)
            await _draw(runtime, "tui-why", (110, 30), lambda app: app.action_why(), *again)
            await _draw(
                runtime,
                "tui-compare",
                (80, 24),
                lambda app: app.action_compare(),
                *again,
                over=BlindCompareDialog,
            )

        asyncio.run(draw())


if __name__ == "__main__":
    main()
