"""A user moves to another base in the terminal chat."""

from __future__ import annotations

from typing import Any

import pytest
from app_makers import Shell
from runtime_makers import QUICK_CARD, correct, open_runtime

from personalpeft_app.commands import chat
from personalpeft_app.tui import app as terminal

CARD = QUICK_CARD.replace("min_steps = 12", "min_steps = 3\nkl_prompts = 0\nfew_shot_replies = 0")
FIRST, OTHER = "tiny-quick", "tiny-other"


@pytest.fixture
def two_bases(shell: Shell, tiny_base: object) -> Shell:
    """A home with the cards of two bases, and a style that ada learned on the first."""
    cards = shell.home / "models"
    cards.mkdir(parents=True)
    (cards / f"{FIRST}.toml").write_text(CARD, "utf-8")
    other = CARD.replace(f'"{FIRST}"', f'"{OTHER}"').replace("seed = 7", "seed = 8")
    (cards / f"{OTHER}.toml").write_text(other, "utf-8")
    with open_runtime(shell.home, cards / f"{FIRST}.toml") as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        assert ada.learn(accept=True).revision
    return shell


def run(shell: Shell, base: str, *args: str) -> Any:
    return shell.run("--base", base, *args, backend="torch")


@pytest.mark.exhaustive
def test_the_terminal_chat_opens_the_other_base_after_a_move(
    two_bases: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, list[str]]] = []

    class Moving:
        """Moves to the other base when it is opened first, and ends when it is opened again."""

        unsent, erased, failure = (), None, None

        def __init__(self, session: Any, loading: object) -> None:
            self._session, self.base = session, None

        def run(self) -> None:
            runtime, user = self._session.runtime, self._session.user
            base = runtime.base().card.name
            opened.append((base, [entry.layer for entry in user.stack().entries]))
            if len(opened) == 1:
                runtime.rebase("ada", OTHER, accept=True)
                self.base = OTHER

    monkeypatch.setattr(terminal, "Tui", Moving)
    monkeypatch.setattr(chat, "can_draw", lambda: True)
    ended = run(two_bases, FIRST, "tui")
    assert ended.exit_code == 0, ended.output
    assert opened == [(FIRST, ["style"]), (OTHER, ["style"])]
    assert f"From now on: --base {OTHER}" in ended.stderr
