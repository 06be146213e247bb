"""Sources of copies of a stack: a shared folder, and a personalpeft server. See also ``bucket``.

Invariants: a source returns bytes and does not interpret them. An API key is sent to its own server
only, also after a redirect, and is never shown. Every read ends after a timeout.
"""

from __future__ import annotations

import os
import ssl
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.request import (
    HTTPRedirectHandler,
    HTTPSHandler,
    ProxyHandler,
    Request,
    build_opener,
)

FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files of a stack, in the order of its digest."""

CHUNK = 1 << 20
"""Bytes of one read."""
# Seconds without data; the time for a whole file is a setting.
_SILENCE_SECONDS = 10.0


class MissingCopy(Exception):
    """The source has no such stack (any more)."""


class InvalidCopy(Exception):
    """A copy cannot be read, or is not what its name says."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a stack, in a ``place``.

    ``read`` yields one of ``FILES`` in parts. It raises ``MissingCopy``, ``InvalidCopy`` or
    ``OSError``.
    """

    place: str
    read: Callable[[str], Generator[bytes]]


class Source(Protocol):
    """A place with copies."""

    def copies(self, digest: str) -> Iterable[Copy]:
        """Return the copies of a stack, the best first. Raises ``OSError``."""


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A folder with a subfolder for each program. That has a folder for each stack's digest."""

    place: Path

    def copies(self, digest: str) -> Iterable[Copy]:
        folders = [part / digest for part in sorted(self.place.iterdir())]
        return [Copy(str(each), partial(_read_file, each)) for each in folders if each.is_dir()]


def _read_file(folder: Path, file: str) -> Generator[bytes]:
    try:
        # A link could lead anywhere. A pipe would never end.
        handle = os.open(folder / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise MissingCopy(f"{file} does not exist") from error
    with os.fdopen(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise InvalidCopy(f"{file} must be a plain file")
        while chunk := opened.read(CHUNK):
            yield chunk


class Server:
    """The HTTP API of a personalpeft server, without proxies and redirects.

    Raises ``ValueError`` for a certificate file that cannot be read.
    """

    def __init__(self, url: str, token: str, certificate: Path | None, timeout: float) -> None:
        self.url, self._token, self.timeout = url, token, timeout
        trust = ssl.create_default_context()
        if certificate:
            try:
                trust.load_verify_locations(certificate)
            except OSError as error:
                raise ValueError(f"{certificate} must be a certificate: {error}") from error
        self._opener = build_opener(ProxyHandler({}), HTTPSHandler(context=trust), _NoRedirects)

    def copies(self, digest: str) -> Iterable[Copy]:
        return [Copy(self.url, lambda file: read_within(self.timeout, self._parts(digest, file)))]

    def _parts(self, digest: str, file: str) -> Generator[bytes]:
        address = f"{self.url}/api/v1/published/{digest}/{file}"
        request = Request(address, headers={"Authorization": f"Bearer {self._token}"})
        try:
            with self._opener.open(request, timeout=_SILENCE_SECONDS) as response:
                if response.status != 200:
                    raise _status_error(response.status)
                while chunk := response.read1(CHUNK):
                    yield chunk
                if response.length:
                    raise InvalidCopy("the connection ended within a file")
        except HTTPError as error:
            with error:
                raise _status_error(error.code) from error
        except HTTPException as error:
            # Its text may be the server's.
            raise InvalidCopy(f"the response is not valid HTTP ({type(error).__name__})") from error


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect, since the API key would go along."""


def _status_error(status: int) -> MissingCopy | InvalidCopy:
    if status == 404:
        return MissingCopy("the server has no such stack")
    if status in (401, 403):
        return InvalidCopy(
            "the server refuses the API key; make one with: personalpeft api-key make --worker"
        )
    if 300 <= status < 400:
        return InvalidCopy("the server redirects, which is not followed")
    return InvalidCopy(f"the server answered {status}")


def read_within(seconds: float, parts: Iterable[bytes]) -> Generator[bytes]:
    """Yield the parts of a file, read in a thread. Raises ``InvalidCopy`` after a time.

    A thread, since a read may block for longer and cannot be stopped. It ends after its next part.
    """
    # A part, the error that ends the read, or None at the end.
    queue: Queue[bytes | Exception | None] = Queue(1)
    cancelled = threading.Event()

    def read() -> None:
        try:
            for part in parts:
                queue.put(part)
                if cancelled.is_set():
                    return
            queue.put(None)
        except Exception as error:  # noqa: BLE001 - it is raised in the reading thread
            queue.put(error)

    threading.Thread(target=read, name="personalpeft-download", daemon=True).start()
    deadline = time.monotonic() + seconds
    try:
        while (part := queue.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            if isinstance(part, Exception):
                raise part
            yield part
    except Empty:
        raise InvalidCopy(f"a file took longer than {seconds:g} s") from None
    finally:
        cancelled.set()
        with suppress(Empty):
            queue.get_nowait()
