"""The library needs no extra, and a command without its extra names it in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from app_makers import Shell

# Runs the command line with the packages of all extras hidden.
_WITHOUT_EXTRAS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from personalpeft_app.cli import main
main()
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


def run(shell: Shell, *args: str) -> subprocess.CompletedProcess[str]:
    packages = [each for some in _PACKAGES.values() for each in some]
    program = _WITHOUT_EXTRAS.format(packages=packages)
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        env={**os.environ, **shell.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_line_and_the_library_work_without_any_extra(shell: Shell) -> None:
    answer = run(shell, "ask", "Hello there", "--backend", "fake")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    for args in (["--help"], ["stack"], ["models"], ["serve", "--help"], ["daemon", "--help"]):
        shown = run(shell, *args)
        assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize(
    ("extra", "args"),
    [
        ("llamacpp", ["ask", "Hello", "--backend", "llamacpp", "--base", "tiny-random"]),
        ("certificates", ["verify-certificate", "none.json"]),
        ("encryption", ["encrypt", "--key", "file"]),
        ("serve", ["serve", "--port", "0", "--backend", "fake"]),
        ("tui", ["tui", "--backend", "fake"]),
        ("daemon", ["daemon", "run", "--backend", "fake"]),
    ],
)
def test_a_command_without_its_extra_names_it(shell: Shell, extra: str, args: list[str]) -> None:
    completed = run(shell, *args)
    assert completed.returncode == 10, completed.stderr
    assert f"personalpeft[{extra}]" in completed.stderr
    assert "Traceback" not in completed.stderr
    error, hint = completed.stderr.strip().splitlines()[-2:]
    assert error.startswith("error:")
    assert hint.startswith("hint:")
