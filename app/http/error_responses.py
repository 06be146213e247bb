"""Turn errors into a status and a body, in the format of the route's clients.

Invariants: ``personalpeft.errors.ERROR_CODES`` has the status of each error of the library. A body
holds no prompt, reply or path of this machine. The client gets the id of a bug, and the log its
type and origin, never its text.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
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
    WeightsError,
    error_id,
    format_origin,
    get_error_codes,
    get_error_type,
)

log = logging.getLogger("personalpeft.http")
_HIDDEN = "personalpeft.hidden"

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
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class InvalidParameter(HTTPException):
    """A parameter of a request is invalid or unsupported; ``param`` names it."""

    code = 400

    def __init__(self, description: str, param: str | None = None) -> None:
        super().__init__(description)
        self.param = param


class UnknownModel(HTTPException):
    """The model of a request is unknown."""

    code = 404


def install_error_handlers(app: Flask, places: Iterable[Path]) -> None:
    """Install handlers for all errors. No body holds the paths of the folders ``places``."""
    hidden = app.extensions[_HIDDEN] = [str(place) for place in places]

    def of_library(error: PersonalPeftError) -> Response:
        return error_response(*describe_error(error, hidden), error)

    def of_http(error: HTTPException) -> Response:
        response = error_response(error.code or 500, error.description or error.name, "", error)
        for name, value in error.get_headers():
            if name not in ("Content-Type", "Content-Length"):
                response.headers.setdefault(name, value)
        return response

    def bug(error: Exception) -> Response:
        return error_response(*_describe_bug(error, str(request.url_rule or "no route")), error)

    app.register_error_handler(PersonalPeftError, of_library)
    app.register_error_handler(HTTPException, of_http)
    app.register_error_handler(Exception, bug)


def error_formatter() -> Callable[[Exception], dict[str, Any]]:
    """Return a function that formats errors after the response has started, without Flask."""
    path, rule, hidden = request.path, str(request.url_rule), current_app.extensions[_HIDDEN]

    def format_error(error: Exception) -> dict[str, Any]:
        ours = isinstance(error, PersonalPeftError)
        status, message, hint = (
            describe_error(error, hidden) if ours else _describe_bug(error, rule)
        )
        return error_body(status, message, hint, error, path)

    return format_error


def _describe_bug(error: Exception, rule: str) -> tuple[int, str, str]:
    log.error("a bug in %s: %s", rule, format_origin(error))
    return 500, bug_message(error), ""


def bug_message(bug: BaseException) -> str:
    """Return what a client may know of a bug: its id in the log."""
    return f"This is a bug in personalpeft; its log has the details under the id {error_id(bug)}."


def describe_error(error: PersonalPeftError, hidden: Iterable[str] = ()) -> tuple[int, str, str]:
    """Return status, message and hint of an error of the library for a client."""
    status = get_error_codes(error).http_status
    if isinstance(error, _LOGGED_ONLY):
        # Messages of adapter files and plugins may hold private text, others only files.
        foreign = isinstance(error, AdapterError | PluginError)
        log.error(
            "%s",
            format_origin(error)
            if foreign
            else f"{get_error_type(error).__name__}: {error.message} {error.hint}",
        )
        summary = (
            (get_error_type(error).__doc__ or "")
            .partition("\n")[0]
            .partition(";")[0]
            .partition("The message")[0]
            .strip()
        )
        return status, summary, "The server's log has the details."
    message, hint = error.message, error.hint
    for path in hidden:
        message, hint = (
            message.replace(path, "of this server"),
            hint.replace(path, "of this server"),
        )
    return status, message, hint


def error_response(status: int, message: str, hint: str, error: Exception) -> Response:
    """Return the response of an error."""
    response = jsonify(error_body(status, message, hint, error, request.path))
    response.status_code = status
    if status == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="personalpeft"'
    again = getattr(error, "retry_after", None)
    if again is not None:
        response.headers["Retry-After"] = str(math.ceil(again))
    return response


def error_body(status: int, message: str, hint: str, error: Exception, path: str) -> dict[str, Any]:
    """Return an error in the format of a path's clients."""
    kind = _kind(status, error)
    if path.startswith("/v1/messages"):
        usual = "invalid_request_error" if status < 500 else "api_error"
        text = f"{message} {hint}".strip()
        return {
            "type": "error",
            "error": {"type": _ANTHROPIC.get(status, usual), "message": text, "kind": kind},
        }
    if path.startswith("/v1/"):
        usual = "invalid_request_error" if status < 500 else "server_error"
        code = "model_not_found" if isinstance(error, UnknownModel) else kind
        param = getattr(error, "param", None)
        text = f"{message} {hint}".strip()
        return {
            "error": {
                "message": text,
                "type": _OPENAI.get(status, usual),
                "param": param,
                "code": code,
            }
        }
    return {"error": {"kind": kind, "message": message, "hint": hint}}


def _kind(status: int, error: Exception) -> str:
    if isinstance(error, PersonalPeftError):
        return get_error_type(error).__name__
    return "Bug" if status == 500 else type(error).__name__
