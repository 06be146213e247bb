"""The handler of each operation, under the operation's name. It calls the library.

Path, query and body are validated. A handler with events yields them, and None as a sign of life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from personalpeft.archive import ExportSummary, ImportSummary
from personalpeft.chat.compare import LabeledComparison
from personalpeft.chat.conversation import Conversation, ConversationSummary
from personalpeft.chat.reply import Reply
from personalpeft.errors import AdapterError, InvalidInput, PersonalFileError
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft.learning.report import LearnReport
from personalpeft.learning.status import SignalStatus
from personalpeft.learning.training_status import TrainingStatus
from personalpeft.learning.triggers import Pending
from personalpeft.memory.types import Item
from personalpeft.provenance import Provenance
from personalpeft.store.types import GarbageReport, Problem, UserSummary
from personalpeft.types import HeadMove, Json, Layer, Revision, Signal, Stack, Turn
from personalpeft_app.http.api_v1 import job_handlers
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.http.api_v1.jobs import Condition
from personalpeft_app.http.api_v1.operations import OPERATIONS
from personalpeft_app.http.api_v1.paging import by_id, newest_first, page, page_by_number
from personalpeft_app.http.api_v1.request_context import RequestContext
from personalpeft_app.http.security import caller
from personalpeft_app.peft_archive import unzip_adapter, zip_adapter


def whoami(call: RequestContext) -> v.TokenInfo:
    return v.TokenInfo(caller().user, call.runtime.base().card.title)


def users(call: RequestContext) -> v.Page[UserSummary]:
    limit = call.query.limit
    found = call.runtime.users(after=call.query.after, limit=limit, search=call.query.search)
    return v.Page(found, found[-1].id if len(found) == limit else None)


def make_user(call: RequestContext) -> UserSummary:
    return call.user.summary()


def summary(call: RequestContext) -> UserSummary:
    return call.user.summary()


def chat(call: RequestContext) -> Reply:
    return call.user.chat(
        call.body.prompt, cancelled=call.is_disconnected, **call.body.fields(without="prompt")
    )


def stream(call: RequestContext) -> Iterator[v.StreamStarted | v.StreamText | v.StreamFinished]:
    with call.ephemeral.stream(call.user.id) as (name, stop):
        cancelled = partial(_either, stop.is_set, call.is_disconnected)
        reply = call.user.stream(
            call.body.prompt, cancelled=cancelled, **call.body.fields(without="prompt")
        )
        try:
            # An error before the first piece is a response with a status, so it comes first.
            first = next(reply, None)
            yield v.StreamStarted(name)
            if first is not None:
                yield v.StreamText(first)
            for piece in reply:
                yield v.StreamText(piece)
            yield v.StreamFinished(reply.reply)
        finally:
            reply.close()


def stop(call: RequestContext) -> v.StreamStopped:
    return v.StreamStopped(call.ephemeral.stop(call.user.id, call.path["stream"]))


def conversations(call: RequestContext) -> v.Page[ConversationSummary]:
    return newest_first(call.user.conversations, call.query)


def conversation(call: RequestContext) -> Conversation:
    return call.user.conversation(call.path["conversation"])


def turns(call: RequestContext) -> v.Page[Turn]:
    return newest_first(call.user.turns, call.query)


def turn(call: RequestContext) -> Turn:
    return call.user.turn(call.path["turn"])


def why(call: RequestContext) -> Provenance:
    return call.user.why(call.path["turn"])


def feedback(call: RequestContext) -> v.SignalCreated:
    return v.SignalCreated(call.user.feedback(call.path["turn"], **call.body.fields()))


def observe(call: RequestContext) -> v.SignalRecorded:
    return v.SignalRecorded(call.user.observe(call.path["turn"], call.body.seen))


def teach(call: RequestContext) -> v.SignalCreated:
    return v.SignalCreated(call.user.teach(**call.body.fields()))


def remember(call: RequestContext) -> v.SignalCreated:
    return v.SignalCreated(call.user.remember(**call.body.fields()))


def retract(call: RequestContext) -> tuple[Signal, ...]:
    return call.user.retract(*call.body.signals)


def signals(call: RequestContext) -> v.Page[Signal]:
    return page(call.user.signals(current=call.query.current), call.query, by_id)


def lessons(call: RequestContext) -> v.Page[SignalStatus]:
    found = call.user.lessons(current=call.query.current)
    return page(found, call.query, lambda status: status.signal.id)


def items(call: RequestContext) -> v.Page[Item]:
    return page(call.user.items(), call.query, by_id)


def edit_item(call: RequestContext) -> Item:
    return call.user.edit_item(call.path["item"], **call.body.fields())


def remove_item(call: RequestContext) -> None:
    call.user.remove_item(call.path["item"])


def pending(call: RequestContext) -> Pending:
    return call.user.pending()


def learning(call: RequestContext) -> TrainingStatus | None:
    return call.user.training_status()


def review(call: RequestContext) -> tuple[LearnReport, ...]:
    return call.user.review()


def stack(call: RequestContext) -> Stack:
    return call.user.stack()


def layers(call: RequestContext) -> v.Page[Layer]:
    return page(call.user.layers(), call.query, lambda layer: layer.name)


def weigh(call: RequestContext) -> Layer:
    call.user.set_weight(call.path["layer"], call.body.weight)
    return _layer(call)


def scope(call: RequestContext) -> Layer:
    call.user.scope(call.path["layer"], call.body.scope)
    return _layer(call)


def rollback(call: RequestContext) -> HeadMove:
    return call.user.rollback(call.path["layer"], call.body.to)


def revisions(call: RequestContext) -> v.Page[Revision]:
    return page(call.user.revisions(call.query.layer), call.query, by_id)


def history(call: RequestContext) -> v.Page[HeadMove]:
    return page_by_number(call.user.history(call.query.layer), call.query)


def reports(call: RequestContext) -> v.Page[Json]:
    return page_by_number(call.user.reports(), call.query)


def digest(call: RequestContext) -> ActivitySummary:
    since, seconds = call.query.since, call.query.seconds
    if since is not None and seconds is not None:
        raise InvalidInput("since and seconds exclude each other.", hint="Give one of them.")
    begin = since if since is not None else timedelta(seconds=seconds or 24 * 3600)
    return call.user.activity_summary(begin, call.query.until)


def compare(call: RequestContext) -> v.BlindComparison:
    found = call.user.compare(**call.body.fields(), cancelled=call.is_disconnected)
    answers = tuple(
        v.BlindAnswer(number, each.name, each.text) for number, each in enumerate(found.answers, 1)
    )
    return v.BlindComparison(
        call.ephemeral.add_comparison(call.user.id, found), found.prompt, answers, found.same
    )


def choose(call: RequestContext) -> LabeledComparison:
    return call.ephemeral.take_comparison(call.user.id, call.path["comparison"]).choose(
        call.body.which
    )


@contextmanager
def export(call: RequestContext) -> Iterator[ExportSummary]:
    """Yield the file, which exists inside the context only."""
    with TemporaryDirectory(prefix="personal-") as folder:
        yield call.user.export(
            Path(folder) / f"{call.user.id}.personal", adapters=call.query.adapters
        )


def import_user(call: RequestContext) -> ImportSummary:
    try:
        return call.runtime.import_user(call.body, as_user=call.query.as_user)
    except PersonalFileError as error:
        # The path of the file here says nothing to the client.
        raise PersonalFileError(
            error.message.replace(str(call.body), "The file"), hint=error.hint
        ) from error


@contextmanager
def export_peft(call: RequestContext) -> Iterator[v.PackedFile]:
    """Yield the file as ``export`` does."""
    with TemporaryDirectory(prefix="personal-") as folder:
        archive = Path(folder) / f"{call.user.id}.zip"
        zip_adapter(call.user.export_peft(Path(folder) / "peft", layer=call.query.layer), archive)
        yield v.PackedFile(archive, archive.stat().st_size)


def import_peft(call: RequestContext) -> Revision:
    with TemporaryDirectory(prefix="personal-") as folder:
        unzip_adapter(call.body, Path(folder))
        return call.user.import_peft(folder, layer=call.query.layer)


@contextmanager
def export_gguf(call: RequestContext) -> Iterator[v.PackedFile]:
    """Yield the file as ``export`` does."""
    with TemporaryDirectory(prefix="personal-") as folder:
        file = call.user.export_gguf(Path(folder) / f"{call.user.id}.gguf", layer=call.query.layer)
        yield v.PackedFile(file, file.stat().st_size)


def import_gguf(call: RequestContext) -> Revision:
    try:
        return call.user.import_gguf(call.body, layer=call.query.layer)
    except AdapterError as error:
        raise AdapterError(
            error.message.replace(str(call.body), "The file"), hint=error.hint
        ) from error


def served(call: RequestContext) -> bytes:
    return call.runtime.read_published_file(call.path["digest"], call.path["file"])


def verify(call: RequestContext) -> tuple[Problem, ...]:
    return call.runtime.verify()


def collect(call: RequestContext) -> GarbageReport:
    return call.runtime.collect_garbage(dry_run=call.query.dry_run)


_BY_NAME = {**globals(), **vars(job_handlers)}
HANDLERS: Mapping[str, Callable[[RequestContext], Any]] = {
    each.name: _BY_NAME[each.name] for each in OPERATIONS
}


def _either(one: Condition, other: Condition) -> bool:
    return one() or other()


def _layer(call: RequestContext) -> Layer:
    return next(layer for layer in call.user.layers() if layer.name == call.path["layer"])
