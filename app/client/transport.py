"""The line to a server: one operation of the table becomes one request, and its answer a value or an error of ours.

Invariant: what was sent and what came are as the table says; whatever else comes is an error, never a value.
"""

from __future__ import annotations

import http.client
import json
import os
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

from personalpeft.errors import ERROR_CODES, Busy, InvalidInput, NotFound, PersonalPeftError
from personalpeft.formatting import to_json
from personalpeft_app.http.api_v1.operations import PARAMETERS, PERSONAL, PREFIX, Operation
from personalpeft_app.http.api_v1.schemas import Fault, Refusal
from personalpeft_app.http.api_v1.serialization import from_json


class NotAllowed(PersonalPeftError, PermissionError):
    """The token is not known, or not for this user."""


class Unreachable(PersonalPeftError, ConnectionError):
    """No server answers there, or it went away in the middle."""


_EXPORTED = "X-Personalpeft-Exported"
_CHUNK = 2**16
_CUT_OFF = "The server went away in the middle of the file."
_TRY_AGAIN = "Nothing was kept of it. Try again."
_KINDS = {kind.__name__: kind for kind in ERROR_CODES}
# What the server says of a request before the library has heard of it.
_BY_STATUS: Mapping[int, type[PersonalPeftError]] = {
    400: InvalidInput,
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    413: InvalidInput,
    415: InvalidInput,
    429: Busy,
}


class Transport:
    """Where the server is, and the token. Safe to use from several threads: each request has a connection of its own."""

    def __init__(self, url: str, token: str, timeout: float) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise InvalidInput(
                f"{url!a} is no address of a server.", hint="Give http://HOST:PORT."
            ) from error
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.path.strip("/")
            or parts.query
        ):
            raise InvalidInput(f"{url!a} is no address of a server.", hint="Give http://HOST:PORT.")
        if not token.isascii() or not token.isprintable() or not token:
            raise InvalidInput(
                "That is no token.", hint="It is in the file token of the server's home."
            )
        self._to = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname, port
        self._token = token
        self._timeout = timeout

    def call(
        self, operation: Operation, body: Any = None, query: Any = None, /, **path: str
    ) -> Any:
        """The answer: a value of the operation's type, a ``Page`` of them, or None. Raises what the library would, ``NotAllowed``,
        ``Unreachable``.
        """
        with self._answer(operation, body, query, path) as response:
            if operation.answer is None:
                return None
            if operation.answer is bytes:
                return response.read()
            return _value(operation.response, _json(response.read()))

    def events(
        self, operation: Operation, body: Any = None, query: Any = None, /, **path: str
    ) -> Generator[Any, None, None]:
        """The values of a stream of events, and None where the server says only that it is there. Raises as ``call``, and the error
        that an event tells of.
        """
        with self._answer(operation, body, query, path) as response:
            name = ""
            for line in response:
                field, _, value = line.decode().rstrip("\n").partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    found = (
                        _value(operation.events[name], _json(value))
                        if name in operation.events
                        else None
                    )
                    if isinstance(found, Refusal):
                        raise error_of(found.error)
                    yield found
                elif value:
                    yield None

    def download(
        self, operation: Operation, query: Any, target: Path, /, **path: str
    ) -> Mapping[str, Any]:
        """Writes the file that the operation answers to where nothing is yet; what the server says of it. Raises as ``call``, and
        ``InvalidInput`` where it cannot be written.
        """
        if target.exists() or target.is_symlink():
            raise InvalidInput(
                f"There is something at {target} already.",
                hint="Choose another name, or move that away.",
            )
        with self._answer(operation, None, query, path) as response:
            about: Mapping[str, Any] = _json(response.getheader(_EXPORTED, ""))
            _save(response, target)
            return about

    @contextmanager
    def _answer(
        self, operation: Operation, body: Any, query: Any, path: Mapping[str, str]
    ) -> Generator[HTTPResponse, None, None]:
        connection = self._to(self._host, self._port, timeout=self._timeout)
        try:
            # A server that refuses a body answers before it has read all of it.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(
                    operation.method, _target(operation, query, path), *self._sent(operation, body)
                )
            response = connection.getresponse()
            if response.status != operation.status:
                _fail(response.status, response.read(), response.getheader("Retry-After"))
            yield response
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, PersonalPeftError):
                raise
            why = str(error) or type(error).__name__
            raise Unreachable(
                f"The server at {self._host} does not answer: {why}.",
                hint="Start it with: personalpeft serve",
            ) from error
        finally:
            connection.close()

    def _sent(self, operation: Operation, body: Any) -> tuple[bytes | None, dict[str, str]]:
        headers = {"Authorization": f"Bearer {self._token}"}
        if operation.upload:
            return body, {**headers, "Content-Type": PERSONAL}
        if body is None:
            return None, headers
        try:
            data = json.dumps(to_json(body), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                "This cannot be sent as JSON.", hint="Give text, numbers and lists."
            ) from error
        return data, {**headers, "Content-Type": "application/json"}


def _save(response: HTTPResponse, target: Path) -> None:
    """Write the body of a response to ``target`` in one step, readable by its owner alone.

    Raises ``InvalidInput`` where it cannot be written, ``Unreachable`` where the body is cut off.
    """
    try:
        # The mode of a file made by mkstemp is 0600 from the start.
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".personal-", suffix=".part")
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                while data := _read(response):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except Unreachable:
        raise
    except OSError as error:
        why = error.strerror or error
        raise InvalidInput(
            f"{target} cannot be written: {why}.", hint="Choose another place."
        ) from error


def _read(response: HTTPResponse) -> bytes:
    """Return the next bytes of a body, none at its end. Raises ``Unreachable`` where it is cut off."""
    try:
        data = response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(_CUT_OFF, hint=_TRY_AGAIN) from error
    # A body that ends before its announced length is no error to http.client.
    if not data and response.length:
        raise Unreachable(_CUT_OFF, hint=_TRY_AGAIN)
    return data


def _target(operation: Operation, query: Any, path: Mapping[str, str]) -> str:
    # Checked here too: what the grammar does not allow could lead to another route.
    checked = {name: from_json(PARAMETERS[name][0], value, name) for name, value in path.items()}
    target = PREFIX + operation.path.format(
        **{name: quote(value, safe="") for name, value in checked.items()}
    )
    asked = (
        {}
        if query is None
        else {name: value for name, value in to_json(query).items() if value is not None}
    )
    words = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in asked.items()
    }
    return f"{target}?{urlencode(words)}" if words else target


def _value(kind: Any, found: Any) -> Any:
    try:
        return from_json(kind, found, "The answer")
    except InvalidInput as error:
        raise Unreachable(
            f"The server answers something else: {error}", hint="Is it of the same version?"
        ) from error


def _json(data: str | bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise Unreachable(
            "What answers there is no server of ours.", hint="Look at the address."
        ) from error


def error_of(told: Fault, status: int = 0, again: str | None = None) -> PersonalPeftError:
    """The error that a fault tells of, of the class that it had in the server."""
    kind = _KINDS.get(told.kind) or _BY_STATUS.get(status, PersonalPeftError)
    if issubclass(kind, Busy):
        after = float(again) if again and again.isdecimal() else None
        return kind(told.message, hint=told.hint, retry_after=after)
    return kind(told.message, hint=told.hint)


def _fail(status: int, data: bytes, again: str | None) -> NoReturn:
    try:
        told = from_json(Refusal, json.loads(data)).error
    except ValueError as error:
        raise Unreachable(
            f"What answers there says {status}, and nothing of ours.", hint="Look at the address."
        ) from error
    raise error_of(told, status, again)
