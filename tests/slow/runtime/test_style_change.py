"""A user who changes their style is followed on the real base, without accepting by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import personalpeft
from benchmarks.learn_course import chat_all
from benchmarks.personas import pools
from benchmarks.style import is_right
from benchmarks.styles import GENERAL, STYLES, UNSEEN, Style
from personalpeft import User

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


@dataclass(frozen=True)
class TwoLearns:
    """What two learns in a row left behind. The second one teaches another style."""

    verdicts: tuple[str, ...]
    in_style: tuple[int, ...]
    in_other_style: tuple[int, ...]
    general: tuple[int, ...]
    uses: tuple[str, ...]


@pytest.fixture(scope="module")
def learns(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> TwoLearns:
    verdicts, right, wrong = [], [], []
    with personalpeft.open(tmp_path_factory.mktemp("habit") / "home") as runtime:
        ada = runtime.user("ada")
        kept = [general(ada)]
        for number, (style, other) in enumerate(((SIGNED, LISTED), (LISTED, SIGNED))):
            edit(ada, style, 12 * number)
            verdicts.append(str(ada.learn().verdict))
            unseen = replies(ada, list(UNSEEN), 96)
            right.append(sum(map(style.holds, unseen)))
            wrong.append(sum(map(other.holds, unseen)))
            kept.append(general(ada))
        uses = tuple(str(each.use) for each in ada.signal_statuses()[:12])
    return TwoLearns(tuple(verdicts), tuple(right), tuple(wrong), tuple(kept), uses)


def test_changed_style_is_learned_like_a_first_one(learns: TwoLearns) -> None:
    assert learns.verdicts == ("promoted", "promoted")
    # Of ten. Two builds that differ only in rounding differ by one or two.
    assert min(learns.in_style) >= 8
    assert learns.in_other_style == (0, 0)
    assert len(set(learns.uses)) == 1


# Of twenty. The gate judges general answers by likelihood, so a loss shows only in what the model
# writes.
@pytest.mark.xfail(reason="on some processors a style costs five of twenty general answers")
def test_general_answers_survive_a_style_and_its_change(learns: TwoLearns) -> None:
    before, *after = learns.general
    assert min(after) >= before - 4
