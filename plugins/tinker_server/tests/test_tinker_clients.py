"""The real SDKs train and sample against a server on a socket, each in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tinker_makers import PYTHONS, TinkerServer, sdk_pythons

from personalpeft_tinker_server import routes

programs = sdk_pythons()


@pytest.mark.skipif(not programs, reason=f"{PYTHONS} names no Python with the tinker SDK")
@pytest.mark.parametrize("python", programs)
def test_an_unmodified_sdk_trains_saves_loads_and_samples(
    server: TinkerServer, url: str, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that results of both kinds come.
    monkeypatch.setattr(routes, "_LARGE_RESULT", 2000)
    secret = server.runtime.api_keys.create(None)[1]
    done = subprocess.run(
        [python, Path(__file__).with_name("sdk_program.py"), url, secret],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", "PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sample" in json.loads(done.stdout.splitlines()[-1])["checked"]
