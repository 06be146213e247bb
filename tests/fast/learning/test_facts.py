"""Which facts are trained on, with which questions, and which questions judge them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import FakeTime

from personalpeft.learning.data.fact_lessons import MIN_HELPFUL_TURNS, as_sentence, helpful_turns
from personalpeft.learning.data.general_prompts import load_general_prompts
from personalpeft.learning.data.lesson_assignment import (
    Assignment,
    assign,
    lessons_for,
    load_assignments,
)
from personalpeft.learning.data.question_bank import PARAPHRASE_TEMPLATES, QuestionTemplate
from personalpeft.learning.outcomes import ReasonCode, reason
from personalpeft.store.home import open_store
from personalpeft.types import Message, Sampling, Signal, SignalKind, Stack, Turn, Usage

START = datetime(2026, 1, 1, tzinfo=UTC)
QUESTIONS = ("What is my dog called?", "What is my dog's name?", "How do I call my dog?")


def wordings(question: str) -> list[str]:
    """Return a question as it is, and in each of the templates."""
    return [question, *(template.fill(question) for template in PARAPHRASE_TEMPLATES)]


def signal(
    number: int, kind: SignalKind, payload: dict[str, Any], *, turn: str | None = None
) -> Signal:
    return Signal(
        f"s{number}",
        "ada",
        kind,
        START + timedelta(minutes=number),
        payload,
        turn=turn,
        source="person",
    )


def fact(
    number: int = 1,
    text: str = "My dog is called Biscuit.",
    *,
    questions: Sequence[str] = QUESTIONS,
    answer: str | None = "Biscuit",
) -> Signal:
    return signal(
        number, SignalKind.FACT, {"text": text, "questions": list(questions), "answer": answer}
    )


def turn(number: int, question: str, reply: str, *, used: Sequence[str] = ("s1",)) -> Turn:
    return Turn(
        id=f"t{number}",
        user="ada",
        at=START + timedelta(minutes=number),
        messages=(Message("user", question),),
        reply=reply,
        stack=Stack("base"),
        sampling=Sampling(),
        usage=Usage(1, 1),
        finish_reason="stop",
        used=tuple(used),
    )


def assign_signals(signals: Sequence[Signal], turns: Sequence[Turn] = ()) -> dict[str, Assignment]:
    found = {each.id: each for each in turns}
    return {r.signal.id: r for r in assign(signals, found.__getitem__, turns=turns)}


def test_fact_without_questions_or_answer_is_only_retrieved() -> None:
    assignment = assign_signals([fact(questions=(), answer=None)])["s1"]

    assert (assignment.place, assignment.layer, assignment.extra_examples) == ("memory", None, ())


def test_fact_with_questions_and_answer_is_retrieved_and_trained() -> None:
    assignment = assign_signals([fact()])["s1"]

    assert (assignment.place, assignment.layer) == ("memory", "memory")
    lessons = lessons_for([assignment], "memory")
    assert {lesson.chosen for lesson in lessons} == {"Biscuit."}
    assert [lesson.messages[-1].content for lesson in lessons if not lesson.is_test] == list(
        QUESTIONS
    )


@given(
    st.lists(
        st.sampled_from([*QUESTIONS, "Who barks?", "who barks", "Whom do I walk at night?"]),
        min_size=1,
    )
)
def test_each_trained_fact_is_judged_by_a_question_that_is_not_trained(
    questions: list[str],
) -> None:
    lessons = lessons_for([assign_signals([fact(questions=questions)])["s1"]], "memory")
    taught = {way for lesson in lessons if not lesson.is_test for way in wordings(lesson.question)}
    tested = [lesson for lesson in lessons if lesson.is_test]

    assert len(tested) == 1
    assert tested[0].question not in taught
    assert taught


def test_later_of_two_contradicting_facts_counts_alone() -> None:
    later = fact(2, "My dog is called Rex.", questions=["what is my dog called"], answer="Rex")
    assignments = assign_signals([fact(), later])

    assert (assignments["s1"].place, assignments["s1"].superseded_by) == ("unused", "s2")
    assert {lesson.chosen for lesson in lessons_for(tuple(assignments.values()), "memory")} == {
        "Rex."
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("C", "C++"),
        ("C++", "C#"),
        ("tea", "coffee"),
        ("\U0001f600", "\U0001f622"),
        ("1.5", "15"),
        ("5", "-5"),
        ("5", ".5"),
        ("A", "A-"),
        ("A", "A*"),
        ("10", "10 %"),
    ],
)
def test_facts_with_different_answers_to_one_question_contradict(one: str, other: str) -> None:
    assignments = assign_signals([fact(answer=one), fact(2, answer=other)])
    assert [assignments[each].place for each in ("s1", "s2")] == ["unused", "memory"]


@pytest.mark.parametrize(
    ("one", "other"),
    [("Biscuit", "biscuit."), ("the  old mill", '"The old mill!"'), ("C++", "c++")],
)
def test_answers_that_differ_only_in_spelling_do_not_contradict(one: str, other: str) -> None:
    assert all(
        r.layer == "memory"
        for r in assign_signals([fact(answer=one), fact(2, answer=other)]).values()
    )


def test_questions_of_punctuation_alone_are_different_questions() -> None:
    assignments = assign_signals(
        [fact(questions=["???"], answer="tea"), fact(2, questions=["!!!"], answer="cake")]
    )
    assert all(r.layer == "memory" for r in assignments.values())


def test_text_after_an_unmarked_question_is_not_part_of_the_question() -> None:
    template = QuestionTemplate("{first} Please tell me.", "{first}")
    assert template.fill("what is my dog called") == "what is my dog called? Please tell me."


def test_repeated_fact_is_no_contradiction() -> None:
    assert all(r.layer == "memory" for r in assign_signals([fact(), fact(2)]).values())


def test_value_superseded_twice_does_not_return() -> None:
    rex = fact(1, "My dog is called Rex.", questions=["Who is my dog?"], answer="Rex")
    biscuit = fact(2, questions=["Who is my dog?", "Who barks?"], answer="Biscuit")
    max_ = fact(3, "My dog is called Max.", questions=["Who barks?"], answer="Max")
    assignments = assign_signals([rex, biscuit, max_])
    assert [assignments[each].place for each in ("s1", "s2", "s3")] == [
        "unused",
        "unused",
        "memory",
    ]
    assert (assignments["s1"].superseded_by, assignments["s2"].superseded_by) == ("s2", "s3")


def test_question_answered_by_the_user_is_not_learned_from_a_helpful_fact() -> None:
    bare = fact(questions=(), answer=None)
    stated = fact(2, "My dog is called Max.", questions=["What is my dog called?"], answer="Max")
    turns = [
        *(
            turn(n, "What is my dog called?", "Your dog is called Biscuit.")
            for n in range(MIN_HELPFUL_TURNS + 1)
        ),
        LAST,
    ]
    assert assign_signals([bare], turns)["s1"].extra_examples
    assignments = assign_signals([bare, stated], turns)
    assert assignments["s1"].extra_examples == ()
    assert {lesson.chosen for lesson in assignments["s2"].extra_examples} == {"Max."}


def helpful(count: int) -> list[Turn]:
    return [
        turn(n, f"{QUESTIONS[n % 3]} ({n})", "Your dog is called Biscuit.") for n in range(count)
    ]


LAST = turn(90, "Thanks, what else?", "Nothing.", used=())


def test_fact_that_helped_repeatedly_is_distilled_from_the_replies_it_helped() -> None:
    turns = [*helpful(MIN_HELPFUL_TURNS), LAST]
    assignment = assign_signals([fact(questions=(), answer=None)], turns)["s1"]

    lessons = lessons_for([assignment], "memory")
    assert {lesson.chosen for lesson in lessons} == {"Your dog is called Biscuit."}
    assert [lesson.messages for lesson in lessons if not lesson.is_test] == [
        each.messages for each in turns[:-1]
    ]


@given(
    st.lists(
        st.sampled_from(["a?", "A", "b?", "c?", "d?", "e?", "f?", "g?", "h?", "i?", "j?"]),
        min_size=2,
        max_size=30,
    )
)
def test_helpful_fact_is_judged_by_the_same_held_out_question_each_time(
    questions: list[str],
) -> None:
    judged = set()
    for count in range(MIN_HELPFUL_TURNS, len(questions) + 1):
        turns = [turn(n, f"dog {each}", "Biscuit.") for n, each in enumerate(questions[:count])]
        lessons = lessons_for(
            [assign_signals([fact(questions=(), answer=None)], [*turns, LAST])["s1"]], "memory"
        )
        taught = {
            way for lesson in lessons if not lesson.is_test for way in wordings(lesson.question)
        }
        (test,) = [lesson for lesson in lessons if lesson.is_test]
        assert test.question not in taught
        assert len(lessons) <= 9
        judged.add(test.messages)
    assert len(judged) == 1


def test_fact_that_helped_once_is_not_trained() -> None:
    assert (
        assign_signals([fact(questions=(), answer=None)], [*helpful(MIN_HELPFUL_TURNS - 1), LAST])[
            "s1"
        ].layer
        is None
    )


@pytest.mark.parametrize(
    ("kind", "payload", "helps"),
    [
        (SignalKind.RATING, {"value": 1}, True),
        (SignalKind.RATING, {"value": -1}, False),
        (SignalKind.EDIT, {"text": "Biscuit!"}, False),
        (SignalKind.COMMENT, {"text": "Be brief."}, False),
        (SignalKind.REWARD, {"value": -0.5}, False),
        (SignalKind.REWARD, {"value": 0.5}, True),
        (SignalKind.REWARD, {"value": -0.1}, True),
    ],
)
def test_feedback_on_a_reply_decides_whether_its_fact_helped(
    kind: SignalKind, payload: dict[str, Any], helps: bool
) -> None:
    rated = signal(5, kind, payload, turn="t0")
    assert bool(helpful_turns([fact(), rated], [*helpful(1), LAST])) is helps


def test_without_training_consent_dislikes_count_and_likes_do_not() -> None:
    def rated(value: int) -> Signal:
        payload = {"value": value, "trains": False}
        return signal(5, SignalKind.RATING, payload, turn="t0")

    assert not helpful_turns([fact(), rated(-1)], [*helpful(1), LAST])
    assert not helpful_turns([fact(), rated(1)], helpful(1))


def test_reply_without_training_consent_teaches_no_other_fact() -> None:
    assert helpful_turns([fact()], [*helpful(1), LAST])
    turns = [replace(each, used=(*each.used, "s9")) for each in helpful(1)]
    assert not helpful_turns([fact()], [*turns, LAST], {"s9"})


def test_a_reply_helped_if_its_own_conversation_went_on() -> None:
    turns = [replace(each, conversation_id="c1") for each in helpful(1)]
    assert not helpful_turns([fact()], [*turns, LAST])
    assert helpful_turns([fact()], turns, continued={turns[0].id})


def test_newest_reply_helped_only_if_it_was_liked() -> None:
    liked = signal(5, SignalKind.RATING, {"value": 1}, turn="t0")
    assert not helpful_turns([fact()], helpful(1))
    assert helpful_turns([fact(), liked], helpful(1))


REPLIES = ("Your dog is called Biscuit.", "I cannot say.", "Biscuit and walnuts.", "Walnuts.")
ASKED = [*QUESTIONS, "What may I not eat?", "And the walnuts?"]


@pytest.mark.exhaustive
@examples(25)
@given(
    answered=st.lists(st.booleans(), min_size=1, max_size=3),
    turns=st.lists(
        st.tuples(
            st.sampled_from(ASKED),
            st.sampled_from(REPLIES),
            st.sets(st.integers(0, 2), max_size=2),
            st.sampled_from(["", "", "", "like", "dislike", "edit", "app"]),
        ),
        max_size=9,
    ),
)
def test_turns_read_for_facts_decide_as_all_turns_would(
    tmp_path_factory: pytest.TempPathFactory,
    answered: list[bool],
    turns: list[tuple[str, str, set[int], str]],
) -> None:
    with open_store(
        tmp_path_factory.mktemp("homes") / "home", now=FakeTime().now, entropy=os.urandom
    ) as store:
        ledger = store.ledger
        texts = ("My dog is called Biscuit.", "I may not eat walnuts.", "I live in Ghent.")
        facts = [
            ledger.add_signal(
                "ada", SignalKind.FACT, fact(1, text, answer="Yes" if known else None).payload
            ).id
            for text, known in zip(texts, answered, strict=False)
        ]
        for question, reply, used, rated in turns:
            spoken = ledger.add_turn(
                "ada",
                messages=[Message("user", question)],
                reply=reply,
                stack=Stack("base"),
                sampling=Sampling(),
                usage=Usage(1, 1),
                finish_reason="stop",
                used=[facts[number] for number in used if number < len(facts)],
            ).id
            match rated:
                case "like" | "app":
                    source = "person" if rated == "like" else "app"
                    ledger.add_signal(
                        "ada", SignalKind.RATING, {"value": 1}, turn=spoken, source=source
                    )
                case "dislike":
                    ledger.add_signal("ada", SignalKind.RATING, {"value": -1}, turn=spoken)
                case "edit":
                    ledger.add_signal("ada", SignalKind.EDIT, {"text": "Rex."}, turn=spoken)
        conversations = ledger.turns("ada")[::-1]
        known = {each.id: each for each in conversations}
        assert load_assignments(store, "ada") == assign(
            ledger.signals("ada"), known.__getitem__, turns=conversations
        )


def test_turns_without_retrieved_facts_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    with open_store(tmp_path / "home", now=FakeTime().now, entropy=os.urandom) as store:
        bare = store.ledger.add_signal("ada", SignalKind.FACT, fact(answer=None).payload).id
        last: Turn | None = None
        for number in range(40):
            last = store.ledger.add_turn(
                "ada",
                messages=[Message("user", f"{number}?")],
                reply=REPLIES[0],
                stack=Stack("base"),
                sampling=Sampling(),
                usage=Usage(1, 1),
                finish_reason="stop",
                used=[bare] if number % 10 == 0 else [],
                conversation_id=last.conversation_id if last else None,
                previous=last.id if last else None,
            )
        turns = type(store.ledger).turns

        def recorded(*given: Any, **more: Any) -> Any:
            found = turns(*given, **more)
            read.extend(found)
            return found

        monkeypatch.setattr(type(store.ledger), "turns", recorded)
        (assignment,) = load_assignments(store, "ada")
    assert assignment.reason == reason(ReasonCode.FACT_HELPED, count=4)
    # These four turns, and the newest, which has no feedback yet.
    assert len(read) == 5


def test_implicit_feedback_counts_against_a_fact_and_never_for_it() -> None:
    seen = [
        replace(signal(5, SignalKind.RATING, {"value": value}, turn="t0"), source="app")
        for value in (-1, 1)
    ]
    assert not helpful_turns([fact(), seen[0]], [*helpful(1), LAST])
    assert not helpful_turns([fact(), seen[1]], helpful(1))


REX = "My dog is called Rex."


@pytest.mark.parametrize(
    ("text", "question", "reply", "helps"),
    [
        (REX, "What is my dog's name?", "I cannot say.", False),
        (REX, "What is my dog's name?", "Your dog is called Max.", False),
        (REX, "What is my dog's name?", "Rex.", True),
        ("My favourite fruit is the papaya.", "What fruit do I love?", "Papaya.", True),
        (
            "My favourite fruit is the papaya.",
            "What fruit do I love?",
            "Your favourite is the mango.",
            False,
        ),
        ("Mein Hund heißt Rex.", "Wie heißt mein Vierbeiner?", "Dein Hund heißt Max.", False),
        ("Mein Hund heißt Rex.", "Wie heißt mein Vierbeiner?", "Dein Hund heißt Rex.", True),
        ("My seat is in row 17.", "Where do I sit?", "In row 17.", True),
        ("My seat is in row 17.", "Where do I sit?", "In row 71.", False),
        (
            "私の犬の名前はビスケットです。",
            "犬の名前は何ですか？",
            "ビスケットという名前です。",
            True,
        ),
        ("私の犬の名前はビスケットです。", "犬の名前は何ですか？", "名前はマックスです。", False),
        ("اسم كلبي بسبوسة.", "ما اسم كلبي؟", "كلبك اسمه بسبوسة.", True),
        ("اسم كلبي بسبوسة.", "ما اسم كلبي؟", "كلبك اسمه ريكس.", False),
        ("मेरे कुत्ते का नाम बिस्किट है।", "मेरे कुत्ते का नाम क्या है?", "उसका नाम बिस्किट है।", True),
        ("मेरे कुत्ते का नाम बिस्किट है।", "मेरे कुत्ते का नाम क्या है?", "उसका नाम टॉमी है।", False),
    ],
)
def test_fact_helped_a_reply_that_only_the_fact_explains(
    text: str, question: str, reply: str, helps: bool
) -> None:
    assert bool(helpful_turns([fact(text=text)], [turn(0, question, reply), LAST])) is helps


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("walnuts", "Walnuts."),
        ("in an old mill near Tournai", "In an old mill near Tournai."),
        ("half-brother", "Half-brother."),
        ("43", "43"),
        ("Really?", "Really?"),
        ("ärztin", "Ärztin."),
        ("თბილისი", "თბილისი."),
        ("ǆem", "ǅem."),
        ("ビスケット", "ビスケット"),
        ("بسبوسة", "بسبوسة"),
        ("बिस्किट", "बिस्किट"),
        ("kq7zX", "kq7zX"),
        ("the code 3958", "The code 3958"),
        ("ada@example.org", "ada@example.org"),
        ("example.com/ada", "example.com/ada"),
        ("iPhone", "iPhone"),
        ("pH 7", "pH 7"),
        ("ß", "ß."),
        ("C++", "C++"),
    ],
)
def test_short_answer_is_phrased_as_a_sentence(answer: str, sentence: str) -> None:
    assert as_sentence(answer) == sentence


@pytest.mark.parametrize("question", ["どこに住んでいますか？", "أين أعيش؟", "Where do I live?"])
def test_question_keeps_its_own_question_mark(question: str) -> None:
    assert not [way for way in wordings(question) if f"{question}?" in way]


def test_pronoun_i_stays_a_capital_in_each_paraphrase() -> None:
    assert not [way for way in wordings("I like what?") if " i like" in way]


@pytest.mark.parametrize(
    "question",
    [
        "NASA job title?",
        "İstanbul'da hangi sokakta oturuyorum?",
        "Wie heißt mein Hund?",
        "¿Cómo se llama mi perro?",
        "私の犬の名前は何ですか？",
        "أين أعيش؟",
        "iPhone colour?",
    ],
)
def test_name_keeps_its_case_in_each_paraphrase_and_test(question: str) -> None:
    lessons = lessons_for([assign_signals([fact(questions=[question])])["s1"]], "memory")
    asked = [*(lesson.question for lesson in lessons), *wordings(question)]
    assert all(question in each for each in asked)


@pytest.mark.parametrize(
    "question",
    ["Wie heißt mein Hund?", "私の犬の名前は何ですか？", "Comment s'appelle mon chien ?"],
)
def test_question_in_another_language_gets_no_english_around_it(question: str) -> None:
    lessons = lessons_for([assign_signals([fact(questions=[question])])["s1"]], "memory")
    asked = [*(lesson.question for lesson in lessons), *wordings(question)]
    around = {each.replace(question, "") for each in asked}
    assert not [text for text in around if any(map(str.isalpha, text))]
    # All of them differ, so what judges the fact is not trained on.
    assert len(set(asked)) == len(PARAPHRASE_TEMPLATES) + 2


def test_stored_facts_are_excluded_from_unanswerable_prompts() -> None:
    (cat,) = [each for each in load_general_prompts().unanswerable_prompts if "cat" in each.topics]
    assert cat.is_answered_in("My cat is called Momo.")
    assert not cat.is_answered_in("My category is lightweight.")
