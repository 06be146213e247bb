"""Learn a style on the real base and roll back, also after kills, and with the same bytes twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from backend_makers import attach, base_logprobs, generate, sequence, torch_backend

import personalpeft
from benchmarks.styles import GENERAL, LESSONS, STYLES, UNSEEN
from personalpeft import LearnReport, Runtime, User
from personalpeft.adapters.compose import compose
from personalpeft.base_models.resolve import unpacked_folder
from personalpeft.engine.engine import Request
from personalpeft.types import Message, Sampling, Stack, Verdict

pytestmark = pytest.mark.slow

BASE = personalpeft.DEFAULT_BASE
STYLE = next(style for style in STYLES if style.name == "in short")
KILLED_PROCESS = Path(__file__).with_name("killed_process.py")
# Before the first save, after one, and when training is complete but nothing is published.
KILLS = [("Learning", 3), ("Learning", 9), ("Judging", 1)]


@dataclass
class LearnedStyle:
    """A home in which one style was learned, with the replies before and after."""

    home: Path
    runtime: Runtime
    ada: User
    report: LearnReport
    bare_logprobs: tuple[Any, ...]
    bare: list[str]
    styled: list[str]
    general: list[str]
    chats: dict[str, str]


def answers(runtime: Runtime, stack: Stack, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """Return greedy replies to one batch of prompts."""
    sampling = Sampling(max_tokens=max_tokens)
    requests = [Request("ada", (Message("user", prompt),), stack, sampling) for prompt in prompts]
    return runtime.engine().complete(requests)


def chats(user: User) -> dict[str, str]:
    return {prompt: user.chat(prompt, temperature=0, max_tokens=24).text for prompt in UNSEEN[:3]}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[LearnedStyle]:
    home = tmp_path_factory.mktemp("job") / "home"
    with personalpeft.open(home) as runtime:
        ada = runtime.user("ada")
        bare_logprobs = base_logprobs(runtime.training_backend())
        before = chats(ada)
        # One processor answers these, so replies end where it is clear what they are.
        bare = answers(runtime, ada.stack(), UNSEEN, 16)
        # Together, which takes a fifth of the time and gives the same replies.
        with ThreadPoolExecutor(len(LESSONS)) as pool:
            replies = pool.map(
                lambda lesson: ada.chat(lesson[0], temperature=0, max_tokens=24), LESSONS
            )
        for reply, (_, answer) in zip(replies, LESSONS, strict=True):
            ada.feedback(reply, edit=STYLE.apply(answer))
        report = ada.learn()
        live = ada.stack()
        styled = answers(runtime, live, UNSEEN, 16)
        general = answers(runtime, live, [question for question, _ in GENERAL], 32)
        yield LearnedStyle(
            home,
            runtime,
            ada,
            report,
            bare_logprobs,
            bare,
            styled,
            general,
            before,
        )


def count_right(replies: Sequence[str]) -> int:
    return sum(
        any(word in reply.lower() for word in words)
        for reply, (_, words) in zip(replies, GENERAL, strict=True)
    )


def test_twelve_edits_teach_the_style(learned: LearnedStyle) -> None:
    assert learned.report.verdict is Verdict.PROMOTED, learned.report
    held = [STYLE.holds(reply) for reply in learned.styled]
    assert sum(held) >= 9, learned.styled
    assert sum(map(STYLE.holds, learned.bare)) <= 1


def test_general_answers_stay_right(
    learned: LearnedStyle, record_property: pytest.RecordProperty
) -> None:
    right = count_right(learned.general)
    record_property("general answers right, of 20", right)
    assert right >= 16, list(zip(GENERAL, learned.general, strict=True))


def test_report_names_sources_revision_and_rollback(learned: LearnedStyle) -> None:
    said = str(learned.report)
    assert len(learned.report.sources) == len(LESSONS)
    assert learned.report.revision is not None
    assert learned.report.revision in said
    assert "personalpeft rollback style" in said


def test_gate_judges_three_replies_to_each_held_out_prompt(learned: LearnedStyle) -> None:
    generated = learned.report.scores["generated"]
    assert generated["asked"] == 9
    assert generated["after"] >= 6


def test_base_is_unchanged(learned: LearnedStyle) -> None:
    assert base_logprobs(learned.runtime.training_backend()) == learned.bare_logprobs


def test_rollback_restores_the_old_replies_exactly_and_forward_the_new_ones(
    learned: LearnedStyle,
) -> None:
    styled = chats(learned.ada)
    assert styled != learned.chats
    learned.ada.rollback("style")
    try:
        assert chats(learned.ada) == learned.chats
    finally:
        learned.ada.rollback("style", learned.report.revision)
    assert chats(learned.ada) == styled


@pytest.mark.exhaustive
def test_same_signals_in_another_home_make_the_same_bytes_after_three_kills(
    learned: LearnedStyle, tmp_path: Path, shared_cache: Path
) -> None:
    home = tmp_path / "home"
    with personalpeft.open(home) as runtime:
        copy_signals(learned.ada, runtime.user("ada"))
    for stage, reports in KILLS:
        done = subprocess.run(
            [sys.executable, str(KILLED_PROCESS), "learn", str(home), BASE, stage, str(reports)],
            capture_output=True,
            text=True,
            # The number of threads must be equal, since sums are split among them.
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
        assert runtime.user("ada").learn().revision == learned.report.revision
        assert runtime.verify() == ()


def copy_signals(one: User, other: User) -> None:
    """Record the turns and edits of one user for another, with new ids and times."""
    turns = {turn.id: turn for turn in one.turns()}
    for edit in one.signals():
        turn = turns[edit.turn or ""]
        same = other._services.store.ledger.add_turn(
            other.id,
            messages=turn.messages,
            reply=turn.reply,
            stack=turn.stack,
            sampling=turn.sampling,
            usage=turn.usage,
            finish_reason=turn.finish_reason,
        )
        other.feedback(same, edit=edit.payload["text"])


@pytest.mark.exhaustive
def test_peft_loads_the_export_with_equal_replies(learned: LearnedStyle, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = learned.ada.export_peft(tmp_path / "style")
    base = learned.runtime.base()
    plain: Any = AutoModelForCausalLM.from_pretrained(
        unpacked_folder(base, full=True), dtype=torch.float32
    )
    theirs: Any = PeftModel.from_pretrained(plain, str(folder)).eval()
    ours = torch_backend(base, slots=1)
    attach(
        ours,
        "style",
        compose(
            [(learned.runtime.engine().read_adapter(learned.ada.stack().entries[0].digest), 1.0)]
        ),
    )
    for prompt in UNSEEN[:2]:
        tokens = ours.render([Message("user", prompt)])
        (said,) = generate(ours, [sequence(tokens, "style", Sampling(max_tokens=16))])
        with torch.inference_mode():
            expected = theirs.generate(
                torch.tensor([tokens]),
                max_new_tokens=16,
                do_sample=False,
                pad_token_id=ours.end_of_turn[0],
            )
        assert ours.decode(expected[0, len(tokens) :].tolist()) == said.text
