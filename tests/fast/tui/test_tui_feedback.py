"""Feedback, learns and reverts in the terminal chat."""

from __future__ import annotations

import pytest
from runtime_makers import correct
from tui_makers import StepGate, TuiDriver, run_tui

from personalpeft import Runtime, User
from personalpeft.errors import HomeError
from personalpeft.types import SignalKind
from personalpeft_app.tui.composer import Composer
from personalpeft_app.tui.controls import RevisionList, WeightControl
from personalpeft_app.tui.model_pane import ModelPane


def _kinds(runtime: Runtime) -> list[SignalKind]:
    return [signal.kind for signal in runtime.user("ada").signals()]


def _stage(ui: TuiDriver) -> str:
    job = ui.app._model.tasks.get("learn")
    assert job is not None
    return job.stage[:12]


def test_thumbs_comments_and_facts_become_signals(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("one")
        await ui.press("up", "plus")
        await ui.wait_for_text("▲ good")
        await ui.press("minus")
        await ui.wait_for_text("▼ not good")
        await ui.press("c")
        await ui.send("use metric units")
        await ui.wait_for_text("1 comment")
        await ui.press("f4")
        await ui.send("my dog is Biscuit")
        await ui.wait_for_message("Remembered")
        assert ui.app.query_one(Composer).mode == "ask"
        kinds = _kinds(runtime)
        assert kinds == [SignalKind.RATING, SignalKind.COMMENT, SignalKind.FACT]

    run_tui(runtime, scenario)


def test_a_reply_edited_in_its_place_becomes_an_edit_signal(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("one")
        (turn,) = runtime.user("ada").turns()
        await ui.open_editor()
        await ui.type(" indeed")
        await ui.press("ctrl+s")
        await ui.wait_for_text("✎ edited")
        (signal,) = runtime.user("ada").signals()
        assert (signal.kind, signal.turn) == (SignalKind.EDIT, turn.id)
        assert signal.payload["text"] == turn.reply + " indeed"
        await ui.press("escape")
        await ui.ask("two")
        assert runtime.user("ada").turns()[0].messages[1].content == turn.reply + " indeed"

    run_tui(runtime, scenario)


@pytest.mark.exhaustive
def test_a_closed_edit_is_restored_when_reopened(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("one")
        await ui.open_editor()
        await ui.type(" unfinished")
        await ui.press("escape")
        assert "unfinished" not in ui.screen
        await ui.press("e")
        await ui.wait_for_text("unfinished")

    assert run_tui(runtime, scenario).unsent != []
    assert not _kinds(runtime)


@pytest.mark.exhaustive
def test_an_unchanged_edit_is_rejected_and_stays_open(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("one")
        await ui.open_editor()
        await ui.press("ctrl+s")
        await ui.wait_for_message("the same as the reply")
        assert "^S save" in ui.screen

    run_tui(runtime, scenario)


def test_a_fact_that_cannot_be_stored_stays_in_the_composer(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(ui: TuiDriver) -> None:
        def full(*args: object, **options: object) -> None:
            raise HomeError("The disk is full.", hint="Free some space.")

        monkeypatch.setattr(User, "remember", full)
        await ui.press("f4")
        await ui.send("my dog is Biscuit")
        await ui.wait_for_message("The disk is full.")
        composer = ui.app.query_one(Composer)
        assert (composer.mode, composer.text) == ("remember", "my dog is Biscuit")

    assert run_tui(runtime, scenario).unsent == ["my dog is Biscuit"]


def test_a_learn_shows_progress_and_then_its_report(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = runtime.user("ada")
    correct(ada, 5)

    async def scenario(ui: TuiDriver) -> None:
        await ui.wait_for_text("5 to learn")
        gate = StepGate(monkeypatch)
        await ui.press("ctrl+l")
        await ui.wait_until(
            lambda: (job := ui.app._model.tasks.get("learn")) and job.stage != "Learning",
            "progress",
        )
        await ui.wait_until(
            lambda: _stage(ui) in ui.screen.splitlines()[-1], "the stage in the footer"
        )
        gate.allow(10_000)
        await ui.wait_until(lambda: "learn" not in ui.app._model.tasks, "the end of the learn")
        await ui.wait_for_text("style: promoted")
        await ui.wait_until(lambda: "to learn" not in ui.screen.splitlines()[-1])
        await ui.wait_for_text(f"ada@{ada.stack().digest[:8]}")

    run_tui(runtime, scenario, size=(120, 40))
    assert ada.layers()[0].head is not None


@pytest.mark.exhaustive
def test_a_retracted_fact_counts_as_new_for_learning(runtime: Runtime) -> None:
    ada = runtime.user("ada")
    dog, _ = (
        ada.remember(f"My {animal} is {name}.", questions=[f"Who is my {animal}?"], answer=name)
        for animal, name in (("dog", "Biscuit"), ("cat", "Momo"))
    )
    assert ada.learn().live
    ada.retract_item(dog)

    async def scenario(ui: TuiDriver) -> None:
        await ui.wait_for_text("1 to learn")

    run_tui(runtime, scenario, size=(120, 40))


@pytest.mark.exhaustive
def test_a_learn_without_new_signals_shows_a_message(runtime: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.press("ctrl+l")
        await ui.wait_for_message("Nothing to learn")

    runtime.user("ada").chat("one")
    run_tui(runtime, scenario)


@pytest.mark.exhaustive
def test_weights_are_changed_by_keys_and_by_mouse(learned: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.wait_until(lambda: ui.app.query(WeightControl), "the weight")
        await ui.press("f3", "down")
        await ui.press("left")
        await ui.wait_until(lambda: learned.user("ada").layers()[0].weight == 0.9, "the new weight")
        await ui.pilot.click(WeightControl, offset=(0, 1))
        await ui.wait_until(
            lambda: learned.user("ada").layers()[0].weight == 0.0, "the mouse's weight"
        )
        await ui.wait_for_text("0.00")

    run_tui(learned, scenario, size=(120, 40))


@pytest.mark.exhaustive
def test_rollback_makes_another_revision_live(learned: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        ui.app.action_open("revisions")
        await ui.pilot.pause()
        await ui.wait_for_text("the bare base")
        ui.app.query_one(RevisionList).focus()
        await ui.press("home", "enter")
        await ui.wait_for_message("is live already")
        await ui.press("end", "enter")
        await ui.wait_until(lambda: learned.user("ada").layers()[0].head is None, "the rollback")
        await ui.wait_for_message("→ the bare base")
        await ui.wait_for_text("ada@base")

    run_tui(learned, scenario, size=(120, 40))


@pytest.mark.exhaustive
def test_a_comparison_is_blind_until_the_choice_which_is_recorded(learned: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("something new")
        before = len(learned.user("ada").signals())
        head = learned.user("ada").layers()[0].head or ""
        ui.app.action_compare()
        await ui.wait_for_text("Which is better?")
        sheet = ui.screen
        assert head not in sheet
        assert "answering" not in sheet  # The footer names no task that has ended.
        await ui.press("1")
        await ui.wait_for_text("You chose")
        (signal,) = learned.user("ada").signals()[before:]
        assert signal.kind is SignalKind.PREFERENCE
        assert signal.payload["revision"] in (head, "base")
        await ui.press("escape")
        assert "You chose" not in ui.screen

    run_tui(learned, scenario)


@pytest.mark.exhaustive
def test_choosing_neither_answer_records_nothing(learned: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("something new")
        before = learned.user("ada").signals()
        ui.app.action_compare()
        await ui.wait_for_text("Which is better?")
        await ui.press("n")
        assert learned.user("ada").signals() == before

    run_tui(learned, scenario)


@pytest.mark.exhaustive
def test_why_names_the_revisions_of_the_selected_reply(learned: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("something new")
        await ui.press("up", "w")
        head = learned.user("ada").layers()[0].head or ""
        await ui.wait_for_text(head)
        assert "edit: Ahoy! Answer" in ui.screen

    run_tui(learned, scenario)


@pytest.mark.exhaustive
def test_the_side_panel_lists_revisions_with_their_gain(learned: Runtime) -> None:
    async def scenario(ui: TuiDriver) -> None:
        await ui.wait_for_text("always")
        ui.app.action_open("revisions")
        (revision,) = learned.user("ada").revisions()
        await ui.wait_for_text(revision.id.rpartition("@")[2])
        assert "━" in str(ui.app.query_one(RevisionList).get_option_at_index(0).prompt)
        ui.app.action_open("report")
        await ui.wait_for_text("held out to judge")
        assert ui.app.query_one(ModelPane).tab == "report"

    run_tui(learned, scenario, size=(120, 40))


async def _command(ui: TuiDriver, name: str) -> None:
    await ui.press("ctrl+p")
    await ui.wait_until(lambda: ui.app.query("CommandInput") or ui.app.screen.is_modal, "the list")
    await ui.type(name)
    await ui.wait_for_text(name)
    await ui.pilot.pause(0.3)
    await ui.press("enter")


def test_training_consent_is_switched_off_and_on(runtime: Runtime) -> None:
    ada = runtime.user("ada")

    async def scenario(ui: TuiDriver) -> None:
        await _command(ui, "Training on or off")
        await ui.wait_until(lambda: not ada.summary().training, "the switch")
        await ui.wait_for_text("no training")
        await _command(ui, "Training on or off")
        await ui.wait_until(lambda: ada.summary().training, "the switch back")
        await ui.wait_until(lambda: "no training" not in ui.screen)

    run_tui(runtime, scenario)


def test_a_user_is_erased_only_after_the_id_was_typed(runtime: Runtime) -> None:
    correct(runtime.user("ada"), 2)

    async def scenario(ui: TuiDriver) -> None:
        await _command(ui, "Forget this user")
        await ui.wait_for_text("2 turns")
        await ui.send("aba")
        assert len(runtime.user("ada").turns()) == 2
        await ui.press("escape")
        await _command(ui, "Forget this user")
        await ui.wait_for_text("2 turns")
        await ui.send("ada")
        await ui.wait_until(lambda: ui.app._exit, "the end of the chat")

    app = run_tui(runtime, scenario)
    assert not runtime.users()
    assert app.erased is not None
    assert (app.erased.user, app.erased.turns) == ("ada", 2)


@pytest.mark.exhaustive
def test_a_user_whose_learn_runs_elsewhere_is_not_erased(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(runtime.user("ada"), 5)

    async def scenario(ui: TuiDriver) -> None:
        gate = StepGate(monkeypatch)
        await ui.press("ctrl+l")
        await ui.wait_until(lambda: ui.app._model.progress[0][0] != "Learning", "a learn")
        await _command(ui, "Forget this user")
        await ui.wait_for_text("5 turns")
        await ui.send("ada")
        await ui.wait_until(lambda: len(ui.messages) > 0, "a message")
        gate.allow(10_000)
        await ui.wait_until(lambda: "learn" not in ui.app._model.tasks, "the end of the learn")
        assert len(runtime.user("ada").turns()) == 5

    assert run_tui(runtime, scenario).erased is None


@pytest.mark.exhaustive
def test_layers_built_anew_are_shown_beside_the_live_ones_and_switched_to(
    runtime: Runtime,
) -> None:
    user = runtime.user("ada")
    for first in (0, 5):
        correct(user, 5, first=first)
        user.learn()
    (before,) = user.layers()

    async def scenario(ui: TuiDriver) -> None:
        for answer in ("n", "y"):
            await ui.app.run_action("rebase")
            await ui.wait_for_text("on which base?")
            await ui.press("enter")
            await ui.wait_for_text("Switch to")
            await ui.wait_for_text("regressed")
            assert user.layers() == (before,)
            await ui.press(answer)
        await ui.wait_until(lambda: user.layers()[0].head != before.head)
        await ui.wait_until(lambda: not ui.app._model.tasks)

    run_tui(runtime, scenario, size=(120, 40))
