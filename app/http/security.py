"""Authentication and authorization: the checks of every request before its body is read.

Blueprints that are registered with the app of ``server.make_app`` get these checks: Host, Origin,
size and API key. A view asks:

    user = require_user(user_id)     # the valid id; 403 unless the caller is that user or an admin
    require_admin()                  # 403 unless the caller is an admin
    caller().user                    # the user of the API key; None for an admin and a worker

Invariants:

- An unknown name in ``Host`` is refused, against DNS rebinding. An address is no name.
- A page of another origin is refused even with an API key, unless the operator named the origin.
- Only views marked ``public`` are open without an API key. Only views marked ``allow_workers`` are
  open to workers.
- A refusal does not tell whether a user exists.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flask import Flask, Response, current_app, g, request
from werkzeug.exceptions import BadRequest, Forbidden, RequestEntityTooLarge, Unauthorized

from personalpeft.ids import check_user_id
from personalpeft.plugins import HttpHost
from personalpeft.store.api_keys import ApiKey, ApiKeys
from personalpeft_app.http import validation

View = TypeVar("View", bound=Callable[..., Any])

NO_API_KEY = "A valid API key is needed: Authorization: Bearer <key>, or X-Api-Key: <key>."
_METHODS = "GET, POST, PUT, PATCH, DELETE"
_HOST = re.compile(r"(\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(:[0-9]{1,5})?")


def caller() -> ApiKey:
    """Return the API key of the current, authenticated request."""
    found: ApiKey = g.caller
    return found


def require_user(user: str) -> str:
    """Return a valid user id, or raise ``InvalidId`` or, for another user, ``Forbidden``."""
    check_user_id(user)
    if not caller().may_act_for(user):
        raise Forbidden("This API key is another user's.")
    return user


def require_admin() -> None:
    """Raise ``Forbidden`` for the API key of one user."""
    if not caller().is_admin:
        raise Forbidden("This needs an admin API key.")


def _marking(mark: str) -> Callable[[View], View]:
    def set_mark(view: View) -> View:
        setattr(view, mark, True)
        return view

    return set_mark


public = _marking("public")
"""Mark a view that needs no API key: its answer holds nothing of a user."""
allow_workers = _marking("for_workers")
"""Mark a view that is open to a worker's API key."""
for_files = _marking("for_files")
"""Mark a view whose body is a file of the user in its path, or of an admin."""
for_large_bodies = _marking("for_large_bodies")
"""Mark a view whose body may be as large as a file, from any valid API key."""


def plugin_host() -> HttpHost:
    """Return what an extension may use of the server."""
    return HttpHost(lambda: caller().id, lambda: caller().user, public, for_large_bodies)


def is_open() -> bool:
    """Return whether this request needs no API key."""
    return _is_marked("public")


def install_auth(
    app: Flask,
    api_keys: ApiKeys,
    names: Collection[str] = (),
    origins: Collection[str] = (),
) -> None:
    """Check every request.

    Args:
        app: The app.
        api_keys: The API keys of the home.
        names: Host names of the server besides localhost and addresses.
        origins: Origins of other pages that may use the server, such as "http://localhost:3000".
    """
    named = {name.lower() for name in names}
    known = named | {"localhost"}

    def authenticate_request() -> Response | None:
        host = request.headers.get("Host", "")
        if not _is_ours(host, known):
            raise BadRequest(
                "The host name is unknown to this server. Start it with --name and that name."
            )
        origin = request.headers.get("Origin")
        # A proxy may change Host. A page at a name of the server is the server's own.
        is_own = origin in (f"http://{host}", f"https://{host}") or _host_of(origin) in named
        if origin is not None and not is_own and origin not in origins:
            raise Forbidden(
                "Pages of another origin may not use this server. Start it with --origin and that"
                " origin to let them."
            )
        if origin in origins and request.method == "OPTIONS":
            return Response(status=204)
        if is_open():
            return None
        kind, _, secret = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            secret = request.headers.get("X-Api-Key", "")
        found = api_keys.authenticate(secret.strip())
        if found is None:
            raise Unauthorized(NO_API_KEY)
        g.caller = found
        # Before any view, so a view that forgets its checks is closed to workers too.
        if found.worker and not _is_marked("for_workers"):
            raise Forbidden("A worker's API key only fetches live stacks.")
        return None

    def allow_origin(response: Response) -> Response:
        origin = request.headers.get("Origin")
        if origin is not None and origin in origins:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Allow-Methods"] = _METHODS
            asked = request.headers.get("Access-Control-Request-Headers", "")
            response.headers["Access-Control-Allow-Headers"] = asked or "Authorization"
            response.headers["Access-Control-Expose-Headers"] = "*"
        if origins:
            response.vary.add("Origin")
        return response

    app.before_request(authenticate_request)
    app.after_request(allow_origin)


def check_body() -> int:
    """Return the bytes of this request's body, and let no more be read.

    A chunked body has no size, so it counts as ``validation.LARGEST``. Raises ``Forbidden`` and
    ``RequestEntityTooLarge``.
    """
    is_file = _is_marked("for_files")
    if is_file:
        user = (request.view_args or {}).get("user")
        require_admin() if user is None else require_user(user)
    is_large = is_file or _is_marked("for_large_bodies")
    most = validation.LARGEST_FILE if is_large else validation.LARGEST
    size = request.content_length
    if size is None:
        size = validation.LARGEST if request.environ.get("wsgi.input_terminated") else 0
    if size > most:
        raise RequestEntityTooLarge(f"A body may have at most {most} bytes here, got {size}.")
    request.max_content_length = size
    return size


def _is_marked(mark: str) -> bool:
    return hasattr(current_app.view_functions.get(request.endpoint or ""), mark)


def _host_of(origin: str | None) -> str | None:
    try:
        return urlsplit(origin or "").hostname
    except ValueError:
        return None


def _is_ours(host: str, names: Collection[str]) -> bool:
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found["address"] or found["name"]
    if name.lower() in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
