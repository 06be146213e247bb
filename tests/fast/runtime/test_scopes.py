"""A layer is attached where its scope says, and a turn names exactly what was attached."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import ask, correct, nothing_changes, opened

from personalpeft import InvalidInput, NotFound, Runtime, User
from personalpeft.chat.routing import calibrate_region
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.memory.embedder import HashEmbedder
from personalpeft.types import Verdict

LETTERS = [
    f"Write a short letter to my friend {name}." for name in ("Bo", "Cy", "Di", "Eve", "Flo", "Gus")
]
NEAR = "Write a short letter to my friend Hal."
FAR = "What is the capital of Peru?"


def taught(user: User, scope: str | None = None) -> User:
    """With a style, and a skill in writing letters above it."""
    correct(user, 5)
    assert user.learn().verdict is Verdict.PROMOTED
    for prompt in LETTERS:
        user.teach(prompt, f"Dear {prompt.split()[-1]}", skill="letters")
    assert user.learn("skill.letters").verdict is Verdict.PROMOTED
    if scope is not None:
        user.scope("skill.letters", scope)  # type: ignore[arg-type]
    return user


def attached(user: User, prompt: str, **more: object) -> list[str]:
    """The layers that a reply's stack names, which are those that its turn names."""
    reply = ask(user, prompt, **more)
    assert user.turn(reply).stack == reply.stack
    return [entry.layer for entry in reply.stack.entries]


def test_a_skill_answers_what_is_near_its_lessons_and_nothing_else(ada: User) -> None:
    taught(ada)
    assert [(layer.name, layer.scope) for layer in ada.layers()] == [
        ("style", "always"),
        ("skill.letters", "near"),
    ]
    assert attached(ada, NEAR) == ["style", "skill.letters"]
    assert attached(ada, LETTERS[0]) == ["style", "skill.letters"]
    assert attached(ada, FAR) == ["style"]
    assert [
        question
        for question in load_general_prompts().regularizer_prompts
        if attached(ada, question) != ["style"]
    ] == []


def test_what_is_not_near_is_answered_as_if_the_skill_had_never_been_learned(
    home: Path, tmp_path: Path
) -> None:
    with opened(home) as runtime, opened(tmp_path / "other") as other:
        ada = taught(runtime.user("ada"))
        bob = other.user("bob")
        correct(bob, 5)
        bob.learn()
        assert ask(ada, FAR).text == ask(bob, FAR).text
        assert ask(ada, NEAR).text != ask(bob, NEAR).text


def test_a_scope_is_kept_and_acts_on_the_next_turn(home: Path) -> None:
    with opened(home) as runtime:
        ada = taught(runtime.user("ada"), "always")
        assert attached(ada, FAR) == ["style", "skill.letters"]
        ada.scope("skill.letters", "never")
        ada.scope("style", "never")
    with opened(home) as runtime:
        ada = runtime.user("ada")
        assert [layer.scope for layer in ada.layers()] == ["never", "never"]
        assert attached(ada, NEAR) == []
        assert len(ada.stack().entries) == 2
        assert runtime.verify() == ()


def test_layers_by_name_are_attached_whatever_their_scope(ada: User) -> None:
    taught(ada, "never")
    assert attached(ada, FAR, layers=["skill.letters"]) == ["skill.letters"]
    assert attached(ada, NEAR, layers=[]) == []


def test_a_follow_up_stays_with_what_the_conversation_is_about(ada: User) -> None:
    taught(ada)
    asked = [
        {"role": "user", "content": LETTERS[0]},
        {"role": "assistant", "content": "Dear Bo"},
        {"role": "user", "content": "Shorter."},
    ]
    reply = ada.chat(asked, temperature=0)
    assert [entry.layer for entry in reply.stack.entries] == ["style", "skill.letters"]


def test_a_layer_with_a_scope_near_is_still_built_upon_and_judged_attached(ada: User) -> None:
    taught(ada, "never")
    for prompt in LETTERS[:4]:
        ada.teach(prompt.replace("short", "long"), "Dear friend", skill="letters")
    report = ada.learn("skill.letters")
    first, second = ada.revisions("skill.letters")
    assert (report.revision, second.parent) == (second.id, first.id)
    assert [entry.layer for entry in second.below] == ["style"]


def test_nothing_is_embedded_for_somebody_with_a_style_alone(
    runtime: Runtime, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(ada, 5)
    ada.learn()

    def loaded(*_: object) -> None:
        raise AssertionError("the embedder was used")

    monkeypatch.setattr(HashEmbedder, "embed", loaded)
    assert attached(ada, FAR) == ["style"]


def test_what_a_layer_is_about_is_worked_out_once(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught(ada)
    assert attached(ada, NEAR) == ["style", "skill.letters"]
    embed, texts = HashEmbedder.embed, []

    def counted(self: HashEmbedder, given: list[str]) -> object:
        texts.extend(given)
        return embed(self, given)

    monkeypatch.setattr(HashEmbedder, "embed", counted)
    assert attached(ada, FAR) == ["style"]
    assert set(texts) == {FAR}


def test_a_scope_that_is_none_and_a_layer_that_is_not_there_change_nothing(
    ada: User, home: Path
) -> None:
    taught(ada)
    with nothing_changes(home):
        with pytest.raises(InvalidInput) as no_scope:
            ada.scope("style", "sometimes")  # type: ignore[arg-type]
        with pytest.raises(NotFound):
            ada.scope("skill.none", "never")
    assert all(scope in no_scope.value.message for scope in ("always", "near", "never"))


WORDS = st.sampled_from(
    ["write", "letter", "friend", "capital", "river", "planet", "who", "bake", "bread"]
)
TEXTS = st.lists(st.lists(WORDS, min_size=1, max_size=5).map(" ".join), min_size=1, max_size=6)


@given(lessons=TEXTS, general=TEXTS)
def test_what_a_lesson_says_is_always_near_to_it(lessons: list[str], general: list[str]) -> None:
    embedder = HashEmbedder()
    rows = [embedder.embed([text]) for text in lessons]
    region = calibrate_region(rows, embedder.embed(general), embedder.min_similarity)
    assert embedder.min_similarity <= region.threshold < 1
    for row in rows:
        assert (region.vectors @ row[0]).max() >= region.threshold
