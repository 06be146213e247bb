"""A chat imports only what it needs, so its first token does not wait for other modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAT = """
import gc, sys, personalpeft
with personalpeft.open(sys.argv[1], base="tiny-random") as runtime:
    ada = runtime.user("ada")
    ada.remember("My dog is called Biscuit.")
    ada.chat("What is my dog called?", max_tokens=1)
assert gc.isenabled()
print(*sys.modules)
"""
NOT_NEEDED = {
    "accelerate",
    "apscheduler",
    "datasets",
    "flask",
    "gguf",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "llama_cpp",
    "matplotlib",
    "pandas",
    "peft",
    "sentence_transformers",
    "scipy",
    "sklearn",
    "textual",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
    "trl",
    "cheroot",
}


@pytest.mark.usefixtures("tiny_base")
def test_chat_with_facts_imports_no_heavy_module_that_it_does_not_need(
    shared_cache: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHAT, str(tmp_path / "home")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PERSONALPEFT_CACHE": str(shared_cache)},
    )
    assert sorted(NOT_NEEDED.intersection(done.stdout.split())) == []
