"""Writes to a home beside other programs: ``writer.py FOLDER USER NAME COUNT``.

It writes a line for each promise as soon as the promise holds: the kind and the id.
"""

from __future__ import annotations

import sys
from pathlib import Path

from crash_operations import open_home


def _promise(kind: str, what: str) -> None:
    sys.stdout.write(f"{kind} {what}\n")
    sys.stdout.flush()


def main(folder: str, user_id: str, name: str, count: str) -> None:
    with open_home(Path(folder)) as runtime:
        user = runtime.user(user_id)
        turn = ""
        for number in range(int(count)):
            match number % 4:
                case 0:
                    turn = user.chat(f"{name} {number}", max_tokens=4).turn_id
                    _promise("turn", turn)
                case 1:
                    _promise("signal", user.feedback(turn, edit=f"Ahoy {name}!"))
                case 2:
                    _promise("signal", user.remember(f"Fact {number} of {name}."))
                case 3:
                    _promise("signal", user.feedback(turn, rating=-1))


if __name__ == "__main__":
    main(*sys.argv[1:])
