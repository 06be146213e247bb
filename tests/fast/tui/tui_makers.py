"""Run the terminal chat without a terminal, press its keys and read its screen."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import pytest
from textual import events
from textual.keys import _character_to_key
from textual.pilot import Pilot

from personalpeft import Runtime, User
from personalpeft.backends.fake import FakeBackend
from personalpeft_app.tui.app import Tui
from personalpeft_app.tui.composer import Composer
from personalpeft_app.tui.user_session import TaskHandle, UserSession


@dataclass
class TuiDriver:
    """Drives the terminal chat: presses keys, reads the screen and waits for changes."""

    app: Tui
    pilot: Pilot[None]
    messages: list[str]
    user: User

    @property
    def screen(self) -> str:
        """All rows of the screen as text."""
        return "\n".join(
            strip.text.rstrip() for strip in self.app.screen._compositor.render_strips()
        )

    @property
    def notifications(self) -> str:
        """All notifications so far, one a line."""
        return "\n".join(self.messages)

    @property
    def composer_text(self) -> str:
        """The text in the composer."""
        return self.app.query_one(Composer).text

    async def type(self, text: str) -> None:
        self.burst(*text)
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
        await self.pilot.pause()

    def burst(self, *keys: str) -> None:
        """Press keys without waiting between them, as they arrive over a slow connection."""
        for each in keys:
            name = _character_to_key(each) if len(each) == 1 else each
            self.app.post_message(events.Key(name, each if len(each) == 1 else None))

    async def wait_until(
        self, happened: Callable[[], object], what: str = "", seconds: float = 20
    ) -> None:
        """Wait until background threads have made ``happened()`` true."""
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, (
                f"{what or 'it'} did not happen; the screen:\n{self.screen}\n{self.notifications}"
            )
            await self.pilot.pause(0.02)

    async def wait_for_text(self, text: str) -> None:
        await self.wait_until(lambda: text in self.screen, f"{text!r} on the screen")

    async def wait_for_message(self, text: str) -> None:
        await self.wait_until(lambda: text in self.notifications, f"the message {text!r}")

    async def send(self, text: str) -> None:
        await self.type(text)
        await self.press("enter")

    async def ask(self, text: str) -> None:
        """Send a prompt and wait for its whole reply."""
        before = len(self.user.turns())
        await self.send(text)
        await self.wait_until(lambda: len(self.user.turns()) > before, "a reply")
        await self.wait_until_idle()
        await self.pilot.pause()

    async def wait_until_idle(self) -> None:
        await self.wait_until(lambda: not self.app._chat.is_answering, "the end of the reply")

    async def open_editor(self) -> None:
        """Open the newest reply for editing."""
        await self.press("up", "e")
        await self.wait_for_text("^S save")

    async def request_erasure(self) -> None:
        """Request the erasure of the selected item and wait for the confirmation dialog."""
        await self.press("d")
        await self.wait_for_text("Forget this for good?")


@asynccontextmanager
async def open_tui(
    runtime: Runtime,
    user: str,
    size: tuple[int, int] = (80, 24),
    load: Callable[[], None] | None = None,
) -> AsyncIterator[TuiDriver]:
    """Open a user's chat. The other arguments are those of ``run_tui``."""

    class Session(UserSession):
        def load(self) -> None:
            if load is not None:
                load()
            super().load()

    session = Session(runtime, runtime.user(user))
    app = Tui(session, TaskHandle("Loading the model"))
    messages: list[str] = []
    notify = app.notify

    def record(message: str, *, title: str = "", **how: Any) -> None:
        messages.append(f"{title} {message}")
        notify(message, title=title, **how)

    app.notify = record  # type: ignore[method-assign]

    async with app.run_test(size=size, notifications=True) as pilot:
        ui = TuiDriver(app, pilot, messages, session.user)
        if load is None:
            await ui.wait_until(lambda: "load" not in app._model.tasks, "loading")
        yield ui
        await app.action_quit()


def run_tui(
    runtime: Runtime,
    scenario: Callable[[TuiDriver], Awaitable[None]],
    size: tuple[int, int] = (80, 24),
    load: Callable[[], None] | None = None,
    bugs: bool = False,
) -> Tui:
    """Open ada's chat, run ``scenario`` on it and close it.

    Args:
        runtime: The runtime whose user ``ada`` is opened.
        scenario: The steps of the test.
        size: Columns and rows of the screen.
        load: Is called before the model is loaded.
        bugs: Accept unexpected errors, which otherwise fail the test.
    """

    async def run() -> Tui:
        async with open_tui(runtime, "ada", size, load) as ui:
            await scenario(ui)
            assert bugs or "This is a bug" not in ui.notifications
        return ui.app

    return asyncio.run(run())


def run_tuis(
    runtimes: Mapping[str, Runtime], scenario: Callable[[TuiDriver], Awaitable[None]]
) -> None:
    """Open a chat of each user, run ``scenario`` on all of them at once and close them."""

    async def run(user: str, runtime: Runtime) -> None:
        async with open_tui(runtime, user) as ui:
            await scenario(ui)
            assert "This is a bug" not in ui.notifications

    async def run_all() -> None:
        async with asyncio.TaskGroup() as group:
            for user, runtime in runtimes.items():
                group.create_task(run(user, runtime))

    # Each chat redirects the output until its end, and they end in any order.
    with redirect_stdout(sys.stdout), redirect_stderr(sys.stderr):
        asyncio.run(run_all())


class StepGate:
    """Blocks each step of the fake model until ``allow`` permits it, and counts steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int = 0) -> None:
        self._free = threading.Semaphore(steps)
        self.steps = 0
        plain = FakeBackend.step

        def step(backend: FakeBackend) -> object:
            assert self._free.acquire(timeout=60)
            self.steps += 1
            return plain(backend)

        monkeypatch.setattr(FakeBackend, "step", step)

    def allow(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._free.release()
