"""General answers are judged by what they say, in whatever manner a layer says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runtime_makers import correct, opened

from personalpeft.engine.engine import Engine
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.settings import CACHE

RIGHT = {canary.question: canary.right[0] for canary in load_general_prompts().probes}


def test_a_manner_that_says_the_question_over_is_not_taken_for_wrong_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With nothing kept there of what the base has said to other tests.
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    texts = Engine.complete

    def mannered(self: Any, requests: Any, **more: Any) -> list[str]:
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

    monkeypatch.setattr(Engine, "complete", mannered)
    with opened(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        correct(ada)
        canaries = ada.learn("style", accept=True).scores["canaries"]
    assert canaries["still_right"] == canaries["right_before"] == len(RIGHT)
