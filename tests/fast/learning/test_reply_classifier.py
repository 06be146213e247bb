"""What users like in replies is found in any language, and chance is seldom taken for it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from example_counts import all_cases

from personalpeft.learning.evaluate.evaluation import compare_replies
from personalpeft.learning.gate.evidence import Evidence, ProbeResults, ThumbsResults
from personalpeft.learning.gate.gate import Judgement, judge, load_margins
from personalpeft.types import Verdict

_ENGLISH = [
    "bread",
    "water",
    "garden",
    "river",
    "because",
    "slowly",
    "again",
    "under",
    "light",
    "always",
    "small",
    "turn",
]
_JAPANESE = [
    "パン",
    "水",
    "庭",
    "川",
    "だから",
    "ゆっくり",
    "また",
    "下",
    "光",
    "いつも",
    "小さい",
    "回る",
]


def _reply(rng: random.Random, words: Sequence[str], end: str) -> str:
    return " ".join(rng.choices(words, k=rng.randint(8, 16))) + end


def _judge(results: ThumbsResults) -> Judgement:
    evidence = Evidence((), (), (), ProbeResults(), 0.0, thumbs=results)
    return judge(evidence, load_margins("test", {}))


def _is_preferred(results: ThumbsResults) -> bool:
    return _judge(results).live


@pytest.mark.parametrize(
    ("words", "liked", "disliked"),
    [(_ENGLISH, ".", "!"), (_JAPANESE, "です。", "だ。"), (_ENGLISH, "", "\n- one\n- two")],
)
def test_replies_that_are_like_the_liked_ones_pass(
    words: Sequence[str], liked: str, disliked: str
) -> None:
    rng = random.Random(1)

    def replies(count: int, *ends: str) -> list[str]:
        return [_reply(rng, words, ends[number % len(ends)]) for number in range(count)]

    rated = replies(20, liked), replies(20, disliked)
    before, after = replies(12, liked, disliked), replies(12, liked)
    assert _is_preferred(compare_replies(*rated, before, after))
    assert not _is_preferred(compare_replies(*rated, after, before))
    assert not _is_preferred(compare_replies(*rated, before, before))


@pytest.mark.parametrize("follows", all_cases([False, True], usual=[True]))
def test_thumbs_at_random_seldom_pass(follows: bool) -> None:
    """Also of a candidate that follows what the classifier of random thumbs happens to prefer."""
    rng = random.Random(2)
    passed = 0
    for _ in range(30):
        rated = [_reply(rng, _ENGLISH, rng.choice(".!?")) for _ in range(60)]
        before, after = ([_reply(rng, _ENGLISH, rng.choice(".!?")) for _ in "ab" * 6] for _ in "ab")
        if follows:
            after = rated[:12]
        passed += _is_preferred(compare_replies(rated[:30], rated[30:], before, after))
    assert passed <= 3


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Verdict.PROMOTED),
        ({"auc_p_value": 0.2}, Verdict.ABSTAINED),
        ({"p_value": 0.2}, Verdict.ABSTAINED),
    ],
)
def test_thumbs_decide_where_no_lesson_does(changes: dict[str, float], verdict: Verdict) -> None:
    good = {"liked": 30, "disliked": 30, "auc": 0.9, "auc_p_value": 0.001, "asked": 12}
    results = ThumbsResults(**{**good, "better": 11, "worse": 1, "p_value": 0.01, **changes})  # type: ignore[arg-type]
    judgement = _judge(results)
    assert judgement.verdict is verdict
    # Only feedback on later replies confirms what a classifier found.
    assert judgement.probation is (verdict is Verdict.PROMOTED)
