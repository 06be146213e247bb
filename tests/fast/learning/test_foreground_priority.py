"""Chats take priority over each stage of a learn: reading, training steps and evaluation."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import correct, open_runtime

from personalpeft.backends.fake import FakeBackend
from personalpeft.backends.sequence import SequenceState


@pytest.mark.parametrize("stage", ["Reading", "Judging"])
def test_paused_learn_submits_nothing_while_chats_are_served(
    home: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    paused, reached, worked = threading.Event(), threading.Event(), threading.Event()
    admit, score = FakeBackend.admit, FakeBackend.score
    owners: list[str] = []

    def recording_admit(self: FakeBackend, row: SequenceState) -> int | None:
        owners.append(row.owner)
        return admit(self, row)

    def recording_score(self: FakeBackend, *asked: Any, **more: Any) -> Any:
        if paused.is_set():
            worked.set()
        return score(self, *asked, **more)

    monkeypatch.setattr(FakeBackend, "admit", recording_admit)
    monkeypatch.setattr(FakeBackend, "score", recording_score)

    def progress(now: str, done: float) -> None:
        if now == stage and not reached.is_set():
            paused.set()
            reached.set()

    with open_runtime(home) as runtime:
        correct(runtime.user("ada"), 6)
        reports: list[Any] = []
        learn = threading.Thread(
            target=lambda: reports.append(
                runtime.user("ada").learn(progress=progress, paused=paused.is_set)
            )
        )
        learn.start()
        assert reached.wait(20)
        del owners[:]
        replies = [runtime.user("bo").chat(f"hello {n}") for n in range(5)]
        assert all(reply.text for reply in replies)
        learn.join(0.5)
        assert learn.is_alive()
        assert set(owners) == {"bo"}
        assert not worked.is_set()
        paused.clear()
        learn.join(60)
        (report,) = reports
        assert report.live


def test_chat_starts_at_once_during_evaluation(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation leaves a row free, and a chat comes before queued evaluation requests."""
    admit = FakeBackend.admit
    asked, answered = threading.Event(), threading.Event()
    after: list[str] = []

    def recording_admit(self: FakeBackend, row: SequenceState) -> int | None:
        if asked.is_set() and not answered.is_set():
            after.append(row.owner)
        return admit(self, row)

    monkeypatch.setattr(FakeBackend, "admit", recording_admit)
    judging = threading.Event()
    with open_runtime(home) as runtime:
        ada, bo = runtime.user("ada"), runtime.user("bo")
        correct(ada, 6)
        step = FakeBackend.step
        held = threading.Event()

        def slow_step(self: FakeBackend) -> Any:
            if judging.is_set() and not asked.is_set():
                # The batch is full of evaluation requests; now the chat arrives.
                held.set()
                assert asked.wait(20)
            return step(self)

        monkeypatch.setattr(FakeBackend, "step", slow_step)
        learn = threading.Thread(
            target=lambda: ada.learn(
                progress=lambda now, done: judging.set() if now == "Judging" else None
            )
        )
        learn.start()
        assert held.wait(20)
        stream = bo.stream("hello")
        reading = threading.Thread(target=lambda: [*stream, answered.set()])
        reading.start()
        engine = runtime.engine()
        waited = threading.Event()
        while not engine._scheduler.queue.has_foreground:
            assert not waited.wait(0.01)
        asked.set()
        reading.join(20)
        assert after[0] == "bo"
        learn.join(60)
