"""Whether the reward of the cookbook's arithmetic recipe rises, over several repetitions.

``PYTHONPATH=tests python -m benchmarks.tinker_arithmetic OUT``. The recipe is unmodified, in the
Python that ``make tinker-env`` makes. OUT keeps the home and the logs. The same command continues
after an interruption: finished repetitions are read, and one that was begun goes on from its last
checkpoint. The last line is the result as JSON.

The test of one repetition is a permutation test of the slope of the share of right answers over the
steps, one-sided. The p-values are combined (Fisher 1925). A repetition has its own initial weights
and samples; the problems of a step are the same in all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import personalpeft
from benchmarks.tinker_server import serving

# What the recipe asks for: it means the server's base here, and is a folder with its tokenizer.
_MODEL = "meta-llama/Llama-3.2-1B"
_PERMUTATIONS = 20_000


def measure(
    out: Path, python: str, base: str, repetitions: int, options: dict[str, object]
) -> dict[str, Any]:
    """Run the repetitions that are missing, and return the rewards and p-values of all."""
    out.mkdir(parents=True, exist_ok=True)
    with personalpeft.open(out / "home", base) as runtime:
        folder = runtime.base().folder
    (out / _MODEL).mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (folder / file).exists():
            shutil.copy(folder / file, out / _MODEL / file)
    settings = out / _MODEL / "tokenizer_config.json"
    if not settings.exists():
        plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        settings.write_text(json.dumps(plain), "utf-8")
    wanted = int(str(options["max_steps"]))
    missing = [n for n in range(repetitions) if len(_rewards(out, n)) < wanted]
    if missing:
        with serving(base, out / "home", {"PERSONALPEFT_TINKER_ALIASES": _MODEL}) as (
            port,
            secret,
            _,
        ):
            for number in missing:
                _run(out, python, number, f"http://127.0.0.1:{port}/tinker", secret, options)
    found = []
    for number in range(repetitions):
        rewards = _rewards(out, number)[:wanted]
        part = max(1, len(rewards) // 5)
        found.append(
            {
                "first_fifth": round(float(np.mean(rewards[:part])), 4),
                "last_fifth": round(float(np.mean(rewards[-part:])), 4),
                "slope_per_step": round(_slope(np.array(rewards)), 6),
                "p": _p_value(rewards, number),
            }
        )
    statistic = -2 * sum(math.log(each["p"]) for each in found)
    half = statistic / 2
    combined = math.exp(-half) * sum(half**n / math.factorial(n) for n in range(repetitions))
    return {"base": base, **options, "repetitions": found, "combined_p": combined}


def _run(
    out: Path, python: str, number: int, url: str, secret: str, options: dict[str, object]
) -> None:
    arguments = [f"{name}={value}" for name, value in options.items()]
    subprocess.run(
        [
            *(python, "-m", "tinker_cookbook.recipes.math_rl.train", "env=arithmetic"),
            *(f"model_name={_MODEL}", "renderer_name=role_colon", "eval_every=0", "save_every=5"),
            *(f"log_path={_log(out, number)}", "behavior_if_log_dir_exists=resume", *arguments),
        ],
        cwd=out,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TINKER_TELEMETRY": "0",
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": f"tml-{secret}",
            "WANDB_MODE": "disabled",
            "PYTHONPATH": "",
        },
        check=True,
    )


def _log(out: Path, number: int) -> Path:
    return out.absolute() / "logs" / str(number)


def _rewards(out: Path, number: int) -> list[float]:
    """Return the share of right answers at each step so far."""
    file = _log(out, number) / "metrics.jsonl"
    if not file.exists():
        return []
    # A step that was repeated after an interruption counts once.
    steps = {}
    for line in file.read_text("utf-8").splitlines():
        row = json.loads(line)
        if "env/all/correct" in row:
            steps[row["step"]] = row["env/all/correct"]
    return [steps[step] for step in sorted(steps)]


def _slope(rewards: np.ndarray) -> float:
    steps = np.arange(len(rewards)) - (len(rewards) - 1) / 2
    return float((steps * rewards).sum() / (steps**2).sum())


def _p_value(rewards: list[float], seed: int) -> float:
    rng, values = np.random.default_rng(seed), np.array(rewards)
    observed = _slope(values)
    above = sum(_slope(rng.permutation(values)) >= observed for _ in range(_PERMUTATIONS))
    return (above + 1) / (_PERMUTATIONS + 1)


def main() -> None:
    """Measure with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", default="smollm2-135m-instruct")
    parser.add_argument("--python", default=".venv-tinker/tinker-cookbook==0.3.0/bin/python")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", default="1e-4")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options = {
        "max_steps": given.steps,
        "learning_rate": given.learning_rate,
        "groups_per_batch": given.groups,
        "group_size": given.group_size,
        "max_tokens": 5,
        "lora_rank": 32,
    }
    python = str(Path(given.python).absolute())
    print(json.dumps(measure(given.out, python, given.base, given.repetitions, options)))  # noqa: T201


if __name__ == "__main__":
    main()
