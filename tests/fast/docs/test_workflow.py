"""The workflow for public runners runs what ``make test`` runs, and names what exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))
    return dict(workflow["jobs"]["test"])


@pytest.fixture(scope="module")
def commands(job: dict[str, Any]) -> list[list[str]]:
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    return [shlex.split(line) for script in scripts for line in script.splitlines()]


def test_the_matrix_has_three_systems_and_two_supported_pythons(job: dict[str, Any]) -> None:
    matrix = job["strategy"]["matrix"]
    assert [each.split("-")[0] for each in matrix["os"]] == ["ubuntu", "macos", "windows"]
    assert matrix["python"] == ["3.11", "3.13"]
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_make_has_the_targets(commands: list[list[str]]) -> None:
    targets = {words[1] for words in commands if words[0] == "make"}
    assert targets == {"browser", "test"}
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)


def test_without_make_the_same_tests_run(commands: list[list[str]]) -> None:
    runs = [words[3:] for words in commands if words[:3] == ["python", "-m", "pytest"]]
    recipe = MAKEFILE.split("\ntest: ")[1].split("\ntest-all:")[0]
    marks = {words[words.index("-m") + 1] for words in runs}
    assert marks == set(re.findall(r'-m "(.+?)"', recipe))
    for words in runs:
        for word in words:
            assert word.startswith("-") or "/" not in word or (ROOT / word).exists(), word


def test_what_is_installed_exists(commands: list[list[str]]) -> None:
    (words,) = (words[4:] for words in commands if words[:4] == ["python", "-m", "pip", "install"])
    for option, value in zip(words[::2], words[1::2], strict=True):
        if extra := re.fullmatch(r"\.\[(\w+)\]", value):
            assert extra[1] in PROJECT["project"]["optional-dependencies"]
        else:
            assert option in ("-c", "-e")
            assert (ROOT / value).exists(), value
    plugins = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert {Path(each).name for each in words if each.startswith("plugins/")} == plugins - {
        "vllm_resolver"
    }


def test_what_the_plugins_need_as_extras_is_installed_for_the_tests() -> None:
    plugins = [tomllib.loads(p.read_text("utf-8")) for p in ROOT.glob("plugins/*/pyproject.toml")]
    extras = [each["project"].get("optional-dependencies", {}) for each in plugins]
    needed = {package for each in extras for extra in each.values() for package in extra}
    assert needed
    assert needed <= set(PROJECT["project"]["optional-dependencies"]["dev"])
