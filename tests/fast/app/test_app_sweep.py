"""The sweep changes one number at a time, stores each result at once, and repeats none."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from app_makers import Shell
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import QUICK_CARD

from benchmarks import sweep
from benchmarks.cards import write_card
from benchmarks.facts import MOST, facts
from benchmarks.result_cache import ResultCache
from personalpeft.base_models.model_card import read_card
from personalpeft.base_models.registry import all_cards, find_card
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput

pytestmark = pytest.mark.exhaustive

_SWEPT = {"rank": (1, 2), "replay": (0, 0.5)}


@pytest.fixture
def quick(tmp_path: Path, tiny_base: Base) -> str:
    """The path of a card that learns in a second, at rank 2."""
    card = tmp_path / "quick.toml"
    card.write_text(QUICK_CARD, "utf-8")
    return str(card)


def _swept(base: str, keep: Path, *only: str) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    found = sweep.bench_sweep(
        base=base, only=only, styles=["pirate"], seeds=1, keep=keep, echo=said.append, swept=_SWEPT
    )
    return found, said


def test_a_sweep_changes_one_number_at_a_time_and_resumes(tmp_path: Path, quick: str) -> None:
    keep = tmp_path / "keep"
    first, said = _swept(quick, keep, "rank")
    assert [(point["number"], point["value"]) for point in first["points"]] == [
        ("rank", 1),
        ("default", ""),
    ]
    assert first["defaults"] == {"rank": 2}
    assert any("rank = 1" in line for line in said)
    kept = (keep / "sweep.jsonl").read_text()

    again, said = _swept(quick, keep, "rank")
    assert again == first
    assert not any(" = " in line for line in said)
    assert (keep / "sweep.jsonl").read_text() == kept
    assert [path.name for path in keep.iterdir()] == ["sweep.jsonl"]

    (keep / "sweep.jsonl").write_text(kept.splitlines(keepends=True)[1])
    third, _ = _swept(quick, keep, "rank")
    # All but the duration: a run is determined by its recipe, its style and its seed.
    figures = ("number", "value", "verdict", "in_style", "kept", "kl", "held_back")
    shown = [
        {tuple(point[name] for name in figures) for point in found["points"]}
        for found in (first, third)
    ]
    assert shown[0] == shown[1]
    assert sweep.by_value(first)["rank"].keys() >= {1, 2}


def test_replay_is_measured_on_a_second_learn(tmp_path: Path, quick: str) -> None:
    found, _ = _swept(quick, tmp_path / "keep", "replay")
    assert [point["value"] for point in found["points"]] == [0, 0.5]
    assert all(
        point["drafts"] is not None and point["held_back"] is not None for point in found["points"]
    )
    none, some = found["points"]
    assert none["held_back"] != some["held_back"]


def test_the_default_applies_to_every_number_and_another_default_to_none() -> None:
    card = find_card("smollm2-135m-instruct")
    runs = list(sweep.planned(card, sweep.SWEPT, ["pirate"], 2))
    plain = [run for run in runs if run.number == sweep.DEFAULT]
    assert {run.key for run in plain if run.recipe.seed == 0} == {plain[0].key}
    assert len({run.key for run in runs}) == len(runs) - len(plain) + 2
    default = sweep.default_recipe(card)
    for name, values in sweep.SWEPT.items():
        assert sweep.value_of(name, default, card) in values, name


@pytest.mark.parametrize(
    ("option", "hint"),
    [(("--only", "learning_rat"), "learning_rate"), (("--style", "pirat"), "pirate")],
)
def test_an_unknown_sweep_parameter_is_refused(
    shell: Shell, tmp_path: Path, option: tuple[str, str], hint: str
) -> None:
    keep = tmp_path / "keep"
    result = shell.run(
        "bench",
        "sweep",
        "--keep",
        str(keep),
        "--base",
        "tiny-random",
        *option,
        "--json",
        backend="torch",
    )
    assert result.exit_code == 2
    assert hint in json.loads(result.stderr)["error"]["hint"]
    assert not keep.exists()


def test_the_command_prints_medians_and_marks_the_default(
    shell: Shell, tmp_path: Path, quick: str, shared_cache: Path
) -> None:
    keep = tmp_path / "keep"
    asked = (
        "bench",
        "sweep",
        "--keep",
        str(keep),
        "--base",
        quick,
        "--only",
        "few_shot_replies",
        "--style",
        "pirate",
        "--seeds",
        "1",
    )
    result = shell.run(*asked, backend="torch", PERSONALPEFT_CACHE=str(shared_cache))
    assert result.exit_code == 0, result.output
    assert [line.split()[1] for line in result.stdout.splitlines()[1:]] == ["0", "1", "2", "4*"]
    told = json.loads(shell.run(*asked, "--json", backend="torch").stdout)
    assert (told["bench"], len(told["points"])) == ("sweep", 4)
    assert not shell.home.exists()


@pytest.mark.parametrize("name", [card.name for card in all_cards()])
def test_a_written_card_reads_back_unchanged_except_for_its_recipe(
    tmp_path: Path, name: str
) -> None:
    card = find_card(name)
    same = read_card(write_card(card, tmp_path / "same.toml", learning=card.learning))
    assert same == card
    other = read_card(
        write_card(card, tmp_path / "other.toml", learning={"rank": 2, "targets": ["q_proj"]})
    )
    assert other.learning == {"rank": 2, "targets": ["q_proj"]}


def test_parallel_sweeps_share_the_work_and_repeat_nothing(tmp_path: Path) -> None:
    done: list[str] = []
    both_at_work = threading.Barrier(2)

    def measure(key: str, before: float) -> Mapping[str, Any]:
        done.append(key)
        if key in "ab":
            # Each holds one of the first two runs until the other has started: the second must have
            # skipped the first.
            both_at_work.wait(20)
        return {"figure": ord(key)}

    def work() -> None:
        ResultCache(tmp_path, "shared").complete({key: key for key in "abcdefgh"}, measure)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(done) == list("abcdefgh")
    assert {
        key: kept["figure"] for key, kept in ResultCache(tmp_path, "shared").figures().items()
    } == {key: ord(key) for key in "abcdefgh"}


def test_finished_runs_are_kept_when_another_fails(tmp_path: Path) -> None:
    def measure(key: str, before: float) -> Mapping[str, Any]:
        if key == "b":
            raise KeyboardInterrupt
        return {}

    work = {key: key for key in "abc"}
    with pytest.raises(KeyboardInterrupt):
        ResultCache(tmp_path, "some").complete(work, measure)
    cache = ResultCache(tmp_path, "some")
    assert list(cache.figures()) == ["a"]
    done: list[tuple[str, object]] = []
    found = cache.complete(
        work, lambda key, before: {"before": before}, lambda *it: done.append(it)
    )
    assert [key for key, _ in done] == ["b", "c"]
    assert found == cache.figures()
    assert [found[key]["before"] for key in "bc"] == [1 / 3, 2 / 3]


def test_a_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text("dear diary\n")
    with pytest.raises(InvalidInput, match="line 1"):
        ResultCache(tmp_path, "some").complete({"a": "a"}, lambda key, before: {})
    assert (tmp_path / "some.jsonl").read_text() == "dear diary\n"


def test_a_memory_layer_is_asked_unknown_facts_and_its_capacity_is_counted(
    shell: Shell, tmp_path: Path, quick: str, shared_cache: Path
) -> None:
    keep = tmp_path / "keep"
    asked = (
        "bench",
        "capacity",
        "--keep",
        str(keep),
        "--base",
        quick,
        "--facts",
        "5",
        "--rank",
        "1",
        "--seeds",
        "1",
    )
    result = shell.run(*asked, backend="torch", PERSONALPEFT_CACHE=str(shared_cache))
    assert result.exit_code == 0, result.output
    told = json.loads(shell.run(*asked, "--json", backend="torch").stdout)
    (load,) = told["loads"]
    assert (told["bench"], load["facts"], load["rank"], load["seed"]) == ("capacity", 5, 1, 0)
    assert 0 < load["tokens"] / load["parameters"] < 1
    assert [path.name for path in keep.iterdir()] == ["capacity.jsonl"]
    assert not shell.home.exists()


@given(count=st.integers(1, MOST), seed=st.integers(0, 5))
def test_facts_are_distinct_and_a_smaller_set_is_a_prefix_of_a_larger_one(
    count: int, seed: int
) -> None:
    told = facts(count, seed)
    assert told == facts(MOST, seed)[:count]
    asked = [question for fact in told for question in (*fact.questions, fact.unseen)]
    assert len(set(asked)) == len(asked) == 4 * count
    for fact in told:
        assert fact.is_in(fact.text)
        assert not any(fact.is_in(question) for question in (*fact.questions, fact.unseen))


def test_no_value_of_a_kind_contains_another() -> None:
    every = {fact.text: fact for seed in range(60) for fact in facts(MOST, seed)}.values()
    for fact in every:
        about = [
            other for other in every if other.unseen == fact.unseen and other.answer != fact.answer
        ]
        assert about
        assert not any(fact.is_in(other.text) for other in about)
