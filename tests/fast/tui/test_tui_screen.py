"""The screen's layout at 80 by 24 and wider, without colours, and its help and commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tui_makers import TuiDriver, run_tui

from personalpeft import Runtime
from personalpeft_app.tui.keys import KEYS

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[3]


def test_a_small_screen_shows_only_the_conversation(learned: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("something")
        reply = learned.user("ada").turns()[0].reply
        *_, question, answer, actions, blank, top, box, bottom, foot = ui.screen.splitlines()
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
        assert len(ui.screen.splitlines()) == 24
        assert max(map(len, ui.screen.splitlines())) <= 80

    run_tui(learned, scenario)


def test_a_narrow_column_separates_no_key_from_its_label(learned: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("something")
        await ui.wait_for_text("w why")

    run_tui(learned, scenario, size=(100, 30))
    run_tui(learned, scenario, size=(62, 24))


def test_a_wide_screen_shows_conversations_and_stack_beside_it(learned: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.wait_for_text("question 3")
        await ui.wait_for_text("always")
        assert "Stack  Revisions  Report  Why" in ui.screen

    run_tui(learned, scenario, size=(140, 40))


def test_one_key_opens_and_closes_the_panel(learned: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        assert "Revisions" not in ui.screen
        await ui.press("f3")
        await ui.wait_for_text("Revisions")
        await ui.press("f3")
        assert "Revisions" not in ui.screen

    run_tui(learned, scenario)


def test_one_key_lists_all_keys(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.press("f1")
        for key in KEYS["Everywhere"]:
            assert key.does in ui.screen
        await ui.press("escape")
        assert "Everywhere" not in ui.screen

    run_tui(runtime, scenario)


def test_the_palette_finds_every_command(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.press("ctrl+p")
        await ui.type("bli")
        await ui.wait_for_text("Compare blind")
        await ui.press("enter")
        await ui.wait_for_message("Ask something first")

    run_tui(runtime, scenario)


def test_every_action_named_by_a_key_exists(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        for command in ui.app.get_system_commands(ui.app.screen):
            assert callable(command.callback)
        for node in (ui.app, *ui.app.screen.walk_children()):
            for _, binding in node._bindings:
                name = binding.action.removeprefix("app.").partition("(")[0]
                if binding.action.startswith("app."):
                    assert hasattr(ui.app, f"action_{name}"), binding.action

    run_tui(runtime, scenario)


def test_no_color_emits_no_colours(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("one")
        styles = [
            segment.style
            for strip in ui.app.screen._compositor.render_strips()
            for segment in strip.apply_filter(
                ui.app._filters[-1], ui.app.screen.background_colors[1]
            )
            if segment.style is not None
        ]
        assert all(style.color is None or style.color.is_default for style in styles)
        assert all(style.bgcolor is None or style.bgcolor.is_default for style in styles)

    run_tui(runtime, scenario)


def test_the_screen_opens_without_torch() -> None:
    program = "import sys, personalpeft_app.tui.app, personalpeft_app.tui.user_session, personalpeft.runtime; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_without_a_terminal_the_error_names_an_alternative() -> None:
    program = [sys.executable, "-m", "personalpeft_app", "tui"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "personalpeft chat" in done.stderr


def test_the_documentation_names_every_key() -> None:
    page = (ROOT / "docs/how-to/terminal-chat.md").read_text("utf-8")
    for keys in KEYS.values():
        for key in keys:
            assert f"| {key.press} | {key.does} |" in page
