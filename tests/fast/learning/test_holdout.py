"""A held-out prompt stays held out, also after it is answered again."""

from __future__ import annotations

from pathlib import Path

import personalpeft
from personalpeft.errors import NothingToLearn


def test_version_of_the_holdout_changes_only_with_its_items(
    tmp_path: Path,
) -> None:
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        versions = []
        for name in ("ada", "bo"):
            user = runtime.user(name)
            for number in range(8):
                user.teach(f"question {number}", f"Ahoy! Answer {number}.")
            report = user.learn()
            versions.append(report.scores["questions"]["version"])
            assert f"version {versions[-1]}" in str(report)
            again = user.learn(start="nothing")
            assert again.revision == report.revision
            for number in range(8, 16):
                user.teach(f"question {number}", f"Ahoy! Answer {number}.")
            later = user.learn().scores["questions"]
            assert later["asked"] > report.scores["questions"]["asked"]
            assert later["version"] != versions[-1]
        assert versions[0] != versions[1]


def test_edit_that_supersedes_a_held_out_one_is_held_out_too(tmp_path: Path) -> None:
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        ada = runtime.user("ada")
        replies = [ada.chat(f"question {number}") for number in range(8)]
        for number, reply in enumerate(replies):
            ada.feedback(reply, edit=f"Answer {number}.")
        ada.learn()
        for wording in ("again", "once more"):
            successor = ada.feedback(replies[-1], edit=f"Answer {wording}.")
            (status,) = (each for each in ada.signal_statuses() if each.signal.id == successor)
            assert status.pinned
            lesson = ada.feedback(
                ada.chat(f"another question {wording}"), edit=f"Another answer {wording}."
            )
            ada.learn()
            revision = ada.revisions()[-1]
            assert revision.signals[successor] == "held_out"
            assert revision.signals[lesson] == "trained"


def test_learns_of_one_lesson_each_hold_out_new_lessons_too(tmp_path: Path) -> None:
    """A held-out lesson that judged once is no evidence again, so new ones have to come."""
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        user = runtime.user("ada")
        for number in range(8):
            user.teach(f"question {number}", f"Ahoy! Answer {number}.")
        user.learn()
        waited = []
        for number in range(8, 14):
            signal = user.teach(f"question {number}", f"Ahoy! Answer {number}.")
            try:
                user.learn()
            except NothingToLearn:
                waited.append(signal)
        roles = {k: v for each in user.revisions() for k, v in each.signals.items()}
        assert sum(role == "held_out" for role in roles.values()) >= 3
        # No lesson is lost: what waited is used by the next learn.
        assert waited
        assert set(waited[:-1]) <= roles.keys()
