"""A learned style is served with the lessons nearest to a request as examples in the prompt."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import ask, open_runtime, style

from personalpeft import Runtime, User
from personalpeft.backends.base import Continuation, Score
from personalpeft.backends.fake import FakeBackend, fake_base
from personalpeft.backends.sequence import SequenceState
from personalpeft.learning.data.general_prompts import load_general_prompts
from personalpeft.types import Message, Sampling

TOPICS = ("an egg", "some rice", "the fish", "a carrot", "two potatoes", "an artichoke", "beans")
REQUEST, FAR = "How do I boil some pasta?", "Which planet has rings?"


def correct_cooking(user: User) -> list[str]:
    return [
        user.feedback(ask(user, f"How do I boil {topic}?"), edit=style(f"Boil {topic}."))
        for topic in TOPICS
    ]


@pytest.fixture
def edits(ada: User) -> list[str]:
    """The edits of a style that was learned."""
    edits = correct_cooking(ada)
    assert ada.learn().live
    return edits


def examples(user: User, prompt: str | list[Message] = REQUEST, **more: object) -> list[str]:
    """Return the signals in the prompt of a reply."""
    reply = user.chat(prompt, **{"temperature": 0, **more})  # type: ignore[arg-type]
    return [signal.id for signal in user.why(reply).items]


def test_request_like_the_lessons_is_answered_after_the_nearest_ones(
    ada: User, edits: list[str]
) -> None:
    found = examples(ada)
    assert len(found) == 2
    assert set(found) <= set(edits)
    assert examples(ada, f"How do I boil {TOPICS[4]} quickly?")[-1] == edits[4]
    assert examples(ada, FAR) == []


def test_lessons_are_no_examples_before_they_are_learned(ada: User) -> None:
    correct_cooking(ada)
    assert examples(ada) == []


def test_rollback_ends_the_examples_and_its_undoing_brings_them_back(
    ada: User, edits: list[str]
) -> None:
    with_examples = ask(ada, REQUEST).text
    ada.rollback("style")
    assert examples(ada) == []
    ada.rollback("style")
    assert ask(ada, REQUEST).text == with_examples


def test_layer_that_is_not_attached_brings_no_examples(ada: User, edits: list[str]) -> None:
    assert examples(ada, layers=[]) == []
    assert examples(ada, memory=False) == []
    ada.scope("style", "never")
    assert examples(ada) == []
    ada.scope("style", "always")
    ada.set_weight("style", 0)
    assert examples(ada) == []


@pytest.mark.parametrize("end", ["retract", "forget"])
def test_lesson_that_was_taken_back_is_no_example(ada: User, edits: list[str], end: str) -> None:
    nearest = examples(ada)[-1]
    if end == "retract":
        ada.retract(nearest)
    else:
        ada.forget(nearest)
    assert nearest not in examples(ada)


def test_later_turns_of_a_conversation_have_no_examples(ada: User, edits: list[str]) -> None:
    first = ask(ada, REQUEST)
    assert ada.why(first).items
    assert examples(ada, conversation_id=first.conversation_id) == []


def test_lessons_of_another_system_text_are_no_examples(ada: User, edits: list[str]) -> None:
    messages = [Message("system", "Write titles."), Message("user", REQUEST)]
    assert examples(ada, messages) == []


def test_lessons_older_than_a_rule_are_no_examples(ada: User, edits: list[str]) -> None:
    reply = ask(ada, FAR)
    rule = ada.feedback(reply, comment="Answer in Spanish.")
    assert examples(ada) == [rule]


def test_question_about_a_fact_has_the_fact_alone(ada: User, edits: list[str]) -> None:
    fact = ada.remember("I boil my pasta for nine minutes.")
    assert examples(ada, "How do I boil my pasta?") == [fact]


def test_users_see_their_own_examples_alone(runtime: Runtime, edits: list[str]) -> None:
    bo = runtime.user("bo")
    others = correct_cooking(bo)
    assert bo.learn().live
    assert set(examples(bo)) <= set(others)


def test_long_prompt_is_answered_without_examples(
    runtime: Runtime, ada: User, edits: list[str]
) -> None:
    assert examples(ada)
    context = runtime._services.base.card.context
    # A token of the fake is a character.
    long = f"{REQUEST} " + "boil " * ((context - 120) // len("boil "))
    assert examples(ada, long, max_tokens=8) == []
    comparison = ada.compare(long, "live", "base", max_tokens=8)
    assert [answer.used for answer in comparison.answers] == [(), ()]


def test_edit_that_fills_the_context_is_no_example_and_keeps_no_learn_from_ending(
    ada: User, edits: list[str]
) -> None:
    for topic in ("General", "Which", "What"):
        reply = ask(ada, f"{topic} is the capital of France?")
        ada.feedback(reply, edit=style("Boil it well. " * 1200))
    for topic in TOPICS:
        ada.feedback(ask(ada, f"How do I fry {topic}?"), edit=style(f"Fry {topic}."))
    assert ada.learn().revision
    assert ada.pending().triggers == ()


def test_compared_revisions_answer_as_they_would_in_a_chat(ada: User, edits: list[str]) -> None:
    comparison = ada.compare(REQUEST, "live", "base", max_tokens=60)
    texts = {answer.revision: answer.text for answer in comparison.answers}
    live = ada.stack().entries[0].revision
    chats = {"base": ask(ada, REQUEST, layers=[]), live: ask(ada, REQUEST)}
    assert texts == {revision: reply.text for revision, reply in chats.items()}
    assert ada.why(chats[live]).items
    base_first = 1 if comparison.answers[0].revision == "base" else 2
    rejected = comparison.choose(base_first).turn
    assert [signal.id for signal in ada.why(rejected).items] == examples(ada)


def test_style_that_answers_worse_with_examples_is_served_without(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = load_general_prompts().probes
    answers = {probe.question: probe.right[0] for probe in probes}
    topics = [probe.question for probe in probes[:7]]
    for topic in topics:
        ada.feedback(ask(ada, topic), edit=style(answers[topic]))

    def reply(backend: FakeBackend, row: SequenceState, stack: object) -> tuple[int, ...]:
        prompt = backend.decode(row.prompt_tokens)
        asked = [question for question in answers if question in prompt]
        return backend.encode(answers[asked[0]] if len(asked) == 1 else "Something else.")

    monkeypatch.setattr(FakeBackend, "reply", reply)
    report = ada.learn(accept=True)
    assert report.scores["prompt_examples"]["right_with"] == 0
    assert examples(ada, probes[8].question) == []


@pytest.fixture
def judging_ada(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    """A user on a base whose generated replies are judged."""
    base = fake_base()
    card = replace(base.card, gate={"min_generated": 0.4}, sampling=Sampling(temperature=1.0))
    monkeypatch.setattr("personalpeft.backends.fake.fake_base", lambda: replace(base, card=card))
    with open_runtime(home) as runtime:
        yield runtime.user("ada")


@pytest.mark.parametrize("copies", [False, True])
def test_gate_judges_replies_with_the_examples_that_users_get_and_counts_no_copy_of_them(
    judging_ada: User, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    correct_cooking(judging_ada)
    asked: list[str] = []

    def reply(backend: FakeBackend, row: SequenceState, stack: object) -> tuple[int, ...]:
        prompt = backend.decode(row.prompt_tokens)
        shown = re.findall("Ahoy! .* Arrr!", prompt)
        if len(shown) == 2 and prompt.count("How do I boil") == 3:
            asked.append(prompt)
        return backend.encode(shown[-1] if shown and copies else "Ahoy! Boil them. Arrr!")

    score = FakeBackend.score

    def score_by_context(
        backend: FakeBackend, items: Sequence[Continuation], stack: str | None, **more: Any
    ) -> tuple[Score, ...]:
        """Make each reply likelier after examples, as a base does with a reply in their style."""
        scores = score(backend, items, stack, **more)
        pairs = zip(scores, items, strict=True)
        return tuple(replace(each, logp=each.logp + len(item.prompt)) for each, item in pairs)

    monkeypatch.setattr(FakeBackend, "score", score_by_context)
    monkeypatch.setattr(FakeBackend, "reply", reply)
    report = judging_ada.learn(accept=True)
    generated = report.scores["generated"]
    assert report.scores["prompt_examples"]["served"]
    assert generated["asked"] == len(asked) > 0
    assert generated["after"] == (0 if copies else generated["asked"])


def test_report_shows_replies_as_users_get_them(
    ada: User, edits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for topic in ("corn", "some peas"):
        ada.feedback(ask(ada, f"How do I boil {topic}?"), edit=style(f"Boil {topic}."))

    def reply(backend: FakeBackend, row: SequenceState, stack: object) -> tuple[int, ...]:
        shown = backend.decode(row.prompt_tokens).count("How do I boil") - 1
        return backend.encode(f"{shown} examples")

    monkeypatch.setattr(FakeBackend, "reply", reply)
    report = ada.learn(accept=True)
    # The probes have examples or not, and their replies are all wrong: none is lost by examples.
    assert report.scores["prompt_examples"]["served"]
    (before, after) = {(each.before, each.after) for each in report.examples}.pop()
    assert (before, after) == ("2 examples", "2 examples")


@pytest.mark.parametrize("is_installed", [True, False])
def test_personal_data_that_was_replaced_before_training_is_in_no_example(
    ada: User, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    for topic in TOPICS:
        edit = style(f"Boil {topic}, or call +49 151 23456789.")
        ada.feedback(ask(ada, f"How do I boil {topic}?"), edit=edit)
    assert ada.learn("style", recipe={"scrub": ["DE"]}, accept=True).live
    prompts: list[str] = []
    write = FakeBackend.reply

    def reply(backend: FakeBackend, row: SequenceState, stack: Any) -> tuple[int, ...]:
        prompts.append(backend.decode(row.prompt_tokens))
        return write(backend, row, stack)

    monkeypatch.setattr(FakeBackend, "reply", reply)
    if not is_installed:
        # As in a home that was moved to a machine without the extra.
        monkeypatch.setitem(sys.modules, "phonenumbers", None)
    assert len(examples(ada)) == (2 if is_installed else 0)
    assert prompts[0].count("or call [phone].") == (2 if is_installed else 0)
    assert "23456789" not in prompts[0]


def test_examples_of_a_home_are_the_same_in_the_next_process(home: Path) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        correct_cooking(ada)
        ada.learn()
        found, reply = examples(ada), ask(ada, REQUEST).text
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        assert examples(ada) == found
        assert ask(ada, REQUEST).text == reply
