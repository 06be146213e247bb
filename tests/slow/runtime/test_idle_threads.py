"""An idle backend leaves no thread of its team to those that compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="counts the threads that Linux lists"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has no team"),
]

PROGRAM = """
import json, os, sys, threading, time
import personalpeft

def idle_threads():
    for _ in range(100):
        count = len(os.listdir("/proc/self/task")) - threading.active_count()
        if not count:
            break
        time.sleep(0.05)
    return count

with personalpeft.open(sys.argv[1], base="smollm2-135m-instruct", backend=sys.argv[2]) as runtime:
    user = runtime.user("ada")
    reply = user.chat("Hello", max_tokens=8)
    left = {"after a reply": idle_threads()}
    user.forget(reply)
    left["after the cache is cleared"] = idle_threads()
print(json.dumps(left))
"""


@pytest.mark.parametrize("backend", ["torch", "llamacpp"])
def test_a_team_ends_with_its_work(backend: str, tmp_path: Path) -> None:
    # When the teams of a process exceed the cores, none of them spins, and a learn uses one core.
    others = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {name: text for name, text in os.environ.items() if not name.startswith("OMP_")}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "home"), backend],
        env=environment | others,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert json.loads(found.stdout) == {"after a reply": 0, "after the cache is cleared": 0}
