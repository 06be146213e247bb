"""The world benchmark runs every part on games of TextWorld, and goes on where it stopped.

It runs on the tiny base, so its figures mean nothing.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
from app_makers import Shell

pytest.importorskip("textworld", reason="needs the package textworld")
pytest.importorskip("personalpeft_world_model", reason="needs the plugin world_model")

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("game", ["coin", "cooking"])
def test_every_part_is_measured_once(shell: Shell, tmp_path: Path, game: str) -> None:
    card = tmp_path / "tiny.toml"
    tiny = resources.files("personalpeft_models") / "tiny-random.toml"
    card.write_text(tiny.read_text("utf-8") + "\n[gate]\nmax_kl = 100\n", "utf-8")
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
