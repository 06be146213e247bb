"""The ``llm`` program uses a user's model through an entry in its own configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from http_makers import LocalServer


@pytest.mark.exhaustive
def test_llm_prompts_a_users_model_with_and_without_streaming(
    site: LocalServer, tmp_path: Path
) -> None:
    ada = site.runtime.user("ada")
    folder = tmp_path / "llm"
    folder.mkdir()
    entry = {
        "model_id": "mine",
        "model_name": "ada",
        "api_base": f"{site.url}/v1",
        "api_key_name": "personalpeft",
    }
    # JSON is valid YAML.
    (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    (folder / "keys.json").write_text(json.dumps({"personalpeft": site.api_key_of("ada")}))
    environment = {**os.environ, "LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": ""}

    def llm(*args: str) -> str:
        program = [
            sys.executable,
            "-m",
            "llm",
            "-m",
            "mine",
            "Hello",
            "-o",
            "temperature",
            "0",
            *args,
        ]
        done = subprocess.run(
            program, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    expected = ada.chat("Hello", temperature=0).text
    assert llm() == expected
    assert llm("--no-stream") == expected
    brief = ada.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        temperature=0,
    ).text
    assert llm("-s", "Be brief.") == brief
