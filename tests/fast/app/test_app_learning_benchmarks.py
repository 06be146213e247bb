"""The learning benchmarks keep their results and print the documented keys.

They run on the fake backend, so their figures mean nothing.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from app_makers import Shell
from runtime_makers import QUICK_CARD

import personalpeft
from benchmarks import learn_course, learn_together, learn_trainer
from benchmarks.edit_styles import select_styles
from benchmarks.learn import Course, bench_learn
from benchmarks.learn_batches import BAD, GOOD, batches, record_acts, record_and_learn
from benchmarks.learn_gate import PASTS, bench_gate
from benchmarks.personas import load_personas, select_personas
from benchmarks.rebase import bench_rebase
from benchmarks.result_cache import ResultCache
from benchmarks.tables import tables_of
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput, ServingFailed

pytestmark = pytest.mark.exhaustive

_WAYS = {"base", "retrieval", "adapter", "both"}


def _course(
    keep: Path, *, people: tuple[str, ...] = ("ada",), nights: int = 2
) -> tuple[dict[str, Any], list[str]]:
    stages: list[str] = []
    course = Course(select_personas(people), nights, 0, 0, 0, "any", "fake")
    result = bench_learn(
        course,
        ResultCache(keep, "learn"),
        echo=lambda text: None,
        progress=lambda stage, _: stages.append(stage),
    )
    return result, stages


def test_a_course_measures_each_method_and_resumes(tmp_path: Path) -> None:
    result, stages = _course(tmp_path)
    assert stages == ["ada, night 1", "ada, night 2"]
    assert (
        set(result["adherence"])
        == set(result["recall"])
        == set(result["tokens_per_second"])
        == _WAYS
    )
    assert (
        result["counts"]["both"]["adherence.after_12_edits"]
        == result["counts"]["both"]["adherence.after_24_mixed"]
        == 20
    )
    assert result["recall"]["both"] is None
    assert len(result["locality_by_night"]) == 2
    right, asked = result["by_person"]["ada"]["adapter"]["adherence.after_12_edits"]
    assert result["adherence"]["adapter"]["after_12_edits"] == right / asked
    assert sum(result["verdicts"].values()) == 2
    assert set(result["bad_updates_accepted"]) == {"adapter", "both"}

    again, stages = _course(tmp_path)
    assert again == result
    assert stages == []
    more, stages = _course(tmp_path, people=("ada", "bruno"), nights=1)
    assert stages == ["ada, night 1", "bruno, night 1"]
    assert more["people"] == ["ada", "bruno"]


def test_eight_rounds_teach_everything_and_change_what_changes(tmp_path: Path) -> None:
    ada = load_personas()["ada"]
    with personalpeft.open(tmp_path, backend="fake") as runtime:
        user = runtime.user("ada")
        nights = [learn_course.simulate_round(user, ada, number, 0) for number in range(1, 9)]
        facts_text = [item.text for item in user.items()]
    assert [len(night.examples) for night in nights] == [12, 11, 15, 15, 15, 15, 12, 15]
    now = [fact.later or fact for fact in ada.facts]
    assert sorted(facts_text) == sorted([ada.later_comment, *(fact.text for fact in now)])
    habits = {1: ada.habit, 7: ada.later}
    assert all(
        habit.holds(wanted)
        for night, habit in habits.items()
        if habit
        for _, wanted in nights[night - 1].examples
    )
    prompts = [prompt for number in (1, 2, 7) for prompt, _ in nights[number - 1].examples]
    assert len(set(prompts)) == len(prompts)


class _ParrotModel:
    """Answers with a fixed text and counts its calls."""

    def __init__(self, reply: dict[str, str]) -> None:
        self.reply, self.asked = reply, 0

    def __call__(self, prompts: list[str], longest: int) -> list[str]:
        self.asked += len(prompts)
        return [self.reply.get(prompt, "") for prompt in prompts]


def test_answers_are_scored_by_the_stored_words_and_retention_by_former_facts() -> None:
    bruno = load_personas()["bruno"]
    questions = [question for fact in bruno.facts for question in fact.unseen]
    reply = {question: fact.answer for fact in bruno.facts for question in fact.unseen}
    changed = [fact for fact in bruno.facts if fact.later]
    parrot = _ParrotModel(reply)
    evaluator = learn_course.Evaluator(parrot)
    for night in range(1, 8):
        evaluator.evaluate(bruno, night, 8, frozenset())
    assert evaluator.figures["recall"] == (len(questions), len(questions))
    # Half of the phrasings of unchanged facts are lost, and one changed fact is taught again.
    kept = [fact for fact in bruno.facts[:10] if not fact.later]
    for fact in kept:
        reply[fact.unseen[0]] = "I forgot."
    new = changed[0].later
    assert new is not None
    for question in changed[0].unseen:
        reply[question] = new.answer
    evaluator.evaluate(bruno, 8, 8, frozenset())
    assert evaluator.figures["retention"] == (len(kept), 2 * len(kept))
    assert evaluator.figures["overwrite"] == (2, 10)


def test_the_plain_training_loop_learns_alongside_and_is_timed(
    tmp_path: Path, tiny_base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (learn_course, "LONG"),
        (learn_trainer, "LONG"),
        (learn_course, "GENERAL"),
    ):
        monkeypatch.setattr(module, name, 4)
    card = tmp_path / "quick.toml"
    card.write_text(QUICK_CARD, "utf-8")
    course = Course(select_personas(["bruno"]), 1, 0, 1, 0, str(card), "torch")
    result = bench_learn(
        course,
        ResultCache(tmp_path, "learn"),
        echo=lambda text: None,
        progress=lambda stage, done: None,
    )
    assert set(result["adherence"]) == {*_WAYS, "trainer"}
    assert result["seconds_per_learn"]["trainer"]["style"] > 0
    assert result["tokens_per_second"]["trainer"]
    assert result["ratios"]["learn_vs_trainer"] is not None
    assert result["ratios"]["learn_vs_trainer"] > 0


def test_joint_learning_is_timed_against_sequential_learning() -> None:
    took = learn_together.compare_joint_and_sequential(2, "any", "fake")
    assert {way: each["verdicts"] for way, each in took.items()} == {
        "apart": ["promoted", "promoted"],
        "together": ["promoted", "promoted"],
    }
    assert all(each["seconds"] > 0 for each in took.values())
    with pytest.raises(ServingFailed):
        learn_together.compare_joint_and_sequential(2, "no-such-base", "torch")


def test_there_are_forty_bad_and_forty_good_batches_ten_of_each_kind() -> None:
    for kinds in (BAD, GOOD):
        known = batches(kinds)
        assert len(known) == 40
        assert len({(each.kind, each.name) for each in known}) == 40
        # A subset contains every kind.
        assert [each.kind for each in known[:4]] == list(kinds)
    assert all(each.bad for each in batches(BAD))
    assert not any(each.bad for each in batches(GOOD))


@pytest.mark.parametrize(
    "batch", [*batches(BAD), *batches(GOOD)], ids=lambda batch: f"{batch.kind}-{batch.name}"
)
def test_a_batch_is_deterministic_and_large_enough_for_the_gate(batch: learn_course.Any) -> None:
    for name in PASTS:
        acts = batch.acts(load_personas()[name], random.Random(1))
        assert acts == batch.acts(load_personas()[name], random.Random(1))
        assert len(acts) >= 3
        assert all(act.text.strip() and act.prompt.strip() for act in acts)


def test_feedback_of_an_untrusted_source_trains_nothing(tmp_path: Path) -> None:
    stranger = next(each for each in batches(BAD) if each.name == "said by a stranger")
    with personalpeft.open(tmp_path, backend="fake") as runtime:
        user = runtime.user("hana")
        record_acts(user, stranger.acts(load_personas()["hana"], random.Random(0)))
        assert learn_course.learn(user) == []


def test_a_batch_counts_as_live_when_a_signal_of_it_is_in_a_live_revision(tmp_path: Path) -> None:
    stranger = next(each for each in batches(BAD) if each.name == "said by a stranger")
    facts = next(each for each in batches(GOOD) if each.kind == "facts")
    hana = load_personas()["hana"]
    with personalpeft.open(tmp_path, backend="fake") as runtime:
        user = runtime.user("hana")
        learn_course.state_facts(user, learn_course.facts_of(hana, 3))
        live, reports = record_and_learn(user, stranger.acts(hana, random.Random(0)))
        assert (live, [report.live for report in reports]) == (False, [True])
        # The fake model knows everything after one learn, so this batch is another user's first.
        other = runtime.user("other")
        live, _ = record_and_learn(other, facts.acts(hana, random.Random(0)))
        assert live


def test_the_gate_benchmark_tries_every_kind_and_keeps_its_results(tmp_path: Path) -> None:
    def tried(bad: int, good: int) -> tuple[dict[str, Any], list[str]]:
        said: list[str] = []
        keep = ResultCache(tmp_path, "gate")
        return (
            bench_gate(
                bad,
                good,
                base="any",
                backend="fake",
                seed=0,
                keep=keep,
                echo=said.append,
                progress=lambda s, d: None,
            ),
            said,
        )

    result, said = tried(2, 4)
    assert [case["kind"] for case in result["cases"]] == [*BAD[:2], *GOOD]
    assert len(said) == 6
    assert all(case["learns"] for case in result["cases"])
    again, said = tried(2, 4)
    assert (again, said) == (result, [])


def test_prefeval_scores_each_option_after_each_way_of_stating_the_preference(
    tmp_path: Path, shell: Shell
) -> None:
    question = {
        "preference": "I like trains.",
        "question": "How do I get to Rome?",
        "classification_task_options": ["By train.", "By plane.", "By car.", "By bus."],
    }
    (tmp_path / "travel.json").write_text(json.dumps([question, question]))
    facts_text = json.loads(
        shell.run("bench", "prefeval", "--data", str(tmp_path), "--json").stdout
    )
    assert facts_text["asked"] == {"travel": 2}
    assert set(facts_text["accuracy"]) == {"without", "said", "rule"}
    assert all(set(shares) == {"travel", "all"} for shares in facts_text["accuracy"].values())
    assert not shell.home.exists()


@pytest.mark.parametrize("content", ["[]", "{", '[{"preference": "x"}]', '{"a": 1}'])
def test_malformed_data_is_refused(tmp_path: Path, shell: Shell, content: str) -> None:
    (tmp_path / "other.json").write_text(content)
    result = shell.run("bench", "prefeval", "--data", str(tmp_path))
    assert result.exit_code == 2
    assert "other.json" in result.stderr


def test_the_commands_print_their_results(shell: Shell) -> None:
    facts_text = json.loads(
        shell.run("bench", "learn", "--people", "carla", "--nights", "1", "--json").stdout
    )
    assert (facts_text["bench"], facts_text["people"], facts_text["nights"]) == (
        "learn",
        ["carla"],
        1,
    )
    figures = ("adherence", "recall", "locality", "retention", "overwrite", "bad_updates_accepted")
    assert {*figures, "seconds_per_learn", "tokens_per_second", "ratios"} <= set(facts_text)
    shown = shell.run("bench", "learn", "--people", "carla", "--nights", "1").stdout
    assert shown
    gate = shell.run("bench", "gate", "--bad", "1", "--good", "1")
    assert gate.exit_code == 0
    assert gate.stdout


def test_an_unknown_persona_is_refused(shell: Shell) -> None:
    result = shell.run("bench", "learn", "--people", "adda")
    assert result.exit_code == 2
    assert "ada" in result.stderr
    with pytest.raises(InvalidInput, match="nobody"):
        select_personas(["nobody-at-all"])


def test_a_move_to_another_base_counts_its_questions(tmp_path: Path, tiny_base: Base) -> None:
    card = QUICK_CARD.replace(
        "min_steps = 12", "min_steps = 3\nkl_prompts = 0\nfew_shot_replies = 0"
    )
    first, second = tmp_path / "tiny-quick.toml", tmp_path / "tiny-other.toml"
    first.write_text(card)
    second.write_text(card.replace('"tiny-quick"', '"tiny-other"').replace("seed = 7", "seed = 8"))
    (style,) = select_styles(("shorter",), None)
    short = replace(style, tokens=8)
    found = bench_rebase(
        str(first), str(second), (short,), backend="torch", progress=lambda stage, _: None
    )
    (move,) = found["users"]
    assert move["improved"] + move["regressed"] + move["tied"] == 3
    assert move["before"] is not None
    assert move["leakage"] is not None
    table = tables_of({**found, "measured": {}})["moves"]
    assert table.rows[0][0] == "shorter"
