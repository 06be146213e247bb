"""Turn errors into a status and a body, in the format of the route's clients.

Invariants: ``personalpeft.errors.ERROR_CODES`` has the status of each error of the library. A body
holds no prompt, reply or path of this machine. The client gets the id of a bug, and the log its
type and origin, never its text.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flask import Flask, Response, current_app, jsonify, request
from werkzeug.exceptions import HTTPException

from personalpeft.errors import (
    AdapterError,
    CardError,
    Damaged,
    HomeError,
    MissingPackage,
    PersonalPeftError,
    PluginError,
    PromptTooLong,
    QueueFull,
    WeightsError,
    error_id,
    format_origin,
    get_error_codes,
    get_error_type,
)
from personalpeft_app.http.api_v1.schemas import ErrorDetails

log = logging.getLogger("personalpeft.http")
_FOLDERS = "personalpeft.folders"

# Their messages name files of this machine, so only the log gets them.
_LOGGED_ONLY = (
    AdapterError,
    CardError,
    Damaged,
    HomeError,
    MissingPackage,
    PluginError,
    WeightsError,
)
# Names of OpenAI and Anthropic for statuses.
_OPENAI = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC = _OPENAI | {
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
_ROUTES_HINT = "GET /api/v1/openapi.json lists all addresses below /api/v1."
_NO_ROUTE = {
    404: ("There is nothing at this address.", _ROUTES_HINT),
    405: ("This address does not take this method.", _ROUTES_HINT),
}


class InvalidParameter(HTTPException):
    """A parameter of a request is invalid or unsupported; ``param`` names it, or is empty."""

    code = 400

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param or 'The body'} {problem}.")
        self.param = param or None


class UnknownModel(HTTPException):
    """The model of a request is unknown."""

    code = 404


# Clients recognise these errors by OpenAI's codes, to shorten a prompt or choose another model.
_OPENAI_CODES: Mapping[type[BaseException], str] = {
    UnknownModel: "model_not_found",
    PromptTooLong: "context_length_exceeded",
}


def install_error_handlers(app: Flask, folders: Iterable[Path]) -> None:
    """Install a handler for all errors. No body holds the paths of the ``folders``."""
    app.extensions[_FOLDERS] = folders

    def respond(error: Exception) -> Response:
        status, details = describe_error(error, folders, str(request.url_rule or "no route"))
        response = jsonify(_body(status, details, error, request.path))
        response.status_code = status
        if status == 401:
            response.headers["WWW-Authenticate"] = 'Bearer realm="personalpeft"'
        again = getattr(error, "retry_after", None)
        is_hopeless = isinstance(error, QueueFull) and again is None
        if is_hopeless or not getattr(error, "should_retry", True):
            response.headers["X-Should-Retry"] = "false"
        if again is not None:
            response.headers["Retry-After"] = str(math.ceil(again))
        for name, value in error.get_headers() if isinstance(error, HTTPException) else ():
            if name not in ("Content-Type", "Content-Length"):
                response.headers.setdefault(name, value)
        return response

    app.register_error_handler(Exception, respond)


def error_formatter() -> Callable[[Exception], dict[str, Any]]:
    """Return a function that formats errors after the response has started, without Flask."""
    path, rule, folders = request.path, str(request.url_rule), current_app.extensions[_FOLDERS]

    def format_error(error: Exception) -> dict[str, Any]:
        status, details = describe_error(error, folders, rule)
        return _body(status, details, error, path)

    return format_error


def describe_error(
    error: BaseException, folders: Iterable[Path], where: str
) -> tuple[int, ErrorDetails]:
    """Return the status of an error, and what a client may know of it.

    Args:
        error: An error of the library or of HTTP, or a bug. The log gets a bug too.
        folders: Folders whose paths no client may see.
        where: What failed, for the log.
    """
    if isinstance(error, HTTPException):
        name, text, hint = type(error).__name__, error.description or error.name, ""
        if "description" not in vars(error):  # Raised by the routing.
            text, hint = _NO_ROUTE.get(error.code or 500, (text, hint))
            routes = current_app.create_url_adapter(request)
            if error.code == 404 and routes and routes.test(f"/v1{request.path}", request.method):
                hint = f"Did you mean /v1{request.path}? Add /v1 to the base URL."
                # Client libraries show the message alone.
                text = f"{text} {hint}"
        return error.code or 500, ErrorDetails(name, text, hint)
    if not isinstance(error, PersonalPeftError):
        log.error("a bug in %s: %s", where, format_origin(error))
        message = f"its log has the details under the id {error_id(error)}."
        return 500, ErrorDetails("Bug", f"This is a bug in personalpeft; {message}")
    status, kind = get_error_codes(error).http_status, get_error_type(error)
    if isinstance(error, _LOGGED_ONLY):
        # Messages of adapter files and plugins may hold private text, others only files.
        foreign = isinstance(error, AdapterError | PluginError)
        log.error(
            "%s",
            format_origin(error) if foreign else f"{kind.__name__}: {error.message} {error.hint}",
        )
        summary = (kind.__doc__ or "").partition("\n")[0].partition(";")[0]
        summary = summary.partition("The message")[0].strip()
        return status, ErrorDetails(kind.__name__, summary, "The server's log has the details.")
    message, hint = error.message, error.hint
    for folder in map(str, folders):
        message, hint = (each.replace(folder, "of this server") for each in (message, hint))
    return status, ErrorDetails(kind.__name__, message, hint)


def _body(status: int, details: ErrorDetails, error: Exception, path: str) -> dict[str, Any]:
    """Return an error in the format of a path's clients."""
    text = f"{details.message} {details.hint}".strip()
    usual = "invalid_request_error" if status < 500 else None
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC.get(status) or usual or "api_error"
        return {"type": "error", "error": {"type": kind, "message": text, "kind": details.kind}}
    if path.startswith("/v1/"):
        openai = {
            "message": text,
            "type": _OPENAI.get(status) or usual or "server_error",
            "param": getattr(error, "param", None),
            "code": _OPENAI_CODES.get(type(error), details.kind),
        }
        return {"error": openai}
    return {"error": asdict(details)}
