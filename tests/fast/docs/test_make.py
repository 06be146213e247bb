"""``make`` checks its requirements before it builds anything, and its errors say what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MADE_FROM = ("Makefile", "pyproject.toml", "constraints.txt")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with the files that the installation needs."""
    for name in (*MADE_FROM, *map(str, _plugins())):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def _plugins() -> list[Path]:
    return [each.relative_to(ROOT) for each in ROOT.glob("plugins/*/pyproject.toml")]


def _program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def _make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as version 3.81 does, which macOS has: it takes no flags of the shell."""
    return subprocess.run(
        ["make", ".SHELLFLAGS=-c", *arguments],
        cwd=checkout,
        # `make test`, which runs this test, names its own clients.
        env={**os.environ, "MAKEFLAGS": "", "PERSONALPEFT_TINKER_PYTHONS": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _make_demo(checkout: Path, python: Path | str) -> list[str]:
    ended = _make(checkout, "demo", f"PYTHON={python}")
    assert ended.returncode == 2
    return [line.partition(":")[0] for line in ended.stderr.splitlines()]


OLD = 'case "$*" in *version_info*) exit 1;; *) echo Python 3.9.18;; esac'


@pytest.mark.parametrize(
    "script", [None, OLD, "echo no such version >&2; exit 127"], ids=["none", "old", "broken"]
)
def test_an_unusable_python_stops_make_before_anything_is_built(
    checkout: Path, script: str | None
) -> None:
    python = _program(checkout / "python", script) if script else checkout / "nowhere"
    lines = _make_demo(checkout, python)
    assert lines[-3:-1] == ["error", "hint"]
    assert not (checkout / ".venv").exists()


def test_an_environment_of_an_older_python_is_reported(checkout: Path) -> None:
    good = _program(checkout / "python", "exit 0")
    _program(checkout / ".venv/bin/python", OLD)
    assert _make_demo(checkout, good)[-3:-1] == ["error", "hint"]


def test_a_failed_installation_is_an_error_and_is_retried(checkout: Path) -> None:
    good = _program(checkout / "python", "exit 0")
    _program(checkout / ".venv/bin/python", "exit 0")
    _program(checkout / ".venv/bin/pip", "echo no compiler >&2; exit 1")
    assert "error" in _make_demo(checkout, good)
    assert not (checkout / ".venv/.installed").exists()


def _install(checkout: Path, **scripts: str) -> None:
    """Stand in for the environment, whose other programs do nothing."""
    for name in ("python", "ruff", "mypy", "lint-imports", "pytest"):
        _program(checkout / ".venv/bin" / name, scripts.get(name, "exit 0"))
    (checkout / ".venv/.installed").touch()


@pytest.mark.parametrize("target", ["test", "crash"])
@pytest.mark.parametrize(
    "failing", ["not (exhaustive", "tests/crash", "slow and not"], ids=["first", "crash", "last"]
)
def test_a_failed_run_of_tests_fails_the_target(checkout: Path, target: str, failing: str) -> None:
    _install(checkout, pytest=f'case "$*" in *"{failing}"*) exit 1;; esac')
    expected = 2 if ("crash" in failing) == (target == "crash") else 0
    assert _make(checkout, target, _without_registry(checkout)).returncode == expected


def test_the_tests_run_without_a_client_that_cannot_be_installed(checkout: Path) -> None:
    _install(checkout, pytest='echo "clients: $PERSONALPEFT_TINKER_PYTHONS."')
    ended = _make(checkout, "test", _without_registry(checkout))
    assert ended.returncode == 0
    assert len([line for line in ended.stderr.splitlines() if line.startswith("note")]) == 1
    assert "clients: .\n" in ended.stdout


def test_the_tests_run_with_a_client_that_is_installed(checkout: Path) -> None:
    _install(checkout, pytest='echo "clients: $PERSONALPEFT_TINKER_PYTHONS."')
    python = _program(
        checkout / "python",
        'mkdir -p "$3/bin"; printf "#!/bin/sh\nexit 0\n" > "$3/bin/pip"; chmod +x "$3/bin/pip"',
    )
    ended = _make(checkout, "test", f"PYTHON={python}")
    assert ended.returncode == 0
    assert "note" not in ended.stderr
    assert "clients: .venv-tinker/tinker==" in ended.stdout
    assert "export" not in ended.stdout


def _without_registry(checkout: Path) -> str:
    """Return the option of make for a Python that cannot install anything."""
    return f"PYTHON={_program(checkout / 'python', 'exit 1')}"


def test_a_client_that_cannot_be_installed_counts_as_missing(checkout: Path) -> None:
    python = _program(
        checkout / "python",
        'mkdir -p "$3/bin"; printf "#!/bin/sh\\nexit 1\\n" > "$3/bin/pip"; chmod +x "$3/bin/pip"',
    )
    assert _make(checkout, "tinker-env", f"PYTHON={python}").returncode == 2
    assert not list((checkout / ".venv-tinker").glob("*/.installed"))
