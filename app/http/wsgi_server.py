"""Run the app behind waitress: sockets, threads, and a graceful stop.

Invariants: there are more threads than concurrent requests, so one is left for ``/healthz``. The
thread that calls ``run`` reads and writes all sockets, until the last byte or the end of the grace.

Other servers of WSGI decide on a body when the app reads it, or cannot stop gracefully. This module
and ``admission`` use waitress's classes below ``create_server``, so its minor version is pinned.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from flask import Flask
from waitress import wasyncore
from waitress.server import BaseWSGIServer, create_server
from waitress.task import ThreadedTaskDispatcher

from personalpeft.errors import InvalidInput, format_origin
from personalpeft_app.http import validation
from personalpeft_app.http.admission import BodyAdmission, channel_class
from personalpeft_app.http.concurrency import ConcurrencyLimiter

# Threads above the limit of requests: for /healthz, and to refuse requests.
_SPARE = 4
# Seconds between checks for a stop while the server is idle.
_LOOK = 0.2
# Seconds for the last bytes of requests that a stop ended.
_LAST = 2.0
_LARGEST_HEADER = 32 * 2**10


class _WithoutText(logging.Filter):
    """Replace an exception in waitress's log by its type and origin."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            record.msg, record.args = f"an error while serving: {format_origin(error)}", ()
            record.exc_info = record.exc_text = None
        return True


_WITHOUT_TEXT = _WithoutText()


def _address(host: str, port: int) -> str:
    """Return the one numeric address to listen on: IPv4 where the name has both families.

    Two sockets would be two servers with a port each, where the system chooses the port.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = {family: str(address[0]) for family, _, _, _, address in reversed(found)}
    return families.get(socket.AF_INET) or families[socket.AF_INET6]


class Server:
    """An app on a listening socket. ``run`` serves until ``stop`` is called."""

    def __init__(self, app: Flask, places: ConcurrencyLimiter, *, host: str, port: int) -> None:
        self._places = places
        self._sockets: dict[int, Any] = {}
        self._dispatcher = ThreadedTaskDispatcher()
        self._dispatcher.set_thread_count(places.count + _SPARE)
        try:
            self._server = create_server(
                app,
                map=self._sockets,
                _dispatcher=self._dispatcher,
                host=_address(host, port),
                port=port,
                # Needed to notice that a client disconnects during its request.
                channel_request_lookahead=1,
                connection_limit=2 * places.count + 100,
                max_request_header_size=_LARGEST_HEADER,
                # ``admission`` decides on bodies; waitress refuses those of this size or more.
                max_request_body_size=validation.LARGEST_FILE + 1,
                ident="personalpeft",
                asyncore_use_poll=True,
            )
        except OSError as error:
            self._dispatcher.shutdown()
            raise InvalidInput(
                f"The server cannot listen on {host}:{port}: {error.strerror or error}.",
                hint="If another program listens there, choose another --port.",
            ) from error
        admission = BodyAdmission(app, app.extensions["personalpeft"].api_keys)
        for each in self._sockets.values():
            if isinstance(each, BaseWSGIServer):
                each.channel_class = channel_class(admission)
        logging.getLogger("waitress").addFilter(_WITHOUT_TEXT)
        self._stop = threading.Event()

    @property
    def port(self) -> int:
        """The port. The system chooses one for 0."""
        return int(self._server.effective_port)

    def stop(self) -> None:
        """Refuse new requests, and end ``run`` once the running ones are answered."""
        self._places.stopping.set()
        self._stop.set()

    def run(self, *, grace: float, close: Callable[[], None]) -> None:
        """Serve until ``stop``, then wait ``grace`` seconds for running requests.

        Then ``close`` is called, which must end the rest.
        """
        try:
            self._turn_until(self._stop.is_set)
            # A refused connection tells load balancers at once.
            for each in [
                each for each in self._sockets.values() if getattr(each, "accepting", False)
            ]:
                wasyncore.dispatcher.close(each)
            self._turn_until(lambda: not self._places.in_use, grace)
        finally:
            close()
            self._turn_until(lambda: not self._places.in_use and not self._unsent(), _LAST)
            self._dispatcher.shutdown()
            wasyncore.close_all(self._sockets, ignore_all=True)

    def _turn_until(self, over: Callable[[], bool], timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not over() and (end is None or time.monotonic() < end):
            wasyncore.loop(timeout=_LOOK, use_poll=True, map=self._sockets, count=1)

    def _unsent(self) -> bool:
        return any(getattr(each, "total_outbufs_len", 0) for each in self._sockets.values())


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` on Ctrl-C and SIGTERM. A second Ctrl-C interrupts at once."""
    pressed = False

    def asked(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed and number == signal.SIGINT:
            raise KeyboardInterrupt
        pressed = True
        stop()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
