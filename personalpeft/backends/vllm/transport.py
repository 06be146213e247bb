"""One server over HTTP: asked from any thread, waited for by one.

Invariants: what was not answered is tried again only while nothing of the answer has come, with longer and longer pauses, and
only where a second try may help; every failure is an error of ours that names the server and a way out; no token is ever part of
what is said or logged.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeVar

import httpx2

from personalpeft.errors import InvalidInput, ServingFailed
from personalpeft.settings import VllmServer

T = TypeVar("T")

# What a gateway says while a server behind it starts or is full.
_FOR_NOW = frozenset({429, 502, 503, 504})
_CONNECT_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
# Of what a server says of a fault, so much is told on.
_TOLD = 300


_START = "Start it, or set PERSONALPEFT_VLLM_URL to where it is; docs/engines.md says how."


class Lost(ServingFailed):
    """A connection failed: who answers next need not be the same server."""


class Unreachable(Lost):
    """Nobody listens there: whatever the server knew, it knows no more."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: a status, and JSON where it is that (else None) beside the text."""

    status: int
    text: str
    data: Any

    @property
    def message(self) -> str:
        """What the server says went wrong."""
        said = self.data.get("error", self.data) if isinstance(self.data, dict) else None
        message = said.get("message") if isinstance(said, dict) else None
        return str(message or self.text or f"status {self.status}")[:_TOLD]


class Wire:
    """Raises ``InvalidInput`` for a certificate file that cannot be read."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self._client = httpx2.AsyncClient(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.token}"} if server.token else {},
            timeout=httpx2.Timeout(server.timeout, connect=_CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            verify=_trust(server),
            # Where a proxy is set for the outer world, this machine must still be asked directly.
            trust_env=not _is_here(server.url),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="personalpeft-vllm", daemon=True
        )
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins something beside; cancelling it drops its connection at once. Raises ``RuntimeError`` where nobody would do it:
        after ``close``, or in a process that was forked from the one that opened it.
        """
        if not self.is_open:
            work.close()
            raise RuntimeError("the wire is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Does something and gives what came of it. Raises ``RuntimeError`` as ``start`` does."""
        return self.start(work).result()

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        patience: float | None = None,
        timeout: float | None = None,
        needed: bool = True,
    ) -> Answer:
        """One question, whatever the answer's status. ``patience`` and ``timeout`` (seconds) are else the server's; what is not
        ``needed`` may be forbidden. Raises ``ServingFailed`` where no answer came, or none but for the moment.
        """
        try:
            answer = await _whole(await self._opened(method, path, body, patience, timeout))
        except httpx2.TransportError as error:
            raise self._unanswered(error) from error
        return self._allowed(answer) if needed else answer

    @asynccontextmanager
    async def events(self, path: str, body: Any) -> AsyncIterator[AsyncIterator[Any] | Answer]:
        """The JSON of each event that the server sends, or its answer where it says something else. Raises ``ServingFailed``,
        also from the iterator.
        """
        response = await self._opened("POST", path, body, None, None)
        try:
            if response.status_code == httpx2.codes.OK:
                yield self._pieces(response)
            else:
                yield self._allowed(_read(response.status_code, await response.aread()))
        except httpx2.SSEError as error:
            raise self._strange() from error
        except httpx2.TransportError as error:
            raise self._unanswered(error) from error
        finally:
            await response.aclose()

    async def _opened(
        self, method: str, path: str, body: Any, patience: float | None, timeout: float | None
    ) -> httpx2.Response:
        """An answer of which nothing but the head was read yet; its reader closes it."""
        limits = httpx2.Timeout(timeout or self.server.timeout, connect=_CONNECT_SECONDS, pool=None)
        pause = _FIRST_PAUSE
        until = time.monotonic() + (self.server.patience if patience is None else patience)
        while True:
            request = self._client.build_request(method, path, json=body, timeout=limits)
            try:
                response = await self._client.send(request, stream=True)
                if response.status_code not in _FOR_NOW:
                    return response
                failed = self._said(await _whole(response))
            except httpx2.TransportError as error:
                failed = self._unanswered(error)
            if time.monotonic() + pause > until:
                raise failed
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _pieces(self, response: httpx2.Response) -> AsyncIterator[Any]:
        done = False
        # To its very end, so that the connection can be used again.
        async for event in httpx2.EventSource(response):
            done = done or event.data == "[DONE]"
            if not done:
                try:
                    yield json.loads(event.data)
                except ValueError as error:
                    raise self._strange() from error
        if not done:
            raise Lost(
                f"{self._who} broke off in the middle of a reply.",
                hint="Try again; its log may say why.",
            )

    @property
    def is_open(self) -> bool:
        """Whether anything can still be asked."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Drops what is under way and ends the thread. Closing twice is fine."""
        if self.is_open:
            self.wait(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    @property
    def _who(self) -> str:
        return f"The vLLM server at {self.server.url}"

    def _allowed(self, answer: Answer) -> Answer:
        if answer.status in (401, 403):
            raise ServingFailed(
                f"{self._who} does not accept {'this' if self.server.token else 'requests without a'} token.",
                hint="Set PERSONALPEFT_VLLM_TOKEN to what it was started with (--api-key).",
            )
        return answer

    def _said(self, answer: Answer) -> ServingFailed:
        return ServingFailed(
            f"{self._who} cannot answer now: {answer.message}", hint="Try again in a while."
        )

    def _strange(self) -> ServingFailed:
        return ServingFailed(
            f"{self._who} answered what is no answer.",
            hint="Look whether something else listens there.",
        )

    def _unanswered(self, error: httpx2.TransportError) -> ServingFailed:
        if (
            isinstance(error.__cause__ or error.__context__, ssl.SSLError)
            or "certificate" in str(error).casefold()
        ):
            hint = "Set PERSONALPEFT_VLLM_CA to the file of the certificate that signed its own."
            return ServingFailed(f"{self._who} has a certificate that is not trusted.", hint=hint)
        if isinstance(error, httpx2.ReadTimeout):
            said = f"{self._who} said nothing for {self.server.timeout:g} s."
            return ServingFailed(
                said, hint="Look at its log, or give it more time (PERSONALPEFT_VLLM_TIMEOUT)."
            )
        if isinstance(error, httpx2.ConnectTimeout):
            # It may be there, and busy, and know what it knew.
            return ServingFailed(
                f"{self._who} cannot be reached within {_CONNECT_SECONDS:g} s.", hint=_START
            )
        if isinstance(error, httpx2.ConnectError):
            return Unreachable(f"{self._who} cannot be reached.", hint=_START)
        return Lost(f"{self._who} broke off: {error}.", hint="Try again; its log may say why.")


async def _whole(response: httpx2.Response) -> Answer:
    try:
        return _read(response.status_code, await response.aread())
    finally:
        await response.aclose()


def _read(status: int, content: bytes) -> Answer:
    text = content.decode("utf-8", "replace")
    try:
        return Answer(status, text, json.loads(text))
    except ValueError:
        return Answer(status, text, None)


def _trust(server: VllmServer) -> ssl.SSLContext | bool:
    if server.certificate is None:
        return True
    try:
        context = ssl.create_default_context()
        context.load_verify_locations(str(server.certificate))
        return context
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(
            f"{server.certificate} cannot be read as a certificate: {error}.",
            hint="PERSONALPEFT_VLLM_CA names a PEM file with the certificate of who signed the server's.",
        ) from error


def _is_here(url: str) -> bool:
    host = httpx2.URL(url).host
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
