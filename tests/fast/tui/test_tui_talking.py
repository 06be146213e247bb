"""Asking, stopping, asking again, and several conversations."""

from __future__ import annotations

import threading

import pytest
from tui_makers import Gate, Seat, sit_down

from personalpeft import Runtime, User
from personalpeft.backends.fake import FakeBackend
from personalpeft.errors import Busy


def test_a_question_is_answered_and_kept(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("Hello there")
        (turn,) = runtime.user("ada").turns()
        assert turn.messages[-1].content == "Hello there"
        await seat.sees(turn.reply)
        assert "› Hello there" in seat.screen
        assert seat.typed == ""

    sit_down(runtime, play)


def test_a_conversation_is_kept_in_mind(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("one")
        await seat.ask("two")
        second, first = runtime.user("ada").turns()
        assert [each.content for each in second.messages] == ["one", first.reply, "two"]

    sit_down(runtime, play)


@pytest.mark.exhaustive
def test_several_lines_are_one_question(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.type("one")
        await seat.press("ctrl+j")
        await seat.ask("two")
        (turn,) = runtime.user("ada").turns()
        assert turn.messages[-1].content == "one\ntwo"

    sit_down(runtime, play)


@pytest.mark.exhaustive
def test_what_is_asked_while_the_model_loads_waits_and_says_so(runtime: Runtime) -> None:
    there = threading.Event()

    async def play(seat: Seat) -> None:
        await seat.send("early")
        await seat.sees("waits for the model")
        assert not runtime.user("ada").turns()
        there.set()
        await seat.until(lambda: runtime.user("ada").turns(), "the reply")

    sit_down(runtime, play, load=lambda: there.wait(20) and None)


@pytest.mark.exhaustive
def test_a_question_that_is_stopped_while_the_model_loads_is_back_where_it_was_typed(
    runtime: Runtime,
) -> None:
    there = threading.Event()

    async def play(seat: Seat) -> None:
        await seat.send("early")
        await seat.sees("waits for the model")
        await seat.press("escape")
        await seat.until(lambda: seat.typed == "early", "the question's return")
        there.set()

    sit_down(runtime, play, load=lambda: there.wait(20) and None)
    assert not runtime.user("ada").turns()


def test_stopping_takes_one_step_and_keeps_what_came(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(seat: Seat) -> None:
        gate = Gate(monkeypatch)
        await seat.send("long")
        gate.let(2)
        await seat.until(lambda: gate.steps == 2, "two steps")
        await seat.press("escape")
        gate.let(20)
        await seat.until(lambda: runtime.user("ada").turns(), "the end")
        (turn,) = runtime.user("ada").turns()
        assert turn.finish_reason == "cancelled"
        assert turn.usage.completion_tokens <= 3
        await seat.sees("stopped")

    sit_down(runtime, play)


def test_a_typed_text_survives_an_error(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(seat: Seat) -> None:
        def busy(*args: object, **asked: object) -> None:
            raise Busy("Too many wait.", hint="Try again in a moment.")

        with monkeypatch.context() as patch:
            patch.setattr(User, "stream", busy)
            await seat.send("important words")
            await seat.hears("Too many wait.")
        assert "Try again in a moment." in seat.said
        assert seat.typed == "important words"
        await seat.press("enter")
        await seat.until(lambda: runtime.user("ada").turns(), "the reply")

    sit_down(runtime, play)


def test_a_question_that_fails_while_one_types_another_stays_and_can_be_tried_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(seat: Seat) -> None:
        typed = threading.Event()

        def late(*args: object, **asked: object) -> None:
            assert typed.wait(20)
            raise Busy("Too many wait.", hint="Try again in a moment.")

        with monkeypatch.context() as patch:
            patch.setattr(User, "stream", late)
            await seat.send("first")
            await seat.type("second")
            typed.set()
            await seat.sees("✗ Too many wait.")
        assert seat.typed == "second"
        await seat.press("ctrl+r")
        await seat.until(lambda: runtime.user("ada").turns(), "the reply")
        assert runtime.user("ada").turns()[0].messages[-1].content == "first"

    sit_down(runtime, play)


@pytest.mark.exhaustive
def test_a_reply_that_is_asked_for_again_takes_the_place_of_the_old_one(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("one")
        await seat.press("ctrl+r")
        await seat.until(lambda: len(runtime.user("ada").turns()) == 2, "another reply")
        new, old = runtime.user("ada").turns()
        assert new.messages == old.messages
        await seat.rests()
        assert seat.screen.count("› one") == 1

    sit_down(runtime, play)


@pytest.mark.exhaustive
def test_conversations_are_apart_and_come_back_from_the_ledger(runtime: Runtime) -> None:
    async def first(seat: Seat) -> None:
        await seat.ask("about cats")
        await seat.press("ctrl+n")
        await seat.ask("about dogs")
        assert len(runtime.user("ada").turns()[0].messages) == 1
        assert "about cats" not in seat.screen

    async def second(seat: Seat) -> None:
        await seat.press("f2")
        await seat.sees("about cats")
        assert "about dogs" in seat.screen
        await seat.press("down", "down", "enter")
        await seat.sees("› about cats")
        await seat.ask("and more of them")
        assert len(runtime.user("ada").turns()[0].messages) == 3

    sit_down(runtime, first)
    sit_down(runtime, second)


@pytest.mark.exhaustive
def test_what_was_typed_in_a_conversation_is_there_when_one_comes_back(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("one")
        await seat.type("half a thought")
        await seat.press("ctrl+n")
        assert seat.typed == ""
        await seat.press("f2", "down", "enter")
        assert seat.typed == "half a thought"

    app = sit_down(runtime, play)
    assert app.unsent == ["half a thought"]


@pytest.mark.exhaustive
def test_what_the_ledger_does_not_have_when_one_leaves_is_handed_back(runtime: Runtime) -> None:
    there = threading.Event()

    async def play(seat: Seat) -> None:
        # One question waits for the model, a second behind it; and in another conversation something is being typed.
        for text in ("first", "second"):
            await seat.send(text)
        await seat.sees("waits for the model")
        await seat.press("ctrl+n")
        await seat.type("half a thought")
        await seat.app.action_quit()
        there.set()
        assert sorted(seat.app.unsent) == ["first", "half a thought", "second"]

    sit_down(runtime, play, load=lambda: there.wait(20) and None)


@pytest.mark.exhaustive
def test_an_edit_that_is_open_when_one_leaves_is_handed_back_and_one_that_changed_nothing_is_not(
    runtime: Runtime,
) -> None:
    async def open_it(seat: Seat) -> None:
        await seat.ask("one")
        await seat.edit()

    async def change_it(seat: Seat) -> None:
        await open_it(seat)
        await seat.type(" but better")

    assert sit_down(runtime, open_it).unsent == []
    (text,) = sit_down(runtime, change_it).unsent
    assert text.endswith(" but better")


@pytest.mark.exhaustive
def test_an_edit_that_is_open_outlives_another_conversation_and_another_reply(
    runtime: Runtime,
) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("one")
        await seat.edit()
        await seat.type(" unfinished")
        await seat.press("ctrl+n")
        await seat.ask("two")
        await seat.press("f2", "down", "enter")
        await seat.sees("› one")
        await seat.press("up", "e")
        await seat.sees("unfinished")
        await seat.press("ctrl+r")
        await seat.until(lambda: len(runtime.user("ada").turns()) == 3, "another reply")

    (text,) = sit_down(runtime, play).unsent
    assert text.endswith(" unfinished")


def test_a_mistake_in_a_thread_is_a_message_and_loses_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(seat: Seat) -> None:
        def broken(*args: object, **asked: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(User, "stream", broken)
            await seat.send("words")
            await seat.hears("bug: ZeroDivisionError()")
        assert seat.typed == "words"

    sit_down(runtime, play, bugs=True)


def test_what_anybody_wrote_is_text_and_never_markup(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("[bold]not markup[/] $x")
        assert "› [bold]not markup[/] $x" in seat.screen
        await seat.press("f2")
        await seat.sees("[bold]not markup")
        assert "\\x1b]0;title\\x07[red]" in seat.screen

    monkeypatch.setattr(FakeBackend, "decode", lambda self, tokens: "\x1b]0;title\x07[red]")
    sit_down(runtime, play)


@pytest.mark.exhaustive
def test_keys_that_come_all_at_once_mean_what_they_mean_one_by_one(runtime: Runtime) -> None:
    ada = runtime.user("ada")

    async def play(seat: Seat) -> None:
        seat.burst("f4", *"Biscuit", "enter")
        await seat.until(ada.items, "the fact")
        seat.burst(*"one", "enter", "ctrl+n", *"two", "enter")
        await seat.until(lambda: len(ada.turns()) == 2, "both replies")
        await seat.rests()
        seat.burst("up", "plus", "c", *"short", "enter", "f1", "escape", *"half a thought")
        await seat.until(lambda: len(ada.signals()) == 3, "what was said of the reply")
        await seat.until(lambda: seat.typed == "half a thought", "the rest")

    sit_down(runtime, play)
    assert [item.text for item in ada.items()] == ["Biscuit", "short"]
    assert [len(turn.messages) for turn in ada.turns()] == [1, 1]
    assert sorted(turn.messages[0].content for turn in ada.turns()) == ["one", "two"]
