"""Changes by other processes appear, and confirmed deletions are carried out."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from runtime_makers import correct
from tui_makers import StepGate, TuiDriver, run_tui

import personalpeft
from personalpeft import Runtime, TrainingStatus, User
from personalpeft.errors import HomeError
from personalpeft_app.tui import app as screen
from personalpeft_app.tui.controls import ForgettableList
from personalpeft_app.tui.user_session import ModelState

pytestmark = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "WATCH_SECONDS", 0.05)


def other(runtime: Runtime) -> Runtime:
    """A second runtime on the same home."""
    return personalpeft.open(runtime.settings.home, backend="fake")


def test_a_turn_of_another_process_appears_in_its_conversation_or_as_a_new_one(
    runtime: Runtime,
) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("about cats")
        await ui.type("half a thought")
        (first,) = runtime.user("ada").turns()
        with other(runtime) as beside:
            ada = beside.user("ada")
            history = [
                {"role": "user", "content": "about cats"},
                {"role": "assistant", "content": first.reply},
            ]
            ada.chat([*history, {"role": "user", "content": "and more of them"}])
            await ui.wait_for_text("› and more of them")
            ada.feedback(first, rating=1)
            await ui.wait_for_text("▲ good")
            ada.chat("about dogs")
        assert ui.composer_text == "half a thought"
        assert "about dogs" not in ui.screen
        await ui.press("f2")
        await ui.wait_for_text("about dogs")
        assert ui.screen.count("› about cats") == 1
        # The conversation continues here from the other process's turns.
        await ui.press("escape")
        await ui.press(*["backspace"] * len("half a thought"))
        await ui.ask("so?")
        assert [m.content for m in runtime.user("ada").turns()[0].messages][2] == "and more of them"

    run_tui(runtime, scenario)


def test_polling_never_shows_a_turn_twice(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        for number in range(3):
            await ui.ask(f"question {number}")
            await ui.pilot.pause(0.2)
        await ui.press("ctrl+r")
        await ui.wait_until(lambda: len(runtime.user("ada").turns()) == 4, "another reply")
        await ui.pilot.pause(0.3)
        assert [ui.screen.count(f"› question {number}") for number in range(3)] == [1, 1, 1]
        assert len(runtime.user("ada").conversations()) == 1

    run_tui(runtime, scenario, size=(80, 40))


def test_a_fact_is_erased_from_the_panel_after_confirmation(runtime: Runtime) -> None:
    ada = runtime.user("ada")
    ada.remember("My dog is called Biscuit.")
    ada.remember("I live in Ghent.")

    async def scenario(ui: TuiDriver) -> None:
        ui.app.action_open("memory")
        await ui.wait_for_text("I live in Ghent.")
        ui.app.query_one("#memory", ForgettableList).focus()
        await ui.request_erasure()
        await ui.press("escape")
        assert len(ada.items()) == 2
        await ui.request_erasure()
        # Without an explicit choice the answer is no.
        await ui.press("enter")
        assert len(ada.items()) == 2
        await ui.request_erasure()
        await ui.press("y")
        await ui.wait_for_text("FORGOTTEN")
        await ui.press("escape")
        await ui.wait_until(lambda: "Ghent" not in ui.screen, "the fact's end")
        assert [item.text for item in ada.items()] == ["My dog is called Biscuit."]
        assert "Biscuit" in ui.screen

    run_tui(runtime, scenario, size=(120, 40))


def test_an_edit_behind_a_reply_is_erased_from_why(learned: Runtime) -> None:
    ada = learned.user("ada")
    before = ada.layers()[0].head

    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("something new")
        await ui.press("up", "w")
        await ui.wait_for_text("edit: Ahoy! Answer 0.")
        items = ui.app.query_one("#why", ForgettableList)
        items.focus()
        await ui.press("down", "d")
        await ui.wait_for_text("signals would be erased")
        await ui.press("y")
        await ui.wait_for_text("FORGOTTEN")
        await ui.press("escape")
        await ui.wait_for_text("forgotten since")

    run_tui(learned, scenario, size=(120, 40))
    assert ada.layers()[0].head != before
    assert len(ada.signals()) == 4


def test_erasing_a_turn_removes_it_from_its_conversation(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("keep this")
        await ui.ask("a secret")
        await ui.press("up", "w")
        await ui.wait_for_text("this reply")
        ui.app.query_one("#why", ForgettableList).focus()
        await ui.request_erasure()
        await ui.press("y")
        await ui.wait_for_text("FORGOTTEN")
        await ui.press("escape")
        await ui.wait_until(lambda: "a secret" not in ui.screen, "the turn's end")
        assert "keep this" in ui.screen

    run_tui(runtime, scenario, size=(120, 40))


def test_a_failed_erasure_shows_a_message_and_changes_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = runtime.user("ada")
    ada.remember("My dog is called Biscuit.")
    forget = User.forget

    def full(self: User, item: str, *, dry_run: bool = False, **options: object) -> object:
        if dry_run:
            return forget(self, item, dry_run=True)
        raise HomeError("The disk is full.", hint="Free some space.")

    monkeypatch.setattr(User, "forget", full)

    async def scenario(ui: TuiDriver) -> None:
        ui.app.action_open("memory")
        await ui.wait_for_text("Biscuit")
        ui.app.query_one("#memory", ForgettableList).focus()
        await ui.request_erasure()
        await ui.press("y")
        await ui.wait_for_message("The disk is full.")
        # The message may cover the end of the line.
        assert "My dog" in ui.screen

    run_tui(runtime, scenario, size=(120, 40))
    assert len(ada.items()) == 1


def test_the_footer_shows_the_progress_of_another_processs_learn(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    now: list[TrainingStatus | None] = [
        TrainingStatus("style", "Learning", 3, 12, datetime(2026, 1, 1, tzinfo=UTC))
    ]
    monkeypatch.setattr(User, "training_status", lambda self: now[0])

    async def scenario(ui: TuiDriver) -> None:
        await ui.wait_for_text("Elsewhere: Learning style ━━······  25%")
        now[0] = None
        await ui.wait_until(lambda: "Elsewhere" not in ui.screen, "its end")

    run_tui(runtime, scenario)


def test_a_local_learn_is_not_shown_as_one_of_another_process(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = runtime.user("ada")
    correct(ada, 5)

    async def scenario(ui: TuiDriver) -> None:
        seen: list[str] = []
        gate = StepGate(monkeypatch)
        await ui.press("ctrl+l")
        await ui.wait_until(lambda: ada.training_status() is not None, "the learn")
        for _ in range(10):
            await ui.pilot.pause(0.05)
            seen.append(ui.screen.splitlines()[-1])
        gate.allow(10_000)
        await ui.wait_until(lambda: "learn" not in ui.app._model.tasks, "the end of the learn")
        assert not any("Elsewhere" in line for line in seen)

    run_tui(runtime, scenario)


def test_a_task_that_ends_during_shutdown_is_ignored(
    runtime: Runtime,
) -> None:
    ada = runtime.user("ada")
    correct(ada, 5)
    ada.learn()

    async def scenario(ui: TuiDriver) -> None:
        panel = ui.app._model
        standing = ModelState(layers=ada.layers(), revisions=ada.revisions())
        await panel.remove()
        await panel.show(standing)

    run_tui(runtime, scenario)
