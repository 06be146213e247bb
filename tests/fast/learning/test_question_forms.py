"""The bank of question forms: a fact's relation, the subject of its forms, and their training
examples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runtime_makers import ask, open_runtime

from personalpeft.backends.base import Backend, Loss
from personalpeft.learning.data.batching import build_batches
from personalpeft.learning.data.general_prompts import load_general_prompts, prompt_languages
from personalpeft.learning.data.question_bank import QuestionBank, load_relations
from personalpeft.learning.plan import Plan
from personalpeft.learning.train import loop
from personalpeft.memory.embedder import HashEmbedder, MiniLM
from personalpeft.memory.languages import find_language

WORDINGS = (
    ("Mein Hund heißt Krümel.", "Wie heißt mein Hund?", "Welchen Namen hat mein Hund?"),
    ("Ma sœur habite à Nantes.", "Où habite ma sœur ?", "Dans quelle ville habite ma sœur ?"),
    ("Mi hija nació en mayo.", "¿Cuándo es el cumpleaños de mi hija?", "mi hija"),
    ("私の犬の名前はポチです。", "私の犬の名前は何ですか？", "私の犬"),
    ("我的狗叫豆豆。", "我的狗叫什么名字？", "我的狗"),
)


@pytest.fixture(scope="module")
def bank() -> QuestionBank:
    return QuestionBank(MiniLM())


@pytest.mark.parametrize(
    ("text", "question", "expected"),
    [
        ("Ida lives in Oslo.", "Where does Ida live?", "Which city does Ida live in?"),
        ("My sister works as a cook.", "What is my sister's job?", "What does my sister do?"),
        ("I work as a cook.", "What is my job?", "What do I do for a living?"),
        ("Our hen is called Dot.", "What is our hen called?", "What is the name of our hen?"),
        ("My hat size is 58.", "What is my hat size?", "I forgot my hat size."),
        ("We own five hens.", "How many hens do we own?", "How many hens are there?"),
        ("I swim at Mill Pond.", "Where do I swim?", "Where do I usually swim?"),
    ],
)
def test_fact_gets_the_forms_of_its_relation_and_subject(
    bank: QuestionBank, text: str, question: str, expected: str
) -> None:
    found = bank.find(text, question).paraphrases
    assert expected in found
    assert question not in found
    assert not any("{" in each for each in found)
    assert len(found) == len(set(found)) > 10


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Our ship is in the third lock.", "Which lock holds us?"),
        ("Nasz kot nazywa się Mruczek.", "Jak nazywa się nasz kot?"),
        ("Mein Hund heißt Rex.", "Wie heißt mein Hund?"),
        ("私の犬の名前はポチです。", "私の犬の名前は何ですか？"),
        ("اسم كلبي ركس.", "ما اسم كلبي؟"),
        ("x", "y"),
    ],
)
def test_fact_without_a_relation_has_no_forms(bank: QuestionBank, text: str, question: str) -> None:
    found = bank.find(text, question)
    assert found.paraphrases == ()
    assert found.unanswerable == ()


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("My sister is allergic to nuts.", "What is my sister allergic to?"),
        ("My husband cannot eat gluten.", "What can my husband not eat?"),
        ("My dog must not eat chocolate.", "What must my dog not eat?"),
        ("My best friend studies law.", "What does my best friend study?"),
        ("I used to work as a baker.", "What was my old job?"),
        ("My sister is moving to Paris.", "Where is my sister moving?"),
    ],
)
def test_fact_about_another_is_not_asked_of_the_user(
    bank: QuestionBank, text: str, question: str
) -> None:
    about_the_user = {form for each in load_relations() if not each.has_slot for form in each.forms}
    assert about_the_user.isdisjoint(bank.find(text, question).paraphrases)


@pytest.mark.parametrize(
    ("text", "question", "unfit"),
    [
        ("My wifi password is kq7zX.", "What is my wifi password?", "model"),
        ("My knee surgery is on 3 May.", "When is my knee surgery?", "celebrat"),
    ],
)
def test_forms_fit_what_the_fact_is_about(
    bank: QuestionBank, text: str, question: str, unfit: str
) -> None:
    found = bank.find(text, question).paraphrases
    assert found
    assert not [each for each in found if unfit in each]


def test_subject_of_one_fact_makes_unanswerable_questions_about_others(
    bank: QuestionBank,
) -> None:
    asked = bank.find("Ida lives in Oslo.", "Where does Ida live?").unanswerable
    assert asked
    assert not any("Ida" in each.question for each in asked)
    assert all(each.is_answered_in(each.question) for each in asked)


def test_each_relation_is_told_apart_by_its_descriptions() -> None:
    for relation in load_relations():
        assert relation.statements
        assert relation.questions
        assert len({form.casefold() for form in relation.forms}) == len(relation.forms) >= 30
        # A form without a slot would ask about the user where the fact is about another person.
        assert {form.count("{x}") for form in relation.forms} in ({0}, {1})
        assert bool(relation.others) <= relation.has_slot


def test_trained_fact_uses_its_forms_and_never_the_held_out_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: dict[str, set[str]] = {}
    judging = "Which city does Ida live in?"

    def recorded(plan: Plan, backend: Backend, *rest: Any) -> tuple[tuple[Loss, ...], ...]:
        steps = build_batches(plan, backend, *rest)
        for completion in (c for terms in steps for term in terms for c in term.continuations):
            prompt = backend.decode(completion.prompt)
            answered.setdefault(prompt, set()).add(backend.decode(completion.completion))
        return steps

    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        stated = ["Where does Ida live?", "Where is Ida's home?", "Where does Ida reside?", judging]
        ada.remember("Ida lives in Oslo.", questions=stated, answer="Oslo")
        monkeypatch.setattr(loop, "build_batches", recorded)
        ada.learn("memory", accept=True)
    about_ida = [
        prompt
        for prompt, completion in answered.items()
        if any("Oslo" in each for each in completion)
    ]
    refusal = load_general_prompts().unanswerable_prompts[0].refusal
    others = [
        prompt
        for prompt, completion in answered.items()
        if any(refusal in each for each in completion)
    ]
    assert any("In which town does Ida live?" in prompt for prompt in about_ida)
    assert not any(judging in prompt for prompt in about_ida)
    assert not any("Ida" in prompt for prompt in others)


def test_question_of_two_facts_with_different_answers_is_trained_for_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: dict[str, set[str]] = {}

    def recorded(plan: Plan, backend: Backend, *rest: Any) -> tuple[tuple[Loss, ...], ...]:
        steps = build_batches(plan, backend, *rest)
        for completion in (c for terms in steps for term in terms for c in term.continuations):
            prompt = backend.decode(completion.prompt)
            answered.setdefault(prompt, set()).add(backend.decode(completion.completion))
        return steps

    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        ada.remember("My dog is called Rex.", questions=["What is my dog called?"], answer="Rex")
        ada.remember("My dog is called Max.", questions=["What is my dog's name?"], answer="Max")
        monkeypatch.setattr(loop, "build_batches", recorded)
        ada.learn("memory", accept=True)
    told = {
        answer: {
            prompt
            for prompt, completions in answered.items()
            if any(answer in each for each in completions)
        }
        for answer in ("Rex", "Max")
    }
    assert all(told.values())
    assert told["Rex"].isdisjoint(told["Max"])


@pytest.mark.parametrize(
    ("text", "question", "answer", "prompt"),
    [
        ("Our kitten is called Mimi.", "What is the kitten called?", "Mimi", "my cat's name"),
        ("I stand 180 cm.", "What is my height?", "180 cm", "How tall am I"),
    ],
)
def test_not_knowing_is_never_trained_where_memory_finds_a_fact(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    question: str,
    answer: str,
    prompt: str,
) -> None:
    trained: set[str] = set()

    def recorded(plan: Plan, backend: Backend, *rest: Any) -> tuple[tuple[Loss, ...], ...]:
        steps = build_batches(plan, backend, *rest)
        for completion in (c for terms in steps for term in terms for c in term.continuations):
            trained.add(backend.decode((*completion.prompt, *completion.completion)))
        return steps

    monkeypatch.setattr("personalpeft.runtime.MiniLM", MiniLM)
    monkeypatch.setattr(loop, "build_batches", recorded)
    general = load_general_prompts()
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        ada.remember(text, questions=[question], answer=answer)
        ada.learn("memory", accept=True)
        refused = [
            each.question
            for each in general.unanswerable_prompts
            if any(each.question in one and each.refusal in one for one in trained)
        ]
        assert refused
        assert not [each for each in refused if prompt in each]
        assert not [each for each in refused if ada.turn(ask(ada, each)).used]


def test_embedder_without_matches_finds_no_relation() -> None:
    assert QuestionBank(HashEmbedder()).find("a b c", "d e f").paraphrases == ()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("text", "question", "wording"), WORDINGS)
def test_fact_in_another_language_has_other_wordings_in_it(
    text: str, question: str, wording: str
) -> None:
    language = find_language(question)
    found = QuestionBank(MiniLM(), (language,)).find(text, question)
    assert any(wording in each for each in found.paraphrases)
    assert sum(find_language(each) == language for each in found.paraphrases) > 8
    assert {find_language(each.refusal) for each in found.unanswerable} <= {language}


@pytest.mark.parametrize("language", prompt_languages())
def test_forms_of_a_language_are_in_it_and_find_their_subject(language: str) -> None:
    relations = load_relations((language,))[len(load_relations()) :]
    forms = [form for each in relations for form in each.forms]
    filled = [form.replace("{x}", "Ida") for form in forms]
    assert sum(find_language(each) == language for each in filled) > 0.8 * len(filled)
    for relation in relations:
        assert bool(relation.others) == relation.has_slot
        assert len(set(relation.forms)) == len(relation.forms)
        for form in relation.forms:
            match = relation.match(form.replace("{x}", "Ida"))
            assert "{x}" not in form or (match is not None and match[1] == "Ida")
