"""What the bare base says to generic questions is asked once a cache, and only what is whole and nobody's is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import ask, correct, opened

from personalpeft import Runtime
from personalpeft.engine.engine import Engine
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.settings import CACHE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The generic questions that the bare base was asked."""
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


def learned(home: Path) -> str:
    with opened(home) as runtime:
        return _learned(runtime)


def _learned(runtime: Runtime) -> str:
    ada = runtime.user("ada")
    correct(ada, 6)
    assert ada.learn().live
    assert ask(ada).text
    return ada.stack().digest


def test_the_next_process_does_not_ask_the_base_again_and_builds_the_same(
    tmp_path: Path, cache: Path, asked: list[str]
) -> None:
    first = learned(tmp_path / "one")
    generic = load_general_prompts()
    assert sorted(asked) == sorted(
        {*generic.regularizer_prompts, *(canary.question for canary in generic.probes)}
    )
    asked.clear()
    assert learned(tmp_path / "two") == first
    assert asked == []


def test_what_a_stack_says_is_not_kept(tmp_path: Path, cache: Path, asked: list[str]) -> None:
    learned(tmp_path / "home")
    (file,) = (cache / "spoken").iterdir()
    before = file.read_bytes()
    with opened(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        correct(ada, 6, first=50)
        ada.learn()
    assert file.read_bytes() == before
    assert "Ahoy" not in before.decode()


@pytest.mark.parametrize("harm", ["half", "changed", "not JSON", "other JSON"])
def test_a_file_that_is_not_whole_is_asked_anew(
    tmp_path: Path, cache: Path, asked: list[str], harm: str
) -> None:
    first = learned(tmp_path / "one")
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
    assert learned(tmp_path / "two") == first
    assert asked
    assert file.read_text() == whole


def test_a_cache_that_nothing_can_be_written_to_is_no_hindrance(
    tmp_path: Path, cache: Path
) -> None:
    cache.mkdir()
    (cache / "spoken").write_text("a file where the folder would be")
    learned(tmp_path / "home")
