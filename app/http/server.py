"""The Flask app over an open runtime.

Invariants:

- Routes use the runtime's public surface. Every route that is not ``security.public`` needs an API key.
- No byte of a body is kept before its API key, size and quota were checked.
- A body is received before its request counts, so a slow client takes no place of the limiter.
- Requests above the limit are refused at once, so a thread is left for ``/healthz``.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from io import BytesIO
from typing import Any

from flask import Blueprint, Flask, Response, g, jsonify, request
from werkzeug.exceptions import ServiceUnavailable

from personalpeft import Runtime
from personalpeft.errors import format_origin
from personalpeft_app.http import (
    anthropic_messages,
    error_responses,
    metrics,
    openai_chat,
    openai_responses,
    openai_rest,
    security,
    validation,
)
from personalpeft_app.http.concurrency import RETRY_AFTER, ConcurrencyLimiter, Quota, limiter_of
from personalpeft_app.http.models import Models

access = logging.getLogger("personalpeft.access")

# Bytes of the bodies of all requests together. They lie in memory.
_MOST_HELD = 2 * validation.LARGEST_FILE
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class _App(Flask):
    """A Flask app whose log names errors without their texts."""

    def log_exception(self, exc_info: Any) -> None:
        """Log an unhandled error. Flask itself would log its text and the path."""
        self.logger.error("a bug outside of a route: %s", format_origin(exc_info[1]))


def make_app(
    runtime: Runtime,
    *,
    owner: str | None = None,
    names: Collection[str] = (),
    origins: Collection[str] = (),
    limiter: ConcurrencyLimiter | None = None,
    more: Sequence[Blueprint] = (),
) -> Flask:
    """Return the app over an open runtime, which the caller closes.

    Args:
        runtime: The open runtime.
        owner: The user that an admin's request without a user means.
        names: Host names to answer to, besides localhost and addresses.
        origins: Origins of other pages that may use the server.
        limiter: The limit of concurrent requests, by default as many as the engine takes.
        more: Further blueprints, which ``security`` checks too.
    """
    app = _App("personalpeft", static_folder=None)
    app.config.update(
        MAX_CONTENT_LENGTH=validation.LARGEST, MAX_FORM_MEMORY_SIZE=validation.LARGEST
    )
    app.url_map.strict_slashes = False
    app.json.sort_keys = False  # type: ignore[attr-defined]  # of the default provider
    security.install_auth(app, runtime.api_keys, names, origins)
    error_responses.install_error_handlers(app, (runtime.settings.home, runtime.settings.cache))

    limiter = limiter or limiter_of(runtime)

    @app.get("/healthz")
    @security.public
    def healthz() -> tuple[Response, int]:
        stopping = limiter.stopping.is_set()
        return jsonify({"status": "stopping" if stopping else "ok"}), 503 if stopping else 200

    _admit(app, limiter)
    models = Models(runtime, owner)
    for blueprint in (
        openai_chat.blueprint(models),
        openai_responses.blueprint(models),
        openai_rest.blueprint(runtime, models),
        anthropic_messages.blueprint(models),
        metrics.blueprint(runtime, limiter),
        *more,
    ):
        app.register_blueprint(blueprint)
    return app


def _admit(app: Flask, limiter: ConcurrencyLimiter) -> None:
    """Receive bodies, limit concurrent requests, and log each without its content."""
    bodies = Quota(
        _MOST_HELD, validation.LARGEST_FILE, "Too many large requests are being received."
    )

    def begin() -> None:
        g.begun, g.held = time.monotonic(), ExitStack()
        if security.is_open():
            request.max_content_length = 0
            return
        if limiter.stopping.is_set():
            raise ServiceUnavailable("The server is stopping.", retry_after=RETRY_AFTER)
        caller, size = security.caller(), security.check_body()
        if size:
            g.held.enter_context(bodies.hold(caller.id, size))
            # In memory: a user's file is not to lie on a disk.
            body = g.held.enter_context(BytesIO())
            shutil.copyfileobj(request.stream, body)
            body.seek(0)
            request.stream = body
        # An administrator's API key may act for many users.
        is_admin = caller.user is None
        g.held.enter_context(limiter.hold(caller.user or caller.id, whole=is_admin))

    def end(response: Response) -> Response:
        # The rule, not the path: user ids and queries are private.
        method, rule = request.method, request.url_rule or "no route"
        begun, held = g.get("begun", time.monotonic()), g.get("held", ExitStack())
        close = response.close

        def close_and_release() -> None:
            try:
                close()
            finally:
                held.close()
                took = 1000 * (time.monotonic() - begun)
                access.info("%s %s %d %.0f ms", method, rule, response.status_code, took)

        # At the last byte: a stream counts until its end, also where a plugin's close fails.
        response.close = close_and_release  # type: ignore[method-assign]  # no hook is that late
        # Werkzeug closes no response of a file that it passes through.
        response.direct_passthrough = False
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    app.before_request(begin)
    app.after_request(end)
