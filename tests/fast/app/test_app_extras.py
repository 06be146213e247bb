"""The library needs no extra, and a command without its extra names it in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from app_makers import Shell

from personalpeft.base_models.types import Base

# Runs commands one after another in one process, with the packages of all extras hidden.
_WITHOUT_EXTRAS = """
import json
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from personalpeft_app.cli import main
for command in json.loads(sys.argv[1]):
    sys.argv[1:] = command
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""
_PACKAGES = {
    "llamacpp": ["llama_cpp"],
    "certificates": ["cryptography"],
    "scrub": ["phonenumbers", "stdnum"],
    "encryption": ["sqlcipher3", "keyring"],
    "serve": ["flask", "cheroot", "prometheus_client"],
    "tui": ["textual", "markdown_it"],
    "daemon": ["apscheduler", "tzlocal"],
}


def run(
    shell: Shell, *commands: Sequence[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    packages = [each for some in _PACKAGES.values() for each in some]
    program = _WITHOUT_EXTRAS.format(packages=packages)
    return subprocess.run(
        [sys.executable, "-c", program, json.dumps(commands)],
        env={**os.environ, **shell.environment, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_line_and_the_library_work_without_any_extra(shell: Shell) -> None:
    completed = run(
        shell,
        ["ask", "Hello there", "--backend", "fake"],
        *(["--help"], ["stack"], ["models"], ["serve", "--help"], ["daemon", "--help"]),
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.strip()


@pytest.mark.parametrize(
    ("extra", "args"),
    [
        ("certificates", ["verify-certificate", "none.json"]),
        ("encryption", ["encrypt", "--key", "file"]),
        ("serve", ["serve", "--port", "0", "--backend", "fake"]),
        ("tui", ["tui", "--backend", "fake"]),
        ("daemon", ["daemon", "run", "--backend", "fake"]),
    ],
)
def test_a_command_without_its_extra_names_it(shell: Shell, extra: str, args: list[str]) -> None:
    assert_names_extra(run(shell, args), extra)


@pytest.mark.exhaustive
def test_a_backend_without_its_extra_names_it(
    shell: Shell, tiny_base: Base, shared_cache: Path
) -> None:
    args = ["ask", "Hello", "--backend", "llamacpp", "--base", tiny_base.card.name]
    assert_names_extra(run(shell, args, PERSONALPEFT_CACHE=str(shared_cache)), "llamacpp")


def assert_names_extra(completed: subprocess.CompletedProcess[str], extra: str) -> None:
    assert completed.returncode == 10, completed.stderr
    assert f"personalpeft[{extra}]" in completed.stderr
    assert "Traceback" not in completed.stderr
    error, hint = completed.stderr.strip().splitlines()[-2:]
    assert error.startswith("error:")
    assert hint.startswith("hint:")
