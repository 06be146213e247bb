"""What the documents say is so: links lead somewhere, code runs as printed, numbers are those of the code."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import personalpeft
from personalpeft.errors import ERROR_CODES
from personalpeft.learning.gate.gate import CONFIRMATION_E_VALUE, TIE_MARGIN, Margins
from personalpeft.learning.rl.advantages import MIN_SPREAD
from personalpeft.learning.rl.rollouts import DECAY, HOPELESS_RATE, SOLVED_RATE
from personalpeft.learning.train.config import RLConfig, TrainingConfig
from personalpeft.plugins import Plugins
from personalpeft_app.http.concurrency import limiter_of
from personalpeft_app.http.server import make_app
from personalpeft_app.http.wsgi_server import Server

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "plugins").rglob("README.md")]
)


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_library_use_of_the_readme_runs_as_printed(
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


def test_the_test_of_the_embedding_page_passes(tmp_path: Path) -> None:
    block = _blocks(ROOT / "docs/how-to/embed.md", "python")[-1]
    exec(
        compile(block, "embedding.md", "exec"), {"personalpeft": personalpeft, "tmp_path": tmp_path}
    )


def test_the_http_page_has_the_errors_of_the_code_and_the_routes_of_the_server(
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


def test_the_clients_of_the_http_page_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai_block, anthropic_block, flask_block = _blocks(
        ROOT / "docs/how-to/serve-openai-clients.md", "python"
    )
    monkeypatch.setenv("PERSONALPEFT_HOME", str(tmp_path))
    names: dict[str, Any] = {}
    on_the_fake = flask_block.replace("personalpeft.open()", 'personalpeft.open(backend="fake")')
    exec(compile(on_the_fake, "http.md", "exec"), names)
    runtime, shop = names["runtime"], names["shop"]
    assert shop.test_client().get("/greeting/ada").status_code == 200
    assert shop.test_client().get("/model/v1/models").status_code == 401
    places = limiter_of(runtime)
    server = Server(make_app(runtime, places=places), places, host="127.0.0.1", port=0)
    thread = threading.Thread(target=lambda: server.run(grace=5, close=runtime.close))
    thread.start()
    try:
        secret = runtime.api_keys.admin_key_file.read_text().strip()
        for library, block in ((openai, openai_block), (anthropic, anthropic_block)):
            said = {
                library.__name__: library,
                "address": f"http://127.0.0.1:{server.port}",
                "token": secret,
            }
            exec(compile(block, "http.md", "exec"), said)
            assert runtime.user("ada").feedback(said["turn"], rating=1)
    finally:
        server.stop()
        thread.join(20)


def test_the_annotated_tree_names_what_is_there() -> None:
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


def test_the_learning_page_has_the_numbers_of_the_code() -> None:
    page = (ROOT / "docs/explanation/learning.md").read_text("utf-8")
    recipe = TrainingConfig()
    for said in (
        f"{recipe.learning_rate:.0e}".replace("e-04", "e-4"),
        f"{recipe.min_steps} steps of {recipe.batch_size} lessons",
        f"{recipe.rank}, {recipe.alpha:g}",
        f"{recipe.kl_prompts} a step, weight {recipe.kl_weight:g}",
        f"| {recipe.content_weight:g} |",
        f"{recipe.preference_pairs} a step, beta {recipe.beta:g}",
        f"more than {TIE_MARGIN} nats",
        f"At {CONFIRMATION_E_VALUE:g} a promotion",
        *(f"{name} = {value} " for name, value in Margins().model_dump().items()),
    ):
        assert said in page, said


def test_the_learning_page_has_the_numbers_of_the_drill() -> None:
    page = (ROOT / "docs/explanation/learning.md").read_text("utf-8").split("## Practice")[1]
    config = RLConfig()
    for said in (
        f"{config.rounds} rounds of {config.prompts_per_round} tasks with {config.num_generations} replies",
        f"of which {config.rejection_rounds} imitate at {config.rejection_learning_rate:.0e}".replace(
            "e-0", "e-"
        ),
        f"in {config.rejection_steps} steps\nof {config.batch_size} replies each",
        f"learn at {config.learning_rate:.0e}".replace("e-0", "e-"),
        f"temperature {config.temperature:g}, replies of up to {config.max_completion_length} tokens",
        f"{config.num_train_tasks} tasks to try and {config.num_eval_tasks} to judge by",
        f"weight {config.beta:g}",
        f"below {MIN_SPREAD:g} counts as {MIN_SPREAD:g}",
        f"above {SOLVED_RATE:g}: solved; below {HOPELESS_RATE:g}: hopeless",
        f"fades by {1 - DECAY:.0%}".replace("%", " %"),
    ):
        assert said in page, said


def test_the_verifier_of_the_plugins_page_is_one() -> None:
    (block,) = _blocks(ROOT / "docs/how-to/write-a-plugin.md", "python")
    names: dict[str, Any] = {}
    exec(compile(block, "write-a-plugin.md", "exec"), names)
    verifying = Plugins().verifier(names["Shouting"]())
    (task,) = verifying.tasks(1, 1)
    assert [verifying.verify(task, reply)["right"] for reply in ("ONE", "One")] == [1.0, 0.0]


def test_nothing_of_the_place_where_it_was_made_is_in_it() -> None:
    home = os.sep + "work" + os.sep
    for page in PAGES:
        assert home not in page.read_text("utf-8"), page
