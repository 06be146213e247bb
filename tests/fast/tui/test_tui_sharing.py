"""What other programs do with the same user appears, and what a person wants forgotten goes, once they are sure."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from runtime_makers import correct
from tui_makers import Gate, Seat, sit_down

import personalpeft
from personalpeft import Runtime, TrainingStatus, User
from personalpeft.errors import HomeError
from personalpeft_app.tui import app as screen
from personalpeft_app.tui.lists import ForgettableList
from personalpeft_app.tui.user_session import ModelState

pytestmark = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "_WATCH_SECONDS", 0.05)


def other(runtime: Runtime) -> Runtime:
    """Another program on the same home."""
    return personalpeft.open(runtime.settings.home, backend="fake")


def test_a_turn_of_another_program_appears_in_its_conversation_and_as_a_new_one(
    runtime: Runtime,
) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("about cats")
        await seat.type("half a thought")
        (first,) = runtime.user("ada").turns()
        with other(runtime) as beside:
            ada = beside.user("ada")
            told = [
                {"role": "user", "content": "about cats"},
                {"role": "assistant", "content": first.reply},
            ]
            ada.chat([*told, {"role": "user", "content": "and more of them"}])
            await seat.sees("› and more of them")
            ada.feedback(first, rating=1)
            await seat.sees("▲ good")
            ada.chat("about dogs")
        assert seat.typed == "half a thought"
        assert "about dogs" not in seat.screen
        await seat.press("f2")
        await seat.sees("about dogs")
        assert seat.screen.count("› about cats") == 1
        # And one goes on here from what was said there.
        await seat.press("escape")
        await seat.press(*["backspace"] * len("half a thought"))
        await seat.ask("so?")
        assert [m.content for m in runtime.user("ada").turns()[0].messages][2] == "and more of them"

    sit_down(runtime, play)


def test_one_question_is_never_shown_twice_however_often_one_looks(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        for number in range(3):
            await seat.ask(f"question {number}")
            await seat.pilot.pause(0.2)
        await seat.press("ctrl+r")
        await seat.until(lambda: len(runtime.user("ada").turns()) == 4, "another reply")
        await seat.pilot.pause(0.3)
        assert [seat.screen.count(f"› question {number}") for number in range(3)] == [1, 1, 1]
        assert len(runtime.user("ada").conversations()) == 1

    sit_down(runtime, play, size=(80, 40))


def test_a_fact_is_forgotten_from_the_panel_once_one_is_sure(runtime: Runtime) -> None:
    ada = runtime.user("ada")
    ada.remember("My dog is called Biscuit.")
    ada.remember("I live in Ghent.")

    async def play(seat: Seat) -> None:
        seat.app.action_open("memory")
        await seat.sees("I live in Ghent.")
        seat.app.query_one("#memory", ForgettableList).focus()
        await seat.want_forgotten()
        await seat.press("escape")
        assert len(ada.items()) == 2
        await seat.want_forgotten()
        # Where nobody says anything else, the answer is no.
        await seat.press("enter")
        assert len(ada.items()) == 2
        await seat.want_forgotten()
        await seat.press("y")
        await seat.sees("FORGOTTEN")
        await seat.press("escape")
        await seat.until(lambda: "Ghent" not in seat.screen, "the fact's end")
        assert [item.text for item in ada.items()] == ["My dog is called Biscuit."]
        assert "Biscuit" in seat.screen

    sit_down(runtime, play, size=(120, 40))


def test_an_edit_that_a_reply_was_built_from_is_forgotten_from_why(learned: Runtime) -> None:
    ada = learned.user("ada")
    before = ada.layers()[0].head

    async def play(seat: Seat) -> None:
        await seat.ask("something new")
        await seat.press("up", "w")
        await seat.sees("edit: Ahoy! Answer 0.")
        said = seat.app.query_one("#why", ForgettableList)
        said.focus()
        await seat.press("down", "d")
        await seat.sees("Destroyed for good: 1 signal, 1 revision.")
        await seat.press("y")
        await seat.sees("FORGOTTEN")
        await seat.press("escape")
        await seat.sees("forgotten since")

    sit_down(learned, play, size=(120, 40))
    assert ada.layers()[0].head != before
    assert len(ada.signals()) == 4


def test_a_conversation_whose_turn_is_forgotten_loses_it(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("keep this")
        await seat.ask("a secret")
        await seat.press("up", "w")
        await seat.sees("this reply")
        seat.app.query_one("#why", ForgettableList).focus()
        await seat.want_forgotten()
        await seat.press("y")
        await seat.sees("FORGOTTEN")
        await seat.press("escape")
        await seat.until(lambda: "a secret" not in seat.screen, "the turn's end")
        assert "keep this" in seat.screen

    sit_down(runtime, play, size=(120, 40))


def test_what_cannot_be_forgotten_is_a_message_and_changes_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = runtime.user("ada")
    ada.remember("My dog is called Biscuit.")
    forget = User.forget

    def full(self: User, item: str, *, dry_run: bool = False, **asked: object) -> object:
        if dry_run:
            return forget(self, item, dry_run=True)
        raise HomeError("The disk is full.", hint="Free some space.")

    monkeypatch.setattr(User, "forget", full)

    async def play(seat: Seat) -> None:
        seat.app.action_open("memory")
        await seat.sees("Biscuit")
        seat.app.query_one("#memory", ForgettableList).focus()
        await seat.want_forgotten()
        await seat.press("y")
        await seat.hears("The disk is full.")
        assert "Biscuit" in seat.screen

    sit_down(runtime, play, size=(120, 40))
    assert len(ada.items()) == 1


def test_a_learn_of_another_program_is_in_the_footer_with_how_far_it_is(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    now: list[TrainingStatus | None] = [
        TrainingStatus("style", "Learning", 3, 12, datetime(2026, 1, 1, tzinfo=UTC))
    ]
    monkeypatch.setattr(User, "training_status", lambda self: now[0])

    async def play(seat: Seat) -> None:
        await seat.sees("Elsewhere: Learning style ━━······  25%")
        now[0] = None
        await seat.until(lambda: "Elsewhere" not in seat.screen, "its end")

    sit_down(runtime, play)


def test_what_is_learned_here_is_not_said_to_be_learned_elsewhere(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = runtime.user("ada")
    correct(ada, 5)

    async def play(seat: Seat) -> None:
        seen: list[str] = []
        gate = Gate(monkeypatch)
        await seat.press("ctrl+l")
        await seat.until(lambda: ada.training_status() is not None, "the learn")
        for _ in range(10):
            await seat.pilot.pause(0.05)
            seen.append(seat.screen.splitlines()[-1])
        gate.let(10_000)
        await seat.until(lambda: seat.app._model.learn_task is None, "the end of the learn")
        assert not any("Elsewhere" in line for line in seen)

    sit_down(runtime, play)


def test_what_ends_while_the_program_closes_is_shown_nowhere_and_breaks_nothing(
    runtime: Runtime,
) -> None:
    ada = runtime.user("ada")
    correct(ada, 5)
    ada.learn()

    async def play(seat: Seat) -> None:
        panel = seat.app._model
        standing = ModelState(layers=ada.layers(), revisions=ada.revisions())
        await panel.remove()
        await panel.show(standing)

    sit_down(runtime, play)
