"""The tables of the documentation are generated from the results that the benchmarks printed."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.pages import find_pages, read_results, render, used_results
from benchmarks.tables import tables_of
from personalpeft.errors import InvalidInput
from personalpeft_app.cli import cli

ROOT = Path(__file__).parents[3]
RESULTS = read_results()
PAGES = list(find_pages())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_match_the_results(page: Path) -> None:
    text = page.read_text("utf-8")
    assert render(text, RESULTS, page.parent) == text, "run make docs"


def test_a_changed_result_and_a_changed_table_are_both_found() -> None:
    page = ROOT / "docs/benchmarks/index.md"
    text = page.read_text("utf-8")
    changed = json.loads(json.dumps(RESULTS))
    changed["engines-llamacpp-zen4"]["memory_mb"] += 1
    assert render(text, changed, page.parent) != text
    memory = f"{RESULTS['engines-llamacpp-zen4']['memory_mb']} MB"
    assert render(text.replace(memory, "1 MB"), RESULTS, page.parent) == text


@pytest.mark.parametrize("name", RESULTS)
def test_a_stored_result_names_its_source_and_is_shown(name: str) -> None:
    measured = RESULTS[name]["measured"]
    assert date.fromisoformat(measured["date"])
    assert measured["machine"]
    assert {"commit", "software", "note"} < set(measured)
    assert tables_of(RESULTS[name])
    assert any(name in used_results(page.read_text("utf-8")) for page in PAGES)


@pytest.mark.parametrize("names", ["no-such-result rates", "serve-zen4 no-such-table"])
def test_a_page_that_names_a_missing_result_is_refused(names: str, tmp_path: Path) -> None:
    block = f"<!-- table: {names} -->\n<!-- end of table -->\n"
    with pytest.raises(InvalidInput, match="no-such"):
        render(block, RESULTS, tmp_path)


def test_the_json_output_of_a_benchmark_is_a_valid_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSONALPEFT_HOME", str(tmp_path / "home"))
    question: dict[str, Any] = {
        "preference": "I like trains.",
        "question": "How do I get to Rome?",
        "classification_task_options": ["By train.", "By plane.", "By car.", "By bus."],
    }
    data = tmp_path / "data"
    data.mkdir()
    (data / "travel.json").write_text(json.dumps([question]))
    arguments = ["bench", "prefeval", "--data", str(data), "--backend", "fake", "--json"]
    printed = CliRunner().invoke(cli, arguments)
    assert printed.exit_code == 0, printed.output
    (tmp_path / "prefeval-here.json").write_text(printed.stdout)
    results = read_results(tmp_path)
    block = "<!-- table: prefeval-here topics -->\nold\n<!-- end of table -->\n"
    shown = render(block, results, tmp_path)
    assert "| travel, 1 |" in shown
    assert results["prefeval-here"]["measured"]["date"] in shown
    assert "old" not in shown
    assert render(shown, results, tmp_path) == shown
