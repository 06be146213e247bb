"""Somebody who changes their way of answering is followed, on the real base: the later word wins without being accepted by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import personalpeft
from personalpeft import User
from personalpeft_app.bench.learn_course import chat_all
from personalpeft_app.bench.people import GENERAL, STYLES, UNSEEN, Style
from personalpeft_app.bench.persons import pools
from personalpeft_app.bench.style import is_right

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

SIGNED, LISTED = (
    next(style for style in STYLES if style.name == name) for name in ("sign-off", "bullets")
)


def edit(user: User, style: Style, first: int) -> None:
    pairs = pools().everyday[first : first + 12]
    for reply, (_, answer) in zip(
        chat_all(user, [question for question, _ in pairs], 40), pairs, strict=True
    ):
        user.feedback(reply, edit=style.apply(answer))


def replies(user: User, prompts: list[str], length: int) -> list[str]:
    return [reply.text for reply in chat_all(user, prompts, length)]


def general(user: User) -> int:
    said = replies(user, [question for question, _ in GENERAL], 48)
    return sum(is_right(words, text) for (_, words), text in zip(GENERAL, said, strict=True))


def test_a_changed_way_of_answering_is_learned_as_a_first_one_is(
    tmp_path: Path, shared_cache: Path
) -> None:
    with personalpeft.open(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        known = general(ada)
        for number, (style, other) in enumerate(((SIGNED, LISTED), (LISTED, SIGNED))):
            edit(ada, style, 12 * number)
            report = ada.learn()
            assert report.verdict == "promoted", report.reason
            unseen = replies(ada, list(UNSEEN), 96)
            assert sum(map(style.holds, unseen)) >= 9, unseen
            assert not any(map(other.holds, unseen)), unseen
            # Of twenty; what a style costs is measured by bench learn, here it only must not be a landslide.
            assert general(ada) >= known - 4
        assert [each.use for each in ada.lessons()[:12]] == ["only kept"] * 12
