"""Ways to run the terminal chat without a terminal, to press its keys and to read its screen."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from textual import events
from textual.keys import _character_to_key
from textual.pilot import Pilot

from personalpeft import Runtime, User
from personalpeft.backends.fake import FakeBackend
from personalpeft.errors import PersonalPeftError
from personalpeft_app.tui.app import Tui
from personalpeft_app.tui.composer import Composer
from personalpeft_app.tui.user_session import TaskHandle, UserSession


class Bug(PersonalPeftError):
    """What no test should come to see."""


def _bug(error: Exception) -> PersonalPeftError:
    return Bug(f"bug: {error!r}")


@dataclass
class Seat:
    """Somebody in front of the screen."""

    app: Tui
    pilot: Pilot[None]
    heard: list[str]
    user: User

    @property
    def screen(self) -> str:
        """All that the screen shows, line by line."""
        return "\n".join(
            strip.text.rstrip() for strip in self.app.screen._compositor.render_strips()
        )

    @property
    def said(self) -> str:
        """All messages so far."""
        return "\n".join(self.heard)

    @property
    def typed(self) -> str:
        """What stands where one types."""
        return self.app.query_one(Composer).text

    async def type(self, text: str) -> None:
        await self.pilot.press(*("space" if each == " " else each for each in text))

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
        await self.pilot.pause()

    def burst(self, *keys: str) -> None:
        """Presses keys faster than anything can be done about them, as they come over a slow line."""
        for each in keys:
            name = _character_to_key(each) if len(each) == 1 else each
            self.app.post_message(events.Key(name, each if len(each) == 1 else None))

    async def until(
        self, happened: Callable[[], object], what: str = "", seconds: float = 20
    ) -> None:
        """Waits for what threads do."""
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, (
                f"{what or 'it'} did not happen; the screen:\n{self.screen}\n{self.said}"
            )
            await self.pilot.pause(0.02)

    async def sees(self, text: str) -> None:
        await self.until(lambda: text in self.screen, f"{text!r} on the screen")

    async def hears(self, text: str) -> None:
        await self.until(lambda: text in self.said, f"the message {text!r}")

    async def send(self, text: str) -> None:
        await self.type(text)
        await self.press("enter")

    async def ask(self, text: str) -> None:
        """Asks, and waits for the whole reply."""
        before = len(self.user.turns())
        await self.send(text)
        await self.until(lambda: len(self.user.turns()) > before, "a reply")
        await self.rests()
        await self.pilot.pause()

    async def rests(self) -> None:
        await self.until(lambda: not self.app._chat.is_busy, "the end of the reply")

    async def edit(self) -> None:
        """Opens the newest reply, to be edited in its place."""
        await self.press("up", "e")
        await self.sees("^S save")

    async def want_forgotten(self) -> None:
        """Asks that what is chosen be forgotten, and is asked back."""
        await self.press("d")
        await self.sees("Forget this for good?")


def sit_down(
    runtime: Runtime,
    play: Callable[[Seat], Awaitable[None]],
    size: tuple[int, int] = (80, 24),
    load: Callable[[], None] | None = None,
    bugs: bool = False,
) -> Tui:
    """Opens ada's chat at a size in cells, does what ``play`` does, and closes it. ``load`` is called before loading; ``bugs``
    says that the play is about one.
    """
    session = UserSession(runtime, runtime.user("ada"), _bug)
    if load is not None:
        plain = session._runtime.engine

        class _Loading:
            def engine(self) -> object:
                load()
                return plain()

        session._runtime = _Loading()  # type: ignore[assignment]
    app = Tui(session, TaskHandle())
    heard: list[str] = []
    notify = app.notify

    def overheard(message: str, *, title: str = "", **how: Any) -> None:
        heard.append(f"{title} {message}")
        notify(message, title=title, **how)

    app.notify = overheard  # type: ignore[method-assign]

    async def run() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            seat = Seat(app, pilot, heard, session.user)
            if load is None:
                await seat.until(lambda: app._model.load_task is None, "loading")
            await play(seat)
            assert bugs or "bug:" not in seat.said
            await app.action_quit()

    asyncio.run(run())
    return app


class Gate:
    """Holds back the steps of the fake model until it is opened, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int = 0) -> None:
        self._free = threading.Semaphore(steps)
        self.steps = 0
        plain = FakeBackend.step

        def step(backend: FakeBackend) -> object:
            assert self._free.acquire(timeout=20)
            self.steps += 1
            return plain(backend)

        monkeypatch.setattr(FakeBackend, "step", step)

    def let(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._free.release()
