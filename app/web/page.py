"""Serve the files of the page. They hold no data of users, so they need no API key.

Invariants: the files are read when the server starts, so a request opens no file. Every response
has the content security policy, which allows scripts, styles, images and requests of this server
alone. Texts of users and models come through ``/api/v1``, with an API key.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from flask import Blueprint, Response, jsonify, redirect, request
from werkzeug.exceptions import NotFound, Unauthorized
from werkzeug.wrappers import Response as BaseResponse

from personalpeft_app.http import security
from personalpeft_app.web.sign_in import SignInCodes

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
}
# The browser checks the page each time. The address of the page's files has a digest of them all.
# So the browser fetches them once, and no server meets a script of another version.
_AGAIN = "no-cache"
_FOR_GOOD = "max-age=31536000, immutable"
_KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_FIRST = "index.html"


def blueprint(codes: SignInCodes | None = None) -> Blueprint:
    """Return the page at ``/`` and its files under ``/web/VERSION/``. The page needs ``ApiV1``.

    With ``codes``, a ``POST`` to ``/web/session`` exchanges a code, sent as a bearer token, for a
    session token.
    """
    found = {
        each.name: each.read_bytes()
        for each in (files(__package__) / "site").iterdir()
        if each.is_file()
    }
    version = hashlib.sha256(
        b"\0".join(content for _, content in sorted(found.items()))
    ).hexdigest()[:12]
    first = found.pop(_FIRST).replace(b'="web/', f'="web/{version}/'.encode())
    made = Blueprint("web", __name__)

    def answer(name: str, content: bytes, kept: str) -> Response:
        kind = _KINDS[name[name.rindex(".") :]]
        response = Response(
            content,
            content_type=f"{kind}; charset=utf-8",
            headers={**_HEADERS, "Cache-Control": kept},
        )
        response.set_etag(hashlib.sha256(content).hexdigest()[:32])
        response.make_conditional(request)
        return response

    @made.get("/", provide_automatic_options=False)
    @security.public
    def page() -> Response | BaseResponse:
        if not request.environ["PATH_INFO"]:
            # A mounted app without the slash: the files would be beside it.
            return redirect(f"{request.root_path}/", 308)
        return answer(_FIRST, first, _AGAIN)

    @made.get("/web/<of>/<name>", provide_automatic_options=False)
    @security.public
    def part(of: str, name: str) -> Response:
        if of != version or name not in found:
            raise NotFound("There is no such file.")
        return answer(name, found[name], _FOR_GOOD)

    if codes is not None:
        # In a header, since the server keeps no body of a caller without an API key.
        @made.post("/web/session", provide_automatic_options=False)
        @security.public
        def session() -> Response:
            given = request.authorization
            secret = codes.redeem(given.token or "") if given is not None else None
            if secret is None:
                raise Unauthorized(
                    "This sign-in link was used before or is too old. Start the server again for a new one."
                )
            return jsonify({"token": secret})

    return made
