"""Items apply from the next prompt on, and stop as soon as they are edited or removed."""

from __future__ import annotations

import pytest
from memory_makers import Home, joined_text

from personalpeft.errors import InvalidInput, NotFound
from personalpeft.memory.items import MAX_ITEM_LENGTH, check_item_text
from personalpeft.types import Message, SignalKind


def test_rule_applies_at_once_in_each_chat(home: Home) -> None:
    rule = home.rule("ada", "Answer in Spanish.")
    recall = home.ask("ada", "What do bees make?")
    assert recall.item_ids == (rule.id,)
    assert '"Answer in Spanish."' in joined_text(recall)


def test_fact_applies_at_once_in_similar_chats(home: Home) -> None:
    fact = home.fact("ada", "My dog is called Biscuit.")
    assert home.ask("ada", "What is my dog called?").item_ids == (fact.id,)
    assert home.ask("ada", "Where do bees sleep?").item_ids == ()


def test_items_are_listed_oldest_first_with_their_kind(home: Home) -> None:
    fact, rule = home.fact("ada", "I live in Ghent."), home.rule("ada", "Be brief.")
    home.store.ledger.add_signal(
        "ada", SignalKind.DEMONSTRATION, {"prompt": "a", "answer": "b", "skill": None}
    )
    assert [(item.id, item.kind, item.text) for item in home.memory.items("ada")] == [
        (fact.id, "fact", "I live in Ghent."),
        (rule.id, "rule", "Be brief."),
    ]


def test_edited_fact_is_replaced_by_the_new_one(home: Home) -> None:
    old = home.fact("ada", "My dog is called Biscuit.", questions=["Who barks at night?"])
    assert home.ask("ada", "What is my dog called?").item_ids == (old.id,)
    new = home.memory.edit("ada", old.id, "My dog is called Rex.")
    recall = home.ask("ada", "What is my dog called?")
    assert recall.item_ids == (new.id,)
    assert "Biscuit" not in joined_text(recall)
    assert home.ask("ada", "Who barks at night?").item_ids == ()
    assert home.store.ledger.signal("ada", new.id).supersedes == old.id


def test_edited_fact_keeps_its_questions(
    home: Home,
) -> None:
    old = home.fact("ada", "My dog is called Biscuit.", questions=["Who barks at night?"])
    new = home.memory.edit("ada", old.id, "My dog is called Rex.", answer="Rex")

    assert home.ask("ada", "Who barks at night?").item_ids == (new.id,)
    payload = home.store.ledger.signal("ada", new.id).payload
    assert (payload["questions"], payload["answer"]) == (["Who barks at night?"], "Rex")


def test_rule_takes_no_answer_and_an_answer_needs_a_question(home: Home) -> None:
    rule, fact = home.rule("ada", "Be brief."), home.fact("ada", "I live in Ghent.")
    for item in (rule, fact):
        with pytest.raises(InvalidInput):
            home.memory.edit("ada", item.id, "Anything else.", answer="Rex")
    assert {item.id for item in home.memory.items("ada")} == {rule.id, fact.id}


def test_edited_rule_stays_with_its_turn(home: Home) -> None:
    old = home.rule("ada", "Be brief.")
    new = home.memory.edit("ada", old.id, "  Be very brief.\n")
    assert (new.kind, new.text) == ("rule", "Be very brief.")
    assert home.memory.items("ada") == (new,)


def test_removed_item_stops_applying_and_stays_in_the_history(home: Home) -> None:
    fact, rule = home.fact("ada", "My dog is called Biscuit."), home.rule("ada", "Be brief.")
    home.ask("ada", "What is my dog called?")
    home.memory.retract("ada", fact.id)
    home.memory.retract("ada", rule.id)
    request = (Message("user", "What is my dog called?"),)
    assert home.recall("ada", request).messages == request
    assert home.memory.items("ada") == ()
    assert len(home.store.ledger.signals("ada", current=False)) == 2


@pytest.mark.parametrize("change", ["edit", "remove"])
def test_inactive_item_cannot_be_changed(home: Home, change: str) -> None:
    removed = home.fact("ada", "I live in Ghent.")
    home.memory.retract("ada", removed.id)
    other = home.store.ledger.add_signal(
        "ada", SignalKind.DEMONSTRATION, {"prompt": "a", "answer": "b", "skill": None}
    )
    theirs = home.fact("bob", "I live in Rome.")
    for each in (removed.id, other.id, theirs.id, "s_nothing"):
        with pytest.raises(NotFound) as caught:
            home.memory.edit(
                "ada", each, "I live in Paris."
            ) if change == "edit" else home.memory.retract("ada", each)
        assert caught.value.hint
    assert home.memory.items("ada") == ()
    assert [item.text for item in home.memory.items("bob")] == ["I live in Rome."]


def test_users_see_no_items_of_others(home: Home) -> None:
    home.fact("ada", "My dog is called Biscuit.")
    home.rule("ada", "Answer in Spanish.")
    home.rule("bob", "Be brief.")
    recall = home.ask("bob", "What is my dog called?")
    assert "Biscuit" not in joined_text(recall)
    assert "Spanish" not in joined_text(recall)
    assert len(recall.item_ids) == 1


def test_contradicted_fact_is_not_retrieved_edited_or_removed(
    home: Home,
) -> None:
    asked = ["What is my dog called?"]
    older = home.fact("ada", "My dog is called Biscuit.", questions=asked, answer="Biscuit")
    later = home.fact("ada", "My dog is called Rex.", questions=asked, answer="Rex")
    for act in (
        lambda: home.memory.edit("ada", older.id, "It is Bob."),
        lambda: home.memory.retract("ada", older.id),
    ):
        with pytest.raises(NotFound):
            act()
    assert [item.id for item in home.memory.items("ada")] == [later.id]


@pytest.mark.parametrize(
    ("asked", "again"),
    [
        ("犬の名前は何ですか？", "犬の名前は何ですか"),
        ("私の車はＢＭＷですか?", "私の車はBMWですか。"),
        ("ما اسم كلبي؟", "ما اسم كلبي"),
        ("मेरे कुत्ते का नाम क्या है।", "मेरे कुत्ते का नाम क्या है"),
    ],
)
def test_punctuation_and_width_do_not_change_a_question_in_any_script(
    home: Home, asked: str, again: str
) -> None:
    home.fact("ada", "My dog is called Biscuit.", questions=[asked], answer="Biscuit")
    later = home.fact("ada", "My dog is called Rex.", questions=[again], answer="Rex")
    assert [item.id for item in home.memory.items("ada")] == [later.id]


def test_sign_at_the_end_of_a_name_makes_another_question(home: Home) -> None:
    for name in ("C", "C#", "C++"):
        home.fact("ada", f"I use {name}.", questions=[f"Do I use {name}"], answer=name)
    assert len(home.memory.items("ada")) == 3


def test_refused_edit_changes_nothing(home: Home) -> None:
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
def test_invalid_item_text_is_refused(text: object, fault: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_item_text(text, what="comment")
    assert fault in caught.value.message
    assert "comment" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "text", ["x" * MAX_ITEM_LENGTH, "two\nlines\tand a tab", "نحن", "👩‍👩‍👧", "naïve"]
)
def test_text_in_any_script_is_accepted(text: str) -> None:
    assert check_item_text(f" {text}\n", what="fact") == text
