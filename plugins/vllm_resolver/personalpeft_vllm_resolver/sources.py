"""Sources of copies of a stack: a shared folder, and a personalpeft server. See also ``bucket``.

Invariants: a source returns bytes and does not interpret them. A token is sent to its own server
only, also after a redirect, and is never shown. Every read ends after a timeout.
"""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

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


class Copy(Protocol):
    """A copy of a stack; ``str`` returns its place."""

    def read(self, file: str) -> Generator[bytes]:
        """Yield one of ``FILES`` in parts. Raises ``MissingCopy``, ``InvalidCopy``, ``OSError``."""


class Source(Protocol):
    """A place with copies."""

    def copies(self, digest: str) -> Iterable[Copy]:
        """Return the copies of a stack, the best first. Raises ``OSError``."""


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A folder with a subfolder for each program, which has a folder for each stack's digest."""

    place: Path

    def copies(self, digest: str) -> Iterable[Copy]:
        return [
            _FolderCopy(part / digest)
            for part in sorted(self.place.iterdir())
            if (part / digest).is_dir()
        ]


@dataclass(frozen=True, slots=True)
class _FolderCopy:
    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def read(self, file: str) -> Generator[bytes]:
        try:
            # A link could lead anywhere. A pipe would never end.
            handle = os.open(self.path / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
        parts = urlsplit(url)
        self.url, self._token, self.timeout = url, token, timeout
        self._host, self._port, self._path = parts.hostname or "", parts.port, parts.path
        self._trust = ssl.create_default_context() if parts.scheme == "https" else None
        if self._trust and certificate:
            try:
                self._trust.load_verify_locations(certificate)
            except OSError as error:
                raise ValueError(f"{certificate} must be a certificate: {error}") from error

    def copies(self, digest: str) -> Iterable[Copy]:
        return [_RemoteCopy(self, digest)]

    def read(self, digest: str, file: str) -> Generator[bytes]:
        """See ``Copy.read``."""
        connection = self._connection()
        timed_out = threading.Event()
        try:
            connection.connect()
            sock = connection.sock

            def cut() -> None:
                timed_out.set()
                # On the plain socket: another thread is using its TLS layer.
                with suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

            timer = threading.Timer(self.timeout, cut)
            timer.daemon = True
            timer.start()
            try:
                target = f"{self._path}/api/v1/served/{digest}/{file}"
                connection.request(
                    "GET", target, headers={"Authorization": f"Bearer {self._token}"}
                )
                response = connection.getresponse()
                _check_status(response)
                while chunk := response.read1(CHUNK):
                    yield chunk
                if response.length or timed_out.is_set():
                    raise InvalidCopy("the connection ended within a file")
            finally:
                timer.cancel()
        except (OSError, HTTPException, InvalidCopy) as error:
            if timed_out.is_set():
                raise InvalidCopy(f"a file took longer than {self.timeout:g} s") from error
            if isinstance(error, HTTPException):
                # Its text may be the server's.
                raise InvalidCopy(
                    f"the response is not valid HTTP ({type(error).__name__})"
                ) from error
            raise
        finally:
            connection.close()

    def _connection(self) -> HTTPConnection:
        if self._trust:
            return HTTPSConnection(
                self._host, self._port, timeout=_SILENCE_SECONDS, context=self._trust
            )
        return HTTPConnection(self._host, self._port, timeout=_SILENCE_SECONDS)


@dataclass(frozen=True, slots=True)
class _RemoteCopy:
    server: Server
    digest: str

    def __str__(self) -> str:
        return self.server.url

    def read(self, file: str) -> Generator[bytes]:
        return self.server.read(self.digest, file)


def _check_status(response: HTTPResponse) -> None:
    if response.status == 404:
        raise MissingCopy("the server has no such stack")
    if response.status in (401, 403):
        raise InvalidCopy(
            "the server refuses the token; make one with: personalpeft token make --worker"
        )
    if 300 <= response.status < 400:
        raise InvalidCopy("the server redirects, which is not followed")
    if response.status != 200:
        raise InvalidCopy(f"the server answered {response.status}")
