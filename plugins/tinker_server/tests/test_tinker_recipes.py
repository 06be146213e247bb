"""Unmodified recipes of the cookbook run to their end against a server, offline."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tinker_makers import TinkerServer, open_server, sdk_pythons

from personalpeft_tinker_server.service import Options

pytestmark = pytest.mark.exhaustive

# Names that recipes ask for: they mean the server's base here.
MODELS = ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B")
TOKENIZERS = (*MODELS, "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer")
MODEL = f"model_name={MODELS[0]}"
SMALL = ("group_size=2", "batch_size=4")
ANSWERS = [("What is the colour of the sky?", "Blue."), ("How do I boil an egg?", "In hot water.")]

RECIPES: Mapping[str, tuple[str, ...]] = {
    "sl_loop": (MODEL, "batch_size=16", "max_length=256", "lora_rank=8", "learning_rate=1e-2"),
    "sl_basic": ("learning_rate=1e-2", "num_epochs=6"),
    "rl_loop": (MODEL, "batch_size=8", "group_size=4", "max_tokens=24", "lora_rank=8"),
    "chat_sl.train": (
        *(MODEL, "dataset=conversations.jsonl", "batch_size=16", "max_length=256"),
        *("lora_rank=8", "learning_rate=1e-2"),
    ),
    "math_rl.train": (
        MODEL,
        "env=arithmetic",
        "group_size=4",
        "groups_per_batch=8",
        "max_tokens=5",
        "max_steps=2",
    ),
    "preference.dpo.train": (
        *(MODEL, "dataset=hhh", "batch_size=8", "max_length=256", "max_steps=4"),
        "learning_rate=1e-3",
    ),
    # With its evaluation, which plays four games of each of a hundred numbers.
    "multiplayer_rl.guess_number.train": (
        *(MODEL, "renderer_name=role_colon", *SMALL),
        *("max_tokens=2", "max_steps=1", "eval_every=1"),
    ),
}


# By recipe, the loss that falls, since all its batches are alike.
LOSSES = {
    **dict.fromkeys(("sl_loop", "sl_basic", "chat_sl.train"), "train_mean_nll"),
    "preference.dpo.train": "dpo_loss",
}


def with_cookbook() -> str | None:
    """Return the first Python that has the cookbook."""
    for python in sdk_pythons():
        found = subprocess.run([python, "-c", "import tinker_cookbook"], capture_output=True)
        if not found.returncode:
            return python
    return None


def write_lines(file: Path, rows: list[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, float32: None) -> Iterator[TinkerServer]:
    """A server under the names of the recipes, with room for all polls of a client."""
    home = tmp_path_factory.mktemp("home")
    with open_server(home, Options(aliases=MODELS), max_queue=512) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(server: TinkerServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with folders named as the ids of the hub that recipes ask for."""
    root, base = tmp_path_factory.mktemp("recipes"), server.runtime.base().folder
    for name in TOKENIZERS:
        (root / name).mkdir(parents=True)
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(base / file, root / name / file)
        special = {
            "eos_token": "<|im_end|>",
            "bos_token": "<|im_start|>",
            "pad_token": "<|im_end|>",
        }
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        (root / name / "tokenizer_config.json").write_text(json.dumps(config))
    chats = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in ANSWERS
    ]
    write_lines(root / "conversations.jsonl", chats * 640)
    for split, count in (("train", 64), ("test", 16)):
        write_lines(root / f"HuggingFaceH4/no_robots/{split}.jsonl", chats * count)
        sums = [
            {"question": f"What is {n} plus 1?", "answer": f"{n}+1\n#### {n + 1}"}
            for n in range(64)
        ]
        write_lines(root / f"openai/gsm8k/main/{split}.jsonl", sums)
        pairs = [
            {name: f"\n\nHuman: {q}\n\nAssistant: {text}" for name, text in each.items()}
            for q, a in ANSWERS
            for each in ({"chosen": a, "rejected": "No."},)
        ]
        write_lines(root / f"Anthropic/hh-rlhf/{split}.jsonl", pairs * 32)
    (root / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n---\n"
    )
    return root


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_to_its_end(
    server: TinkerServer, url: str, folder: Path, recipe: str
) -> None:
    python = with_cookbook()
    if python is None:
        pytest.skip("no Python has the cookbook; make tinker-env makes one")
    log = folder / "logs" / recipe
    done = subprocess.run(
        [python, "-m", f"tinker_cookbook.recipes.{recipe}", *RECIPES[recipe], f"log_path={log}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_OFFLINE": "1",
            "TINKER_TELEMETRY": "0",
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": f"tml-{server.runtime.api_keys.create(None)[1]}",
            "WANDB_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert rows
    if loss := LOSSES.get(recipe):
        losses = [row[loss] for row in rows if loss in row]
        assert losses[-1] < losses[0] * 0.8
    if "guess_number" in recipe:
        assert any(name.startswith("test/") for row in rows for name in row)
    saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    assert any("sampler_path" in each for each in saved)
