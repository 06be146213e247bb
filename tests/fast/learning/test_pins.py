"""A question that was held back stays one, also when it is said anew."""

from __future__ import annotations

from pathlib import Path

import personalpeft


def test_an_edit_that_replaces_a_held_back_one_is_held_back_too(tmp_path: Path) -> None:
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        ada = runtime.user("ada")
        replies = [ada.chat(f"question {number}") for number in range(8)]
        for number, reply in enumerate(replies):
            ada.feedback(reply, edit=f"Answer {number}.")
        ada.learn()
        for wording in ("again", "once more"):
            heir = ada.feedback(replies[-1], edit=f"Answer {wording}.")
            lesson = ada.feedback(ada.chat(f"another question {wording}"), edit=f"Another answer {wording}.")
            ada.learn()
            revision = ada.revisions()[-1]
            assert revision.signals[heir] == "pinned"
            assert revision.signals[lesson] == "train"
