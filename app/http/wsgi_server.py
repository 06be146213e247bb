"""Run the app behind cheroot: sockets, threads, and a graceful stop.

Invariants: there are more threads than concurrent requests, so one is left for ``/healthz``.
``admission`` decides on each body before it is read. A body is received before the app runs, so a
slow client takes no place of the limiter.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import Any
from weakref import WeakSet

from cheroot.errors import MaxSizeExceeded
from cheroot.server import ChunkedRFile, HeaderReader, HTTPConnection, HTTPRequest
from cheroot.wsgi import Gateway_10
from cheroot.wsgi import Server as WSGIServer
from flask import Flask
from werkzeug.exceptions import BadRequest, HTTPException, Unauthorized

from personalpeft.errors import InvalidInput, format_origin
from personalpeft_app.http import validation
from personalpeft_app.http.admission import BodyAdmission, too_large
from personalpeft_app.http.concurrency import ConcurrencyLimiter
from personalpeft_app.http.security import REFUSED_BODY

# Threads above the limit of requests: for /healthz, to receive bodies, and to refuse requests.
_SPARE = 64
# Seconds between checks for a stop while the server is idle.
_LOOK = 0.2
# Seconds for the last bytes of requests that a stop ended.
_LAST = 2.0
# Seconds of silence after which a connection is closed.
_SILENCE = 30
_BACKLOG = 128
_LARGEST_HEADER = 32 * 2**10
# Bytes of a body that stay in memory, and those that are read at once.
_IN_MEMORY, _PART = 2**19, 2**16

_CONTINUE = b"100-continue"
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
        self._stop = threading.Event()
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
        self._stop.set()

    def run(self, *, grace: float, close: Callable[[], None]) -> None:
        """Serve until ``stop``, then wait ``grace`` seconds for running requests.

        Then ``close`` is called, which must end the rest.
        """
        # Threads of a daemon thread are such threads too: no request keeps the process from ending.
        serving = threading.Thread(target=self._server.start, daemon=True)
        serving.start()
        try:
            # Without waiting for the event: a signal may set it in this thread, so no lock is held.
            while serving.is_alive() and not (self._stop.is_set() and self._server.ready):
                time.sleep(_LOOK)
            self._wait_for_requests(grace)
        finally:
            close()
            self._wait_for_requests(_LAST)
            self._server.disconnect()
            stopping = threading.Thread(target=self._server.stop, daemon=True)
            stopping.start()
            stopping.join(_LAST)

    def _wait_for_requests(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self._limiter.in_use and time.monotonic() < end:
            time.sleep(_LOOK / 10)


class _HeaderReader(HeaderReader):
    """Reads headers, and keeps cheroot from asking for a body that is not admitted yet."""

    def __call__(self, rfile: Any, hdict: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = super().__call__(rfile, hdict)
        if found.get(b"Expect", b"").lower() == _CONTINUE:
            # Equal by the rules of HTTP, but cheroot answers the value in lower case alone.
            found[b"Expect"] = _CONTINUE.upper()
        return found


class _Request(HTTPRequest):
    header_reader = _HeaderReader()


class _Connection(HTTPConnection):
    RequestHandlerClass = _Request

    def __init__(self, server: _Server, *args: Any) -> None:
        super().__init__(server, *args)
        server.open_connections.add(self)


class _Gateway(Gateway_10):
    """One request to the app."""

    def get_environ(self) -> dict[str, Any]:
        gone = partial(_is_disconnected, self.req.conn.socket)
        # Under the name that waitress gives it, so that the app finds it under either server.
        return {**super().get_environ(), "waitress.client_disconnected": gone}

    def respond(self) -> None:
        """Receive the body if it is admitted, and call the app."""
        request = self.req
        length = int(self.env.get("CONTENT_LENGTH") or 0)
        # The size of a chunked body is not announced, so it counts as the largest that may be.
        size = validation.LARGEST if request.chunked_read else length
        if size <= 0:
            super().respond()
            return
        with (
            request.server.admission.hold(self.env, size) as refusal,
            SpooledTemporaryFile(_IN_MEMORY) as body,
        ):
            if refusal is None:
                refusal = self._receive(size, body.write)
            elif self._is_left(refusal, size):
                request.close_connection = True
            else:
                self._receive(size, lambda part: None)
            body.seek(0)
            self.env |= {"wsgi.input": body, REFUSED_BODY: refusal}
            super().respond()

    def _is_left(self, refusal: HTTPException, size: int) -> bool:
        """Return whether a refused body is not read, and the connection closed after the answer.

        Others are read to the end: a client that still sends then may never read the answer.
        """
        is_known = not isinstance(refusal, Unauthorized)
        most = validation.LARGEST_FILE if is_known else validation.LARGEST
        return self.req.chunked_read or self._is_waiting or size > most

    @property
    def _is_waiting(self) -> bool:
        """Whether the client sends the body only when it is asked for it."""
        return str(self.env.get("HTTP_EXPECT", "")).lower() == _CONTINUE.decode()

    def _receive(self, size: int, take: Callable[[bytes], Any]) -> HTTPException | None:
        """Give the parts of the body to ``take``. Returns a refusal if it is too large."""
        request = self.req
        if self._is_waiting:
            request.conn.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.chunked_read:
            return self._receive_chunks(size, take)
        while size:
            part = request.rfile.read(min(size, _PART))
            if not part:
                raise ConnectionResetError(errno.ECONNRESET, "the client is gone")
            take(part)
            size -= len(part)
        return None

    def _receive_chunks(self, most: int, take: Callable[[bytes], Any]) -> HTTPException | None:
        try:
            # Chunks have lengths and ends of their own. What goes far beyond is not read.
            data = ChunkedRFile(self.req.conn.rfile, 2 * most).read(most)
        except (ConnectionError, TimeoutError):
            raise
        except ValueError:
            self.req.close_connection = True
            return BadRequest("The chunks of the body are malformed.")
        except (MaxSizeExceeded, OSError):
            data = None
        if data is None or len(data) >= most:
            self.req.close_connection = True
            return too_large(most)
        take(data)
        return None


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
            shutdown_timeout=_LOOK,
        )
        self.gateway = _Gateway
        self.open_connections: WeakSet[_Connection] = WeakSet()
        self.admission = BodyAdmission(app, app.extensions["personalpeft"].api_keys)
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
    """Return whether the client has closed the connection."""
    try:
        with _Selector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            return bool(selector.select(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True
