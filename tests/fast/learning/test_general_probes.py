"""General probes judge what an answer says and not the style it is written in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runtime_makers import correct, open_runtime

from personalpeft.engine.engine import Engine
from personalpeft.learning.data.general_prompts import load_base_replies, load_general_prompts
from personalpeft.settings import CACHE

RIGHT = {canary.question: canary.right[0] for canary in load_general_prompts().probes}


def test_style_that_repeats_the_question_is_not_counted_as_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An empty cache, so that no completion of another test is found in it.
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    texts = Engine.complete

    def complete_in_style(self: Any, requests: Any, **more: Any) -> list[str]:
        replies = texts(self, requests, **more)
        for place, request in enumerate(requests):
            question = request.messages[-1].content
            if question in RIGHT:
                lead = (
                    f"You asked : {question} And this is what I say to you now : "
                    if request.stack.entries
                    else ""
                )
                words = f"{lead}It is {RIGHT[question]} .".split()
                replies[place] = " ".join(words[: request.sampling.max_tokens])
        return replies

    monkeypatch.setattr(Engine, "complete", complete_in_style)
    with open_runtime(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        correct(ada)
        probe_results = ada.learn("style", accept=True).scores["probes"]
    assert probe_results["still_right"] == probe_results["right_before"] == len(RIGHT)


def test_no_probe_is_worded_like_a_training_prompt() -> None:
    def four_words(text: str) -> set[tuple[str, ...]]:
        words = text.casefold().strip("?.").split()
        return {tuple(words[n : n + 4]) for n in range(len(words) - 3)}

    prompts = load_general_prompts()
    trained_on = [*prompts.regularizer_prompts, *prompts.everyday_prompts]
    held = {each for prompt in trained_on for each in four_words(prompt)}
    shared = [each.question for each in prompts.probes if four_words(each.question) & held]
    assert not shared


@pytest.mark.parametrize("base", load_base_replies())
def test_shipped_replies_of_a_base_are_of_all_general_prompts(base: str) -> None:
    assert load_base_replies()[base].keys() == set(load_general_prompts().replied_to)
