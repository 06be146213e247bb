"""``forget`` erases a whole conversation or a whole layer, with all that came of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_makers import ask, correct, home_unchanged, open_runtime, style

import personalpeft
from personalpeft import Forgotten, NotFound, Runtime, User

SECRET = "Zorblax"


def holds(home: Path) -> list[str]:
    wanted = SECRET.lower().encode()
    files = [path for path in home.rglob("*") if path.is_file()]
    return [path.name for path in files if wanted in path.read_bytes().lower()]


def conversation(user: User) -> tuple[str, list[str]]:
    """Have a conversation of two turns, of which the last was regenerated; return its id."""
    first = ask(user, f"I am {SECRET} of Ur.")
    second = ask(user, "And my cat?", conversation_id=first.conversation_id)
    again = ask(user, "And my cat?", replaces=second)
    assert first.conversation_id is not None
    return first.conversation_id, [first.turn_id, second.turn_id, again.turn_id]


@pytest.mark.parametrize("named_by", ["its id", "its last turn", "its first turn's rest"])
def test_conversation_is_erased_whole_with_its_feedback(
    home: Path, ada: User, named_by: str
) -> None:
    other = ask(ada, "What is two and two?")
    whole, turns = conversation(ada)
    rating = ada.feedback(turns[1], rating=1)
    if named_by == "its first turn's rest":
        ada.forget(turns[0], rebuild=False)
        turns = turns[1:]
    report = ada.forget(turns[-1] if named_by == "its last turn" else whole, conversation=True)
    assert (report.item, set(report.turns), report.signals) == (whole, set(turns), (rating,))
    assert [turn.id for turn in ada.turns()] == [other.turn_id]
    assert [each.id for each in ada.conversations()] == [other.conversation_id]
    assert holds(home) == []


def test_dry_run_of_a_conversation_changes_nothing(home: Path, ada: User) -> None:
    _, turns = conversation(ada)
    with home_unchanged(home):
        report = ada.forget(turns[0], conversation=True, dry_run=True)
    assert set(report.turns) == set(turns)


def test_unknown_conversation_is_refused(home: Path, ada: User) -> None:
    _, turns = conversation(ada)
    with home_unchanged(home):
        for wrong, error in (("t_nothing", NotFound), ("s_x", NotFound), ("", NotFound)):
            with pytest.raises(error):
                ada.forget(wrong, conversation=True)
    ada.forget(turns[0], conversation=True)
    with pytest.raises(Forgotten):
        ada.forget(turns[0], conversation=True)


def teach_all(user: User) -> None:
    correct(user, 5)
    user.remember(f"My dog is {SECRET}.", questions=["My dog?", "Which dog?"], answer=SECRET)
    for number in range(5):
        user.teach(f"Write to {SECRET} {number}.", f"Dear {number}", skill="email")
    user.learn()


def test_layer_is_erased_with_all_that_it_was_taught(
    home: Path, runtime: Runtime, ada: User
) -> None:
    teach_all(ada)
    style_head = ada.stack().entries[0]
    taught = {each.id for each in ada.signals() if each.payload.get("skill") == "email"}
    report = ada.forget("skill.email")
    assert (report.item, set(report.signals)) == ("skill.email", taught)
    assert "skill.email" in report.heads
    assert "skill.email" not in [each.layer for each in report.rebuilt]
    assert style_head in ada.stack().entries
    assert [layer.name for layer in ada.layers()] == ["style", "memory"]
    assert ada.revisions("style")
    assert runtime.verify() == ()
    ada.forget("memory")
    assert holds(home) == []
    with pytest.raises(NotFound):
        ada.forget("skill.email")


def test_style_is_erased_and_the_layers_on_it_are_rebuilt_without_it(ada: User) -> None:
    teach_all(ada)
    report = ada.forget("style")
    assert {each.layer for each in report.rebuilt} == {"skill.email", "memory"}
    assert {each.layer for each in ada.stack().entries} == {"skill.email", "memory"}
    assert all(not revision.below for revision in ada.revisions("skill.email"))
    ada.teach("Question 9", style("Answer 9."))
    assert ada.pending()


def test_imported_layer_is_erased(tmp_path: Path, ada: User, runtime: Runtime) -> None:
    teach_all(ada)
    ada.export_peft(tmp_path / "peft", layer="style")
    bob = runtime.user("bob")
    bob.import_peft(tmp_path / "peft", layer="skill.pirate")
    assert bob.forget("skill.pirate").revisions
    assert bob.layers() == ()
    assert ada.stack().entries


def test_copy_of_a_layer_is_erased_with_what_the_layer_learned(ada: User) -> None:
    teach_all(ada)
    copy = ada.copy_layer("skill.email", "skill.pirate")
    other = ada.copy_layer("style", "skill.captain")
    assert copy.id == next(each.head for each in ada.layers() if each.name == "skill.pirate")
    lesson = next(each for each in ada.signals() if each.payload.get("skill") == "email")
    report = ada.forget(lesson.id, rebuild=False)
    assert copy.id in report.revisions
    assert report.heads["skill.pirate"] is None
    kept = {each.id for each in ada.revisions()}
    assert copy.id not in kept
    assert other.id in kept


def test_a_layer_without_a_live_revision_cannot_be_copied(ada: User) -> None:
    ada.teach("Write to Bob.", "Dear", skill="email")
    for layer in ("skill.email", "skill.pirate"):
        with pytest.raises(NotFound) as refused:
            ada.copy_layer(layer, "skill.captain")
        assert refused.value.hint


def test_layer_that_was_taught_and_never_built_is_erased(home: Path, ada: User) -> None:
    lesson = ada.teach(f"Write to {SECRET}.", "Dear", skill="email")
    assert ada.forget("skill.email").signals == (lesson,)
    assert holds(home) == []


def test_forgotten_layer_and_conversation_stay_forgotten_in_a_restored_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        teach_all(ada)
        ada.export_peft(tmp_path / "peft", layer="style")
        ada.import_peft(tmp_path / "peft", layer="skill.pirate")
        _, turns = conversation(ada)
        runtime.maintenance.back_up(tmp_path / "copies")
        for name in ("skill.pirate", "skill.email", "memory"):
            ada.forget(name)
        ada.forget(turns[0], conversation=True)
        assert b"pirate" not in (home / "forgotten.jsonl").read_bytes()
    personalpeft.restore(tmp_path / "copies", home, replace=True)
    assert holds(home) == []
    with open_runtime(home) as runtime:
        assert [layer.name for layer in runtime.user("ada").layers()] == ["style"]
