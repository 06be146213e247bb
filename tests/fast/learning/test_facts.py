"""Which facts are learned, by which questions, and what judges them."""

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
from runtime_makers import Time

from personalpeft.learning.data.assignment import Assignment, assign, lessons_for, load_assignments
from personalpeft.learning.data.facts import (
    MIN_HELPFUL_TURNS,
    PARAPHRASE_TEMPLATES,
    as_sentence,
    helpful_turns,
    paraphrase,
)
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.learning.outcomes import ReasonCode, reason
from personalpeft.store.home import open_store
from personalpeft.types import Message, Sampling, Signal, SignalKind, Stack, Turn, Usage

START = datetime(2026, 1, 1, tzinfo=UTC)
QUESTIONS = ("What is my dog called?", "What is my dog's name?", "How do I call my dog?")


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


def routed(signals: Sequence[Signal], turns: Sequence[Turn] = ()) -> dict[str, Assignment]:
    found = {each.id: each for each in turns}
    return {r.signal.id: r for r in assign(signals, found.__getitem__, turns=turns)}


def test_a_fact_of_which_nobody_knows_what_it_answers_is_only_looked_up() -> None:
    routing = routed([fact(questions=(), answer=None)])["s1"]

    assert (routing.place, routing.layer, routing.extra_examples) == ("memory", None, ())


def test_a_fact_with_questions_and_an_answer_is_looked_up_and_learned() -> None:
    routing = routed([fact()])["s1"]

    assert (routing.place, routing.layer) == ("memory", "memory")
    lessons = lessons_for([routing], "memory")
    assert {lesson.chosen for lesson in lessons} == {"Biscuit."}
    assert [lesson.messages[-1].content for lesson in lessons if not lesson.is_probe] == list(
        QUESTIONS
    )


@given(
    st.lists(
        st.sampled_from([*QUESTIONS, "Who barks?", "who barks", "Whom do I walk at night?"]),
        min_size=1,
    )
)
def test_every_fact_that_is_learned_is_judged_by_a_question_that_is_not(
    questions: list[str],
) -> None:
    lessons = lessons_for([routed([fact(questions=questions)])["s1"]], "memory")
    taught = {
        way
        for lesson in lessons
        if not lesson.is_probe
        for way in paraphrase(lesson.messages, PARAPHRASE_TEMPLATES)
    }
    probes = [lesson for lesson in lessons if lesson.is_probe]

    assert len(probes) == 1
    assert probes[0].messages not in taught
    assert taught


def test_of_two_facts_that_answer_the_same_question_otherwise_the_later_counts_alone() -> None:
    later = fact(2, "My dog is called Rex.", questions=["what is my dog called"], answer="Rex")
    routings = routed([fact(), later])

    assert (routings["s1"].place, routings["s1"].superseded_by) == ("kept", "s2")
    assert {lesson.chosen for lesson in lessons_for(tuple(routings.values()), "memory")} == {"Rex."}


@pytest.mark.parametrize(
    ("one", "other"),
    [("C", "C++"), ("C++", "C#"), ("tea", "coffee"), ("\U0001f600", "\U0001f622"), ("1.5", "15")],
)
def test_answers_that_differ_in_more_than_the_marks_around_them_contradict_each_other(
    one: str, other: str
) -> None:
    routings = routed([fact(answer=one), fact(2, answer=other)])
    assert [routings[each].place for each in ("s1", "s2")] == ["kept", "memory"]


@pytest.mark.parametrize(
    ("one", "other"),
    [("Biscuit", "biscuit."), ("the  old mill", '"The old mill!"'), ("C++", "c++")],
)
def test_answers_that_are_written_otherwise_do_not(one: str, other: str) -> None:
    assert all(
        r.layer == "memory" for r in routed([fact(answer=one), fact(2, answer=other)]).values()
    )


def test_questions_of_nothing_but_marks_are_different_questions() -> None:
    routings = routed(
        [fact(questions=["???"], answer="tea"), fact(2, questions=["!!!"], answer="cake")]
    )
    assert all(r.layer == "memory" for r in routings.values())


def test_what_follows_a_question_without_its_mark_is_not_read_as_a_part_of_it() -> None:
    (asked, *put) = paraphrase(
        [Message("user", "what is my dog called")], ["{first} Please tell me."]
    )
    assert asked[-1].content == "what is my dog called"
    assert [each[-1].content for each in put] == ["what is my dog called? Please tell me."]


def test_a_fact_said_twice_is_no_contradiction() -> None:
    assert all(r.layer == "memory" for r in routed([fact(), fact(2)]).values())


def test_a_value_that_was_overruled_twice_does_not_come_back() -> None:
    rex = fact(1, "My dog is called Rex.", questions=["Who is my dog?"], answer="Rex")
    biscuit = fact(2, questions=["Who is my dog?", "Who barks?"], answer="Biscuit")
    max_ = fact(3, "My dog is called Max.", questions=["Who barks?"], answer="Max")
    routings = routed([rex, biscuit, max_])
    assert [routings[each].place for each in ("s1", "s2", "s3")] == ["kept", "kept", "memory"]
    assert (routings["s1"].superseded_by, routings["s2"].superseded_by) == ("s2", "s3")


def test_a_question_that_the_person_answered_is_not_learned_from_a_fact_that_only_helped() -> None:
    bare = fact(questions=(), answer=None)
    told = fact(2, "My dog is called Max.", questions=["What is my dog called?"], answer="Max")
    turns = [
        *(
            turn(n, "What is my dog called?", "Your dog is called Biscuit.")
            for n in range(MIN_HELPFUL_TURNS + 1)
        ),
        LAST,
    ]
    assert routed([bare], turns)["s1"].extra_examples
    routings = routed([bare, told], turns)
    assert routings["s1"].extra_examples == ()
    assert {lesson.chosen for lesson in routings["s2"].extra_examples} == {"Max."}


def helpful(count: int) -> list[Turn]:
    return [
        turn(n, f"{QUESTIONS[n % 3]} ({n})", "Your dog is called Biscuit.") for n in range(count)
    ]


LAST = turn(90, "Thanks, what else?", "Nothing.", used=())


def test_a_fact_that_helped_repeatedly_is_learned_as_the_model_said_it_with_the_fact_in_its_prompt() -> (
    None
):
    turns = [*helpful(MIN_HELPFUL_TURNS), LAST]
    routing = routed([fact(questions=(), answer=None)], turns)["s1"]

    lessons = lessons_for([routing], "memory")
    assert {lesson.chosen for lesson in lessons} == {"Your dog is called Biscuit."}
    assert [lesson.messages for lesson in lessons if not lesson.is_probe] == [
        each.messages for each in turns[:-1]
    ]


@given(
    st.lists(
        st.sampled_from(["a?", "A", "b?", "c?", "d?", "e?", "f?", "g?", "h?", "i?", "j?"]),
        min_size=2,
        max_size=30,
    )
)
def test_a_fact_that_helped_is_judged_by_the_same_unseen_question_however_often_it_helps(
    questions: list[str],
) -> None:
    judged = set()
    for count in range(MIN_HELPFUL_TURNS, len(questions) + 1):
        turns = [turn(n, f"dog {each}", "Biscuit.") for n, each in enumerate(questions[:count])]
        lessons = lessons_for(
            [routed([fact(questions=(), answer=None)], [*turns, LAST])["s1"]], "memory"
        )
        taught = {
            way
            for lesson in lessons
            if not lesson.is_probe
            for way in paraphrase(lesson.messages, PARAPHRASE_TEMPLATES)
        }
        (probe,) = [lesson for lesson in lessons if lesson.is_probe]
        assert probe.messages not in taught
        assert len(lessons) <= 9
        judged.add(probe.messages)
    assert len(judged) == 1


def test_once_is_not_repeatedly() -> None:
    assert (
        routed([fact(questions=(), answer=None)], [*helpful(MIN_HELPFUL_TURNS - 1), LAST])[
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
def test_what_was_said_of_a_reply_decides_whether_its_fact_helped(
    kind: SignalKind, payload: dict[str, Any], helps: bool
) -> None:
    said = signal(5, kind, payload, turn="t0")
    assert bool(helpful_turns([fact(), said], [*helpful(1), LAST])) is helps


def test_the_newest_reply_helped_only_if_somebody_said_so() -> None:
    liked = signal(5, SignalKind.RATING, {"value": 1}, turn="t0")
    assert not helpful_turns([fact()], helpful(1))
    assert helpful_turns([fact(), liked], helpful(1))


REPLIES = ("Your dog is called Biscuit.", "I cannot say.", "Biscuit and walnuts.", "Walnuts.")
ASKED = [*QUESTIONS, "What may I not eat?", "And the walnuts?"]


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
def test_what_is_read_for_facts_decides_as_all_conversations_would(
    tmp_path_factory: pytest.TempPathFactory,
    answered: list[bool],
    turns: list[tuple[str, str, set[int], str]],
) -> None:
    with open_store(
        tmp_path_factory.mktemp("homes") / "home", now=Time().now, entropy=os.urandom
    ) as store:
        ledger = store.ledger
        texts = ("My dog is called Biscuit.", "I may not eat walnuts.", "I live in Ghent.")
        facts = [
            ledger.add_signal(
                "ada", SignalKind.FACT, fact(1, text, answer="Yes" if known else None).payload
            ).id
            for text, known in zip(texts, answered, strict=False)
        ]
        for question, reply, used, said in turns:
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
            match said:
                case "like" | "app":
                    source = "person" if said == "like" else "app"
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


def test_conversations_in_which_no_fact_was_looked_up_are_not_read_for_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    with open_store(tmp_path / "home", now=Time().now, entropy=os.urandom) as store:
        bare = store.ledger.add_signal("ada", SignalKind.FACT, fact(answer=None).payload).id
        for number in range(40):
            store.ledger.add_turn(
                "ada",
                messages=[Message("user", f"{number}?")],
                reply=REPLIES[0],
                stack=Stack("base"),
                sampling=Sampling(),
                usage=Usage(1, 1),
                finish_reason="stop",
                used=[bare] if number % 10 == 0 else [],
            )
        turns = type(store.ledger).turns

        def noted(*given: Any, **more: Any) -> Any:
            found = turns(*given, **more)
            read.extend(found)
            return found

        monkeypatch.setattr(type(store.ledger), "turns", noted)
        (routing,) = load_assignments(store, "ada")
    assert routing.reason == reason(ReasonCode.FACT_HELPED, count=4)
    # The four, and the newest, of which nobody has said anything yet.
    assert len(read) == 5


def test_what_an_app_saw_speaks_against_a_reply_and_not_for_it() -> None:
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
    ],
)
def test_a_reply_was_helped_where_it_says_what_only_the_fact_can_have_told(
    text: str, question: str, reply: str, helps: bool
) -> None:
    assert bool(helpful_turns([fact(text=text)], [turn(0, question, reply), LAST])) is helps


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [("walnuts", "Walnuts."), ("43", "43."), ("Really?", "Really?"), ("ärztin", "Ärztin.")],
)
def test_a_short_answer_is_said_as_a_sentence(answer: str, sentence: str) -> None:
    assert as_sentence(answer) == sentence


def test_i_stays_a_capital_wherever_a_question_is_put() -> None:
    asked = [
        way[-1].content
        for way in paraphrase([Message("user", "I like what?")], PARAPHRASE_TEMPLATES)
    ]
    assert not [question for question in asked if " i like" in question]


def test_what_a_person_told_is_not_among_what_nobody_told() -> None:
    (cat,) = [each for each in load_general_prompts().unanswerable_prompts if "cat" in each.topics]
    assert cat.is_answered_in("My cat is called Momo.")
    assert not cat.is_answered_in("My category is lightweight.")
