"""The handlers of operations. They call the library.

An operation without a function of its name here is one call of the library's method of that name.
Path, query and body are validated. A handler with events yields them, and None as a sign of life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from personalpeft import Runtime, file_system
from personalpeft.archive import ExportSummary, ImportSummary
from personalpeft.chat.compare import LabeledComparison
from personalpeft.chat.reply import Reply
from personalpeft.erasure import ForgetReport, ForgetUserReport
from personalpeft.errors import InvalidInput, NotFound, PersonalFileError, suggest_nearest
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft.learning.options import Condition
from personalpeft.store.types import UserSummary
from personalpeft.types import Layer, Revision, Signal
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.http.api_v1.ephemeral_state import EphemeralState
from personalpeft_app.http.api_v1.jobs import Jobs
from personalpeft_app.http.api_v1.operations import OPERATIONS, Operation
from personalpeft_app.http.concurrency import Quota
from personalpeft_app.http.generation import check_whole
from personalpeft_app.http.security import caller
from personalpeft_app.http.validation import LARGEST_FILE
from personalpeft_app.peft_archive import unzip_adapter, zip_adapter

T = TypeVar("T")

# Seconds between comments that keep a stream alive. Proxies and clients end a stream after a longer
# silence. Only writing shows that a reader is gone.
HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One authenticated, validated request.

    ``user`` is None if the path names no user. ``body`` is the file of an upload, and the folder for
    the file of a download. ``is_disconnected`` returns whether the client is gone.
    """

    runtime: Runtime
    jobs: Jobs
    ephemeral: EphemeralState
    job_streams: Quota
    user: Any
    path: Mapping[str, str]
    query: Any
    body: Any
    is_disconnected: Condition

    @property
    def owner(self) -> str | None:
        """The id of the user in the path."""
        return self.path.get("user")

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields of the body, or else of the query, for the library's method."""
        return dict(self.query if self.body is None else self.body)


def whoami(call: RequestContext) -> v.ApiKeyInfo:
    return v.ApiKeyInfo(caller().user, call.runtime.base().card.title)


def forget_user(call: RequestContext) -> ForgetUserReport:
    report = call.runtime.forget_user(call.user.id, **call.arguments)
    if not call.query.dry_run:
        _forget_here(call)
    return report


def chat(call: RequestContext) -> Reply:
    return check_whole(call.user.chat(**call.arguments, cancelled=call.is_disconnected))


def stream(call: RequestContext) -> Iterator[v.StreamStarted | v.StreamText | v.StreamFinished]:
    with (
        call.ephemeral.stream(call.user.id) as (name, stop),
        call.user.stream(
            **call.arguments, cancelled=lambda: stop.is_set() or call.is_disconnected()
        ) as reply,
    ):
        # An error of the request itself is a response with a status, so it comes first. The name
        # does not wait for the first piece: a queued reply can be stopped too.
        reply.begin()
        yield v.StreamStarted(name, reply.stack, reply.prompt_tokens)
        sent = 0
        for piece in reply:
            logprobs = reply.logprobs[sent:]
            sent += len(logprobs)
            yield v.StreamText(piece, logprobs)
        yield v.StreamFinished(reply.reply if stop.is_set() else check_whole(reply.reply))


def stop(call: RequestContext) -> v.StreamStopped:
    return v.StreamStopped(call.ephemeral.stop(call.user.id, call.path["stream"]))


def retract(call: RequestContext) -> tuple[Signal, ...]:
    return call.user.retract(*call.body.signals, training_only=call.body.training_only)


def forget(call: RequestContext) -> v.Job:
    def work(**watched: Any) -> ForgetReport:
        report: ForgetReport = call.user.forget(**call.arguments, **watched)
        if not call.body.dry_run:
            _forget_here(call)
        return report

    return call.jobs.begin(call.user.id, "forget", work)


def _forget_here(call: RequestContext) -> None:
    """Drop what this server holds of a user: jobs and comparisons may quote forgotten text."""
    call.jobs.forget(call.user.id)
    call.ephemeral.forget(call.user.id)


def rebase(call: RequestContext) -> v.Job:
    # A name alone: the library would also read a card from a path.
    # The open base may have no card that is found by its name.
    cards = (call.runtime.base().card, *call.runtime.models())
    names = dict.fromkeys(card.name for card in cards)
    if call.body.to not in names:
        raise NotFound(
            f"There is no base called {call.body.to}.",
            hint=suggest_nearest(call.body.to, names, what="base"),
        )
    work = partial(call.runtime.rebase, call.user.id, **call.arguments)
    return call.jobs.begin(call.user.id, "rebase", work)


def bases(call: RequestContext) -> tuple[v.BaseInfo, ...]:
    cards = call.runtime.available_bases()
    return tuple(v.BaseInfo(card.name, card.title, card is cards[0]) for card in cards)


def jobs(call: RequestContext) -> v.Page[v.Job]:
    found = call.jobs.of(call.owner)
    return _page(found, [each.id for each in found], call.query)


def job(call: RequestContext) -> v.Job:
    return call.jobs.get(call.owner, call.path["job"])


def follow(call: RequestContext) -> Iterator[v.Job | None]:
    with call.job_streams.hold(caller().id):
        yield from call.jobs.watch(call.owner, call.path["job"], HEARTBEAT_SECONDS)


def cancel(call: RequestContext) -> v.Job:
    return call.jobs.cancel(call.owner, call.path["job"])


def set_training(call: RequestContext) -> UserSummary:
    call.user.set_training(call.body.allowed)
    return call.user.summary()


def set_weight(call: RequestContext) -> Layer:
    call.user.set_weight(call.path["layer"], call.body.weight)
    return _layer(call)


def scope(call: RequestContext) -> Layer:
    call.user.scope(call.path["layer"], call.body.scope)
    return _layer(call)


def activity_summary(call: RequestContext) -> ActivitySummary:
    since, seconds = call.query.since, call.query.seconds
    if since is not None and seconds is not None:
        raise InvalidInput("since and seconds exclude each other.", hint="Give one of them.")
    begin = since if since is not None else timedelta(seconds=seconds or 24 * 3600)
    return call.user.activity_summary(begin, call.query.until)


def compare(call: RequestContext) -> v.BlindComparison:
    found = call.user.compare(**call.arguments, cancelled=call.is_disconnected)
    name = call.ephemeral.add_comparison(call.user.id, found)
    return v.BlindComparison(name, found.prompt, found.blind_answers, found.same)


def choose(call: RequestContext) -> LabeledComparison:
    return call.ephemeral.choose(call.user.id, call.path["comparison"], call.body.which)


def export(call: RequestContext) -> ExportSummary:
    return call.user.export(call.body / f"{call.user.id}.personal", adapters=call.query.adapters)


def import_user(call: RequestContext) -> ImportSummary:
    try:
        return call.runtime.import_user(call.body, as_user=call.query.as_user)
    except PersonalFileError as error:
        # The path of the file here says nothing to the client.
        raise PersonalFileError(
            error.message.replace(str(call.body), "The file"), hint=error.hint
        ) from error


def export_peft(call: RequestContext) -> Path:
    archive: Path = call.body / f"{call.user.id}.zip"
    zip_adapter(call.user.export_peft(call.body / "peft", layer=call.query.layer), archive)
    return archive


def import_peft(call: RequestContext) -> Revision:
    with file_system.temporary_folder(LARGEST_FILE) as folder:
        unzip_adapter(call.body, folder)
        return call.user.import_peft(folder, layer=call.query.layer)


def export_gguf(call: RequestContext) -> Path:
    return call.user.export_gguf(call.body / f"{call.user.id}.gguf", layer=call.query.layer)


def import_gguf(call: RequestContext) -> Revision:
    return call.user.import_gguf(call.body, layer=call.query.layer)


def _of_library(operation: Operation) -> Callable[[RequestContext], Any]:
    """Return the handler of an operation that is one call of the library."""
    name = "summary" if operation.name == "make_user" else operation.name
    names = [each for each in operation.parameters if each != "user"]

    def handle(call: RequestContext) -> Any:
        owner = call.user if "user" in operation.parameters else call.runtime
        method = partial(getattr(owner, name), *(call.path[each] for each in names))
        if operation.paged:
            return _read_page(operation, method, call.query)
        method = partial(method, **call.arguments)
        if operation.answer is v.Job:
            kind, users = cast(v.JobKind, operation.name), call.arguments.get("users", ())
            return call.jobs.begin(call.owner, kind, method, users=users)
        result = method()
        is_signal = operation.answer in (v.SignalCreated, v.SignalRecorded)
        return operation.answer(result) if is_signal else result

    return handle


def _read_page(operation: Operation, read: Callable[..., Sequence[Any]], query: Any) -> v.Page[Any]:
    options = {name: value for name, value in query if name not in ("after", "limit")}
    if cursor := _CURSORS.get(operation.name):
        # One more than the limit tells whether there is another page.
        found = tuple(read(**options, **{cursor: query.after}, limit=query.limit + 1))
        part = found[: query.limit]
        return v.Page(part, part[-1].id if len(found) > len(part) else None)
    found = tuple(read(**options))
    match operation.name:
        case "history" | "reports":
            # These have no ids. The lists only grow, so a number is a name.
            keys = [str(number) for number, _ in enumerate(found, 1)]
        case "signal_statuses":
            keys = [each.signal.id for each in found]
        case "layers":
            keys = [each.name for each in found]
        case _:
            keys = [each.id for each in found]
    return _page(found, keys, query)


def _page(found: tuple[T, ...], keys: Sequence[str], query: Any) -> v.Page[T]:
    """Return the page of a whole list that follows the value with the key ``query.after``.

    Raises ``NotFound`` if that value is gone.
    """
    begin = 0
    if query.after is not None:
        if query.after not in keys:
            raise NotFound(
                f"after must be the id of something in this list, got {query.after!a}.",
                hint="Begin again with the first page.",
            )
        begin = keys.index(query.after) + 1
    end = begin + query.limit
    return v.Page(found[begin:end], keys[end - 1] if end < len(found) else None)


def _layer(call: RequestContext) -> Layer:
    return next(layer for layer in call.user.layers() if layer.name == call.path["layer"])


# The parameter for ``after`` of what the library itself reads in pages.
_CURSORS = {"users": "after", "conversations": "before", "turns": "before"}
_FOR_ADMIN = {"every_job": jobs, "any_job": job, "follow_any": follow, "cancel_any": cancel}
HANDLERS: Mapping[str, Callable[[RequestContext], Any]] = {
    each.name: _FOR_ADMIN.get(each.name) or globals().get(each.name) or _of_library(each)
    for each in OPERATIONS
}
