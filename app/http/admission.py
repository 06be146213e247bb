"""Decides from a request's headers whether the server keeps its body, before it reads the body.

Waitress stores a whole body before the app runs. So its parser asks here once it has the headers.

- A body is kept only for a valid token.
- A body above ``validation.LARGEST`` is kept only where a route takes files. The caller must be
  allowed to use that route.
- All bodies together take at most ``MOST_HELD`` bytes, those of one token at most
  ``validation.LARGEST_FILE``.

The announced size counts, from the headers to the end of the answer. A refused body is thrown away
as it comes, or the connection is closed where that would take long. The app answers a refused
request, so that the error has the form of its route.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from io import BytesIO
from typing import Any

from flask import Flask
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.receiver import FixedStreamReceiver
from waitress.task import WSGITask
from werkzeug.exceptions import (
    Forbidden,
    HTTPException,
    RequestEntityTooLarge,
    TooManyRequests,
    Unauthorized,
)

from personalpeft.errors import PersonalPeftError
from personalpeft.store.api_keys import ApiKeys
from personalpeft_app.http import security, validation
from personalpeft_app.http.security import Caller

MOST_HELD = 2 * validation.LARGEST_FILE
"""Bytes of the bodies of all connections together."""
# Seconds after which a body that found no room is worth sending again.
_AGAIN = 5


class BodyAdmission:
    """The bodies that the server holds, and the rules for new ones. Thread-safe."""

    def __init__(self, app: Flask, tokens: ApiKeys) -> None:
        self._app = app
        self._tokens = tokens
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """Return the caller that the headers name, None without a valid token."""
        try:
            return security.authenticate(
                self._tokens, headers.get("AUTHORIZATION", ""), headers.get("X_API_KEY", "")
            )
        except PersonalPeftError:
            # The app meets the same error and answers with it.
            return None

    def admit(
        self, caller: Caller | None, method: str, path: str, size: int
    ) -> HTTPException | None:
        """Reserve room for a body of ``size`` bytes, or return why it is refused."""
        if caller is None:
            return Unauthorized(security.NO_TOKEN)
        if size > validation.LARGEST and (
            refusal := self._refused_file(caller, method, path, size)
        ):
            return refusal
        with self._lock:
            own = self._held.get(caller.token, 0) + size
            if own > validation.LARGEST_FILE or sum(self._held.values()) + size > MOST_HELD:
                return TooManyRequests(
                    "Too many large requests are being received.", retry_after=_AGAIN
                )
            self._held[caller.token] = own
        return None

    def release(self, token: str, size: int) -> None:
        """Give the room of an admitted body back."""
        with self._lock:
            left = self._held.pop(token) - size
            if left:
                self._held[token] = left

    def _refused_file(
        self, caller: Caller, method: str, path: str, size: int
    ) -> HTTPException | None:
        try:
            endpoint, names = self._app.url_map.bind("localhost").match(
                "/" + path.lstrip("/"), method=method
            )
        except HTTPException:
            return _too_large(validation.LARGEST)
        if not validation.is_for_files(self._app.view_functions[endpoint]):
            return _too_large(validation.LARGEST)
        user = names.get("user")
        if not (caller.is_admin if user is None else caller.may_act_for(user)):
            return Forbidden("This token may not send files here.")
        return _too_large(validation.LARGEST_FILE) if size > validation.LARGEST_FILE else None


def channel_class(admission: BodyAdmission) -> Any:
    """Return what makes the channels of a waitress server whose bodies ``admission`` decides on."""
    return partial(_Channel, admission)


class _Discard:
    """A buffer that keeps nothing of what is written to it."""

    def __len__(self) -> int:
        return 0

    def append(self, data: bytes) -> None:
        """Throw the bytes away."""

    def getfile(self) -> BytesIO:
        """Return an empty file."""
        return BytesIO()

    def close(self) -> None:
        """Do nothing."""


class _Parser(HTTPRequestParser):
    """The parser of one request, which asks ``admission`` between the headers and the body."""

    refusal: HTTPException | None = None
    _token, _size = "", 0

    def __init__(self, admission: BodyAdmission, adj: Any) -> None:
        super().__init__(adj)
        self._admission = admission

    def parse_header(self, header_plus: bytes) -> None:
        super().parse_header(header_plus)
        if self.body_rcv is None:
            return
        # The size of a chunked body is not announced, so it counts as the largest that may be.
        size = validation.LARGEST if self.chunked else self.content_length
        caller = self._admission.caller(self.headers)
        self.refusal = self._admission.admit(caller, self.command, self.path, size)
        if self.refusal is None and caller is not None:
            self._token, self._size = caller.token, size
            return
        # A client that still sends when its connection is closed may never read the answer.
        if (
            self.chunked
            or self.expect_continue
            or size > (validation.LARGEST if caller is None else validation.LARGEST_FILE)
        ):
            self._leave_body()
        else:
            self.body_rcv = FixedStreamReceiver(size, _Discard())

    def received(self, data: bytes) -> int:
        consumed: int = super().received(data)
        if self.chunked and self.body_bytes_received > validation.LARGEST:
            self.refusal = _too_large(validation.LARGEST)
            self.close()
            self._leave_body()
            self.error, self.completed = None, True
        return consumed

    def close(self) -> None:
        """Close the buffer and give its room back."""
        super().close()
        self.release()

    def release(self) -> None:
        """Give the room of the body back. Twice is fine."""
        token, size, self._size = self._token, self._size, 0
        if size:
            self._admission.release(token, size)

    def _leave_body(self) -> None:
        """Answer without the body, and have the connection closed after that."""
        self.body_rcv, self.content_length = None, 0
        self.chunked = self.expect_continue = False
        self.headers["CONNECTION"] = "close"


class _Task(WSGITask):
    """A request to the app, which learns why the body was refused."""

    def get_environment(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environment()
        environ[security.REFUSED_BODY] = self.request.refusal
        return environ


class _Channel(HTTPChannel):
    """A connection whose bodies ``admission`` decides on."""

    task_class = _Task

    def __init__(self, admission: BodyAdmission, *args: Any, **more: Any) -> None:
        self.parser_class = partial(_Parser, admission)
        super().__init__(*args, **more)

    def handle_close(self) -> None:
        """Close the connection. Waitress itself forgets a request that came in part."""
        super().handle_close()
        # Without the lock of the requests, which waitress may hold here.
        if self.request is not None:
            self.request.release()


def _too_large(most: int) -> RequestEntityTooLarge:
    return RequestEntityTooLarge(f"The body is too large: at most {most} bytes are taken here.")
