"""Whoever is being answered goes first in all of a learn: while it reads, between its steps, and while it judges."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import correct, opened

from personalpeft.backends.base import SequenceState
from personalpeft.backends.fake import FakeBackend


@pytest.mark.parametrize("stage", ["Reading", "Judging"])
def test_a_pause_holds_its_questions_and_scores_back_and_chats_are_answered_meanwhile(
    home: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    paused, reached, worked = threading.Event(), threading.Event(), threading.Event()
    admit, score = FakeBackend.admit, FakeBackend.score
    owners: list[str] = []

    def admitted(self: FakeBackend, row: SequenceState) -> int | None:
        owners.append(row.owner)
        return admit(self, row)

    def scored(self: FakeBackend, *asked: Any, **more: Any) -> Any:
        if paused.is_set():
            worked.set()
        return score(self, *asked, **more)

    monkeypatch.setattr(FakeBackend, "admit", admitted)
    monkeypatch.setattr(FakeBackend, "score", scored)

    def progress(now: str, done: float) -> None:
        if now == stage and not reached.is_set():
            paused.set()
            reached.set()

    with opened(home) as runtime:
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


def test_without_a_pause_a_chat_begins_at_once_in_the_middle_of_judging(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same process: questions that judge leave a row free, and a person's comes before those that wait."""
    admit = FakeBackend.admit
    asked, answered = threading.Event(), threading.Event()
    after: list[str] = []

    def admitted(self: FakeBackend, row: SequenceState) -> int | None:
        if asked.is_set() and not answered.is_set():
            after.append(row.owner)
        return admit(self, row)

    monkeypatch.setattr(FakeBackend, "admit", admitted)
    judging = threading.Event()
    with opened(home) as runtime:
        ada, bo = runtime.user("ada"), runtime.user("bo")
        correct(ada, 6)
        step = FakeBackend.step
        held = threading.Event()

        def slow(self: FakeBackend) -> Any:
            if judging.is_set() and not asked.is_set():
                # The batch is full of questions now; somebody asks.
                held.set()
                assert asked.wait(20)
            return step(self)

        monkeypatch.setattr(FakeBackend, "step", slow)
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
        while not engine._core._scheduler.queue.has_foreground:
            assert not waited.wait(0.01)
        asked.set()
        reading.join(20)
        assert after[0] == "bo"
        learn.join(60)
