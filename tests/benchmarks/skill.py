"""``bench skill``: does a demonstrated skill solve unseen tasks, and does practice help?

One user on one family of reasoning-gym, through the public surface alone. The same unseen tasks are
asked greedily at four stages. The first has no lessons. The others follow demonstrations, rejection
sampling and policy gradient. A task outside the skill's scope is answered without its layer. No
demonstration and no practice task is among them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import personalpeft
from benchmarks.homes import temporary_home
from personalpeft import LearnReport, User
from personalpeft.learning.rl.rollouts import PASS_THRESHOLD, is_eval_task
from personalpeft.learning.train.config import RLConfig
from personalpeft.plugins import Task
from personalpeft.verifiers.reasoning_gym import ReasoningGym

FAMILY = "word_sequence_reversal,min_words=3,max_words=4"
DEMONSTRATIONS = 30
_USER, _SKILL, _AT_ONCE = "bench", "tasks", 16
_Z = 1.96


def bench_skill(
    family: str,
    *,
    base: str,
    backend: str,
    unseen: int,
    rounds: int | None,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Measure thirty demonstrations, then both kinds of practice.

    ``rounds`` are for each of them, by default the base's own. ``points_shown`` and
    ``points_practised`` are percentage points: demonstrations over the base, and practice over the
    demonstrations.

    Raises:
        InvalidInput: The family has too few tasks.
    """
    gym = ReasoningGym(family)
    shown, asked = _drawn(gym, unseen)
    with temporary_home(base, backend) as runtime:
        user = runtime.user(_USER)
        runtime.engine()
        card = runtime.base().card
        config = RLConfig(**RLConfig.read_table(card.name, "practice", card.practice))
        imitate = config.rejection_rounds if rounds is None else rounds
        follow = config.rounds - config.rejection_rounds if rounds is None else rounds

        def rate() -> dict[str, Any]:
            echo(f"asking {len(asked)} unseen tasks")
            return _rate(user, gym, asked, config.max_completion_length)

        def stage(name: str, learn: Callable[[], LearnReport]) -> dict[str, Any]:
            began = time.perf_counter()
            report = learn()
            seconds = time.perf_counter() - began
            verdict = str(report.verdict) + (" (on probation)" if report.probation else "")
            echo(f"{name}: {verdict}, {report.reason}")
            found = {
                "name": name,
                "unseen": rate(),
                "verdict": verdict,
                "reason": report.reason,
                "seconds": round(seconds, 1),
                "steps": report.steps,
            }
            echo(f"{name}: {found['unseen']['passed']} of {found['unseen']['asked']}")
            return found

        def practise(rounds: int) -> Callable[[], LearnReport]:
            return lambda: user.practice(
                _SKILL, verifier="reasoning-gym", family=family, rounds=rounds
            )

        before = rate()
        echo(f"base: {before['passed']} of {before['asked']}")
        for task in shown:
            user.teach(task.prompt, str(task.about["answer"]), skill=_SKILL)
        stages = [
            stage("demonstrations", lambda: user.learn(f"skill.{_SKILL}")),
            stage("rejection sampling", practise(imitate)),
            stage("policy gradient", practise(follow)),
        ]
    rates = [before["rate"], *(each["unseen"]["rate"] for each in stages)]
    return {
        "bench": "skill",
        "base": base,
        "family": family,
        "demonstrations": len(shown),
        "before": before,
        "stages": stages,
        "points_shown": round(100 * (rates[1] - rates[0]), 1),
        "points_practised": round(100 * (rates[3] - rates[1]), 1),
    }


def _drawn(gym: ReasoningGym, unseen: int) -> tuple[Sequence[Task], Sequence[Task]]:
    """Return the demonstrations and the unseen tasks. Practice never trains on the latter."""
    drawn = list(
        {task.prompt: task for task in gym.tasks(1, 8 * (unseen + DEMONSTRATIONS))}.values()
    )
    asked = [task for task in drawn if is_eval_task(task)][:unseen]
    shown = [task for task in drawn if not is_eval_task(task)][:DEMONSTRATIONS]
    if len(asked) < unseen or len(shown) < DEMONSTRATIONS:
        raise personalpeft.InvalidInput(
            f"This family has too few different tasks: {len(drawn)}.",
            hint="Choose settings that give more.",
        )
    return shown, asked


def _rate(user: User, gym: ReasoningGym, tasks: Sequence[Task], longest: int) -> dict[str, Any]:
    """Return how many tasks passed, with the 95 per cent interval of their share.

    And for how many the skill's layer was ``attached``.
    """

    def ask(task: Task) -> tuple[bool, bool]:
        reply = user.chat(task.prompt, temperature=0, max_tokens=longest)
        return gym.verify(task, reply.text) >= PASS_THRESHOLD, bool(reply.stack.entries)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(ask, tasks))
    passed = sum(right for right, _ in answers)
    least, most = interval(passed, len(tasks))
    return {
        "passed": passed,
        "asked": len(tasks),
        "rate": round(passed / len(tasks), 3),
        "least": round(least, 3),
        "most": round(most, 3),
        "attached": sum(attached for _, attached in answers),
    }


def interval(passed: int, asked: int) -> tuple[float, float]:
    """Return Wilson's 95 per cent interval of the pass rate (Wilson 1927)."""
    share, spread = passed / asked, _Z**2 / asked
    middle = (share + spread / 2) / (1 + spread)
    reach = _Z / (1 + spread) * math.sqrt(share * (1 - share) / asked + spread / (4 * asked))
    return max(0.0, middle - reach), min(1.0, middle + reach)
