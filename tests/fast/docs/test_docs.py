"""The documentation's links resolve, its code runs as printed, and its numbers are the code's."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import personalpeft
from benchmarks.pages import anchor_of
from personalpeft.errors import ERROR_CODES
from personalpeft.learning.gate.evidence import CONFIRMATION_E_VALUE, TIE_MARGIN
from personalpeft.learning.gate.gate import Margins
from personalpeft.learning.rl.rollouts import DECAY, HOPELESS_RATE, MIN_SPREAD, SOLVED_RATE
from personalpeft.learning.train.config import RLConfig, TrainingConfig
from personalpeft.plugins import Plugins
from personalpeft_app.http.server import make_app

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "plugins").rglob("README.md")]
)


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_anchor_of_a_link_is_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        text = ((page.parent / target) if target else page).read_text("utf-8")
        headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
        assert anchor in map(anchor_of, headings), (target, anchor)


def test_the_library_example_of_the_readme_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = _blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in block.splitlines() if line.strip() and "import" not in line]) <= 10
    monkeypatch.setenv("PERSONALPEFT_HOME", str(tmp_path))
    on_the_fake = block.replace("personalpeft.open()", 'personalpeft.open(backend="fake")')
    exec(compile(on_the_fake, "README.md", "exec"), {})
    assert "PROMOTED" in capsys.readouterr().out
    with personalpeft.open(backend="fake") as runtime:
        (style,) = runtime.user("ada", create=False).layers()
        assert style.head is None


def test_the_http_page_lists_the_errors_and_routes_of_the_code(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs/how-to/serve-openai-clients.md").read_text("utf-8")
    named: dict[int, list[str]] = {}
    for error, outcome in ERROR_CODES.items():
        named.setdefault(outcome.http_status, []).append(f"`{error.__name__}`")
    for status, errors in named.items():
        assert f"| {status} | {', '.join(errors)} |" in page, status
    with personalpeft.open(tmp_path, backend="fake") as runtime:
        for rule in make_app(runtime).url_map.iter_rules():
            assert rule.rule.partition("/<")[0] in page, rule.rule


def test_the_app_of_the_http_page_answers_and_mounts_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = _blocks(ROOT / "docs/how-to/serve-openai-clients.md", "python")[-1]
    monkeypatch.setenv("PERSONALPEFT_HOME", str(tmp_path))
    names: dict[str, Any] = {}
    on_the_fake = block.replace("personalpeft.open()", 'personalpeft.open(backend="fake")')
    exec(compile(on_the_fake, "http.md", "exec"), names)
    with names["runtime"]:
        browser = names["shop"].test_client()
        assert browser.get("/greeting/ada").status_code == 200
        assert browser.get("/model/v1/models").status_code == 401


def test_the_annotated_tree_lists_existing_files() -> None:
    (page,) = (ROOT / "docs").rglob("architecture.md")
    tree = page.read_text("utf-8").split("## What is where")[1].split("```")[1]
    for line in tree.strip().splitlines():
        for name in (
            line.split("  ")[0].split() or re.findall(r"^\s+(\S+\.py \S+\.py|\S+)", line)[0].split()
        ):
            assert (ROOT / name).exists() or (ROOT / "personalpeft" / name).exists(), name
    folders = {
        path.name for path in (ROOT / "personalpeft").iterdir() if (path / "__init__.py").exists()
    }
    assert all(f"{folder}/" in tree for folder in folders)


def test_the_learning_and_gate_pages_have_the_numbers_of_the_code() -> None:
    pages = [
        (ROOT / f"docs/explanation/{name}.md").read_text("utf-8") for name in ("learning", "gate")
    ]
    # A line break may occur anywhere.
    page = " ".join("\n".join(pages).split())
    recipe = TrainingConfig()
    for phrase in (
        f"{recipe.learning_rate:.0e}".replace("e-04", "e-4"),
        f"{recipe.min_steps} steps of {recipe.batch_size} lessons",
        f"{recipe.rank}, {recipe.alpha:g}",
        f"{recipe.kl_prompts} a step, weight {recipe.kl_weight:g}",
        f"{recipe.few_shot_replies} a step, weight {recipe.few_shot_weight:g}",
        f"{recipe.preference_pairs} a step, beta {recipe.beta:g}",
        f"more than {TIE_MARGIN} nats",
        f"At {CONFIRMATION_E_VALUE:g} a promotion",
        *(f"{name} = {value} " for name, value in Margins().model_dump().items()),
    ):
        assert phrase in page, phrase


def test_the_practice_page_has_the_numbers_of_reinforcement_learning() -> None:
    page = " ".join((ROOT / "docs/explanation/practice.md").read_text("utf-8").split())
    config = RLConfig()
    for phrase in (
        f"{config.rounds} rounds of {config.prompts_per_round} tasks with {config.num_generations} replies",
        f"the first {config.rejection_rounds} rounds, {config.rejection_steps} steps of"
        f" {config.batch_size} replies each, at {config.rejection_learning_rate:.0e}".replace(
            "e-0", "e-"
        ),
        f"one step each, at {config.learning_rate:.0e}".replace("e-0", "e-"),
        f"temperature {config.temperature:g}, up to {config.max_completion_length} tokens",
        f"{config.num_train_tasks} to practice, {config.num_eval_tasks} to judge by",
        f"weight {config.beta:g}",
        f"below {MIN_SPREAD:g} counts as {MIN_SPREAD:g}",
        f"solved if a rate above {SOLVED_RATE:g}",
        f"hopeless if one below {HOPELESS_RATE:g}",
        f"decay by {1 - DECAY:.0%}".replace("%", " %"),
    ):
        assert phrase in page, phrase


def test_the_verifier_of_the_plugins_page_implements_the_protocol() -> None:
    block, *_ = _blocks(ROOT / "docs/how-to/write-a-plugin.md", "python")
    names: dict[str, Any] = {}
    exec(compile(block, "write-a-plugin.md", "exec"), names)
    verifying = Plugins().verifier(names["Shouting"]())
    (task,) = verifying.tasks(1, 1)
    assert [verifying.verify(task, reply)["right"] for reply in ("ONE", "One")] == [1.0, 0.0]


def test_the_repository_holds_no_paths_of_a_development_machine() -> None:
    home = os.sep + "work" + os.sep
    for page in PAGES:
        assert home not in page.read_text("utf-8"), page
