"""Items act from the next prompt on, and stop acting as soon as they are edited or removed."""

from __future__ import annotations

import pytest
from memory_makers import Home, prompt

from personalpeft.errors import InvalidInput, NotFound
from personalpeft.memory.items import MAX_ITEM_LENGTH, check_item_text
from personalpeft.types import Message, SignalKind


def test_a_rule_acts_at_once_in_every_chat(home: Home) -> None:
    rule = home.rule("ada", "Answer in Spanish.")
    recall = home.ask("ada", "What do bees make?")
    assert recall.item_ids == (rule.id,)
    assert '"Answer in Spanish."' in prompt(recall)


def test_a_fact_acts_at_once_in_the_chats_it_is_near_to(home: Home) -> None:
    fact = home.fact("ada", "My dog is called Biscuit.")
    assert home.ask("ada", "What is my dog called?").item_ids == (fact.id,)
    assert home.ask("ada", "Where do bees sleep?").item_ids == ()


def test_items_are_listed_oldest_first_and_by_kind(home: Home) -> None:
    fact, rule = home.fact("ada", "I live in Ghent."), home.rule("ada", "Be brief.")
    home.store.ledger.add_signal(
        "ada", SignalKind.DEMONSTRATION, {"prompt": "a", "answer": "b", "skill": None}
    )
    assert [(item.id, item.kind, item.text) for item in home.memory.items("ada")] == [
        (fact.id, "fact", "I live in Ghent."),
        (rule.id, "rule", "Be brief."),
    ]
    assert [item.id for item in home.memory.items("ada", "rule")] == [rule.id]


def test_an_edited_fact_stops_acting_and_the_new_one_acts(home: Home) -> None:
    old = home.fact("ada", "My dog is called Biscuit.", questions=["Who barks at night?"])
    assert home.ask("ada", "What is my dog called?").item_ids == (old.id,)
    new = home.memory.edit("ada", old.id, "My dog is called Rex.")
    recall = home.ask("ada", "What is my dog called?")
    assert recall.item_ids == (new.id,)
    assert "Biscuit" not in prompt(recall)
    assert home.ask("ada", "Who barks at night?").item_ids == ()
    assert home.store.ledger.signal("ada", new.id).supersedes == old.id


def test_an_edited_fact_with_another_answer_is_found_by_the_questions_that_it_had(
    home: Home,
) -> None:
    old = home.fact("ada", "My dog is called Biscuit.", questions=["Who barks at night?"])
    new = home.memory.edit("ada", old.id, "My dog is called Rex.", answer="Rex")

    assert home.ask("ada", "Who barks at night?").item_ids == (new.id,)
    payload = home.store.ledger.signal("ada", new.id).payload
    assert (payload["questions"], payload["answer"]) == (["Who barks at night?"], "Rex")


def test_a_rule_has_no_answer_and_an_answer_needs_a_question(home: Home) -> None:
    rule, fact = home.rule("ada", "Be brief."), home.fact("ada", "I live in Ghent.")
    for item in (rule, fact):
        with pytest.raises(InvalidInput):
            home.memory.edit("ada", item.id, "Anything else.", answer="Rex")
    assert {item.id for item in home.memory.items("ada")} == {rule.id, fact.id}


def test_an_edited_rule_stays_with_its_turn(home: Home) -> None:
    old = home.rule("ada", "Be brief.")
    new = home.memory.edit("ada", old.id, "  Be very brief.\n")
    assert (new.kind, new.text) == ("rule", "Be very brief.")
    assert home.memory.items("ada") == (new,)


def test_a_removed_item_stops_acting_and_stays_in_the_history(home: Home) -> None:
    fact, rule = home.fact("ada", "My dog is called Biscuit."), home.rule("ada", "Be brief.")
    home.ask("ada", "What is my dog called?")
    home.memory.remove("ada", fact.id)
    home.memory.remove("ada", rule.id)
    said = (Message("user", "What is my dog called?"),)
    assert home.recall("ada", said).messages == said
    assert home.memory.items("ada") == ()
    assert len(home.store.ledger.signals("ada", current=False)) == 2


@pytest.mark.parametrize("change", ["edit", "remove"])
def test_what_does_not_act_cannot_be_changed(home: Home, change: str) -> None:
    removed = home.fact("ada", "I live in Ghent.")
    home.memory.remove("ada", removed.id)
    other = home.store.ledger.add_signal(
        "ada", SignalKind.DEMONSTRATION, {"prompt": "a", "answer": "b", "skill": None}
    )
    theirs = home.fact("bob", "I live in Rome.")
    for each in (removed.id, other.id, theirs.id, "s_nothing"):
        with pytest.raises(NotFound) as caught:
            home.memory.edit(
                "ada", each, "I live in Paris."
            ) if change == "edit" else home.memory.remove("ada", each)
        assert caught.value.hint
    assert home.memory.items("ada") == ()
    assert [item.text for item in home.memory.items("bob")] == ["I live in Rome."]


def test_no_user_sees_the_items_of_another(home: Home) -> None:
    home.fact("ada", "My dog is called Biscuit.")
    home.rule("ada", "Answer in Spanish.")
    home.rule("bob", "Be brief.")
    recall = home.ask("bob", "What is my dog called?")
    assert "Biscuit" not in prompt(recall)
    assert "Spanish" not in prompt(recall)
    assert len(recall.item_ids) == 1


def test_a_fact_that_a_later_one_contradicts_does_not_act_and_is_neither_edited_nor_removed(
    home: Home,
) -> None:
    asked = ["What is my dog called?"]
    older = home.fact("ada", "My dog is called Biscuit.", questions=asked, answer="Biscuit")
    later = home.fact("ada", "My dog is called Rex.", questions=asked, answer="Rex")
    for act in (
        lambda: home.memory.edit("ada", older.id, "It is Bob."),
        lambda: home.memory.remove("ada", older.id),
    ):
        with pytest.raises(NotFound):
            act()
    assert [item.id for item in home.memory.items("ada")] == [later.id]


def test_a_refused_edit_changes_nothing(home: Home) -> None:
    fact = home.fact("ada", "I live in Ghent.")
    with pytest.raises(InvalidInput):
        home.memory.edit("ada", fact.id, " ")
    assert [item.id for item in home.memory.items("ada")] == [fact.id]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("\u200b\u2060", "empty"),
        ("x" * (MAX_ITEM_LENGTH + 1), str(MAX_ITEM_LENGTH + 1)),
        ("a\x00b", "U+0000"),
        ("a\x1b[31mb", "U+001B"),
        ("a\ud800b", "U+D800"),
        (None, "NoneType"),
        (b"bytes", "bytes"),
    ],
)
def test_a_text_that_cannot_be_an_item_is_refused_by_name(text: object, fault: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_item_text(text, what="comment")
    assert fault in caught.value.message
    assert "comment" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "text", ["x" * MAX_ITEM_LENGTH, "two\nlines\tand a tab", "نحن", "👩‍👩‍👧", "naïve"]
)
def test_any_writing_of_people_is_accepted(text: str) -> None:
    assert check_item_text(f" {text}\n", what="fact") == text
