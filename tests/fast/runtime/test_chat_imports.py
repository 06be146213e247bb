"""A chat imports what it needs: a first token in a fresh process does not wait for the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    "apscheduler",
    "datasets",
    "flask",
    "gguf",
    "httpx",
    "llama_cpp",
    "matplotlib",
    "pandas",
    "peft",
    "sentence_transformers",
    "sklearn",
    "textual",
    "trl",
    "waitress",
}


def test_a_chat_with_facts_imports_nothing_heavy_that_it_does_not_need(
    shared_cache: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHAT, str(tmp_path / "home")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PERSONALPEFT_CACHE": str(shared_cache)},
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & NOT_NEEDED
