"""A tiny base that learns fast."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """The tiny model that ships with personalpeft, with a recipe that learns fast."""
    tiny = resources.files("personalpeft_models") / "tiny-random.toml"
    path = tmp_path / "tiny-t2t.toml"
    path.write_text(tiny.read_text("utf-8") + TABLES, "utf-8")
    return path


TABLES = """
[learning]
target_modules = ["q_proj", "v_proj"]
rank = 8
alpha = 32.0
min_steps = 60
batch_size = 8
learning_rate = 0.02
kl_prompts = 0

[gate]
max_kl = 100

[practice]
rounds = 25
rejection_rounds = 0
num_train_tasks = 16
num_eval_tasks = 8
max_completion_length = 16
learning_rate = 0.005
"""
