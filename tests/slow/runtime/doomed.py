"""A process that is going to be killed. It says each thing on stdout once it is promised, so that the test can hold it to that.

``live HOME`` talks, corrects, learns and rolls back for ever, on the fake backend. ``learn HOME BASE STAGE STEPS`` learns and kills itself
when so many reports of that stage have come.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

import personalpeft
from personalpeft import NothingToLearn, User


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def live(home: str) -> None:
    with personalpeft.open(home, backend="fake") as runtime:
        ada = runtime.user("ada")
        say("open")
        for n in itertools.count(len(ada.turns())):
            reply = ada.chat(f"question {n}", temperature=0)
            say("turn", reply.turn_id)
            say("signal", ada.feedback(reply, edit=f"Ahoy! Answer {n}. Arrr!"))
            say("signal", ada.remember(f"Fact {n}."))
            if n % 4 == 3:
                learn(ada)
            if n % 8 == 7 and ada.history():
                say("head", ada.rollback("style").after)


def learn(ada: User) -> None:
    try:
        report = ada.learn()
    except NothingToLearn:
        return
    if report.revision:
        say("revision", report.revision)
    if report.verdict == "promoted":
        say("head", report.revision)


def learn_until(home: str, base: str, stage: str, reports: int) -> None:
    backend = "fake" if base == "fake" else "torch"
    seen = itertools.count(1)

    def progress(now: str, done: float) -> None:
        if now == stage and next(seen) == reports:
            os.kill(os.getpid(), signal.SIGKILL)

    with personalpeft.open(home, base=base, backend=backend) as runtime:
        say("revision", runtime.user("ada").learn(progress=progress).revision)


if __name__ == "__main__":
    if sys.argv[1] == "live":
        live(sys.argv[2])
    else:
        learn_until(*sys.argv[2:5], int(sys.argv[5]))
