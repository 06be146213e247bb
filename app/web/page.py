"""Hands out the page: a handful of files that hold nothing of anybody, so that they need no token.

Invariants: what is handed out was read when the server started, so a request opens no file and no name leads out of the
folder; every answer carries the policy, under which nothing runs, looks or is asked but what comes from here; whatever a
person or a model wrote comes through ``/api/v1`` alone, with a token.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from flask import Blueprint, Response, request
from werkzeug.exceptions import NotFound

from personalpeft_app.http import security

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        # A text that is set as markup is an error, not a hole.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # Kept by the browser and asked after each time: a server of another version never meets a page of the last one.
    "Cache-Control": "no-cache",
}
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FIRST = "index.html"


def blueprint() -> Blueprint:
    """The page at ``/`` and its files under ``/web/``, for ``server.make_app``; it speaks with ``OwnApi`` beside it."""
    found = {each.name: each.read_bytes() for each in (files(__package__) / "site").iterdir() if each.is_file()}
    tags = {name: hashlib.sha256(content).hexdigest()[:32] for name, content in found.items()}
    made = Blueprint("web", __name__)

    def file(name: str) -> Response:
        if name not in found:
            raise NotFound("There is no such file.")
        kind = _KINDS[name[name.rindex(".") :]]
        response = Response(found[name], content_type=f"{kind}; charset=utf-8", headers=_HEADERS)
        response.set_etag(tags[name])
        response.make_conditional(request)
        return response

    @made.get("/", provide_automatic_options=False)
    @security.for_anybody
    def page() -> Response:
        return file(_FIRST)

    @made.get("/web/<name>", provide_automatic_options=False)
    @security.for_anybody
    def part(name: str) -> Response:
        return file(name)

    return made
