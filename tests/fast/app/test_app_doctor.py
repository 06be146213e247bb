"""``doctor`` reports the measured CPU features of llama.cpp, and ``--load`` measures them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from app_makers import Shell

import personalpeft
from personalpeft.backends.llamacpp.cpu_probe import probe_cpu
from personalpeft.base_models.gguf.file import source_gguf_file
from personalpeft.base_models.model_card import card_text
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.types import Source

_REAL = "smollm2-135m-instruct"


def check_results(
    shell: Shell, *args: str, backend: str = "llamacpp", **env: str
) -> tuple[int, dict[str, Any]]:
    """Return the exit code and each check's result by its name."""
    result = shell.run("doctor", *args, "--json", backend=backend, **env)
    assert "Traceback" not in result.output
    return result.exit_code, {each["name"]: each for each in json.loads(result.stdout)["checks"]}


@pytest.mark.exhaustive
def test_the_features_used_by_llamacpp_are_reported_once_probed(shell: Shell) -> None:
    code, before = check_results(shell, "--base", _REAL)
    assert code == 0
    file = source_gguf_file(find_card(_REAL))
    assert file is not None
    tried = probe_cpu(file, shell.cache)
    assert tried.reason not in before["device"]["message"]
    assert tried.reason in check_results(shell, "--base", _REAL)[1]["device"]["message"]


@pytest.mark.exhaustive
def test_loading_reports_the_features_in_use_and_creates_no_home(shell: Shell) -> None:
    code, checks = check_results(shell, "--load", "--base", "tiny-random")
    assert code == 0, checks
    (note,) = (shell.cache / "llamacpp").iterdir()
    model = checks["model"]["message"]
    assert json.loads(note.read_text("utf-8"))["reason"] in model
    assert not shell.home.exists()
    # A stored probe result is used again, whatever it holds.
    note.write_text(json.dumps({"repack": False, "reason": "written-here"}), "utf-8")
    assert (
        "written-here"
        in check_results(shell, "--load", "--base", "tiny-random")[1]["model"]["message"]
    )


def test_the_engine_of_a_server_follows_the_users_of_the_home(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("personalpeft.host.has_gpu", lambda: False)
    found = []
    for users in ((), ("ada", "bo"), ("cy",)):
        with personalpeft.open(shell.home, backend="fake") as runtime:
            for user in users:
                # An API key means that other users will connect.
                runtime.api_keys.create(user) if user == "bo" else runtime.user(user)
        _, checks = check_results(shell, "--base", _REAL, backend="auto")
        found.append(checks["serve"]["message"])
        assert checks["backend"]["message"].startswith("llamacpp")
    assert [each.partition(",")[0] for each in found] == ["llamacpp", "llamacpp", "torch"]
    assert ["; 2 replies" in each for each in found] == [True, True, False]


@pytest.mark.exhaustive
def test_what_learns_is_reported_with_the_reason_for_its_weights(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learning(free: int, **env: str) -> str:
        monkeypatch.setattr("personalpeft.host.free_memory", lambda: free)
        _, checks = check_results(shell, "--base", _REAL, **env)
        return str(checks["learning"]["message"])

    fits, tight, chosen = (
        learning(1 << 40),
        learning(1 << 30),
        learning(0, PERSONALPEFT_WEIGHTS="loaded"),
    )
    assert all(each.startswith("torch, ") for each in (fits, tight, chosen))
    assert "1024.0 GiB" in fits
    assert "in the file (" in tight
    assert "1.0 GiB" in tight
    assert "PERSONALPEFT_WEIGHTS" in chosen


@pytest.mark.parametrize("backend", ["auto", "torch", "llamacpp"])
def test_a_base_that_is_missing_is_one_fault(shell: Shell, tmp_path: Path, backend: str) -> None:
    card = card_text(
        replace(
            find_card(_REAL), name="mine", source=Source("package", files=("no_such:model.gguf",))
        )
    )
    (tmp_path / "mine.toml").write_text(card, "utf-8")
    for base in (str(tmp_path / "mine.toml"), "no-such-base"):
        code, checks = check_results(shell, "--base", base, backend=backend)
        assert code
        assert [name for name, each in checks.items() if not each["ok"]] == ["base"]


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("gate", "min_generated = 40"),
        ("gate", "max_probes = 0.2"),
        ("learning", "rnk = 8"),
        ("learning", "memory = 3"),
        ("learning.memory", 'rank = "many"'),
        ("learning", "learning_rate = inf"),
        ("learning", "learning_rate = [1]"),
        ("learning", "learning_rate = 2026-11-30"),
        ("learning", "target_modules = [1]"),
        ("rl", "rounds = 0"),
    ],
)
def test_a_mistake_in_how_a_card_learns_is_found_before_the_first_learn(
    shell: Shell, tmp_path: Path, table: str, key: str
) -> None:
    card = tmp_path / "mine.toml"
    card.write_text(f"{card_text(find_card('tiny-random'))}\n[{table}]\n{key}\n", "utf-8")
    code, checks = check_results(shell, "--base", str(card), backend="torch")
    assert code
    assert [name for name, each in checks.items() if not each["ok"]] == ["learning"]
    assert key.partition(" ")[0] in checks["learning"]["message"]
    assert checks["learning"]["hint"]


def test_a_mistyped_backend_is_reported(shell: Shell) -> None:
    code, checks = check_results(shell, backend="torhc")
    assert code
    assert [name for name, each in checks.items() if not each["ok"]] == ["backend"]
    assert "torch" in checks["backend"]["hint"]


def test_a_mistake_in_any_card_of_the_home_is_found_and_hides_no_other_card(shell: Shell) -> None:
    sound = card_text(replace(find_card("tiny-random"), name="sound"))
    folder = shell.home / "models"
    folder.mkdir(parents=True)
    (folder / "sound.toml").write_text(sound, "utf-8")
    code, checks = check_results(shell, backend="fake")
    assert (code, checks["cards"]["ok"]) == (0, True)
    for fault in ("[sourc", f'{sound}\n[learning]\nscrub = ["XX"]\n'.replace('"sound"', '"other"')):
        (folder / "other.toml").write_text(fault, "utf-8")
        code, checks = check_results(shell, backend="fake")
        assert code
        assert [name for name, each in checks.items() if not each["ok"]] == ["cards"]
        assert checks["cards"]["hint"]
        listed = json.loads(shell.run("models", "list", "--json").stdout)["models"]
        assert "sound" in {each["name"] for each in listed}


def test_a_plugin_that_may_load_and_does_not_exist_is_reported(shell: Shell) -> None:
    code, checks = check_results(shell, backend="fake", PERSONALPEFT_PLUGINS="sums,smus")
    assert code
    assert [name for name, each in checks.items() if not each["ok"]] == ["plugins"]
    assert "smus" in checks["plugins"]["message"]
    assert "sums" in checks["plugins"]["hint"]
