"""``bench thumbs``: do thumbs alone change the replies, and does the gate let them?

Each preference is a simulated user in a home of its own. The user rates replies that the base
sampled, and writes nothing. One learn follows, whose candidate is made live whatever the verdict.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.edit_styles import select_styles
from benchmarks.edits import known_general
from benchmarks.homes import temporary_home
from benchmarks.learn_course import chat_all
from benchmarks.result_cache import Figures, ResultCache, make_key
from personalpeft import Reply, User
from personalpeft.errors import InvalidInput, suggest_nearest
from personalpeft.types import Progress

_TEMPERATURE, _TOKENS, _WORDS = 0.7, 100, 70
_UNSEEN = 40


def _ends_early(reply: Reply) -> bool:
    return reply.finish_reason == "stop" and len(reply.text.split()) <= _WORDS


def _is_one_paragraph(reply: Reply) -> bool:
    return "\n" not in reply.text.strip()


def _avoids_first_person(reply: Reply) -> bool:
    return not re.search(r"\b(I|my)\b", reply.text)


PREFERENCES: Mapping[str, Callable[[Reply], bool]] = {
    "short": _ends_early,
    "one_paragraph": _is_one_paragraph,
    "no_first_person": _avoids_first_person,
}


def select_preferences(names: Sequence[str]) -> tuple[str, ...]:
    """Return the named preferences, or all. Raises ``InvalidInput`` for an unknown one."""
    for name in names:
        if name not in PREFERENCES:
            hint = suggest_nearest(name, PREFERENCES, what="preference")
            raise InvalidInput(f"There is no preference called {name!a}.", hint=hint)
    return tuple(dict.fromkeys(names or PREFERENCES))


def bench_thumbs(
    names: Sequence[str],
    *,
    ratings: int,
    seed: int,
    base: str,
    backend: str,
    keep: ResultCache,
    echo: Callable[[str], None],
    progress: Progress,
) -> dict[str, Any]:
    """Run the users that are neither cached nor run by another process, then return all.

    Each has a preference of ``names`` and rates so many replies.
    """

    def measure(name: str, before: float) -> Figures:
        progress(name, before)
        return measure_user(name, ratings=ratings, seed=seed, base=base, backend=backend)

    kept = keep.complete(
        {make_key(name, base, ratings, seed): name for name in names},
        measure,
        lambda name, _: echo(f"{name}: done"),
    )
    users = [each["result"] for each in kept.values()]
    return {"bench": "thumbs", "base": base, "seed": seed, "users": users}


def measure_user(name: str, *, ratings: int, seed: int, base: str, backend: str) -> Figures:
    """Return the figures of one user and the replies behind them.

    Of the replies to ``asked`` unseen prompts so many are as the user likes, ``before`` and
    ``after``. ``up`` and ``down`` count the thumbs. ``improved`` and ``regressed`` count held-out
    items. Of ``general_asked`` general probes that the base had right, ``general`` still are.
    """
    likes, prompts = PREFERENCES[name], _prompts(seed)
    unseen, rated = prompts[:_UNSEEN], prompts[_UNSEEN : _UNSEEN + ratings]
    with temporary_home(base, backend) as runtime:
        user = runtime.user("rater")
        knew, before = known_general(user), _sample(user, unseen, seed)
        thumbs = [(reply, likes(reply)) for reply in _sample(user, rated, seed)]
        for reply, is_liked in thumbs:
            user.feedback(reply, rating=1 if is_liked else -1)
        report = user.learn(accept=True)
        after = _sample(user, unseen, seed)
        kept = known_general(user) & knew
    target = report.scores.get("target", {})
    up = sum(is_liked for _, is_liked in thumbs)
    result = {
        "name": name,
        "up": up,
        "down": len(thumbs) - up,
        "asked": len(unseen),
        "before": sum(map(likes, before)),
        "after": sum(map(likes, after)),
        "verdict": str(report.verdict),
        "reason": report.reason,
        "improved": target.get("improved", 0),
        "regressed": target.get("regressed", 0),
        "seconds": round(report.seconds, 1),
        "general": len(kept),
        "general_asked": len(knew),
    }
    return {"result": result, "replies": [reply.text for reply in after]}


def _prompts(seed: int) -> Sequence[str]:
    """Return the prompts of the realistic edits in prose, in an order of the seed."""
    styles = [each for each in select_styles(()) if each.set == "prose"]
    cases = (case for style in styles for case in (*style.lessons, *style.unseen))
    prompts = list(dict.fromkeys(case.prompt for case in cases))
    random.Random(seed).shuffle(prompts)
    return prompts


def _sample(user: User, prompts: Sequence[str], seed: int) -> list[Reply]:
    return chat_all(user, prompts, _TOKENS, temperature=_TEMPERATURE, seed=seed)
