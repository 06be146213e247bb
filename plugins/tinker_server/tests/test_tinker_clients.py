"""The real SDKs train and sample against a server on a socket, each in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tinker_makers import (
    FIFTY_BATCHES,
    FIFTY_STEPS,
    PYTHONS,
    TinkerServer,
    peft_losses,
    sdk_pythons,
)

from personalpeft_tinker_server import routes

programs = sdk_pythons()


pytestmark = [
    pytest.mark.skipif(not programs, reason=f"{PYTHONS} names no Python with the tinker SDK"),
    pytest.mark.parametrize("python", programs),
]


def run_program(python: str, *arguments: str) -> Any:
    """Run the program in an SDK's environment, and return what it printed."""
    done = subprocess.run(
        [python, Path(__file__).with_name("sdk_program.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", "PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_unmodified_sdk_trains_saves_loads_and_samples(
    server: TinkerServer, url: str, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that results of both kinds come.
    monkeypatch.setattr(routes, "LARGE_RESULT", 2000)
    secret = server.runtime.api_keys.create(None)[1]
    assert "sample" in run_program(python, url, secret)["checked"]


def test_fifty_steps_through_an_sdk_have_the_losses_of_peft_and_adamw(
    server: TinkerServer, url: str, python: str, tmp_path: Path
) -> None:
    client = server.client()
    steps = json.dumps({"batches": FIFTY_BATCHES, "adam": FIFTY_STEPS})
    trained = run_program(python, url, client.secret, steps)
    folder = client.archive(trained["start"], tmp_path)
    assert trained["losses"] == pytest.approx(peft_losses(server, folder), rel=1e-4)
