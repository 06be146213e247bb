"""``doctor`` reports the measured CPU features of llama.cpp, and ``--load`` measures them."""

from __future__ import annotations

import json
from typing import Any

from app_makers import Shell

from personalpeft.backends.llamacpp.cpu_probe import probe_cpu
from personalpeft.base_models.gguf.file import source_gguf_file
from personalpeft.base_models.registry import find_card

_REAL = "smollm2-135m-instruct"


def check_results(shell: Shell, *args: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and each check's result by its name."""
    result = shell.run("doctor", *args, "--json", backend="llamacpp")
    assert "Traceback" not in result.output
    return result.exit_code, {each["name"]: each for each in json.loads(result.stdout)["checks"]}


def test_the_features_used_by_llamacpp_are_reported_once_probed(shell: Shell) -> None:
    code, before = check_results(shell, "--base", _REAL)
    assert code == 0
    file = source_gguf_file(find_card(_REAL))
    assert file is not None
    tried = probe_cpu(file, shell.cache)
    assert tried.reason not in before["device"]["message"]
    assert tried.reason in check_results(shell, "--base", _REAL)[1]["device"]["message"]


def test_loading_reports_the_features_in_use_and_creates_no_home(shell: Shell) -> None:
    code, checks = check_results(shell, "--load", "--base", "tiny-random")
    assert code == 0, checks
    (note,) = (shell.cache / "llamacpp").iterdir()
    model = checks["model"]["message"]
    assert json.loads(note.read_text("utf-8"))["why"] in model
    assert not shell.home.exists()
    # A stored probe result is used again, whatever it holds.
    note.write_text(json.dumps({"extra": False, "why": "written-here"}), "utf-8")
    assert (
        "written-here"
        in check_results(shell, "--load", "--base", "tiny-random")[1]["model"]["message"]
    )


def test_a_mistyped_backend_is_reported(shell: Shell) -> None:
    result = shell.run("doctor", "--json", backend="torhc")
    (backend,) = (each for each in json.loads(result.stdout)["checks"] if each["name"] == "backend")
    assert result.exit_code
    assert not backend["ok"]
    assert "torch" in backend["hint"]
