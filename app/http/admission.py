"""Decides from a request's headers whether the server keeps its body, before it reads the body.

- A body is kept only for a valid token.
- A body above ``validation.LARGEST`` is kept only where a route takes files or large bodies. The
  caller must be allowed to use a route that takes files.
- All bodies together take at most ``MOST_HELD`` bytes, those of one token at most
  ``validation.LARGEST_FILE``.

The announced size counts, from the headers to the end of the answer. The app answers a refused
request, so that the error has the form of its route.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from flask import Flask
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
from personalpeft_app.http.concurrency import Quota
from personalpeft_app.http.security import Caller

MOST_HELD = 2 * validation.LARGEST_FILE
"""Bytes of the bodies of all connections together."""


class BodyAdmission:
    """The bodies that the server holds, and the rules for new ones. Thread-safe."""

    def __init__(self, app: Flask, tokens: ApiKeys) -> None:
        self._app = app
        self._tokens = tokens
        self._bodies = Quota(
            MOST_HELD, validation.LARGEST_FILE, "Too many large requests are being received."
        )

    @contextmanager
    def hold(self, environ: Mapping[str, Any], size: int) -> Iterator[HTTPException | None]:
        """Reserve room for a body of ``size`` bytes inside the context.

        Yields None, or why the body is refused.
        """
        caller = self._caller(environ)
        refusal = self._refusal(caller, environ, size)
        with ExitStack() as held:
            if caller is not None and refusal is None:
                try:
                    held.enter_context(self._bodies.hold(caller.token, size))
                except TooManyRequests as error:
                    refusal = error
            yield refusal

    def _caller(self, environ: Mapping[str, Any]) -> Caller | None:
        authorization = environ.get("HTTP_AUTHORIZATION", "")
        try:
            return security.authenticate(
                self._tokens, authorization, environ.get("HTTP_X_API_KEY", "")
            )
        except PersonalPeftError:
            # The app meets the same error and answers with it.
            return None

    def _refusal(
        self, caller: Caller | None, environ: Mapping[str, Any], size: int
    ) -> HTTPException | None:
        if caller is None:
            return Unauthorized(security.NO_TOKEN)
        return self._refused_file(caller, environ, size) if size > validation.LARGEST else None

    def _refused_file(
        self, caller: Caller, environ: Mapping[str, Any], size: int
    ) -> HTTPException | None:
        path, method = "/" + environ["PATH_INFO"].lstrip("/"), environ["REQUEST_METHOD"]
        try:
            endpoint, names = self._app.url_map.bind("localhost").match(path, method=method)
        except HTTPException:
            return too_large(validation.LARGEST)
        view = self._app.view_functions[endpoint]
        is_open = validation.is_for_large_bodies(view)
        if not is_open and not validation.is_for_files(view):
            return too_large(validation.LARGEST)
        user = names.get("user")
        if not is_open and not (caller.is_admin if user is None else caller.may_act_for(user)):
            return Forbidden("This token may not send files here.")
        return too_large(validation.LARGEST_FILE) if size > validation.LARGEST_FILE else None


def too_large(most: int) -> RequestEntityTooLarge:
    """Return the refusal of a body of more than ``most`` bytes."""
    return RequestEntityTooLarge(f"The body is too large: at most {most} bytes are taken here.")
