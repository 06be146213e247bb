"""``bench edits``: do realistic edits carry over to prompts that were never edited?

Each style (``edit_styles.py``) is learned in its own home. Twelve replies are edited, one learn
follows, and ten unseen prompts are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.edit_styles import SETS, EditStyle
from benchmarks.homes import temporary_home
from benchmarks.learn_course import chat_all
from benchmarks.personas import mentions, pools
from benchmarks.result_cache import Figures, ResultCache, make_key
from personalpeft import Reply, User
from personalpeft.types import Progress

ENOUGH = 6
_GENERAL, _GENERAL_TOKENS = 12, 48


def bench_edits(
    styles: Sequence[EditStyle],
    *,
    seed: int,
    base: str,
    backend: str,
    keep: ResultCache,
    echo: Callable[[str], None],
    progress: Progress,
) -> dict[str, Any]:
    """Run the styles that are neither cached nor run by another process, then summarize all.

    ``shares`` are by set and method (base, greedy, sampled). ``live_below_enough`` are the styles
    that went live with fewer than six of ten.
    """

    def measure(style: EditStyle, before: float) -> Figures:
        progress(style.name, before)
        return measure_style(style, seed=seed, base=base, backend=backend)

    kept = keep.complete(
        {make_key(style.name, base, seed): style for style in styles},
        measure,
        lambda style, _: echo(f"{style.name}: done"),
    )
    found = [each["result"] for each in kept.values()]
    right, asked = (sum(each[name] for each in found) for name in ("general", "general_asked"))
    return {
        "bench": "edits",
        "base": base,
        "seed": seed,
        "styles": found,
        "shares": {
            name: _shares(own) for name in SETS if (own := [r for r in found if r["set"] == name])
        },
        "general": round(right / asked, 3) if asked else None,
        "live_below_enough": [r["name"] for r in found if r["live"] and r["greedy"] < ENOUGH],
    }


def measure_style(style: EditStyle, *, seed: int, base: str, backend: str) -> Figures:
    """Return the figures of one style and the replies behind them.

    Of ``asked`` unseen prompts, ``base`` counts the replies before the learn that pass; ``greedy``
    and ``sampled`` those after it. Of ``general_asked`` general probes that the base had right,
    ``general`` still are.
    """
    unseen = [case.prompt for case in style.unseen]
    with temporary_home(base, backend) as runtime:
        user = runtime.user("editor")
        knew = known_general(user)
        before = chat_all(user, unseen, style.tokens)
        lessons = [case.prompt for case in style.lessons]
        for case, reply in zip(style.lessons, chat_all(user, lessons, style.tokens), strict=True):
            user.feedback(reply, edit=case.answer)
        report = user.learn()
        greedy = chat_all(user, unseen, style.tokens)
        sampled = chat_all(user, unseen, style.tokens, temperature=None, seed=seed)
        kept = known_general(user) & knew
    ways = {"base": before, "greedy": greedy, "sampled": sampled}
    result = {
        "name": style.name,
        "set": style.set,
        "asked": len(unseen),
        **{way: _passes(style, replies) for way, replies in ways.items()},
        "verdict": str(report.verdict),
        "live": report.live,
        "reason": report.reason,
        "seconds": round(report.seconds, 1),
        "general": len(kept),
        "general_asked": len(knew),
    }
    return {
        "result": result,
        "replies": {way: [reply.text for reply in replies] for way, replies in ways.items()},
    }


def known_general(user: User) -> set[str]:
    """Return the general probes that a user's stack answers right."""
    general = pools().general[:_GENERAL]
    replies = chat_all(user, [each.question for each in general], _GENERAL_TOKENS)
    pairs = zip(general, replies, strict=True)
    return {each.question for each, reply in pairs if mentions(each.right, reply.text)}


def _passes(style: EditStyle, replies: Sequence[Reply]) -> int:
    return sum(style.passes(c, r.text) for c, r in zip(style.unseen, replies, strict=True))


def _shares(results: Sequence[Figures]) -> dict[str, float]:
    asked = sum(result["asked"] for result in results)
    return {
        way: round(sum(result[way] for result in results) / asked, 3)
        for way in ("base", "greedy", "sampled")
    }
