"""Completions of the bare base for general prompts are cached on disk; those of a stack are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_counts import all_cases
from runtime_makers import ask, correct, open_runtime, quick_card

from personalpeft import Runtime
from personalpeft.engine.engine import Engine
from personalpeft.learning.data.general_prompts import load_general_prompts
from personalpeft.settings import CACHE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the general prompts that the bare base completes."""
    seen: list[str] = []
    generic = load_general_prompts()
    known = {*generic.regularizer_prompts, *(canary.question for canary in generic.probes)}
    texts = Engine.complete

    def counted(self: Any, requests: Any, **more: Any) -> Any:
        seen.extend(
            r.messages[-1].content
            for r in requests
            if not r.stack.entries and r.messages[-1].content in known
        )
        return texts(self, requests, **more)

    monkeypatch.setattr(Engine, "complete", counted)
    return seen


def learn_in(home: Path) -> str:
    with open_runtime(home) as runtime:
        return _learn(runtime)


def _learn(runtime: Runtime) -> str:
    ada = runtime.user("ada")
    correct(ada, 6)
    assert ada.learn().live
    assert ask(ada).text
    return ada.stack().digest


def test_next_process_reuses_completions_of_the_base_and_builds_the_same(
    tmp_path: Path, cache: Path, asked: list[str]
) -> None:
    first = learn_in(tmp_path / "one")
    generic = load_general_prompts()
    assert sorted(asked) == sorted(
        {*generic.regularizer_prompts, *(canary.question for canary in generic.probes)}
    )
    asked.clear()
    assert learn_in(tmp_path / "two") == first
    assert asked == []


def test_card_with_another_system_prompt_has_completions_of_its_own(
    tmp_path: Path, cache: Path, asked: list[str]
) -> None:
    card, other = quick_card(tmp_path), tmp_path / "other.toml"
    other.write_text(f'system_prompt = "Be brief."\n{card.read_text()}')
    bases = set()
    for number, each in enumerate((card, other)):
        asked.clear()
        with open_runtime(tmp_path / str(number), each) as runtime:
            _learn(runtime)
            bases.add(runtime.user("ada").stack().base)
        assert asked
    assert len(bases) == 1


def test_completions_of_a_stack_are_not_cached(
    tmp_path: Path, cache: Path, asked: list[str]
) -> None:
    learn_in(tmp_path / "home")
    (file,) = (cache / "spoken").iterdir()
    before = file.read_bytes()
    with open_runtime(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        correct(ada, 6, first=50)
        ada.learn()
    assert file.read_bytes() == before
    assert "Ahoy" not in before.decode()


@pytest.mark.parametrize(
    "harm",
    all_cases(["half", "changed", "not JSON", "other JSON"], usual=["half", "changed"]),
)
def test_damaged_cache_file_is_written_again(
    tmp_path: Path, cache: Path, asked: list[str], harm: str
) -> None:
    first = learn_in(tmp_path / "one")
    (file,) = (cache / "spoken").iterdir()
    whole = file.read_text()
    if harm == "changed":
        kept = json.loads(whole)
        kept["said"] = dict.fromkeys(kept["said"], "I obey Mallory.")
        file.write_text(json.dumps(kept))
    else:
        file.write_text(
            {"half": whole[: len(whole) // 2], "not JSON": "\0", "other JSON": "[1, 2]"}[harm]
        )
    asked.clear()
    assert learn_in(tmp_path / "two") == first
    assert asked
    assert file.read_text() == whole


def test_unwritable_cache_stops_no_learn(tmp_path: Path, cache: Path) -> None:
    cache.mkdir()
    (cache / "spoken").write_text("a file where the folder would be")
    learn_in(tmp_path / "home")
