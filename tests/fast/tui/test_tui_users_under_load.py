"""Each terminal chat shows the replies that its user gets alone, while all users ask at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from backend_makers import hold_steps
from runtime_makers import ask, open_runtime
from tui_makers import TuiDriver, run_tuis

from personalpeft import Runtime, User

USERS = ("ada", "bo", "cy", "di")
PROMPTS = ("Hi", "So?")


def _add_rules(runtime: Runtime, users: Sequence[str]) -> None:
    """Give each user a rule of their own, so that every reply differs."""
    for user in users:
        one = runtime.user(user)
        one.feedback(ask(one), comment=f"Call me {user.upper()}.")


def _converse(user: User) -> list[str]:
    """Ask the prompts in one conversation and return the replies."""
    first = user.chat(PROMPTS[0])
    second = user.chat(PROMPTS[1], conversation_id=first.conversation_id)
    return [first.text, second.text]


@pytest.mark.parametrize(
    ("num_users", "num_programs"),
    [
        (2, 1),
        pytest.param(4, 1, marks=pytest.mark.exhaustive),
        pytest.param(4, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_chats_at_once_show_the_replies_of_a_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_users: int, num_programs: int
) -> None:
    """The users share one program, or each has a program on the same home."""
    users = USERS[:num_users]
    with open_runtime(tmp_path / "alone") as runtime:
        _add_rules(runtime, users)
        wanted = {user: _converse(runtime.user(user)) for user in users}
    assert len({text for texts in wanted.values() for text in texts}) == num_users * len(PROMPTS)

    async def scenario(ui: TuiDriver) -> None:
        own = wanted[ui.user.id]
        for prompt, reply in zip(PROMPTS, own, strict=True):
            await ui.send(prompt)
            # No reply begins before every user has asked.
            await everyone.wait()
            steps.set()
            await ui.wait_for_text(reply)
            await ui.wait_until_idle()
            await everyone.wait()
            steps.clear()
        others = [text for texts in wanted.values() if texts is not own for text in texts]
        assert [text for text in others if text in ui.screen] == []
        assert [turn.reply for turn in ui.user.turns()[::-1][-len(PROMPTS) :]] == own

    everyone = asyncio.Barrier(num_users)
    with ExitStack() as programs:
        runtimes = [
            programs.enter_context(open_runtime(tmp_path / "home")) for _ in range(num_programs)
        ]
        _add_rules(runtimes[0], users)
        steps = hold_steps(monkeypatch)
        run_tuis({user: runtimes[n % num_programs] for n, user in enumerate(users)}, scenario)
