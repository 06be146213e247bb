"""Demonstrations in bulk: groups are held out whole, and a learn may bring a recipe and a judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from runtime_makers import open_runtime, tiny_card

from personalpeft import (
    InvalidInput,
    NotFound,
    NothingToLearn,
    PersonalPeftError,
    PluginError,
    Runtime,
    User,
    plugins,
)
from personalpeft.plugins import Task
from personalpeft.types import Demonstration, Message, Verdict

LAYER = "skill.world.a"
CARD = tiny_card("\n[gate]\nmax_kl = 100\n", name="tiny-bulk", context_length=1024)
QUICK = {
    "rank": 4,
    "target_modules": ["q_proj", "v_proj"],
    "min_steps": 30,
    "batch_size": 4,
    "learning_rate": 0.02,
    "kl_prompts": 0,
    "few_shot_replies": 0,
}


class ExactAnswer:
    """A reply is right if it is the wanted answer."""

    def __init__(self, family: str = "") -> None:
        pass

    def tasks(self, seed: int, count: int) -> Sequence[Task]:
        return ()

    def verify(self, task: Task, reply: str) -> float:
        return float(reply == task.about["answer"])


def games(count: int, size: int = 3, *, first: int = 0) -> list[Demonstration]:
    return [
        Demonstration(
            [Message("system", f"Map {game}."), Message("user", f"Step {step}")],
            "ok",
            f"game-{game}",
        )
        for game in range(first, first + count)
        for step in range(size)
    ]


def teach(user: User, demonstrations: Sequence[Demonstration]) -> tuple[str, ...]:
    return user.teach_many(demonstrations, skill="world.a")


def roles_by_group(user: User) -> dict[str, set[str]]:
    group = {each.id: each.payload["group"] for each in user.signals()}
    roles = defaultdict(set)
    for revision in user.revisions(LAYER):
        for signal, role in revision.signals.items():
            roles[group[signal]].add(role)
    return dict(roles)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A user on the tiny base, who learned a skill that a verifier judges."""
    folder = tmp_path_factory.mktemp("bulk")
    card = folder / "tiny-bulk.toml"
    card.write_text(CARD, "utf-8")
    with open_runtime(folder / "home", card) as runtime:
        ada = runtime.user("ada")
        teach(ada, games(12))
        ada.scope(LAYER, "never")
        ada.learn(LAYER, recipe=QUICK, verifier=ExactAnswer())
        yield ada


def test_many_are_taught_in_one_transaction_or_not_at_all(ada: User) -> None:
    ids = teach(ada, games(4))
    assert [signal.id for signal in ada.signals()] == list(ids)
    payload = ada.signals()[0].payload
    assert payload["before"] == [["system", "Map 0."]]
    assert (payload["prompt"], payload["answer"], payload["group"]) == ("Step 0", "ok", "game-0")
    with pytest.raises(InvalidInput):
        teach(ada, [*games(1, first=9), Demonstration("", "ok")])
    assert len(ada.signals()) == len(ids)


def test_a_group_is_held_out_as_a_whole_and_stays_on_its_side(ada: User) -> None:
    teach(ada, games(8))
    ada.learn(LAYER)
    before = roles_by_group(ada)
    assert all(len(roles) == 1 for roles in before.values())
    assert {role for roles in before.values() for role in roles} == {"trained", "held_out"}
    # More of the same games, and new ones.
    teach(ada, games(8, size=5)[3:])
    teach(ada, games(4, first=8))
    ada.learn(LAYER)
    after = roles_by_group(ada)
    assert all(len(roles) == 1 for roles in after.values())
    assert {group: after[group] for group in before} == before


def test_a_verifier_judges_the_answers_to_held_out_prompts(learned: User) -> None:
    (revision,) = learned.revisions(LAYER)
    tasks = revision.scores["tasks"]
    held_out = [role for role in revision.signals.values() if role == "held_out"]
    assert tasks["asked"] == len(held_out)
    assert (tasks["passed_before"], tasks["passed_after"]) == (0, len(held_out))
    assert revision.verdict is Verdict.PROMOTED
    reply = learned.chat(
        [{"role": "system", "content": "Map 99."}, {"role": "user", "content": "Step 1"}],
        layers=[LAYER],
        memory=False,
        temperature=0,
    )
    assert reply.text == "ok"
    assert learned.chat("Step 1", temperature=0).stack.entries == ()


def test_the_recipe_of_a_learn_stays_with_the_layer(ada: User) -> None:
    teach(ada, games(12))
    ada.learn(LAYER, recipe=QUICK, accept=True)
    teach(ada, games(2, first=20))
    report = ada.learn(LAYER, accept=True)
    (revision,) = (each for each in ada.revisions(LAYER) if each.id == report.revision)
    assert revision.recipe["overrides"] == QUICK
    assert revision.recipe["rank"] == 4
    teach(ada, games(2, first=30))
    report = ada.learn(LAYER, recipe={})
    (revision,) = (each for each in ada.revisions(LAYER) if each.id == report.revision)
    assert "overrides" not in revision.recipe


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The verifiers that are installed. A test may take them away."""
    entries = [EntryPoint("exact-answer", f"{__name__}:ExactAnswer", plugins.VERIFIERS)]
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: entries if group == plugins.VERIFIERS else []
    )
    return entries


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "rolled back"])
def test_the_verifier_of_a_learn_stays_with_the_layer(
    ada: User, installed: list[EntryPoint], is_live: bool
) -> None:
    teach(ada, games(12))
    ada.learn(LAYER, recipe=QUICK, verifier="exact-answer", accept=True)
    if not is_live:
        ada.rollback(LAYER, to="base")
    for first in (20, 30):
        teach(ada, games(4, first=first))
        report = ada.learn()
        assert report.layer == LAYER
        assert report.scores["tasks"]["asked"] >= 3
    assert ada.revisions(LAYER)[-1].recipe["overrides"] == QUICK
    teach(ada, games(4, first=40))
    assert "tasks" not in ada.learn(LAYER, recipe={}).scores
    teach(ada, games(4, first=50))
    assert "tasks" not in ada.learn().scores


def test_a_rebuild_after_forget_keeps_the_recipe_and_the_verifier(
    ada: User, installed: list[EntryPoint]
) -> None:
    teach(ada, games(12))
    ada.learn(LAYER, recipe=QUICK, verifier="exact-answer", accept=True)
    (first,) = ada.revisions(LAYER)
    trained = next(signal for signal, role in first.signals.items() if role == "trained")
    (rebuilt,) = ada.forget(trained).rebuilt
    (revision,) = ada.revisions(LAYER)
    assert (revision.id, first.id in revision.id) == (rebuilt.revision, False)
    assert revision.recipe["overrides"] == QUICK
    assert rebuilt.scores["tasks"]["asked"] >= 3


def test_without_its_verifier_a_layer_is_not_learned_and_forgets_all_the_same(
    ada: User, installed: list[EntryPoint]
) -> None:
    ids = teach(ada, games(12))
    ada.learn(LAYER, recipe=QUICK, verifier="exact-answer", accept=True)
    installed.clear()
    with pytest.raises(NothingToLearn):
        ada.learn()
    (first,) = ada.revisions(LAYER)
    teach(ada, games(4, first=20))
    assert ada.learn(dry_run=True).layer == LAYER
    with pytest.raises(NotFound, match=r"'exact-answer', which cannot be loaded") as missing:
        ada.learn()
    assert "Install" in missing.value.hint
    assert ada.revisions(LAYER) == (first,)
    report = ada.forget(next(each for each in ids if first.signals[each] == "trained"))
    assert "exact-answer" in report.not_rebuilt[LAYER]
    assert ada.revisions(LAYER) == ()


def test_more_lessons_take_more_steps_as_the_recipe_says(ada: User) -> None:
    teach(ada, games(40))
    recipe = {**QUICK, "min_steps": 6, "batch_size": 10, "max_steps": 10_000, "eval_fraction": 0.1}
    report = ada.learn(LAYER, recipe=recipe, dry_run=True)
    (trained, held_out) = (108, 12)
    assert trained + held_out == 120
    assert f"{round(6 * trained / 30)} steps" in report.reason


def test_a_large_layer_holds_no_more_out_than_decides(ada: User) -> None:
    teach(ada, games(200))
    ada.learn(LAYER, recipe=QUICK)
    (revision,) = ada.revisions(LAYER)
    held_out = list(revision.signals.values()).count("held_out")
    # The last game may take it over the limit.
    assert 128 <= held_out < 128 + 3


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"recipe": {"rnk": 4}}, InvalidInput, "rnk"),
        ({"recipe": {"rank": 0}}, InvalidInput, "rank = 0"),
        ({"recipe": {"target_modules": ["nowhere"]}}, InvalidInput, "nowhere"),
        ({"recipe": {"rank": 4}, "layer": None}, InvalidInput, "layer"),
        ({"verifier": "nobody"}, NotFound, "nobody"),
        ({"verifier": object()}, PluginError, "verifier"),
    ],
)
def test_a_wrong_recipe_or_verifier_changes_nothing(
    ada: User, arguments: dict[str, object], kind: type[PersonalPeftError], words: str
) -> None:
    teach(ada, games(4))
    with pytest.raises(kind) as caught:
        ada.learn(**{"layer": LAYER, **arguments})  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert caught.value.hint
    assert ada.revisions() == ()


def test_a_skill_has_a_scope_as_soon_as_it_was_taught(ada: User) -> None:
    teach(ada, games(1))
    ada.scope(LAYER, "never")
    assert [(layer.name, layer.scope, layer.head) for layer in ada.layers()] == [
        (LAYER, "never", None)
    ]
    with pytest.raises(NotFound):
        ada.scope("skill.other", "never")


def test_messages_and_groups_of_demonstrations_move_with_a_user(
    ada: User, runtime: Runtime, tmp_path: Path
) -> None:
    teach(ada, games(2))
    ada.export(tmp_path / "ada.personal")
    runtime.import_user(tmp_path / "ada.personal", as_user="bo")
    ours, theirs = ([each.payload for each in user.signals()] for user in (ada, runtime.user("bo")))
    assert theirs == ours
