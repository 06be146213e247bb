"""Runs the app behind waitress: sockets, threads, and a stop that lets what is being written end.

Invariants: there are more threads than places, so one is left for ``/healthz`` whatever is asked; the sockets are read and
written by one thread, the one that called ``serve``, until the last byte is out or the grace is over.
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

# Threads besides those of the places: for /healthz, and for saying no to what finds no place.
_SPARE = 4
# Seconds between two looks whether it is time to stop, while nobody asks anything.
_LOOK = 0.2
# Seconds for the last bytes of what was ended by a stop.
_LAST = 2.0
_LARGEST_HEADER = 32 * 2**10


class _WithoutText(logging.Filter):
    """Replaces an exception in what waitress logs by its kind and where it was raised."""

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
    """An app on a socket. Made listening; ``run`` answers until ``stop`` is called from another thread or a signal handler."""

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
                # Without it nobody would notice that a client has gone while its request is worked on.
                channel_request_lookahead=1,
                connection_limit=2 * places.count + 100,
                max_request_header_size=_LARGEST_HEADER,
                # Which body is taken, ``admission`` decides; waitress refuses what is not below this.
                max_request_body_size=validation.LARGEST_FILE + 1,
                ident="personalpeft",
                asyncore_use_poll=True,
            )
        except OSError as error:
            self._dispatcher.shutdown()
            raise InvalidInput(
                f"Nothing can listen on {host}:{port}: {error.strerror or error}.",
                hint="Another program may be listening there; choose another --port.",
            ) from error
        admission = BodyAdmission(app, app.extensions["personalpeft"].api_keys)
        for each in self._sockets.values():
            if isinstance(each, BaseWSGIServer):
                each.channel_class = channel_class(admission)
        logging.getLogger("waitress").addFilter(_WITHOUT_TEXT)
        self._stop = threading.Event()

    @property
    def port(self) -> int:
        """Where it listens, which the system chose where 0 was asked for."""
        return int(self._server.effective_port)

    def stop(self) -> None:
        """Takes nothing new from now on, and ends ``run`` once all is said."""
        self._places.stopping.set()
        self._stop.set()

    def run(self, *, grace: float, close: Callable[[], None]) -> None:
        """Answers until it is stopped; then waits ``grace`` seconds for what is being written, and calls ``close``, which
        must end the rest.
        """
        try:
            self._turn_until(self._stop.is_set)
            # Whoever comes now finds nobody listening, which a balancer understands at once.
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

    def _turn_until(self, over: Callable[[], bool], longest: float | None = None) -> None:
        end = None if longest is None else time.monotonic() + longest
        while not over() and (end is None or time.monotonic() < end):
            wasyncore.loop(timeout=_LOOK, use_poll=True, map=self._sockets, count=1)

    def _unsent(self) -> bool:
        return any(getattr(each, "total_outbufs_len", 0) for each in self._sockets.values())


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Has Ctrl-C and SIGTERM call ``stop``; pressed again, Ctrl-C interrupts at once."""
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
