"""HTTP to one server: requests from any thread, run by one event loop.

Invariants: a request is repeated only before any of the response has come, and only where it may
help. The pauses grow. Every failure is an error that names the server and what to do. No token is
logged or shown.
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

# What a gateway answers while a server starts or is full.
_TEMPORARY = frozenset({429, 502, 503, 504})
CONNECT_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_MAX_MESSAGE = 300
_START_HINT = "Start it, or set PERSONALPEFT_VLLM_URL to its address; see docs/how-to/engines.md."
_LOG_HINT = "Try again; its log may have the reason."


class ConnectionLost(ServingFailed):
    """A connection failed. The next server at the address may be another one."""


class Unreachable(ConnectionLost):
    """No server listens. Whatever the server had loaded is gone."""


@dataclass(frozen=True, slots=True)
class Response:
    """A status, the text, and its JSON value (None if it is not JSON)."""

    status: int
    text: str
    data: Any

    @property
    def message(self) -> str:
        """The server's error message."""
        error = self.data.get("error", self.data) if isinstance(self.data, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        return str(message or self.text or f"status {self.status}")[:_MAX_MESSAGE]


class Transport:
    """Raises ``InvalidInput`` for a certificate file that cannot be read."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self._client = httpx2.AsyncClient(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.token}"} if server.token else {},
            timeout=httpx2.Timeout(server.timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            verify=_ssl_context(server),
            # A proxy for other hosts must not get requests to this machine.
            trust_env=not _is_loopback(server.url),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="personalpeft-vllm", daemon=True
        )
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Cancelling the future drops its connection at once.

        Raises ``RuntimeError`` after ``close``, and in a process forked from the one that opened
        it.
        """
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the transport is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Raises ``RuntimeError`` as ``start`` does."""
        return self.start(work).result()

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        retry_seconds: float | None = None,
        timeout: float | None = None,
        required: bool = True,
    ) -> Response:
        """Send a request and return the response, whatever its status.

        Args:
            method: The HTTP method.
            path: The path below the server's address.
            body: A JSON value.
            retry_seconds: Seconds in which the request is repeated, else the server's setting.
            timeout: Seconds to wait for a response, else the server's setting.
            required: Whether a response that denies access is an error.

        Raises:
            ServingFailed: There was no response, or only temporary failures.
        """
        try:
            response = await _read_all(await self._send(method, path, body, retry_seconds, timeout))
        except httpx2.TransportError as error:
            raise self._transport_error(error) from error
        return self._check_auth(response) if required else response

    @asynccontextmanager
    async def stream_events(
        self, path: str, body: Any
    ) -> AsyncIterator[AsyncIterator[Any] | Response]:
        """Yield the JSON of each server-sent event, or a response with another status.

        Raises ``ServingFailed``, also from the iterator.
        """
        response = await self._send("POST", path, body, None, None)
        try:
            if response.status_code == httpx2.codes.OK:
                yield self._parse_events(response)
            else:
                yield self._check_auth(_parse(response.status_code, await response.aread()))
        except httpx2.SSEError as error:
            raise self._invalid_response() from error
        except httpx2.TransportError as error:
            raise self._transport_error(error) from error
        finally:
            await response.aclose()

    def close(self) -> None:
        """Cancel all requests and end the thread. Closing twice is allowed."""
        if self._thread.is_alive():
            self.wait(self._shutdown())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _send(
        self, method: str, path: str, body: Any, retry_seconds: float | None, timeout: float | None
    ) -> httpx2.Response:
        """Return a response whose body is unread. The caller closes it."""
        limits = httpx2.Timeout(timeout or self.server.timeout, connect=CONNECT_SECONDS, pool=None)
        pause = _FIRST_PAUSE
        deadline = time.monotonic() + (
            self.server.retry_seconds if retry_seconds is None else retry_seconds
        )
        while True:
            request = self._client.build_request(method, path, json=body, timeout=limits)
            try:
                response = await self._client.send(request, stream=True)
                if response.status_code not in _TEMPORARY:
                    return response
                answer = await _read_all(response)
                failure = self._error(f"is not available: {answer.message}", "Try again later.")
            except httpx2.TransportError as error:
                failure = self._transport_error(error)
            if time.monotonic() + pause > deadline:
                raise failure
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _parse_events(self, response: httpx2.Response) -> AsyncIterator[Any]:
        done = False
        # Read to the end, so that the connection can be used again.
        async for event in httpx2.EventSource(response):
            done = done or event.data == "[DONE]"
            if not done:
                try:
                    yield json.loads(event.data)
                except ValueError as error:
                    raise self._invalid_response() from error
        if not done:
            raise self._error("broke off during a reply", _LOG_HINT, ConnectionLost)

    async def _shutdown(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _error(
        self, what: str, hint: str, kind: type[ServingFailed] = ServingFailed
    ) -> ServingFailed:
        return kind(f"The vLLM server at {self.server.url} {what}.", hint=hint)

    def _check_auth(self, response: Response) -> Response:
        if response.status in (401, 403):
            token = "this token" if self.server.token else "requests without a token"
            raise self._error(
                f"does not accept {token}", "Set PERSONALPEFT_VLLM_TOKEN to the server's --api-key."
            )
        return response

    def _invalid_response(self) -> ServingFailed:
        return self._error(
            "sent an invalid response", "Check whether another program listens at this address."
        )

    def _transport_error(self, error: httpx2.TransportError) -> ServingFailed:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, ssl.SSLError) or "certificate" in str(error).casefold():
            return self._error(
                "has a certificate that is not trusted",
                "Set PERSONALPEFT_VLLM_CA to the certificate that signed the server's.",
            )
        if isinstance(error, httpx2.ReadTimeout):
            return self._error(
                f"sent nothing for {self.server.timeout:g} s",
                "See its log, or set a longer PERSONALPEFT_VLLM_TIMEOUT.",
            )
        if isinstance(error, httpx2.ConnectTimeout):
            # Not Unreachable: a busy server still has its stacks.
            return self._error(f"cannot be reached within {CONNECT_SECONDS:g} s", _START_HINT)
        if isinstance(error, httpx2.ConnectError):
            return self._error("cannot be reached", _START_HINT, Unreachable)
        return self._error(f"broke off: {error}", _LOG_HINT, ConnectionLost)


async def _read_all(response: httpx2.Response) -> Response:
    try:
        return _parse(response.status_code, await response.aread())
    finally:
        await response.aclose()


def _parse(status: int, content: bytes) -> Response:
    text = content.decode("utf-8", "replace")
    try:
        return Response(status, text, json.loads(text))
    except ValueError:
        return Response(status, text, None)


def _ssl_context(server: VllmServer) -> ssl.SSLContext | bool:
    if server.certificate is None:
        return True
    try:
        context = ssl.create_default_context()
        context.load_verify_locations(str(server.certificate))
        return context
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(
            f"{server.certificate} must be a certificate: {error}.",
            hint="Set PERSONALPEFT_VLLM_CA to a PEM file.",
        ) from error


def _is_loopback(url: str) -> bool:
    host = httpx2.URL(url).host
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
