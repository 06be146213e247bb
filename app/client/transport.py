"""Requests to a server: one operation of the table is one request.

Invariant: an answer is a value of the table's type. Anything else that comes is an error.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx2

from personalpeft.archive import new_file
from personalpeft.errors import Busy, InvalidInput, NotFound, PersonalPeftError
from personalpeft.formatting import to_json
from personalpeft.types import Json
from personalpeft_app.http.api_v1.operations import PARAMETERS, PERSONAL, PREFIX, Operation
from personalpeft_app.http.api_v1.schemas import ErrorDetails, ErrorResponse
from personalpeft_app.http.api_v1.serialization import ERROR_KINDS, from_json


class NotAllowed(PersonalPeftError, PermissionError):
    """The API key is unknown, or not for this user."""


class Unreachable(PersonalPeftError, ConnectionError):
    """No server answers at the address, or the connection broke off."""


Arguments: TypeAlias = Mapping[str, Any] | None

_EXPORTED = "X-Personalpeft-Exported"
# Errors of the server itself, which the library does not know.
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
    """The address of a server, and the API key. Thread-safe: each request has its own connection."""

    def __init__(self, url: str, api_key: str, timeout: float) -> None:
        try:
            address = httpx2.URL(url)
            is_address = address.scheme in ("http", "https") and bool(address.host)
        except httpx2.InvalidURL:
            is_address = False
        if not is_address or address.query:
            raise InvalidInput(
                f"The address of a server must be http://HOST:PORT or a path below it, got {url!a:.200}.",
                hint="Give the address that personalpeft serve prints.",
            )
        if not api_key.isascii() or not api_key.isprintable() or not api_key:
            raise InvalidInput(
                "The API key must be printable ASCII text.",
                hint="Make one with: personalpeft api-key make --user NAME",
            )
        self._host = address.host
        self._client = httpx2.Client(
            base_url=address,
            headers={"Authorization": f"Bearer {api_key}", "Connection": "close"},
            timeout=timeout,
            verify=ssl.create_default_context() if address.scheme == "https" else False,
            # The API key must not reach a proxy, nor another server by a redirect.
            trust_env=False,
            follow_redirects=False,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )

    def call(
        self, operation: Operation, arguments: Arguments = None, data: bytes = b"", /, **path: str
    ) -> Any:
        """Return the answer, a value of the operation's type.

        Raises what the library would, ``NotAllowed`` and ``Unreachable``.

        Args:
            operation: The operation.
            arguments: The fields of its body, or else of its query.
            data: The file, if its body is one.
            path: The values in its path.
        """
        with self._answer(operation, arguments, path, data) as response:
            answer = response.read()
        if operation.answer in (None, bytes):
            return None if operation.answer is None else answer
        return _read(operation.response, answer)

    def events(
        self, operation: Operation, arguments: Arguments = None, /, **path: str
    ) -> Generator[Any, None, None]:
        """Yield the values of a stream of events, and None for each sign of life.

        Raises as ``call``, and the error of an error event.
        """
        with self._answer(operation, arguments, path) as response:
            name = ""
            # httpx2's own reader of events skips the signs of life.
            for line in response.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data" and name in operation.events:
                    event = _read(operation.events[name], value)
                    if isinstance(event, ErrorResponse):
                        raise error_of(event.error)
                    yield event
                elif value:
                    yield None

    def download(
        self, operation: Operation, arguments: Arguments, target: Path, /, **path: str
    ) -> Json:
        """Write the file that the operation answers, and return the server's summary of it.

        Raises as ``call``, and ``InvalidInput`` if the target exists or cannot be written.
        """
        with new_file(target) as file, self._answer(operation, arguments, path) as response:
            about: Json = _read(Json, response.headers.get(_EXPORTED, ""))
            for data in response.iter_bytes():
                file.write(data)
            return about

    @contextmanager
    def _answer(
        self, operation: Operation, arguments: Arguments, path: Mapping[str, str], data: bytes = b""
    ) -> Generator[httpx2.Response, None, None]:
        # Checked here too: another text could lead to another route.
        names = {name: from_json(PARAMETERS[name][0], each, name) for name, each in path.items()}
        try:
            with self._client.stream(
                operation.method,
                PREFIX + operation.path.format(**names),
                **_content(operation, arguments, data),
            ) as response:
                if response.status_code != operation.status:
                    status, again = response.status_code, response.headers.get("Retry-After")
                    refusal = _read(ErrorResponse, response.read(), status)
                    raise error_of(refusal.error, status, again)
                yield response
        except httpx2.RequestError as error:
            raise Unreachable(
                f"The server at {self._host} does not answer: {error or type(error).__name__}.",
                hint="Start it with: personalpeft serve",
            ) from error


def _content(operation: Operation, arguments: Arguments, data: bytes) -> dict[str, Any]:
    """Return the query and the body of a request as arguments of httpx2."""
    try:
        given = to_json(arguments or {})
        text = json.dumps(given, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            "The arguments must be data that JSON can hold.", hint="Give text, numbers and lists."
        ) from error
    if operation.body is not None:
        return {"content": text, "headers": {"Content-Type": "application/json"}}
    query = {"params": {name: value for name, value in given.items() if value is not None}}
    upload = {"content": data, "headers": {"Content-Type": PERSONAL}} if operation.upload else {}
    return query | upload


def _read(kind: Any, data: str | bytes, status: int = 200) -> Any:
    """Return the value of a type from JSON. Raises ``Unreachable``."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise Unreachable(
            f"Another program answers at this address, with status {status}.",
            hint="Check the address.",
        ) from error
    try:
        return from_json(kind, found, "The answer")
    except InvalidInput as error:
        raise Unreachable(
            f"The server's answer is invalid: {error}", hint="Update the server or this client."
        ) from error


def error_of(details: ErrorDetails, status: int = 0, again: str | None = None) -> PersonalPeftError:
    """Return the error of a fault, of the class that it had in the server."""
    kind = ERROR_KINDS.get(details.kind) or _BY_STATUS.get(status, PersonalPeftError)
    if issubclass(kind, Busy):
        after = float(again) if again and again.isdecimal() else None
        return kind(details.message, hint=details.hint, retry_after=after)
    return kind(details.message, hint=details.hint)
