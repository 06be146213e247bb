"""Our own API as a Flask blueprint: the routes of the table, the strict reading of what comes, and the writing of what goes.

Invariants: what is not in the table has no route; who is calling is known before anything is read (``security``); a user is made
only by a request whose path, query and body are right; errors leave as ``failures`` says them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flask import Blueprint, Response, request, send_file
from werkzeug.exceptions import UnsupportedMediaType

from personalpeft import Runtime
from personalpeft.archive import ExportSummary
from personalpeft.clock import SYSTEM, Clock
from personalpeft.errors import InvalidInput, PersonalPeftError, format_origin, get_error_type
from personalpeft.formatting import to_json
from personalpeft.learning.options import not_cancelled
from personalpeft_app.http import error_responses, security, validation
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.http.api_v1.ephemeral_state import EphemeralState
from personalpeft_app.http.api_v1.handlers import ACTS
from personalpeft_app.http.api_v1.jobs import Jobs, bug_fault
from personalpeft_app.http.api_v1.openapi import document
from personalpeft_app.http.api_v1.operations import (
    OPERATIONS,
    PARAMETERS,
    PERSONAL,
    PREFIX,
    Operation,
)
from personalpeft_app.http.api_v1.request_context import RequestContext
from personalpeft_app.http.api_v1.serialization import from_json, from_query
from personalpeft_app.http.concurrency import stream_limiter_of


class ApiV1:
    """Our own API over one open runtime: ``blueprint`` for ``server.make_app``; ``close`` it before the runtime."""

    def __init__(self, runtime: Runtime, *, clock: Clock = SYSTEM) -> None:
        self._runtime = runtime
        self._hidden = (str(runtime.settings.home), str(runtime.settings.cache))
        self.jobs = Jobs(clock, self._fault)
        self._desk = EphemeralState(clock)
        self._job_streams = stream_limiter_of(runtime)
        self.blueprint = Blueprint("own", __name__, url_prefix=PREFIX)
        for operation in OPERATIONS:
            self.blueprint.add_url_rule(
                re.sub(r"{(\w+)}", r"<\1>", operation.path),
                operation.name,
                self._view(operation),
                methods=[operation.method],
                # Else Flask would answer OPTIONS for us.
                provide_automatic_options=False,
            )
        self.blueprint.add_url_rule(
            "/openapi.json", "openapi", _openapi, provide_automatic_options=False
        )

    def close(self) -> None:
        """Stops what learns after its running step."""
        self.jobs.close()

    def _view(self, operation: Operation) -> Callable[..., Response]:
        def view(**path: str) -> Response:
            if operation.everybody and not (operation.workers and security.caller().worker):
                security.require_admin()
            if "user" in path:
                security.require_user(path["user"])
            checked = {
                name: from_json(PARAMETERS[name][0], value, name) for name, value in path.items()
            }
            query = _query(operation)
            if operation.upload:
                with _uploaded(operation) as file:
                    done = ACTS[operation.name](self._call(operation, checked, query, file))
                return _json(done, operation.status)
            call = self._call(operation, checked, query, _body(operation))
            done = ACTS[operation.name](call)
            if operation.events:
                return self._events(operation, done)
            if operation.download:
                return _file(done)
            if operation.answer is None:
                return Response(status=operation.status)
            if operation.answer is bytes:
                return _same_for_ever(done)
            response = _json(done, operation.status)
            if isinstance(done, v.Job) and operation.status == 202:
                whose = "" if done.user is None else f"/users/{done.user}"
                response.headers["Location"] = f"{PREFIX}{whose}/jobs/{done.id}"
            return response

        if operation.upload:
            validation.for_files(view)
        return security.allow_workers(view) if operation.workers else view

    def _call(
        self, operation: Operation, path: Mapping[str, str], query: Any, body: Any
    ) -> RequestContext:
        person = (
            self._runtime.user(path["user"], create=operation.makes_user)
            if "user" in path
            else None
        )
        # Only a real server knows who has gone.
        gone = request.environ.get("waitress.client_disconnected", not_cancelled)
        return RequestContext(
            self._runtime, self.jobs, self._desk, self._job_streams, person, path, query, body, gone
        )

    def _events(self, operation: Operation, values: Generator[Any, None, None]) -> Response:
        names = {kind: name for name, kind in operation.events.items()}
        # What keeps the first event away is an answer with a status of its own.
        first = next(values)

        def written() -> Iterator[str]:
            try:
                for value in chain([first], values):
                    yield ": still here\n\n" if value is None else _event(names[type(value)], value)
            except PersonalPeftError as error:
                yield _event("error", v.Refusal(self._fault(error)))
            except Exception as bug:  # noqa: BLE001 - the status has gone out already; who reads has to hear that this is no end.
                error_responses.log.error("a bug in a stream: %s", format_origin(bug))
                yield _event("error", v.Refusal(bug_fault(bug)))

        response = Response(
            written(), mimetype="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )
        # Also where the reader went away before the first byte, when nothing of the above has begun.
        response.call_on_close(values.close)
        return response

    def _fault(self, error: PersonalPeftError) -> v.Fault:
        _, message, hint = error_responses.describe_error(error, self._hidden)
        return v.Fault(get_error_type(error).__name__, message, hint)


def _openapi() -> Response:
    from importlib.metadata import version

    return _json(document(version("personalpeft")), 200)


@contextmanager
def _uploaded(operation: Operation) -> Generator[Path, None, None]:
    """The body of this request as a file, which is gone afterwards."""
    if request.mimetype != PERSONAL:
        raise UnsupportedMediaType(f"Send {operation.file}, with Content-Type: {PERSONAL}.")
    request.max_content_length = validation.LARGEST_FILE
    with TemporaryDirectory(prefix="personal-") as folder:
        path = Path(folder) / "sent.personal"
        with path.open("wb") as file:
            shutil.copyfileobj(request.stream, file)
        yield path


def _file(made: AbstractContextManager[ExportSummary | v.PackedFile]) -> Response:
    with ExitStack() as stack:
        exported = stack.enter_context(made)
        response = send_file(exported.path, mimetype=PERSONAL, as_attachment=True)
        told = to_json(exported) | {"path": exported.path.name}
        response.headers["X-Personalpeft-Exported"] = json.dumps(told)
        # The file is there until the last byte of it is out.
        response.call_on_close(stack.pop_all().close)
        return response


def _same_for_ever(data: bytes) -> Response:
    # Whoever asked may keep it, and nobody between: it is somebody's, and shown to who holds a token.
    return Response(
        data, mimetype=PERSONAL, headers={"Cache-Control": "private, max-age=31536000, immutable"}
    )


def _body(operation: Operation) -> Any:
    if operation.body is None:
        return None
    is_given = operation.needs_body or request.get_data()
    return from_json(operation.body, validation.read_object() if is_given else {})


def _query(operation: Operation) -> Any:
    """Return what the address names after the question mark, each once."""
    for name, values in request.args.lists():
        if len(values) != 1:
            raise InvalidInput(
                f"{ascii(name)[:80]} is given {len(values)} times.", hint="Give it once."
            )
    return from_query(operation.query, request.args)


def _json(value: Any, status: int) -> Response:
    text = json.dumps(to_json(value), allow_nan=False)
    return Response(text, status=status, mimetype="application/json")


def _event(name: str, value: Any) -> str:
    # JSON has no line ends of its own, so one line of data holds it.
    return f"event: {name}\ndata: {json.dumps(to_json(value), allow_nan=False)}\n\n"
