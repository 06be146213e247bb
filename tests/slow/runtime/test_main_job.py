"""The main job on the real base: teach it a style, see it change, undo it; killed in between, and with the same result twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from backend_makers import attach, torch_backend, written

import personalpeft
from benchmarks.styles import GENERAL, LESSONS, STYLES, UNSEEN
from personalpeft import LearnReport, Runtime, User
from personalpeft.adapters.compose import compose
from personalpeft.backends.base import SequenceState
from personalpeft.engine.engine import Request
from personalpeft.types import Message, Sampling, Stack, Verdict

pytestmark = pytest.mark.slow

BASE = personalpeft.DEFAULT_BASE
STYLE = next(style for style in STYLES if style.name == "in short")
DOOMED = Path(__file__).with_name("doomed.py")
# Before the first save, after one, and when all is trained but nothing is published.
KILLS = [("Learning", 3), ("Learning", 9), ("Judging", 1)]


@dataclass
class Job:
    """A home in which one style was learned, with what was said before and after."""

    home: Path
    runtime: Runtime
    ada: User
    report: LearnReport
    fingerprint: str
    bare: list[str]
    styled: list[str]
    general_before: list[str]
    general_after: list[str]
    chats: dict[str, str]


def answers(runtime: Runtime, stack: Stack, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """Greedy replies, asked as one batch."""
    sampling = Sampling(max_tokens=max_tokens)
    requests = [Request("ada", (Message("user", prompt),), stack, sampling) for prompt in prompts]
    return runtime.engine().complete(requests)


def chats(user: User) -> dict[str, str]:
    return {prompt: user.chat(prompt, temperature=0, max_tokens=24).text for prompt in UNSEEN[:3]}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[Job]:
    home = tmp_path_factory.mktemp("job") / "home"
    with personalpeft.open(home) as runtime:
        ada = runtime.user("ada")
        fingerprint = runtime.engine().backend.fingerprint()
        before = chats(ada)
        bare = answers(runtime, ada.stack(), UNSEEN, 96)
        general = [question for question, _ in GENERAL]
        general_before = answers(runtime, ada.stack(), general, 48)
        for question, answer in LESSONS:
            ada.feedback(ada.chat(question, temperature=0, max_tokens=40), edit=STYLE.apply(answer))
        report = ada.learn()
        live = ada.stack()
        styled, general_after = (
            answers(runtime, live, UNSEEN, 96),
            answers(runtime, live, general, 48),
        )
        yield Job(
            home,
            runtime,
            ada,
            report,
            fingerprint,
            bare,
            styled,
            general_before,
            general_after,
            before,
        )


def right(replies: Sequence[str]) -> int:
    return sum(
        any(word in reply.lower() for word in words)
        for reply, (_, words) in zip(replies, GENERAL, strict=True)
    )


def test_twelve_edits_teach_the_style(job: Job) -> None:
    assert job.report.verdict is Verdict.PROMOTED, job.report
    held = [STYLE.holds(reply) for reply in job.styled]
    assert sum(held) >= 9, job.styled
    assert sum(map(STYLE.holds, job.bare)) <= 1


def test_general_answers_stay_right(job: Job, record_property: pytest.RecordProperty) -> None:
    before, after = right(job.general_before), right(job.general_after)
    record_property("general answers right before and after, of 20", (before, after))
    assert after >= 16, list(zip(GENERAL, job.general_before, job.general_after, strict=True))


def test_the_report_says_all_of_it(job: Job) -> None:
    said = str(job.report)
    assert len(job.report.sources) == len(LESSONS)
    assert job.report.revision is not None
    assert job.report.revision in said
    assert "personalpeft rollback style" in said


def test_the_base_is_untouched(job: Job) -> None:
    assert job.runtime.engine().backend.fingerprint() == job.fingerprint


def test_rollback_brings_the_old_answers_back_byte_for_byte_and_forward_the_new_ones(
    job: Job,
) -> None:
    styled = chats(job.ada)
    assert styled != job.chats
    job.ada.rollback("style")
    try:
        assert chats(job.ada) == job.chats
    finally:
        job.ada.rollback("style", job.report.revision)
    assert chats(job.ada) == styled


@pytest.mark.exhaustive
def test_the_same_words_in_another_home_make_the_same_bytes_though_it_is_killed_thrice(
    job: Job, tmp_path: Path, shared_cache: Path
) -> None:
    home = tmp_path / "home"
    with personalpeft.open(home) as runtime:
        repeat(job.ada, runtime.user("ada"))
    for stage, reports in KILLS:
        done = subprocess.run(
            [sys.executable, str(DOOMED), "learn", str(home), BASE, stage, str(reports)],
            capture_output=True,
            text=True,
            # With as many threads as here: sums are split among them.
            env={**os.environ, "PERSONALPEFT_CACHE": str(shared_cache)},
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        with personalpeft.open(home) as runtime:
            ada = runtime.user("ada")
            assert (ada.history(), ada.revisions()) == ((), ())
            assert [
                each for each in runtime.verify() if not each.remedy.startswith("Harmless")
            ] == []
    with personalpeft.open(home) as runtime:
        assert runtime.user("ada").learn().revision == job.report.revision
        assert runtime.verify() == ()


def repeat(one: User, other: User) -> None:
    """Says in another home what was said in this one, with ids and times of its own."""
    edits = {signal.turn: signal for signal in one.signals()}
    for turn in reversed(one.turns()):
        if turn.id in edits:
            same = other._services.store.ledger.add_turn(
                other.id,
                messages=turn.messages,
                reply=turn.reply,
                stack=turn.stack,
                sampling=turn.sampling,
                usage=turn.usage,
                finish_reason=turn.finish_reason,
            )
            other.feedback(same, edit=edits[turn.id].payload["text"])


@pytest.mark.exhaustive
def test_peft_loads_the_export_and_says_the_same(job: Job, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = job.ada.export_peft(tmp_path / "style")
    base = job.runtime.base()
    plain: Any = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    theirs: Any = PeftModel.from_pretrained(plain, str(folder)).eval()
    ours = torch_backend(base, slots=1)
    attach(
        ours,
        "style",
        compose([(job.runtime.engine().read_adapter(job.ada.stack().entries[0].digest), 1.0)]),
    )
    for prompt in UNSEEN[:2]:
        tokens = ours.render([Message("user", prompt)])
        (said,) = written(ours, [SequenceState(tokens, "style", Sampling(max_tokens=16))])
        with torch.inference_mode():
            expected = theirs.generate(
                torch.tensor([tokens]),
                max_new_tokens=16,
                do_sample=False,
                pad_token_id=ours.end_of_turn[0],
            )
        assert ours.decode(expected[0, len(tokens) :].tolist()) == said.text
