"""Where copies of a stack are found: below a shared folder, and at a personalpeft server. ``bucket`` has those in object storage.

Invariants: a source gives bytes and decides nothing by them; a token goes to the one server that it is for, however that answers,
and is never part of what is said; what takes too long ends.
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
"""What a stack's folder holds, in the order in which its digest reads it."""

CHUNK = 1 << 20
"""How much of a file is read at once."""
# Of a server that says nothing, in seconds; how long all of it may take is a setting.
_SILENCE = 10.0


class Missing(Exception):
    """There is no such stack (any more)."""


class Unfit(Exception):
    """What there is cannot be had, or is not what the name stands for."""


class Copy(Protocol):
    """A stack as one place has it; ``str`` says where."""

    def read(self, file: str) -> Generator[bytes]:
        """One of ``FILES``, in parts. Raises ``Missing``, ``Unfit``, ``OSError``."""


class Source(Protocol):
    """Where copies are."""

    def copies(self, digest: str) -> Iterable[Copy]:
        """Those of a stack, the best first. Raises ``OSError``."""


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A folder below which every program has a part of its own, and in it the folders of its stacks by their digests."""

    place: Path

    def copies(self, digest: str) -> Iterable[Copy]:
        return [
            _Folder(part / digest)
            for part in sorted(self.place.iterdir())
            if (part / digest).is_dir()
        ]


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def read(self, file: str) -> Generator[bytes]:
        try:
            # A link could lead anywhere, and a pipe would never end.
            handle = os.open(self.path / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise Missing(f"{file} is not there") from error
        with os.fdopen(handle, "rb") as opened:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise Unfit(f"{file} is no plain file")
            while chunk := opened.read(CHUNK):
                yield chunk


class Server:
    """The HTTP API of a personalpeft server. Asked directly: never through a proxy, and where it sends one elsewhere, nobody
    goes. Raises ``ValueError`` for a certificate file that cannot be read.
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
                raise ValueError(
                    f"{certificate} cannot be read as a certificate: {error}"
                ) from error

    def copies(self, digest: str) -> Iterable[Copy]:
        return [_Remote(self, digest)]

    def read(self, digest: str, file: str) -> Generator[bytes]:
        """See ``Copy.read``."""
        connection = self._connection()
        late = threading.Event()
        try:
            connection.connect()
            line = connection.sock

            def cut() -> None:
                late.set()
                # Beneath TLS, which another thread is in the middle of.
                with suppress(OSError):
                    socket.socket.shutdown(line, socket.SHUT_RDWR)

            watch = threading.Timer(self.timeout, cut)
            watch.daemon = True
            watch.start()
            try:
                target = f"{self._path}/api/v1/served/{digest}/{file}"
                connection.request(
                    "GET", target, headers={"Authorization": f"Bearer {self._token}"}
                )
                response = connection.getresponse()
                _check(response)
                while chunk := response.read1(CHUNK):
                    yield chunk
                if response.length or late.is_set():
                    raise Unfit("it broke off in the middle of a file")
            finally:
                watch.cancel()
        except (OSError, HTTPException, Unfit) as error:
            if late.is_set():
                raise Unfit(f"it took longer than {self.timeout:g} s over a file") from error
            if isinstance(error, HTTPException):
                # Its words may be the server's.
                raise Unfit(
                    f"it does not answer as a server does ({type(error).__name__})"
                ) from error
            raise
        finally:
            connection.close()

    def _connection(self) -> HTTPConnection:
        if self._trust:
            return HTTPSConnection(self._host, self._port, timeout=_SILENCE, context=self._trust)
        return HTTPConnection(self._host, self._port, timeout=_SILENCE)


@dataclass(frozen=True, slots=True)
class _Remote:
    server: Server
    digest: str

    def __str__(self) -> str:
        return self.server.url

    def read(self, file: str) -> Generator[bytes]:
        return self.server.read(self.digest, file)


def _check(response: HTTPResponse) -> None:
    if response.status == 404:
        raise Missing("it has no such stack")
    if response.status in (401, 403):
        raise Unfit("it does not accept the token: personalpeft token make --worker makes one")
    if 300 <= response.status < 400:
        raise Unfit("it sends elsewhere, where nobody goes")
    if response.status != 200:
        raise Unfit(f"it answered {response.status}")
