"""The world benchmark runs every part on games of TextWorld, and goes on where it stopped.

It runs on the tiny base, so its figures mean nothing.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from app_makers import Shell

import personalpeft

pytest.importorskip("textworld", reason="needs the package textworld")
pytest.importorskip("personalpeft_world_model", reason="needs the plugin world_model")

from benchmarks.world_model import bench_world

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def card(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    tiny = resources.files("personalpeft_models") / "tiny-random.toml"
    path.write_text(tiny.read_text("utf-8") + "\n[gate]\nmax_kl = 100\n", "utf-8")
    return path


@pytest.mark.parametrize("game", ["coin", "cooking"])
def test_every_part_is_measured_once(shell: Shell, tmp_path: Path, card: Path, game: str) -> None:
    few = ("--games", "4", "--unseen", "1", "--seeds", "1", "--epochs", "1")
    command = ("bench", "world", "--base", str(card), "--game", game, *few)
    run = shell.run(*command, "--keep", str(tmp_path), "--json", backend="torch")
    found = json.loads(run.stdout)
    assert (found["bench"], found["game"], found["games"], found["unseen"]) == ("world", game, 4, 1)
    parts = {"fidelity", "consistency", "verification", "warm-start", "synthetic"}
    assert set(found["figures"]) == parts
    fidelity = found["figures"]["fidelity"]
    assert fidelity["exact_match"]["asked"] == fidelity["seen"]["asked"] > 0
    again = shell.run(*command, "--keep", str(tmp_path), backend="torch")
    assert "exact match" in again.stdout
    assert "predicting" not in again.stderr


def test_two_parts_may_have_sizes_of_their_own(shell: Shell, tmp_path: Path, card: Path) -> None:
    few = ("--games", "4", "--unseen", "1", "--epochs", "1", "--keep", str(tmp_path), "--json")
    command = ("bench", "world", "--base", str(card), *few)

    def measure(part: str, *options: str) -> dict[str, Any]:
        run = shell.run(*command, "--only", part, *options, backend="torch")
        return dict(json.loads(run.stdout)["figures"][part])

    assert measure("synthetic", "--trajectories", "6")["games"] == 6
    assert measure("verification", "--verified-games", "3")["with"]["games"] == 3
    # Not the figures that are kept of another size.
    assert measure("verification")["with"]["games"] == 1


def test_an_interrupted_warm_start_goes_on_with_the_skills_that_it_learned(
    tmp_path: Path, card: Path
) -> None:
    def run(stop_at: str) -> tuple[dict[str, Any], list[str]]:
        lines: list[str] = []

        def echo(line: str) -> None:
            lines.append(line)
            if line.startswith(stop_at):
                raise KeyboardInterrupt

        few = {"games": 8, "unseen": 1, "epochs": 1.0, "seeds": 1}
        options = {**few, "game": "coin", "parts": ["warm-start"], "keep": tmp_path}
        return bench_world(str(card), "torch", echo=echo, **options), lines  # type: ignore[arg-type]

    for stop_at in ("seed 0, without", "seed 0, with warm"):
        with pytest.raises(KeyboardInterrupt):
            run(stop_at)
    found, lines = run("nowhere")
    assert len(found["figures"]["warm-start"]["with"]) == 1
    assert sum(line.endswith("of an earlier run is there") for line in lines) == 3
    with personalpeft.open(tmp_path / "home-8-1", base=card) as runtime:
        (alone,) = runtime.user("acts.coin-without-0").revisions()
        copied, built = runtime.user("world").revisions("skill.coin-with-0")
    assert alone.parent is None
    assert (built.parent, copied.reason.split(" ")[0]) == (copied.id, "copied")
    assert alone.recipe["steps"] == built.recipe["steps"] == 60
