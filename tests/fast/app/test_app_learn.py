"""The benchmarks of learning ask what they say they ask, keep what they measured, and print it under the names that the
documentation gives: on the fake backend, where the figures themselves mean nothing.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from app_makers import Place
from runtime_makers import QUICK_CARD

import personalpeft
from benchmarks import learn_course, learn_together, learn_trainer
from benchmarks.learn import Course, LearnBench, bench_learn
from benchmarks.learn_batches import BAD, GOOD, batches, learned_of, say
from benchmarks.learn_gate import PASTS, bench_gate
from benchmarks.personas import load_personas, select_personas
from benchmarks.result_cache import ResultCache
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput, ServingFailed

pytestmark = pytest.mark.exhaustive

_WAYS = {"base", "retrieval", "adapter", "both"}


def _course(
    keep: Path, *, people: tuple[str, ...] = ("ada",), nights: int = 2
) -> tuple[LearnBench, list[str]]:
    stages: list[str] = []
    course = Course(select_personas(people), nights, 0, 0, 0, "any", "fake")
    found = bench_learn(
        course,
        ResultCache(keep, "learn"),
        say=lambda text: None,
        progress=lambda stage, _: stages.append(stage),
    )
    return found, stages


def test_a_course_asks_each_way_and_goes_on_where_it_was(tmp_path: Path) -> None:
    found, stages = _course(tmp_path)
    assert stages == ["ada, night 1", "ada, night 2"]
    assert set(found.adherence) == set(found.recall) == set(found.tokens_per_second) == _WAYS
    assert (
        found.counts["both"]["adherence.after_12_edits"]
        == found.counts["both"]["adherence.after_24_mixed"]
        == 20
    )
    assert found.recall["both"] is None
    assert len(found.locality_by_night) == 2
    right, asked = found.by_person["ada"]["adapter"]["adherence.after_12_edits"]
    assert found.adherence["adapter"]["after_12_edits"] == right / asked
    assert sum(found.verdicts.values()) == 2
    assert set(found.bad_updates_accepted) == {"adapter", "both"}

    again, stages = _course(tmp_path)
    assert again == found
    assert stages == []
    more, stages = _course(tmp_path, people=("ada", "bruno"), nights=1)
    assert stages == ["ada, night 1", "bruno, night 1"]
    assert more.people == ("ada", "bruno")


def test_eight_nights_teach_all_and_change_what_changes(tmp_path: Path) -> None:
    ada = load_personas()["ada"]
    with personalpeft.open(tmp_path, backend="fake") as runtime:
        user = runtime.user("ada")
        nights = [learn_course.live_through(user, ada, number, 0) for number in range(1, 9)]
        told = [item.text for item in user.items()]
    assert [len(night.examples) for night in nights] == [12, 11, 15, 15, 15, 15, 12, 15]
    now = [fact.later or fact for fact in ada.facts]
    assert sorted(told) == sorted([ada.later_comment, *(fact.text for fact in now)])
    habits = {1: ada.habit, 7: ada.later}
    assert all(
        habit.holds(wanted)
        for night, habit in habits.items()
        if habit
        for _, wanted in nights[night - 1].examples
    )
    prompts = [prompt for number in (1, 2, 7) for prompt, _ in nights[number - 1].examples]
    assert len(set(prompts)) == len(prompts)


class _Parrot:
    """Answers with what it was told to, and counts."""

    def __init__(self, says: dict[str, str]) -> None:
        self.says, self.asked = says, 0

    def __call__(self, prompts: list[str], longest: int) -> list[str]:
        self.asked += len(prompts)
        return [self.says.get(prompt, "") for prompt in prompts]


def test_an_examinee_is_right_where_the_words_are_said_and_retention_is_of_what_once_held() -> None:
    bruno = load_personas()["bruno"]
    questions = [question for fact in bruno.facts for question in fact.unseen]
    says = {question: fact.answer for fact in bruno.facts for question in fact.unseen}
    changed = [fact for fact in bruno.facts if fact.later]
    parrot = _Parrot(says)
    examinee = learn_course.Examinee(parrot)
    for night in range(1, 8):
        examinee.examine(bruno, night, 8, frozenset())
    assert examinee.figures["recall"] == (len(questions), len(questions))
    # Half of the phrasings of what nobody changed are forgotten, and one changed fact is said anew.
    kept = [fact for fact in bruno.facts[:10] if not fact.later]
    for fact in kept:
        says[fact.unseen[0]] = "I forgot."
    new = changed[0].later
    assert new is not None
    for question in changed[0].unseen:
        says[question] = new.answer
    examinee.examine(bruno, 8, 8, frozenset())
    assert examinee.figures["retention"] == (len(kept), 2 * len(kept))
    assert examinee.figures["overwrite"] == (2, 10)


def test_the_plain_loop_learns_beside_and_is_timed(
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
    found = bench_learn(
        course,
        ResultCache(tmp_path, "learn"),
        say=lambda text: None,
        progress=lambda stage, done: None,
    )
    assert set(found.adherence) == {*_WAYS, "trainer"}
    assert found.seconds_per_learn["trainer"]["style"] > 0
    assert found.tokens_per_second["trainer"]
    assert found.ratios["learn_vs_trainer"] is not None
    assert found.ratios["learn_vs_trainer"] > 0


def test_users_together_are_timed_against_the_same_one_after_another() -> None:
    took = learn_together.compared(2, "any", "fake")
    assert {way: each["verdicts"] for way, each in took.items()} == {
        "apart": ["promoted", "promoted"],
        "together": ["promoted", "promoted"],
    }
    assert all(each["seconds"] > 0 for each in took.values())
    with pytest.raises(ServingFailed):
        learn_together.compared(2, "no-such-base", "torch")


def test_there_are_forty_bad_and_forty_good_batches_ten_of_each_kind() -> None:
    for kinds in (BAD, GOOD):
        known = batches(kinds)
        assert len(known) == 40
        assert len({(each.kind, each.name) for each in known}) == 40
        # A part has of every kind.
        assert [each.kind for each in known[:4]] == list(kinds)
    assert all(each.bad for each in batches(BAD))
    assert not any(each.bad for each in batches(GOOD))


@pytest.mark.parametrize(
    "batch", [*batches(BAD), *batches(GOOD)], ids=lambda batch: f"{batch.kind}-{batch.name}"
)
def test_a_batch_says_the_same_each_time_and_enough_to_be_judged(batch: learn_course.Any) -> None:
    for name in PASTS:
        acts = batch.acts(load_personas()[name], random.Random(1))
        assert acts == batch.acts(load_personas()[name], random.Random(1))
        assert len(acts) >= 3
        assert all(act.text.strip() and act.prompt.strip() for act in acts)


def test_what_a_stranger_says_becomes_nothing(tmp_path: Path) -> None:
    stranger = next(each for each in batches(BAD) if each.name == "said by a stranger")
    with personalpeft.open(tmp_path, backend="fake") as runtime:
        user = runtime.user("hana")
        say(user, stranger.acts(load_personas()["hana"], random.Random(0)))
        assert learn_course.learn(user) == []


def test_a_batch_is_live_where_something_that_was_learned_of_it_is(tmp_path: Path) -> None:
    stranger = next(each for each in batches(BAD) if each.name == "said by a stranger")
    facts = next(each for each in batches(GOOD) if each.kind == "facts")
    hana = load_personas()["hana"]
    with personalpeft.open(tmp_path, backend="fake") as runtime:
        user = runtime.user("hana")
        learn_course.tell(user, learn_course.facts_of(hana, 3))
        live, reports = learned_of(user, stranger.acts(hana, random.Random(0)))
        assert (live, [report.live for report in reports]) == (False, [True])
        live, _ = learned_of(user, facts.acts(hana, random.Random(0)))
        assert live


def test_the_gate_tries_of_every_kind_and_keeps_what_came_of_it(tmp_path: Path) -> None:
    def tried(bad: int, good: int) -> tuple[object, list[str]]:
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
                note=said.append,
                progress=lambda s, d: None,
            ),
            said,
        )

    found, said = tried(2, 4)
    assert [case.kind for case in found.cases] == [*BAD[:2], *GOOD]  # type: ignore[attr-defined]
    assert len(said) == 6
    assert all(case.learns for case in found.cases)  # type: ignore[attr-defined]
    again, said = tried(2, 4)
    assert (again, said) == (found, [])


def test_prefeval_scores_each_option_after_each_way_of_saying_the_preference(
    tmp_path: Path, place: Place
) -> None:
    question = {
        "preference": "I like trains.",
        "question": "How do I get to Rome?",
        "classification_task_options": ["By train.", "By plane.", "By car.", "By bus."],
    }
    (tmp_path / "travel.json").write_text(json.dumps([question, question]))
    told = json.loads(place.run("bench", "prefeval", "--data", str(tmp_path), "--json").stdout)
    assert told["asked"] == {"travel": 2}
    assert set(told["accuracy"]) == {"without", "said", "rule"}
    assert all(set(shares) == {"travel", "all"} for shares in told["accuracy"].values())
    assert not place.home.exists()


@pytest.mark.parametrize("content", ["[]", "{", '[{"preference": "x"}]', '{"a": 1}'])
def test_other_data_is_refused(tmp_path: Path, place: Place, content: str) -> None:
    (tmp_path / "other.json").write_text(content)
    result = place.run("bench", "prefeval", "--data", str(tmp_path))
    assert result.exit_code == 2
    assert "other.json" in result.stderr


def test_the_commands_print_what_they_measured(place: Place) -> None:
    told = json.loads(
        place.run("bench", "learn", "--people", "carla", "--nights", "1", "--json").stdout
    )
    assert (told["bench"], told["people"], told["nights"]) == ("learn", ["carla"], 1)
    figures = ("adherence", "recall", "locality", "retention", "overwrite", "bad_updates_accepted")
    assert {*figures, "seconds_per_learn", "tokens_per_second", "ratios"} <= set(told)
    shown = place.run("bench", "learn", "--people", "carla", "--nights", "1").stdout
    assert shown
    gate = place.run("bench", "gate", "--bad", "1", "--good", "1")
    assert gate.exit_code == 0
    assert gate.stdout


def test_nobody_is_asked_who_is_not_there(place: Place) -> None:
    result = place.run("bench", "learn", "--people", "adda")
    assert result.exit_code == 2
    assert "ada" in result.stderr
    with pytest.raises(InvalidInput, match="nobody"):
        select_personas(["nobody-at-all"])
