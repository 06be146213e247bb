"""Make methods of the client from the table of operations and the library's own methods.

A method has the signature and the docstring of the library's method of the same name. Parameters
that the operation does not take are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from personalpeft.chat.compare import BlindAnswer, Comparison, LabeledComparison
from personalpeft.chat.reply import turn_id_of
from personalpeft.chat.validation import check_prompt, check_tools
from personalpeft_app.client.streaming import RemoteStream, follow
from personalpeft_app.client.transport import Transport
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.http.api_v1.operations import CHOOSE, OPERATIONS, Operation

P = ParamSpec("P")
R = TypeVar("R")

_PAGE = 1000
_OPERATIONS = {operation.name: operation for operation in OPERATIONS}
# Names of the library's parameters in paths, and in the queries of pages.
_IN_PATH = {
    "user_id": "user",
    "reply": "turn",
    "item_id": "item",
    "conversation_id": "conversation",
}
_IN_PAGES = {"before": "after"}


class RemoteObject:
    """A server, or one user of it. ``path`` names the user."""

    def __init__(self, transport: Transport, **path: str) -> None:
        self._transport = transport
        self._path = path


def remote_method(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Return a method that does in the server what the library's ``method`` does here.

    A learn, practice, forget or rebase is followed to its end; leaving the call early stops it.
    """
    operation = _OPERATIONS[method.__name__]
    kind = operation.body or operation.query
    taken = {"self", *operation.parameters, *kind.model_fields}
    if operation.answer is v.Job:
        taken |= {"progress", "cancelled"}
    if operation.events:
        taken |= {"cancelled"}

    def sent_as(name: str) -> str:
        if _IN_PATH.get(name) in operation.parameters:
            return _IN_PATH[name]
        return _IN_PAGES.get(name, name) if operation.paged else name

    library = signature(method)
    parameters = [each for each in library.parameters.values() if sent_as(each.name) in taken]
    shown = library.replace(parameters=parameters)

    @wraps(method)
    def call(self: RemoteObject, *args: P.args, **kwargs: P.kwargs) -> Any:
        bound = shown.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = {sent_as(name): value for name, value in list(bound.arguments.items())[1:]}
        path = {
            name: _as_sent(name, given.pop(name)) for name in operation.parameters if name in given
        }
        path |= self._path
        if operation.paged:
            return _all_pages(self._transport, operation, given, path)
        watching = {name: given.pop(name) for name in ("progress", "cancelled") if name in given}
        sent = {name: _as_sent(name, value) for name, value in given.items()}
        if operation.events:
            return RemoteStream(self._transport, sent, path, **watching)
        content = (sent, None) if operation.body is not None else (None, sent)
        answer = self._transport.call(operation, *content, **path)
        match answer:
            case v.Job():
                job = follow(self._transport, answer, **watching)
                return job.report or job.forget_report or job.rebase_report or job.reports
            case v.SignalCreated() | v.SignalRecorded():
                return answer.signal
            case v.BlindComparison():
                choose = partial(_choose, self._transport, answer.id, path)
                # Blind ones, which have what a choice needs.
                answers: Any = answer.answers
                return Comparison(answer.prompt, answers, choose)
        return None if library.return_annotation == "None" else answer

    call.__signature__ = shown  # type: ignore[attr-defined]  # read by ``inspect``
    return call  # type: ignore[return-value]  # self is a ``RemoteObject``


def _choose(
    transport: Transport,
    comparison: str,
    path: Mapping[str, str],
    chosen: BlindAnswer,
    other: BlindAnswer,
) -> LabeledComparison:
    return transport.call(CHOOSE, {"which": chosen.name}, **path, comparison=comparison)


def _as_sent(name: str, value: Any) -> Any:
    """Return an argument as data. Raises ``InvalidInput``."""
    if name == "prompt" and not isinstance(value, str):
        return check_prompt(value)
    if name == "tools":
        return check_tools(value)
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name in ("turn", "item") or (name == "replaces" and value is not None):
        return turn_id_of(value)
    return value


def _all_pages(
    transport: Transport, operation: Operation, query: Mapping[str, Any], path: Mapping[str, str]
) -> tuple[Any, ...]:
    """Return the values of all pages, or the first ``limit`` of the query."""
    limit = query.get("limit")
    found: tuple[Any, ...] = ()
    while limit is None or len(found) < limit or limit < 0:
        # The server refuses a negative number.
        size = _PAGE if limit is None else min(_PAGE, limit - len(found))
        page: v.Page[Any] = transport.call(operation, None, {**query, "limit": size}, **path)
        found += page.items
        if page.next is None:
            break
        query = {**query, "after": page.next}
    return found
