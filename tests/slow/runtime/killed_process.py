"""A process that the tests kill. It prints each promise once it holds, so that a test can check it.

``live HOME`` chats, corrects, learns and rolls back forever, on the fake backend.
``learn HOME BASE STAGE STEPS`` learns and kills itself after that many reports of the stage.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

import personalpeft
from personalpeft import NothingToLearn, User


def acknowledge(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def live(home: str) -> None:
    with personalpeft.open(home, backend="fake") as runtime:
        ada = runtime.user("ada")
        acknowledge("open")
        for n in itertools.count(len(ada.turns())):
            reply = ada.chat(f"question {n}", temperature=0)
            acknowledge("turn", reply.turn_id)
            acknowledge("signal", ada.feedback(reply, edit=f"Ahoy! Answer {n}. Arrr!"))
            acknowledge("signal", ada.remember(f"Fact {n}."))
            if n % 4 == 3:
                learn(ada)
            if n % 8 == 7 and ada.history():
                acknowledge("head", ada.rollback("style").after)


def learn(ada: User) -> None:
    try:
        report = ada.learn()
    except NothingToLearn:
        return
    if report.revision:
        acknowledge("revision", report.revision)
    if report.verdict == "promoted":
        acknowledge("head", report.revision)


def learn_until(home: str, base: str, stage: str, reports: int) -> None:
    backend = "fake" if base == "fake" else "torch"
    seen = itertools.count(1)

    def progress(now: str, done: float) -> None:
        if now == stage and next(seen) == reports:
            os.kill(os.getpid(), signal.SIGKILL)

    with personalpeft.open(home, base=base, backend=backend) as runtime:
        acknowledge("revision", runtime.user("ada").learn(progress=progress).revision)


if __name__ == "__main__":
    if sys.argv[1] == "live":
        live(sys.argv[2])
    else:
        learn_until(*sys.argv[2:5], int(sys.argv[5]))
