"""A layer is attached as its scope says, and a turn names exactly the attached layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import ask, correct, home_unchanged, open_runtime

from personalpeft import InvalidInput, NotFound, Runtime, User
from personalpeft.chat.routing import calibrate_region
from personalpeft.learning.data.general_prompts import load_general_prompts
from personalpeft.memory.embedder import HashEmbedder
from personalpeft.settings import CACHE
from personalpeft.types import Verdict

LETTERS = [
    f"Write a short letter to my friend {name}." for name in ("Bo", "Cy", "Di", "Eve", "Flo", "Gus")
]
NEAR = "Write a short letter to my friend Hal."
FAR = "What is the capital of Peru?"


def learn_style_and_skill(user: User, scope: str | None = None) -> User:
    """Learn a style, and above it a skill for letters."""
    correct(user, 5)
    assert user.learn().verdict is Verdict.PROMOTED
    for prompt in LETTERS:
        user.teach(prompt, f"Dear {prompt.split()[-1]}", skill="letters")
    assert user.learn("skill.letters").verdict is Verdict.PROMOTED
    if scope is not None:
        user.scope("skill.letters", scope)  # type: ignore[arg-type]
    return user


def attached(user: User, prompt: str, **more: object) -> list[str]:
    """Return the layers in the reply's stack, after a check that its turn names the same."""
    reply = ask(user, prompt, **more)
    assert user.turn(reply).stack == reply.stack
    return [entry.layer for entry in reply.stack.entries]


def test_near_skill_answers_requests_similar_to_its_lessons_alone(ada: User) -> None:
    learn_style_and_skill(ada)
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


def test_distant_request_is_answered_as_without_the_skill(home: Path, tmp_path: Path) -> None:
    with open_runtime(home) as runtime, open_runtime(tmp_path / "other") as other:
        ada = learn_style_and_skill(runtime.user("ada"))
        bob = other.user("bob")
        correct(bob, 5)
        bob.learn()
        assert ask(ada, FAR).text == ask(bob, FAR).text
        # Compare stacks: the fake backend has few words, so texts may be equal by chance.
        assert ask(ada, NEAR).stack != ask(bob, NEAR).stack


@pytest.mark.exhaustive
def test_damaged_cache_of_general_vectors_changes_no_scope(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    with open_runtime(home) as runtime:
        learn_style_and_skill(runtime.user("ada"))
        assert attached(runtime.user("ada"), NEAR) == ["style", "skill.letters"]
    (file,) = tmp_path.glob("cache/general_vectors/*")
    file.write_bytes(file.read_bytes()[:-1])
    with open_runtime(home) as runtime:
        assert attached(runtime.user("ada"), NEAR) == ["style", "skill.letters"]
        assert attached(runtime.user("ada"), FAR) == ["style"]


def test_scope_is_stored_and_applies_to_the_next_turn(home: Path) -> None:
    with open_runtime(home) as runtime:
        ada = learn_style_and_skill(runtime.user("ada"), "always")
        assert attached(ada, FAR) == ["style", "skill.letters"]
        ada.scope("skill.letters", "never")
        ada.scope("style", "never")
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        assert [layer.scope for layer in ada.layers()] == ["never", "never"]
        assert attached(ada, NEAR) == []
        assert len(ada.stack().entries) == 2
        assert runtime.verify() == ()


def test_layers_selected_by_name_are_attached_whatever_their_scope(ada: User) -> None:
    learn_style_and_skill(ada, "never")
    assert attached(ada, FAR, layers=["skill.letters"]) == ["skill.letters"]
    assert attached(ada, NEAR, layers=[]) == []


def test_follow_up_keeps_the_layers_of_its_conversation(ada: User) -> None:
    learn_style_and_skill(ada)
    asked = [
        {"role": "user", "content": LETTERS[0]},
        {"role": "assistant", "content": "Dear Bo"},
        {"role": "user", "content": "Shorter."},
    ]
    reply = ada.chat(asked, temperature=0)
    assert [entry.layer for entry in reply.stack.entries] == ["style", "skill.letters"]


def test_near_layer_is_attached_while_others_are_built_and_judged_on_it(ada: User) -> None:
    learn_style_and_skill(ada, "never")
    for prompt in LETTERS[:4]:
        ada.teach(prompt.replace("short", "long"), "Dear friend", skill="letters")
    report = ada.learn("skill.letters")
    first, second = ada.revisions("skill.letters")
    assert (report.revision, second.parent) == (second.id, first.id)
    assert [entry.layer for entry in second.below] == ["style"]


def test_style_needs_no_embeddings_without_examples_in_the_prompt(
    runtime: Runtime, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(ada, 5)
    ada.learn()

    def loaded(*_: object) -> None:
        raise AssertionError("the embedder was used")

    monkeypatch.setattr(HashEmbedder, "embed", loaded)
    assert attached(ada, FAR, memory=False) == ["style"]


def test_similarity_region_of_a_layer_is_computed_once(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn_style_and_skill(ada)
    assert attached(ada, NEAR) == ["style", "skill.letters"]
    embed, texts = HashEmbedder.embed, []

    def counted(self: HashEmbedder, given: list[str]) -> object:
        texts.extend(given)
        return embed(self, given)

    monkeypatch.setattr(HashEmbedder, "embed", counted)
    assert attached(ada, FAR) == ["style"]
    assert set(texts) == {FAR}


def test_invalid_scope_and_unknown_layer_change_nothing(ada: User, home: Path) -> None:
    learn_style_and_skill(ada)
    with home_unchanged(home):
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
def test_each_lesson_is_near_its_own_region(lessons: list[str], general: list[str]) -> None:
    embedder = HashEmbedder()
    rows = [embedder.embed([text]) for text in lessons]
    region = calibrate_region(
        rows, embedder.embed(general), embedder.similarity, embedder.min_similarity
    )
    assert embedder.min_similarity <= region.threshold < 1
    for row in rows:
        assert (region.vectors @ row[0]).max() >= region.threshold
