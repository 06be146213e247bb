"""The README's library example runs as printed on the real base."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import personalpeft

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

README = Path(__file__).parents[3] / "README.md"


def test_readme_example_runs_as_printed_and_records_its_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block, *_ = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    monkeypatch.setenv("PERSONALPEFT_HOME", str(tmp_path / "home"))
    exec(compile(block, "README.md", "exec"), {})
    assert "ada · style: " in capsys.readouterr().out
    with personalpeft.open() as runtime:
        ada = runtime.user("ada", create=False)
        assert len(ada.signals()) == 6
        assert len(ada.turns()) == 6
        assert len(ada.reports()) == 1
        assert runtime.verify() == ()
