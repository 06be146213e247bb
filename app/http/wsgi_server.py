"""Run the app behind cheroot: sockets, threads, and a graceful stop.

Invariants: there are more threads than concurrent requests, and clients that send slowly take some
of the spare ones alone. So one is left for ``/healthz``. The app reads a body, or refuses it unread;
a client that is still sending can read the refusal.
"""

from __future__ import annotations

import logging
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from weakref import WeakSet

from cheroot.errors import MaxSizeExceeded
from cheroot.makefile import StreamReader
from cheroot.server import ChunkedRFile, HTTPConnection, HTTPRequest
from cheroot.wsgi import Gateway_10
from cheroot.wsgi import Server as WSGIServer
from flask import Flask
from werkzeug.exceptions import RequestEntityTooLarge

from personalpeft.errors import InvalidInput, format_origin
from personalpeft_app.http import validation
from personalpeft_app.http.concurrency import ConcurrencyLimiter

# Threads above the limit of requests: for /healthz, to receive bodies, and to refuse requests.
_SPARE = 64
# Seconds between checks for a stop while the server is idle.
_LOOK = 0.2
# Seconds for the last bytes of requests that a stop ended.
_LAST = 2.0
# Seconds of silence after which a connection is closed.
_SILENCE = 30
# Seconds to send the head of a request, or its body. A body gets more for each byte that came.
_HEAD_SECONDS = 10
_BODY_SECONDS = 30
_SECONDS_PER_BYTE = 1 / 10_000
# Seconds after which a request counts as slow, and how many threads wait for slow ones.
_PROMPT = 1.0
_SLOW = _SPARE - 16
_BACKLOG = 128
_LARGEST_HEADER = 32 * 2**10
# Bytes of a refused body that are read at once.
_PART = 2**16

# Polling needs no file descriptor of its own; Windows has select alone.
_Selector: type[selectors.BaseSelector] = getattr(
    selectors, "PollSelector", selectors.SelectSelector
)
_log = logging.getLogger("personalpeft.http")


def _address(host: str, port: int) -> str:
    """Return the one numeric address to listen on: IPv4 where the name has both families."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = {family: str(address[0]) for family, _, _, _, address in reversed(found)}
    return families.get(socket.AF_INET) or families[socket.AF_INET6]


class Server:
    """An app on a listening socket. ``run`` serves until ``stop`` is called."""

    def __init__(self, app: Flask, limiter: ConcurrencyLimiter, *, host: str, port: int) -> None:
        self._limiter = limiter
        try:
            self._server = _Server(app, _address(host, port), port, limiter.count + _SPARE)
        except OSError as error:
            raise InvalidInput(
                f"The server cannot listen on {host}:{port}: {error.strerror or error}.",
                hint="If another program listens there, choose another --port.",
            ) from error

    @property
    def port(self) -> int:
        """The port. The system chooses one for 0."""
        return int(self._server.bind_addr[1])

    def stop(self) -> None:
        """Refuse new requests, and end ``run`` once the running ones are answered."""
        self._limiter.stopping.set()

    def run(
        self,
        *,
        grace: float,
        close: Callable[[], None],
        stop_jobs: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until ``stop``, then wait ``grace`` seconds for running requests.

        ``stop_jobs`` is called before that wait, so that streams of their events end. ``close`` is
        called after it, and must end the rest.
        """
        # Threads of a daemon thread are such threads too: no request keeps the process from ending.
        serving = threading.Thread(target=self._server.start, daemon=True)
        serving.start()
        try:
            # Without waiting for the event: a signal may set it in this thread, so no lock is held.
            stopping = self._limiter.stopping
            while serving.is_alive() and not (stopping.is_set() and self._server.ready):
                time.sleep(_LOOK)
            stop_jobs()
            self._wait_while(lambda: self._limiter.in_use, grace)
        finally:
            close()
            self._wait_while(lambda: self._limiter.in_use or self._server.answering, _LAST)
            self._server.disconnect()
            ending = threading.Thread(target=self._server.stop, daemon=True)
            ending.start()
            ending.join(_LAST)

    def _wait_while(self, is_busy: Callable[[], object], timeout: float) -> None:
        end = time.monotonic() + timeout
        while is_busy() and time.monotonic() < end:
            time.sleep(_LOOK / 10)


class _Chunks(ChunkedRFile):
    """A body in chunks. A chunk is read at once, so the largest is bounded."""

    def read(self, size: int | None = None) -> bytes:
        try:
            data: bytes = super().read(size)
        except (ConnectionError, TimeoutError):
            raise
        except (MaxSizeExceeded, OSError):
            raise RequestEntityTooLarge from None
        return data


class _Request(HTTPRequest):
    def send_headers(self) -> None:
        """Send the headers. A body that was not read to its end ends the connection."""
        is_unread = not self.rfile.closed if self.chunked_read else self.rfile.remaining
        if is_unread:
            self.close_connection = self.conn.is_refused = True
        self.server.answering.add(self)
        super().send_headers()

    def respond(self) -> None:
        """Answer. The app is done before the last bytes are sent."""
        try:
            super().respond()
        finally:
            self.server.answering.discard(self)


class _Socket(socket.SocketIO):
    """Reads from a connection, with a time limit for the head of a request and for its body."""

    def __init__(self, connection: socket.socket, slow: threading.Semaphore) -> None:
        super().__init__(connection, "rb")
        self._connection, self._slow = connection, slow
        self.expect(_HEAD_SECONDS)

    def expect(self, seconds: float) -> None:
        """Begin to count the time."""
        self._started_at, self._seconds, self._received = time.monotonic(), seconds, 0

    def readinto(self, buffer: Any) -> int | None:
        if not self._wait(_PROMPT):
            # A thread that waits is missing elsewhere.
            with _hold(self._slow) as is_held:
                seconds = self._seconds + self._received * _SECONDS_PER_BYTE
                if not is_held or not self._wait(seconds):
                    raise TimeoutError("timed out")  # Cheroot compares the text.
        count = super().readinto(buffer)
        self._received += count or 0
        return count

    def _wait(self, seconds: float) -> bool:
        """Wait for data until ``seconds`` have passed since the begin, or the connection is silent."""
        left = self._started_at + seconds - time.monotonic()
        return _is_readable(self._connection, min(max(0.0, left), _SILENCE))


class _Reader(StreamReader):
    def __init__(self, raw: _Socket, size: int) -> None:
        super(StreamReader, self).__init__(raw, size)
        self.bytes_read = 0


class _Connection(HTTPConnection):
    RequestHandlerClass = _Request
    is_refused = False

    def __init__(self, server: _Server, sock: socket.socket, *args: Any) -> None:
        super().__init__(server, sock, *args)
        self.incoming = _Socket(sock, server.slow)
        self.rfile = _Reader(self.incoming, self.rbufsize)
        server.open_connections.add(self)

    def communicate(self) -> bool:
        self.incoming.expect(_HEAD_SECONDS)
        return bool(super().communicate())  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close it. A client that still sends a refused body gets time to read the answer."""
        with _hold(self.server.slow) if self.is_refused else nullcontext() as is_held:
            if is_held:
                end = time.monotonic() + _SILENCE
                with suppress(OSError):
                    self.socket.shutdown(socket.SHUT_WR)
                    while time.monotonic() < end and self.socket.recv(_PART):
                        pass
            super().close()


@contextmanager
def _hold(slow: threading.Semaphore) -> Iterator[bool]:
    """Take a place for the context, if one is free. Yield whether it was."""
    is_held = slow.acquire(blocking=False)
    try:
        yield is_held
    finally:
        if is_held:
            slow.release()


class _Gateway(Gateway_10):
    """One request to the app."""

    def get_environ(self) -> dict[str, Any]:  # type: ignore[override]  # its stub says None
        gone = partial(_is_disconnected, self.req.conn.socket)
        self.req.conn.incoming.expect(_BODY_SECONDS)
        if self.req.chunked_read:
            # Chunks have lengths and ends of their own.
            self.req.rfile = _Chunks(self.req.conn.rfile, 2 * validation.LARGEST)
        # Under the name that waitress gives it, so that the app finds it under either server.
        environ: Any = super().get_environ()  # type: ignore[no-untyped-call]
        found = {**environ, "waitress.client_disconnected": gone}
        if not self.req.chunked_read:
            # Werkzeug takes it as true whatever it is, and a body that was cut off as whole.
            del found["wsgi.input_terminated"]
        return found


class _Server(WSGIServer):
    """The server of cheroot. Its port is taken when it is made, before its threads ``start``."""

    ConnectionClass = _Connection

    def __init__(self, app: Flask, host: str, port: int, threads: int) -> None:
        super().__init__(
            (host, port),
            app,
            numthreads=threads,
            server_name="personalpeft",
            request_queue_size=_BACKLOG,
            accepted_queue_size=threads,
            accepted_queue_timeout=1,
            timeout=_SILENCE,
            shutdown_timeout=_LOOK,  # type: ignore[arg-type]  # seconds, whole or not
        )
        self.gateway = _Gateway
        self.slow = threading.BoundedSemaphore(_SLOW)
        self.open_connections: WeakSet[_Connection] = WeakSet()
        # Requests whose response was begun, and whose last bytes are not sent yet.
        self.answering: set[_Request] = set()
        self.max_request_header_size = _LARGEST_HEADER
        self.keep_alive_conn_limit = threads
        self.expiration_interval = _LOOK
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = super().bind(family, socket.SOCK_STREAM)
        self._listener.listen(_BACKLOG)

    def bind(self, family: int, type: int, proto: int = 0) -> socket.socket:
        """Return the socket that is bound already."""
        self.socket = self._listener
        return self._listener

    def disconnect(self) -> None:
        """End all connections. A thread that still writes to one gets an error."""
        for each in list(self.open_connections):
            with suppress(OSError):
                each.socket.shutdown(socket.SHUT_RDWR)

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        """Log the type and origin of an error, without its text."""
        error = sys.exception()
        if error is not None and level >= logging.ERROR:
            _log.error("an error while serving: %s", format_origin(error))


def _is_disconnected(connection: socket.socket) -> bool:
    try:
        return _is_readable(connection, 0) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True


def _is_readable(connection: socket.socket, timeout: float) -> bool:
    with _Selector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(timeout))
