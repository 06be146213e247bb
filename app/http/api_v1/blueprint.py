"""The API as a Flask blueprint: routes of the table, validated requests, responses.

Invariants: ``security`` knows the caller before a request is read. Only a request with a valid body
creates a user, whatever follows. ``error_responses`` formats errors.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from flask import Blueprint, Response, request, send_file
from werkzeug.exceptions import UnsupportedMediaType

from personalpeft import Runtime, User, file_system
from personalpeft.archive import ExportSummary
from personalpeft.errors import InvalidInput
from personalpeft.formatting import to_json
from personalpeft.learning.options import not_cancelled
from personalpeft_app.http import security, validation
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.http.api_v1.ephemeral_state import EphemeralState
from personalpeft_app.http.api_v1.handlers import HANDLERS, RequestContext
from personalpeft_app.http.api_v1.jobs import Jobs
from personalpeft_app.http.api_v1.openapi import document
from personalpeft_app.http.api_v1.operations import (
    OPERATIONS,
    PARAMETERS,
    PERSONAL,
    PREFIX,
    Operation,
)
from personalpeft_app.http.api_v1.serialization import from_json, from_query
from personalpeft_app.http.concurrency import stream_quota_of
from personalpeft_app.http.error_responses import describe_error
from personalpeft_app.http.generation import format_event, sse_response


class ApiV1:
    """The API over an open runtime, as a ``blueprint`` of ``make_app``. Close it before that."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        folders = (runtime.settings.home, runtime.settings.cache)
        self.jobs = Jobs(lambda error: describe_error(error, folders, "a job")[1])
        self._ephemeral = EphemeralState()
        self._job_streams = stream_quota_of(runtime)
        self.blueprint = Blueprint("api_v1", __name__, url_prefix=PREFIX)
        for operation in OPERATIONS:
            view = self._view(operation)
            for path in filter(None, (operation.path, operation.former_path)):
                self.blueprint.add_url_rule(
                    re.sub(r"{(\w+)}", r"<\1>", path),
                    operation.name,
                    view,
                    methods=[operation.method],
                    # Flask would answer OPTIONS by itself.
                    provide_automatic_options=False,
                )
        self.blueprint.add_url_rule(
            "/openapi.json", "openapi", _openapi, provide_automatic_options=False
        )

    def close(self) -> None:
        """Stop the jobs after their running steps."""
        self.jobs.close()

    def _view(self, operation: Operation) -> Callable[..., Response]:
        def view(**path: str) -> Response:
            if operation.admin and not (operation.workers and security.caller().worker):
                security.require_admin()
            if "user" in path:
                security.require_user(path["user"])
            checked = {
                name: from_json(PARAMETERS[name][0], value, name) for name, value in path.items()
            }
            query = _query(operation)
            with ExitStack() as stack:
                body = _body(operation, stack)
                call = RequestContext(
                    self._runtime,
                    self.jobs,
                    self._ephemeral,
                    self._job_streams,
                    self._user(operation, path.get("user")),
                    checked,
                    query,
                    body,
                    # A test client has no connection to lose.
                    request.environ.get("waitress.client_disconnected", not_cancelled),
                )
                result = HANDLERS[operation.name](call)
                if operation.download:
                    response = _file(result)
                    # The file must exist until its last byte is sent.
                    response.call_on_close(stack.pop_all().close)
                    return response
            if operation.events:
                return sse_response(_events(operation, result), partial(format_event, name="error"))
            if operation.answer is None:
                return Response(status=operation.status)
            if operation.answer is bytes:
                return _immutable(result)
            response = _json(result, operation.status)
            if isinstance(result, v.Job) and operation.status == 202:
                owner = "" if result.user is None else f"/users/{result.user}"
                response.headers["Location"] = f"{PREFIX}{owner}/jobs/{result.id}"
            return response

        if operation.upload:
            security.for_files(view)
        return security.allow_workers(view) if operation.workers else view

    def _user(self, operation: Operation, name: str | None) -> User | None:
        if name is None:
            return None
        # A user's own API key creates that user. A refusal would name other users.
        creates = operation.makes_user or security.caller().user == name
        return self._runtime.user(name, create=creates)


def _events(operation: Operation, values: Generator[Any, None, None]) -> Generator[str, None, None]:
    names = {kind: name for name, kind in operation.events.items()}
    with closing(values):
        for value in values:
            yield (
                ": still here\n\n"
                if value is None
                else format_event(_text(value), names[type(value)])
            )


def _openapi() -> Response:
    return _json(document(), 200)


def _body(operation: Operation, stack: ExitStack) -> Any:
    """Return the body of this request: a value, a temporary file, or None without one.

    For a download it is a folder to write the file into. The stack deletes files.
    """
    if operation.download:
        return stack.enter_context(file_system.temporary_folder(2 * validation.LARGEST_FILE))
    if operation.upload:
        if request.mimetype != PERSONAL:
            raise UnsupportedMediaType(f"Send {operation.upload}, with Content-Type: {PERSONAL}.")
        folder = stack.enter_context(file_system.temporary_folder(validation.LARGEST_FILE))
        path = folder / "sent.personal"
        with path.open("wb") as file:
            shutil.copyfileobj(request.stream, file)
        request.stream.close()
        return path
    if operation.body is None:
        return None
    is_given = operation.needs_body or request.get_data()
    return from_json(operation.body, validation.read_object() if is_given else {})


def _file(exported: ExportSummary | Path) -> Response:
    path = exported if isinstance(exported, Path) else exported.path
    response = send_file(path, mimetype=PERSONAL, as_attachment=True)
    about = {} if path is exported else to_json(exported)
    summary = about | {"path": path.name, "bytes": path.stat().st_size}
    response.headers["X-Personalpeft-Exported"] = json.dumps(summary)
    return response


def _immutable(data: bytes) -> Response:
    response = send_file(BytesIO(data), mimetype=PERSONAL, conditional=False)
    # The client may cache it, proxies may not: it is of one user.
    response.headers["Cache-Control"] = "private, max-age=31536000, immutable"
    return response


def _query(operation: Operation) -> Any:
    """Return what the address names after the question mark, each once."""
    for name, values in request.args.lists():
        if len(values) != 1:
            raise InvalidInput(
                f"{ascii(name)[:80]} must have one value, got {len(values)}.", hint="Give it once."
            )
    return from_query(operation.query, request.args)


def _json(value: Any, status: int) -> Response:
    return Response(_text(value), status=status, mimetype="application/json")


def _text(value: Any) -> str:
    return json.dumps(to_json(value), allow_nan=False)
