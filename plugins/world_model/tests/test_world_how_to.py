"""The page about world models works as printed, on fewer games and the tiny base."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from personalpeft_app.cli import cli

pytest.importorskip("textworld", reason="needs the extra [textworld]")

pytestmark = pytest.mark.exhaustive

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "world-model.md"
FEWER = ((r"--games 300", "--games 6"), (r"--games 30 ", "--games 2 "))


def test_the_page_works_as_printed(
    tmp_path: Path, card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERSONALPEFT_HOME", str(tmp_path / "home"))
    ran = []
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", PAGE.read_text("utf-8"), re.S):
        if language == "python":
            on_tiny = block.replace("personalpeft.open()", f"personalpeft.open(base={str(card)!r})")
            names: dict[str, Any] = {}
            exec(compile(on_tiny, PAGE.name, "exec"), names)
            ran.append("python")
            continue
        for pattern, fewer in FEWER:
            block = re.sub(pattern, fewer, block)
        for line in block.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line)
            if program != "personalpeft":
                continue
            # A gate of random weights has nothing to promote.
            extra = ["--epochs", "1", "--accept"] if arguments[1] == "learn" else []
            done = CliRunner().invoke(cli, ["--base", str(card), *arguments, *extra])
            # The tiny base may write a state of the wrong outcome, or one without an end.
            codes = (0, 1) if arguments[1] == "verify" else (0,)
            assert done.exit_code in codes, (line, done.output)
            assert "error:" not in done.stderr, (line, done.output)
            assert done.stdout.strip(), line
            ran.append(arguments[1])
    assert ran == ["record", "record", "learn", "fidelity", "verify", "python", "python"]
