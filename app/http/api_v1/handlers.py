"""What each operation does, in the words of the library: one function of its name for every line of the table.

Nothing is decided here. A function gets the user, what stands in the path and the query, and the body, all checked, and gives a
value back; a function of an operation with events gives them one after another, and None where it has nothing to say yet.
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
from personalpeft.chat.reply import Reply
from personalpeft.errors import AdapterError, InvalidInput, PersonalFileError
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft.learning.progress import TrainingStatus
from personalpeft.learning.report import LearnReport
from personalpeft.learning.status import SignalStatus
from personalpeft.learning.triggers import Pending
from personalpeft.memory.types import Item
from personalpeft.provenance import Provenance
from personalpeft.store.types import GarbageReport, Problem, UserSummary
from personalpeft.types import HeadMove, Json, Layer, Revision, Signal, Stack, Turn
from personalpeft_app.http.api_v1 import job_handlers
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.http.api_v1.jobs import Asking
from personalpeft_app.http.api_v1.operations import OPERATIONS
from personalpeft_app.http.api_v1.paging import by_id, page, page_by_number
from personalpeft_app.http.api_v1.request_context import Call
from personalpeft_app.http.security import caller
from personalpeft_app.peft_archive import packed, unpacked


def holder(call: Call) -> v.Holder:
    return v.Holder(caller().user, call.runtime.base().card.title)


def users(call: Call) -> v.Page[UserSummary]:
    limit = call.query.limit
    found = call.runtime.users(after=call.query.after, limit=limit)
    return v.Page(found, found[-1].id if len(found) == limit else None)


def make_user(call: Call) -> UserSummary:
    return call.user.summary()


def summary(call: Call) -> UserSummary:
    return call.user.summary()


def chat(call: Call) -> Reply:
    return call.user.chat(call.body.prompt, cancelled=call.gone, **_asked(call.body))


def stream(call: Call) -> Iterator[v.Begun | v.Piece | v.Ended]:
    with call.desk.stream(call.user.id) as (name, stop):
        over = partial(_either, stop.is_set, call.gone)
        reply = call.user.stream(call.body.prompt, cancelled=over, **_asked(call.body))
        try:
            # The first piece is asked for before anything is answered: what keeps it away is then an answer of its own, with a status.
            first = next(reply, None)
            yield v.Begun(name)
            if first is not None:
                yield v.Piece(first)
            for piece in reply:
                yield v.Piece(piece)
            yield v.Ended(reply.reply)
        finally:
            reply.close()


def stop(call: Call) -> v.Stopped:
    return v.Stopped(call.desk.stop(call.user.id, call.path["stream"]))


def turns(call: Call) -> v.Page[Turn]:
    # One more than is asked for says whether there is another page; the ledger brings no others.
    found = call.user.turns(call.query.limit + 1, before=call.query.after)
    part = found[: call.query.limit]
    return v.Page(part, part[-1].id if len(found) > len(part) else None)


def turn(call: Call) -> Turn:
    return call.user.turn(call.path["turn"])


def why(call: Call) -> Provenance:
    return call.user.why(call.path["turn"])


def feedback(call: Call) -> v.Said:
    said = call.body
    return v.Said(
        call.user.feedback(
            call.path["turn"],
            rating=said.rating,
            edit=said.edit,
            prefer=said.prefer,
            comment=said.comment,
            reward=said.reward,
            source=said.source,
        )
    )


def observe(call: Call) -> v.Observed:
    return v.Observed(call.user.observe(call.path["turn"], call.body.seen))


def teach(call: Call) -> v.Said:
    body = call.body
    return v.Said(call.user.teach(body.prompt, body.answer, skill=body.skill, source=body.source))


def remember(call: Call) -> v.Said:
    body = call.body
    return v.Said(
        call.user.remember(
            body.text, questions=body.questions, answer=body.answer, source=body.source
        )
    )


def retract(call: Call) -> tuple[Signal, ...]:
    return call.user.retract(*call.body.signals)


def signals(call: Call) -> v.Page[Signal]:
    return page(call.user.signals(current=call.query.current), call.query, by_id)


def lessons(call: Call) -> v.Page[SignalStatus]:
    return page(
        call.user.lessons(current=call.query.current), call.query, lambda account: account.signal.id
    )


def items(call: Call) -> v.Page[Item]:
    return page(call.user.items(), call.query, by_id)


def edit_item(call: Call) -> Item:
    body = call.body
    return call.user.edit_item(
        call.path["item"], body.text, questions=body.questions, answer=body.answer
    )


def remove_item(call: Call) -> None:
    call.user.remove_item(call.path["item"])


def pending(call: Call) -> Pending:
    return call.user.pending()


def learning(call: Call) -> TrainingStatus | None:
    return call.user.training_status()


def review(call: Call) -> tuple[LearnReport, ...]:
    return call.user.review()


def stack(call: Call) -> Stack:
    return call.user.stack()


def layers(call: Call) -> v.Page[Layer]:
    return page(call.user.layers(), call.query, lambda layer: layer.name)


def weigh(call: Call) -> Layer:
    call.user.set_weight(call.path["layer"], call.body.weight)
    return _layer(call)


def scope(call: Call) -> Layer:
    call.user.scope(call.path["layer"], call.body.scope)
    return _layer(call)


def rollback(call: Call) -> HeadMove:
    return call.user.rollback(call.path["layer"], call.body.to)


def revisions(call: Call) -> v.Page[Revision]:
    return page(call.user.revisions(call.query.layer), call.query, by_id)


def history(call: Call) -> v.Page[HeadMove]:
    return page_by_number(call.user.history(call.query.layer), call.query)


def reports(call: Call) -> v.Page[Json]:
    return page_by_number(call.user.reports(), call.query)


def digest(call: Call) -> ActivitySummary:
    since, seconds = call.query.since, call.query.seconds
    if since is not None and seconds is not None:
        raise InvalidInput("Both since and seconds are given.", hint="Give one of them.")
    begin = since if since is not None else timedelta(seconds=seconds or 24 * 3600)
    return call.user.activity_summary(begin, call.query.until)


def compare(call: Call) -> v.BlindComparison:
    body = call.body
    found = call.user.compare(
        body.prompt,
        body.a,
        body.b,
        layer=body.layer,
        max_tokens=body.max_tokens,
        memory=body.memory,
        cancelled=call.gone,
    )
    answers = tuple(
        v.BlindAnswer(number, each.name, each.text) for number, each in enumerate(found.answers, 1)
    )
    return v.BlindComparison(call.desk.keep(call.user.id, found), found.prompt, answers, found.same)


def choose(call: Call) -> LabeledComparison:
    return call.desk.comparison(call.user.id, call.path["comparison"]).choose(call.body.which)


@contextmanager
def export(call: Call) -> Iterator[ExportSummary]:
    """The file lives as long as the context."""
    with TemporaryDirectory(prefix="personal-") as folder:
        yield call.user.export(
            Path(folder) / f"{call.user.id}.personal", adapters=call.query.adapters
        )


def import_user(call: Call) -> ImportSummary:
    try:
        return call.runtime.import_user(call.body, as_user=call.query.as_user)
    except PersonalFileError as error:
        # It names the file as it lies here, which says nothing to who sent it.
        raise PersonalFileError(
            error.message.replace(str(call.body), "The file"), hint=error.hint
        ) from error


@contextmanager
def export_peft(call: Call) -> Iterator[v.Packed]:
    """As ``export``."""
    with TemporaryDirectory(prefix="personal-") as folder:
        archive = Path(folder) / f"{call.user.id}.zip"
        packed(call.user.export_peft(Path(folder) / "peft", layer=call.query.layer), archive)
        yield v.Packed(archive, archive.stat().st_size)


def import_peft(call: Call) -> Revision:
    with TemporaryDirectory(prefix="personal-") as folder:
        unpacked(call.body, Path(folder))
        return call.user.import_peft(folder, layer=call.query.layer)


@contextmanager
def export_gguf(call: Call) -> Iterator[v.Packed]:
    """As ``export``."""
    with TemporaryDirectory(prefix="personal-") as folder:
        file = call.user.export_gguf(Path(folder) / f"{call.user.id}.gguf", layer=call.query.layer)
        yield v.Packed(file, file.stat().st_size)


def import_gguf(call: Call) -> Revision:
    try:
        return call.user.import_gguf(call.body, layer=call.query.layer)
    except AdapterError as error:
        raise AdapterError(
            error.message.replace(str(call.body), "The file"), hint=error.hint
        ) from error


def served(call: Call) -> bytes:
    return call.runtime.read_published_file(call.path["digest"], call.path["file"])


def verify(call: Call) -> tuple[Problem, ...]:
    return call.runtime.verify()


def collect(call: Call) -> GarbageReport:
    return call.runtime.collect_garbage(dry_run=call.query.dry_run)


_BY_NAME = {**globals(), **vars(job_handlers)}
ACTS: Mapping[str, Callable[[Call], Any]] = {each.name: _BY_NAME[each.name] for each in OPERATIONS}


def _asked(body: v.ChatBody) -> dict[str, Any]:
    return {
        "tools": body.tools,
        "must_call": body.must_call,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_tokens": body.max_tokens,
        "stop": body.stop,
        "seed": body.seed,
        "memory": body.memory,
        "layers": body.layers,
        "revision": body.revision,
        "template": body.template,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        "timeout": body.timeout,
    }


def _either(one: Asking, other: Asking) -> bool:
    return one() or other()


def _layer(call: Call) -> Layer:
    return next(layer for layer in call.user.layers() if layer.name == call.path["layer"])
