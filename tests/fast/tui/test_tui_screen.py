"""What is on the screen: at 80 by 24 and wider, without colours, with help and commands at hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tui_makers import Seat, sit_down

from personalpeft import Runtime
from personalpeft_app.tui.keys import KEYS

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[3]


def test_a_small_screen_shows_the_conversation_alone(learned: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("something")
        reply = learned.user("ada").turns()[0].reply
        *_, question, answer, actions, blank, top, box, bottom, foot = seat.screen.splitlines()
        assert question == " ▌ › something"
        assert answer == f" ▌   {reply}"
        assert actions == " ▌   + good  - bad  e edit  c comment  r retry  y copy  w why"
        assert blank == ""
        assert (top[:3], box[:7], bottom[:3]) == (" ╭─", " │ Ask ", " ╰─")
        stack = learned.user("ada").stack().digest[:8]
        assert (
            foot
            == f" ada@{stack}                                              F1 help  ^P commands"
        )
        assert len(seat.screen.splitlines()) == 24
        assert max(map(len, seat.screen.splitlines())) <= 80

    sit_down(learned, play)


def test_a_wide_screen_shows_conversations_and_stack_beside_it(learned: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.sees("question 3")
        await seat.sees("always")
        assert "Stack  Revisions  Report  Why" in seat.screen

    sit_down(learned, play, size=(140, 40))


def test_the_panel_opens_and_closes_on_one_key(learned: Runtime) -> None:
    async def play(seat: Seat) -> None:
        assert "Revisions" not in seat.screen
        await seat.press("f3")
        await seat.sees("Revisions")
        await seat.press("f3")
        assert "Revisions" not in seat.screen

    sit_down(learned, play)


def test_one_key_lists_all_keys(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.press("f1")
        for key in KEYS["Everywhere"]:
            assert key.does in seat.screen
        await seat.press("escape")
        assert "Everywhere" not in seat.screen

    sit_down(runtime, play)


def test_the_palette_finds_every_command(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.press("ctrl+p")
        await seat.type("bli")
        await seat.sees("Compare blind")
        await seat.press("enter")
        await seat.hears("Ask something first")

    sit_down(runtime, play)


def test_every_action_that_a_key_names_is_there(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        for command in seat.app.get_system_commands(seat.app.screen):
            assert callable(command.callback)
        for node in (seat.app, *seat.app.screen.walk_children()):
            for _, binding in node._bindings:
                name = binding.action.removeprefix("app.").partition("(")[0]
                if binding.action.startswith("app."):
                    assert hasattr(seat.app, f"action_{name}"), binding.action

    sit_down(runtime, play)


def test_no_color_sends_no_colour(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def play(seat: Seat) -> None:
        await seat.ask("one")
        styles = [
            segment.style
            for strip in seat.app.screen._compositor.render_strips()
            for segment in strip.apply_filter(
                seat.app._filters[-1], seat.app.screen.background_colors[1]
            )
            if segment.style is not None
        ]
        assert all(style.color is None or style.color.is_default for style in styles)
        assert all(style.bgcolor is None or style.bgcolor.is_default for style in styles)

    sit_down(runtime, play)


def test_the_screen_is_there_without_torch() -> None:
    program = "import sys, personalpeft_app.tui.app, personalpeft_app.tui.user_session, personalpeft.runtime; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_without_a_terminal_it_names_another_way() -> None:
    program = [sys.executable, "-m", "personalpeft_app", "tui"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "personalpeft chat" in done.stderr


def test_the_page_names_every_key() -> None:
    page = (ROOT / "docs/how-to/terminal-chat.md").read_text("utf-8")
    for keys in KEYS.values():
        for key in keys:
            assert f"| {key.press} | {key.does} |" in page
