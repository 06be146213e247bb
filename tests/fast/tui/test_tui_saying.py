"""What one says about replies, and what becomes of it: signals, learns, and taking them back."""

from __future__ import annotations

import pytest
from runtime_makers import correct
from tui_makers import Gate, Seat, sit_down

from personalpeft import Runtime, User
from personalpeft.errors import HomeError
from personalpeft.types import SignalKind
from personalpeft_app.tui.composer import Composer
from personalpeft_app.tui.lists import RevisionList
from personalpeft_app.tui.model_pane import ModelPane
from personalpeft_app.tui.weight_control import WeightControl


def _kinds(runtime: Runtime) -> list[SignalKind]:
    return [signal.kind for signal in runtime.user("ada").signals()]


def _stage(seat: Seat) -> str:
    job = seat.app._model.learn_task
    assert job is not None
    return job.stage[:12]


def test_thumbs_comments_and_facts_become_signals(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("one")
        await seat.press("up", "plus")
        await seat.sees("▲ good")
        await seat.press("minus")
        await seat.sees("▼ not good")
        await seat.press("c")
        await seat.send("use metric units")
        await seat.sees("1 comment")
        await seat.press("f4")
        await seat.send("my dog is Biscuit")
        await seat.hears("Remembered")
        assert seat.app.query_one(Composer).mode == "ask"
        kinds = _kinds(runtime)
        assert kinds == [SignalKind.RATING, SignalKind.COMMENT, SignalKind.FACT]

    sit_down(runtime, play)


def test_a_reply_edited_in_its_place_becomes_an_edit_signal(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("one")
        (turn,) = runtime.user("ada").turns()
        await seat.edit()
        await seat.type(" indeed")
        await seat.press("ctrl+s")
        await seat.sees("✎ edited")
        (signal,) = runtime.user("ada").signals()
        assert (signal.kind, signal.turn) == (SignalKind.EDIT, turn.id)
        assert signal.payload["text"] == turn.reply + " indeed"
        await seat.press("escape")
        await seat.ask("two")
        assert runtime.user("ada").turns()[0].messages[1].content == turn.reply + " indeed"

    sit_down(runtime, play)


@pytest.mark.exhaustive
def test_an_edit_that_is_left_is_there_again(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("one")
        await seat.edit()
        await seat.type(" unfinished")
        await seat.press("escape")
        assert "unfinished" not in seat.screen
        await seat.press("e")
        await seat.sees("unfinished")

    assert sit_down(runtime, play).unsent != []
    assert not _kinds(runtime)


@pytest.mark.exhaustive
def test_an_edit_that_changes_nothing_says_so_and_stays_open(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("one")
        await seat.edit()
        await seat.press("ctrl+s")
        await seat.hears("the same as the reply")
        assert "^S save" in seat.screen

    sit_down(runtime, play)


def test_a_fact_that_cannot_be_kept_stays_where_it_was_typed(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(seat: Seat) -> None:
        def full(*args: object, **said: object) -> None:
            raise HomeError("The disk is full.", hint="Free some space.")

        monkeypatch.setattr(User, "remember", full)
        await seat.press("f4")
        await seat.send("my dog is Biscuit")
        await seat.hears("The disk is full.")
        composer = seat.app.query_one(Composer)
        assert (composer.mode, composer.text) == ("remember", "my dog is Biscuit")

    assert sit_down(runtime, play).unsent == ["my dog is Biscuit"]


def test_learning_shows_how_far_it_is_and_then_its_report(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = runtime.user("ada")
    correct(ada, 5)

    async def play(seat: Seat) -> None:
        await seat.sees("5 to learn")
        gate = Gate(monkeypatch)
        await seat.press("ctrl+l")
        await seat.until(
            lambda: (job := seat.app._model.learn_task) and job.stage != "Learning",
            "progress",
        )
        await seat.until(
            lambda: _stage(seat) in seat.screen.splitlines()[-1], "the stage in the footer"
        )
        gate.let(10_000)
        await seat.until(lambda: seat.app._model.learn_task is None, "the end of the learn")
        await seat.sees("style: promoted")
        await seat.until(lambda: "to learn" not in seat.screen.splitlines()[-1])
        assert f"ada@{ada.stack().digest[:8]}" in seat.screen

    sit_down(runtime, play, size=(120, 40))
    assert ada.layers()[0].head is not None


@pytest.mark.exhaustive
def test_what_was_taken_back_is_something_to_learn(runtime: Runtime) -> None:
    ada = runtime.user("ada")
    dog, _ = (
        ada.remember(f"My {animal} is {name}.", questions=[f"Who is my {animal}?"], answer=name)
        for animal, name in (("dog", "Biscuit"), ("cat", "Momo"))
    )
    assert ada.learn().live
    ada.remove_item(dog)

    async def play(seat: Seat) -> None:
        await seat.sees("1 to learn")

    sit_down(runtime, play, size=(120, 40))


@pytest.mark.exhaustive
def test_nothing_to_learn_is_a_message(runtime: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.press("ctrl+l")
        await seat.hears("Nothing to learn")

    runtime.user("ada").chat("one")
    sit_down(runtime, play)


@pytest.mark.exhaustive
def test_a_weight_is_turned_with_the_keys_and_with_the_mouse(learned: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.until(lambda: seat.app.query(WeightControl), "the weight")
        await seat.press("f3", "down")
        await seat.press("left")
        await seat.until(lambda: learned.user("ada").layers()[0].weight == 0.9, "the new weight")
        await seat.pilot.click(WeightControl, offset=(0, 1))
        await seat.until(
            lambda: learned.user("ada").layers()[0].weight == 0.0, "the mouse's weight"
        )
        await seat.sees("0.00")

    sit_down(learned, play, size=(120, 40))


def test_rolling_back_makes_another_revision_live(learned: Runtime) -> None:
    async def play(seat: Seat) -> None:
        seat.app.action_open("revisions")
        await seat.pilot.pause()
        await seat.sees("the bare base")
        seat.app.query_one(RevisionList).focus()
        await seat.press("home", "enter")
        await seat.hears("is live already")
        await seat.press("end", "enter")
        await seat.until(lambda: learned.user("ada").layers()[0].head is None, "the rollback")
        await seat.hears("→ the bare base")
        await seat.sees("ada@base")

    sit_down(learned, play, size=(120, 40))


@pytest.mark.exhaustive
def test_comparing_is_blind_until_one_is_chosen_and_the_choice_counts(learned: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("something new")
        before = len(learned.user("ada").signals())
        head = learned.user("ada").layers()[0].head or ""
        seat.app.action_compare()
        await seat.sees("Which is better?")
        sheet = seat.screen
        assert head not in sheet
        await seat.press("1")
        await seat.sees("You chose")
        (signal,) = learned.user("ada").signals()[before:]
        assert signal.kind is SignalKind.PREFERENCE
        assert signal.payload["revision"] in (head, "base")
        await seat.press("escape")
        assert "You chose" not in seat.screen

    sit_down(learned, play)


@pytest.mark.exhaustive
def test_choosing_neither_keeps_nothing(learned: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("something new")
        before = learned.user("ada").signals()
        seat.app.action_compare()
        await seat.sees("Which is better?")
        await seat.press("n")
        assert learned.user("ada").signals() == before

    sit_down(learned, play)


@pytest.mark.exhaustive
def test_why_names_what_the_selected_reply_was_made_of(learned: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.ask("something new")
        await seat.press("up", "w")
        head = learned.user("ada").layers()[0].head or ""
        await seat.sees(head)
        assert "edit: Ahoy! Answer" in seat.screen

    sit_down(learned, play)


@pytest.mark.exhaustive
def test_the_side_panel_shows_revisions_with_what_they_gained(learned: Runtime) -> None:
    async def play(seat: Seat) -> None:
        await seat.sees("always")
        seat.app.action_open("revisions")
        (revision,) = learned.user("ada").revisions()
        await seat.sees(revision.id.rpartition("@")[2])
        assert "━" in str(seat.app.query_one(RevisionList).get_option_at_index(0).prompt)
        seat.app.action_open("report")
        await seat.sees("held back to judge by")
        assert seat.app.query_one(ModelPane).tab == "report"

    sit_down(learned, play, size=(120, 40))
