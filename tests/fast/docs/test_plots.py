"""The plots are drawn from the benchmarks' results, and equal results give equal drawings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sweep import SWEPT

pytestmark = pytest.mark.exhaustive

_PLOTS = Path(__file__).parents[3] / "docs/plots"


def _drawn(folder: Path) -> dict[str, bytes]:
    subprocess.run(
        [sys.executable, str(_PLOTS / "draw.py"), str(folder)], check=True, capture_output=True
    )
    return {path.name: path.read_bytes() for path in folder.glob("*.svg")}


def _sweep() -> str:
    defaults = {name: values[1] for name, values in SWEPT.items()}
    lines = []
    for number, value in [
        ("default", ""),
        *((name, value) for name, values in SWEPT.items() for value in values),
    ]:
        figures = {
            "in_style": 9,
            "kept": 18,
            "known": 19,
            "drafts": 4 if number == "replay" else None,
        }
        figures |= {"kl": 0.5, "held_back": None, "seconds": 20.0}
        run = {
            "key": "",
            "number": number,
            "value": value,
            "style": "pirate",
            "seed": 0,
            "default": "d",
        }
        lines.append(json.dumps({**run, "defaults": defaults, **figures}))
    return "\n".join(lines)


def _capacity() -> str:
    load = {"seed": 0, "parameters": 1000, "kept": 18, "known": 19}
    counts = [(rank, count) for rank in (1, 16) for count in (5, 10)]
    return "\n".join(
        json.dumps({**load, "rank": rank, "facts": count, "tokens": count, "recalled": 4})
        for rank, count in counts
    )


def test_equal_results_give_equal_drawings(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "sweep.jsonl").write_text(_sweep())
    (tmp_path / "capacity.jsonl").write_text(_capacity())
    first = _drawn(tmp_path)
    assert first.keys() == {f"{name}.svg" for name in (*SWEPT, "capacity")}
    assert _drawn(tmp_path) == first
