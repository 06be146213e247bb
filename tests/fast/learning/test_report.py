"""A report's JSON has everything that its text says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import correct, open_runtime

from personalpeft.former_names import rename_report
from personalpeft.learning.outcomes import LearnOutcome, ReasonCode, SignalUse, reason
from personalpeft.learning.report import Example, LearnReport, SignalUsage, excerpt, from_json

WHY = reason(ReasonCode.EDIT)

FIGURES = {
    "asked": 3,
    "improved": 2,
    "regressed": 1,
    "before": -3.25,
    "after": -1.5,
    "median_before": -2.75,
    "median_after": -0.5,
}
REPORT = LearnReport(
    user="ada",
    layer="style",
    outcome=LearnOutcome.PROMOTED,
    reasons=(
        reason(ReasonCode.IMPROVED, improved=3, regressed=0, asked=3, examples="held-out"),
        reason(ReasonCode.PROBES_KEPT, kept=5, asked=5),
        reason(ReasonCode.ON_PROBATION),
    ),
    at=datetime(2026, 5, 1, 12, tzinfo=UTC),
    seconds=12.34,
    revision="style@0123456789ab",
    previous_head="style@ba9876543210",
    probation=True,
    steps=30,
    sources=(
        SignalUsage(
            "sig_00000000000000000000000abc",
            "edit",
            "Ahoy!",
            SignalUse.LEARNED,
            reason(ReasonCode.EDIT),
        ),
        SignalUsage(
            "sig_00000000000000000000000def",
            "rating",
            "1",
            SignalUse.UNUSED,
            reason(ReasonCode.STRONGER_SIGNAL, kind="edit"),
        ),
    ),
    examples=(Example("Why do we dream?", "Nobody knows.", "Ahoy! Nobody knows."),),
    scores={
        "target": FIGURES,
        "retention": {"asked": 0},
        "trained": {"asked": 0},
        "probes": {
            "asked": 6,
            "right_before": 5,
            "still_right": 4,
            "broken": 0,
            "broken_before": 0,
            "kl": 0.25,
        },
        "e_value": 2.25,
        "decided_items": ["s_1", "s_2"],
    },
)


def test_report_says_the_verdict_its_reason_its_sources_and_how_to_undo_it() -> None:
    assert str(REPORT).splitlines() == [
        "ada · style: PROMOTED (on probation)",
        "  3 of 3 held-out answers improved; 5 of 5 general questions are still answered right;",
        "  on probation, since this is little evidence",
        "",
        "  signals",
        "    trained on: 1",
        "      000abc  edit          Ahoy!",
        "    recorded only: 1",
        "      000def  rating        1",
        "",
        "  scores",
        "    held out      log-prob a token -3.25 -> -1.50, 2 of 3 better, 1 worse",
        "                  median token -2.75 -> -0.50",
        "    general       4 of 5 right answers stayed right, KL from the base 0.25 nats a token",
        "    evidence      e-value 2.2 from 2 answers; 20 confirms",
        "",
        "  > Why do we dream?",
        "    before: Nobody knows.",
        "    after:  Ahoy! Nobody knows.",
        "",
        "  style@0123456789ab · 30 steps · 12.3 s",
        "  undo: personalpeft rollback style --user ada",
    ]


def test_json_has_everything_that_the_text_has() -> None:
    data = REPORT.as_json()
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    for number in re.findall(r"\d+\.\d+", str(REPORT)):
        assert str(float(number)) in text or number == "12.3"
    for source in REPORT.sources:
        stored = next(each for each in data["sources"] if each["signal"] == source.signal)
        for name in ("kind", "text", "use", "why"):
            assert stored[name] == getattr(source, name)
    words = (
        "ada",
        "style",
        "promoted",
        REPORT.reason,
        "style@0123456789ab",
        "Ahoy! Nobody knows.",
        "Why do we dream?",
    )
    assert all(word in text for word in words)
    views = {"live", "verdict", "reason", "dry_run", "moved", "event", "before", "room"}
    assert set(data) == {*LearnReport.__dataclass_fields__, *views}
    assert from_json(json.loads(text)) == REPORT


def test_former_names_of_a_reports_capacity_are_read_and_sent_for_one_release() -> None:
    room = {"parameters": 800, "tokens": 3, "most": 8, "advised": 1}
    stored = {key: each for key, each in REPORT.as_json().items() if key != "capacity"}
    report = from_json(rename_report({**stored, "room": room}))
    assert report.capacity == {
        "parameters": 800,
        "tokens": 3,
        "max_tokens": 8,
        "recommended_tokens": 1,
    }
    assert report.as_json()["room"] == report.room == room


def test_only_a_live_revision_has_an_undo_command() -> None:
    for outcome in (LearnOutcome.REFUSED, LearnOutcome.ABSTAINED):
        assert "undo" not in str(replace(REPORT, outcome=outcome))


def test_score_that_is_not_a_number_is_shown() -> None:
    scores = {
        "target": {**FIGURES, "after": None},
        "probes": {**REPORT.scores["probes"], "kl": None},
    }
    assert str(replace(REPORT, scores=scores)).count("no number") == 2


def test_long_list_of_signals_is_counted_and_shortened() -> None:
    many = tuple(
        SignalUsage(f"sig_{n:026}", "edit", "Ahoy!", SignalUse.LEARNED, WHY) for n in range(40)
    )
    text = str(replace(REPORT, sources=many))
    assert "40" in text
    assert "28" in text


@pytest.mark.parametrize("field", ["prompt", "before", "after"])
@given(written=st.text(max_size=400))
def test_report_lines_stay_short_and_whole_for_any_text(field: str, written: str) -> None:
    values: dict[str, Any] = {"prompt": "p", "before": "b", "after": "a", field: written}
    text = str(replace(REPORT, examples=(Example(**values),)))
    assert all(len(line) <= 92 for line in text.splitlines())
    assert text.count("\n") < 45


@given(written=st.text())
def test_excerpt_is_one_short_line(written: str) -> None:
    assert len(excerpt(written).splitlines()) <= 1
    assert len(excerpt(written)) <= 60


def test_excerpt_of_a_script_without_spaces_shows_its_beginning() -> None:
    text = "それはとても長い文章です。" * 10
    assert excerpt(text).startswith("それはとても長い文章です。")
    assert len(excerpt(text)) == 60


@pytest.mark.exhaustive
def test_reports_of_nightly_learns_grow_with_what_is_new_alone(tmp_path: Path) -> None:
    with open_runtime(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        sizes = []
        for night in range(8):
            correct(ada, 8 if night == 0 else 2, first=10 * night)
            report = ada.learn()
            sizes.append(len(report.sources))
            assert len(report.sources) + sum(report.source_counts.values()) == 8 + 2 * night
        assert sizes == [8] + [2] * 7
