"""Sending, cancelling and regenerating in the terminal chat, with several conversations."""

from __future__ import annotations

import threading

import pytest
from tui_makers import StepGate, TuiDriver, run_tui

from personalpeft import Runtime, User
from personalpeft.backends.fake import FakeBackend
from personalpeft.errors import Busy


def test_a_prompt_is_answered_and_recorded(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("Hello there")
        (turn,) = runtime.user("ada").turns()
        assert turn.messages[-1].content == "Hello there"
        await ui.wait_for_text(turn.reply)
        assert "› Hello there" in ui.screen
        assert ui.composer_text == ""

    run_tui(runtime, scenario)


def test_a_conversation_keeps_its_context(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("one")
        await ui.ask("two")
        second, first = runtime.user("ada").turns()
        assert [each.content for each in second.messages] == ["one", first.reply, "two"]

    run_tui(runtime, scenario)


@pytest.mark.exhaustive
def test_several_lines_are_one_prompt(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.type("one")
        await ui.press("ctrl+j")
        await ui.ask("two")
        (turn,) = runtime.user("ada").turns()
        assert turn.messages[-1].content == "one\ntwo"

    run_tui(runtime, scenario)


@pytest.mark.exhaustive
def test_a_prompt_sent_while_the_model_loads_is_queued_and_says_so(runtime: Runtime) -> None:
    there = threading.Event()

    async def scenario(ui: TuiDriver) -> None:
        await ui.send("early")
        await ui.wait_for_text("waits for the model")
        assert not runtime.user("ada").turns()
        there.set()
        await ui.wait_until(lambda: runtime.user("ada").turns(), "the reply")

    run_tui(runtime, scenario, load=lambda: there.wait(20) and None)


@pytest.mark.exhaustive
def test_a_prompt_cancelled_while_the_model_loads_returns_to_the_composer(
    runtime: Runtime,
) -> None:
    there = threading.Event()

    async def scenario(ui: TuiDriver) -> None:
        await ui.send("early")
        await ui.wait_for_text("waits for the model")
        await ui.press("escape")
        await ui.wait_until(lambda: ui.composer_text == "early", "the question's return")
        there.set()

    run_tui(runtime, scenario, load=lambda: there.wait(20) and None)
    assert not runtime.user("ada").turns()


def test_cancelling_takes_one_step_and_keeps_the_partial_reply(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(ui: TuiDriver) -> None:
        gate = StepGate(monkeypatch)
        await ui.send("long")
        gate.allow(2)
        await ui.wait_until(lambda: gate.steps == 2, "two steps")
        await ui.press("escape")
        gate.allow(20)
        await ui.wait_until(lambda: runtime.user("ada").turns(), "the end")
        (turn,) = runtime.user("ada").turns()
        assert turn.finish_reason == "cancelled"
        assert turn.usage.completion_tokens <= 3
        await ui.wait_for_text("stopped")

    run_tui(runtime, scenario)


def test_typed_text_survives_an_error(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(ui: TuiDriver) -> None:
        def busy(*args: object, **options: object) -> None:
            raise Busy("Too many wait.", hint="Try again in a moment.")

        with monkeypatch.context() as patch:
            patch.setattr(User, "stream", busy)
            await ui.send("important words")
            await ui.wait_for_message("Too many wait.")
        assert "Try again in a moment." in ui.notifications
        assert ui.composer_text == "important words"
        await ui.press("enter")
        await ui.wait_until(lambda: runtime.user("ada").turns(), "the reply")

    run_tui(runtime, scenario)


@pytest.mark.exhaustive
def test_a_failed_prompt_can_be_retried_while_another_is_typed(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(ui: TuiDriver) -> None:
        typed = threading.Event()

        def late(*args: object, **options: object) -> None:
            assert typed.wait(20)
            raise Busy("Too many wait.", hint="Try again in a moment.")

        with monkeypatch.context() as patch:
            patch.setattr(User, "stream", late)
            await ui.send("first")
            await ui.type("second")
            typed.set()
            await ui.wait_for_text("✗ Too many wait.")
        assert ui.composer_text == "second"
        await ui.press("ctrl+r")
        await ui.wait_until(lambda: runtime.user("ada").turns(), "the reply")
        assert runtime.user("ada").turns()[0].messages[-1].content == "first"

    run_tui(runtime, scenario)


@pytest.mark.exhaustive
def test_a_regenerated_reply_replaces_the_old_one(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("one")
        await ui.press("ctrl+r")
        await ui.wait_until(lambda: len(runtime.user("ada").turns()) == 2, "another reply")
        new, old = runtime.user("ada").turns()
        assert new.messages == old.messages
        assert new.sampling.seed != old.sampling.seed
        await ui.wait_until_idle()
        assert ui.screen.count("› one") == 1

    run_tui(runtime, scenario)


@pytest.mark.exhaustive
def test_conversations_are_separate_and_reload_from_the_ledger(runtime: Runtime) -> None:
    async def first(ui: TuiDriver) -> None:
        await ui.ask("about cats")
        await ui.press("ctrl+n")
        await ui.ask("about dogs")
        assert len(runtime.user("ada").turns()[0].messages) == 1
        assert "about cats" not in ui.screen

    async def second(ui: TuiDriver) -> None:
        await ui.press("f2")
        await ui.wait_for_text("about cats")
        assert "about dogs" in ui.screen
        await ui.press("down", "down", "enter")
        await ui.wait_for_text("› about cats")
        await ui.ask("and more of them")
        assert len(runtime.user("ada").turns()[0].messages) == 3

    run_tui(runtime, first)
    run_tui(runtime, second)


@pytest.mark.exhaustive
def test_a_draft_is_restored_when_its_conversation_is_reopened(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("one")
        await ui.type("half a thought")
        await ui.press("ctrl+n")
        assert ui.composer_text == ""
        await ui.press("f2", "down", "enter")
        assert ui.composer_text == "half a thought"

    app = run_tui(runtime, scenario)
    assert app.unsent == ["half a thought"]


@pytest.mark.exhaustive
def test_prompts_missing_from_the_ledger_are_returned_on_exit(runtime: Runtime) -> None:
    there = threading.Event()

    async def scenario(ui: TuiDriver) -> None:
        # One prompt waits for the model and a second for the first; a draft is open in another
        # conversation.
        for text in ("first", "second"):
            await ui.send(text)
        await ui.wait_for_text("waits for the model")
        await ui.press("ctrl+n")
        await ui.type("half a thought")
        await ui.app.action_quit()
        there.set()
        assert sorted(ui.app.unsent) == ["first", "half a thought", "second"]

    run_tui(runtime, scenario, load=lambda: there.wait(20) and None)


@pytest.mark.exhaustive
def test_an_open_edit_is_returned_on_exit_unless_it_changes_nothing(
    runtime: Runtime,
) -> None:
    async def open_it(ui: TuiDriver) -> None:
        await ui.ask("one")
        await ui.open_editor()

    async def change_it(ui: TuiDriver) -> None:
        await open_it(ui)
        await ui.type(" but better")

    assert run_tui(runtime, open_it).unsent == []
    (text,) = run_tui(runtime, change_it).unsent
    assert text.endswith(" but better")


@pytest.mark.exhaustive
def test_an_open_edit_survives_another_conversation_and_another_reply(
    runtime: Runtime,
) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("one")
        await ui.open_editor()
        await ui.type(" unfinished")
        await ui.press("ctrl+n")
        await ui.ask("two")
        await ui.press("f2", "down", "enter")
        await ui.wait_for_text("› one")
        await ui.press("up", "e")
        await ui.wait_for_text("unfinished")
        await ui.press("ctrl+r")
        await ui.wait_until(lambda: len(runtime.user("ada").turns()) == 3, "another reply")

    (text,) = run_tui(runtime, scenario).unsent
    assert text.endswith(" unfinished")


def test_an_error_in_a_background_thread_is_a_message_and_loses_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(ui: TuiDriver) -> None:
        def broken(*args: object, **options: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(User, "stream", broken)
            await ui.send("words")
            await ui.wait_for_message("This is a bug in personalpeft: ZeroDivisionError")
        assert ui.composer_text == "words"

    run_tui(runtime, scenario, bugs=True)


def test_user_and_model_text_is_never_markup(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("[bold]not markup[/] $x")
        assert "› [bold]not markup[/] $x" in ui.screen
        await ui.press("f2")
        await ui.wait_for_text("[bold]not markup")
        assert "\\x1b]0;title\\x07[red]" in ui.screen

    monkeypatch.setattr(
        FakeBackend, "decode", lambda self, tokens: "\x1b]0;title\x07[red]" if tokens else ""
    )
    run_tui(runtime, scenario)


@pytest.mark.exhaustive
def test_keys_pressed_in_a_burst_act_in_order(runtime: Runtime) -> None:
    ada = runtime.user("ada")

    async def scenario(ui: TuiDriver) -> None:
        ui.burst("f4", *"Biscuit", "enter")
        await ui.wait_until(ada.items, "the fact")
        ui.burst(*"one", "enter", "ctrl+n", *"two", "enter")
        await ui.wait_until(lambda: len(ada.turns()) == 2, "both replies")
        await ui.wait_until_idle()
        ui.burst("up", "plus", "c", *"short", "enter", "f1", "escape", *"half a thought")
        await ui.wait_until(lambda: len(ada.signals()) == 3, "the feedback signals")
        await ui.wait_until(lambda: ui.composer_text == "half a thought", "the rest")

    run_tui(runtime, scenario)
    assert [item.text for item in ada.items()] == ["Biscuit", "short"]
    assert [len(turn.messages) for turn in ada.turns()] == [1, 1]
    assert sorted(turn.messages[0].content for turn in ada.turns()) == ["one", "two"]
