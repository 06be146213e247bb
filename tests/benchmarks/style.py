"""``bench style``: do a dozen edits change the style of answers, and nothing else?

One user for each style, on the real base, through the public surface: twelve edits, one learn. Ten
unseen questions and twenty general ones are asked before and after. Peak memory is of the whole
process. The first token is timed in new processes, since loading is most of it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import personalpeft
from benchmarks.homes import temporary_folder, temporary_home
from benchmarks.peak import peak_mb
from benchmarks.styles import GENERAL, LESSONS, UNSEEN, Style
from personalpeft import User

_LONG, _SHORT, _REPLY = 96, 48, 40
_ROLLED_BACK = 3
_USER = "bench"


def ask_base(*, base: str, backend: str) -> tuple[list[str], list[str]]:
    """Return the bare base's answers to the unseen and the general questions."""
    with temporary_home(base, backend) as runtime:
        return _ask_all(runtime.user(_USER))


def run_style(
    style: Style,
    base_answers: tuple[list[str], list[str]],
    *,
    base: str,
    backend: str,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Learn one style of one user in a temporary home.

    ``in_style`` and ``base_in_style`` are of ten unseen questions. Of ``general_asked`` general
    questions ``general_right`` are right after the learn. Of the ``facts_before`` that the base has
    right, ``facts_kept`` stay right. The probes are the gate's. ``kl`` is in nats a token.
    """
    base_unseen, base_general = base_answers
    with temporary_home(base, backend) as runtime:
        user = runtime.user(_USER)
        runtime.engine()
        for prompt, answer in LESSONS:
            user.feedback(
                user.chat(prompt, temperature=0, max_tokens=_REPLY), edit=style.apply(answer)
            )
        echo(f"{style.name}: learning")
        report = user.learn()
        echo(f"{style.name}: {report.verdict}, {report.reason}")
        unseen, general = _ask_all(user)
        if user.stack().entries:
            user.rollback("style")
        back = [_ask(user, prompt, _LONG) for prompt in UNSEEN[:_ROLLED_BACK]]
    known, kept = (
        [is_right(words, text) for (_, words), text in zip(GENERAL, answers, strict=True)]
        for answers in (base_general, general)
    )
    probes = report.scores["probes"]
    return {
        "style": style.name,
        "verdict": str(report.verdict) + (" (on probation)" if report.probation else ""),
        "in_style": sum(map(style.holds, unseen)),
        "base_in_style": sum(map(style.holds, base_unseen)),
        "facts_before": sum(known),
        "facts_kept": sum(k and b for k, b in zip(kept, known, strict=True)),
        "general_right": sum(kept),
        "general_asked": len(GENERAL),
        "probes_before": probes["right_before"],
        "probes_kept": probes["still_right"],
        "kl": probes["kl"],
        "learn_seconds": report.seconds,
        "rollback_identical": back == base_unseen[:_ROLLED_BACK],
    }


def _ask_all(user: User) -> tuple[list[str], list[str]]:
    """Return a user's answers to the unseen and the general questions."""
    unseen = [_ask(user, prompt, _LONG) for prompt in UNSEEN]
    return unseen, [_ask(user, question, _SHORT) for question, _ in GENERAL]


def _ask(user: User, prompt: str, length: int) -> str:
    return user.chat(prompt, temperature=0, max_tokens=length).text


def is_right(words: Sequence[str], text: str) -> bool:
    """Return whether a reply has one of the words of a right answer, in any case."""
    return any(word in text.lower() for word in words)


def first_token_seconds(home: Path, base: str, *, times: int = 3) -> float:
    """Return the median seconds of ``personalpeft ask`` in new processes to the first byte."""
    command = [sys.executable, "-m", "personalpeft_app", "ask", "--home", str(home), "--base", base]
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        with subprocess.Popen(
            [*command, "--user", _USER, "Why is the sky blue?"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as run:
            if run.stdout is None or not run.stdout.read(1):
                raise personalpeft.WeightsError(
                    "ask printed nothing.", hint="Run personalpeft ask by hand to see why."
                )
            taken.append(time.perf_counter() - began)
            run.kill()
    return statistics.median(taken)


def bench_style(
    styles: Sequence[Style], *, base: str, backend: str, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Learn each style in turn, then time the first token with and without facts.

    Seconds are medians of three; ``peak_mb`` is of the learning process.
    """
    echo("asking the bare base")
    before = ask_base(base=base, backend=backend)
    results = [run_style(style, before, base=base, backend=backend, echo=echo) for style in styles]
    with temporary_folder() as folder:
        home = folder / "home"
        echo("timing the first token")
        plain = first_token_seconds(home, base)
        with personalpeft.open(home, base) as runtime:
            runtime.user(_USER).remember("My dog is called Biscuit.")
        return {
            "bench": "style",
            "base": base,
            "styles": results,
            "first_token_seconds": plain,
            "first_token_with_facts_seconds": first_token_seconds(home, base),
            "peak_mb": peak_mb(),
        }
