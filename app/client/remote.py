"""``personalpeft.Runtime`` and ``personalpeft.User`` over HTTP, with the same methods and values.

A method is made from the table of operations and the library's method of the same name, with its
signature and docstring. Parameters that the operation does not take are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from personalpeft import file_system
from personalpeft.adapters.safe_io import read_file
from personalpeft.archive import ExportSummary, ImportSummary
from personalpeft.chat.compare import Comparison
from personalpeft.chat.reply import Reply, turn_id_of
from personalpeft.chat.validation import Prompt, check_prompt, check_tools
from personalpeft.deprecation import RenamedAttributes, accept_renamed_arguments
from personalpeft.errors import InvalidInput, PersonalFileError, map_write_errors
from personalpeft.ids import check_user_id
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft.runtime import Runtime
from personalpeft.types import Revision
from personalpeft.user import RENAMED_ATTRIBUTES, User
from personalpeft_app.client.streaming import RemoteStream, follow
from personalpeft_app.client.transport import Transport
from personalpeft_app.http.api_v1 import operations as do
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.peft_archive import unzip_adapter, zip_adapter

P = ParamSpec("P")
R = TypeVar("R")

_PAGE = 1000
_OPERATIONS = {operation.name: operation for operation in do.OPERATIONS}
# Names of the library's parameters in paths.
_IN_PATH = {
    "user_id": "user",
    "reply": "turn",
    "item_id": "item",
    "conversation_id": "conversation",
}


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
        return "after" if operation.paged and name == "before" else name

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
        answer = self._transport.call(operation, sent, **path)
        match answer:
            case v.Job():
                job = follow(self._transport, answer, **watching)
                return job.report or job.forget_report or job.rebase_report or job.reports
            case v.SignalCreated() | v.SignalRecorded():
                return answer.signal
            case v.BlindComparison():
                # Blind ones, which have what a choice needs.
                answers: Any = answer.answers
                which = {**path, "comparison": answer.id}
                return Comparison(
                    answer.prompt,
                    answers,
                    lambda chosen, _: self._transport.call(
                        do.CHOOSE, {"which": chosen.name}, **which
                    ),
                )
        return None if library.return_annotation == "None" else answer

    call.__signature__ = shown  # type: ignore[attr-defined]  # read by ``inspect``
    return call  # type: ignore[return-value]  # self is a ``RemoteObject``


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
    transport: Transport, operation: do.Operation, query: Mapping[str, Any], path: Mapping[str, str]
) -> tuple[Any, ...]:
    """Return the values of all pages, or the first ``limit`` of the query."""
    limit = query.get("limit")
    found: tuple[Any, ...] = ()
    while limit is None or len(found) < limit or limit < 0:
        # The server refuses a negative number.
        size = _PAGE if limit is None else min(_PAGE, limit - len(found))
        page: v.Page[Any] = transport.call(operation, {**query, "limit": size}, **path)
        found += page.items
        if page.next is None:
            break
        query = {**query, "after": page.next}
    return found


@accept_renamed_arguments(token="api_key")
def connect(url: str, api_key: str, *, timeout: float = 600.0) -> Client:
    """Return a client of the server at ``http://HOST:PORT``. Nothing is sent yet.

    Where an app mounts the server below a path, the address ends with that path. ``timeout`` is
    the most seconds between two bytes of a response. Raises ``InvalidInput``.
    """
    return Client(Transport(url, api_key, timeout))


class Client(
    RemoteObject,
    RenamedAttributes,
    renamed={"collect": "collect_garbage", "served": "read_published_file"},
):
    """A server, from ``connect``. Thread-safe. ``personalpeft.Runtime`` documents each method.

    All but ``user``, ``forget_user``, ``rebase``, ``bases`` and ``whoami`` need an admin API key.
    """

    def user(self, user_id: str, *, create: bool = True) -> RemoteUser:
        check_user_id(user_id)
        self._transport.call(do.MAKE_USER if create else do.SUMMARY, user=user_id)
        return RemoteUser(user_id, self._transport)

    def whoami(self) -> v.ApiKeyInfo:
        """Return the user of the API key, and the base that answers."""
        return self._transport.call(do.WHOAMI)

    def bases(self) -> tuple[v.BaseInfo, ...]:
        """Return the bases that ``rebase`` can name."""
        return self._transport.call(do.BASES)

    def import_user(self, file: str | Path, *, as_user: str | None = None) -> ImportSummary:
        try:
            data = Path(file).expanduser().read_bytes()
        except OSError as error:
            raise PersonalFileError(
                f"{file} cannot be read: {error.strerror or error}.", hint="Check the path."
            ) from error
        return self._transport.call(do.IMPORT_USER, {"as_user": as_user}, data)

    users = remote_method(Runtime.users)
    forget_user = remote_method(Runtime.forget_user)
    rebase = remote_method(Runtime.rebase)
    learn_many = accept_renamed_arguments(memory="max_memory_mb")(remote_method(Runtime.learn_many))
    read_published_file = remote_method(Runtime.read_published_file)
    verify = remote_method(Runtime.verify)
    collect_garbage = remote_method(Runtime.collect_garbage)


class RemoteUser(RemoteObject, RenamedAttributes, renamed=RENAMED_ATTRIBUTES):
    """One user of a server, from ``Client.user``.

    ``personalpeft.User`` documents each method.
    """

    def __init__(self, user_id: str, transport: Transport) -> None:
        super().__init__(transport, user=user_id)
        self.id = user_id

    def __repr__(self) -> str:
        return f"RemoteUser({self.id!r})"

    stream = remote_method(User.stream)
    feedback = remote_method(User.feedback)
    record_implicit_feedback = accept_renamed_arguments(seen="event")(
        remote_method(User.record_implicit_feedback)
    )
    teach = remote_method(User.teach)
    remember = remote_method(User.remember)
    set_training = remote_method(User.set_training)
    retract = remote_method(User.retract)
    items = remote_method(User.items)
    edit_item = remote_method(User.edit_item)
    retract_item = remote_method(User.retract_item)
    learn = accept_renamed_arguments(memory="max_memory_mb")(remote_method(User.learn))
    practice = accept_renamed_arguments(memory="max_memory_mb")(remote_method(User.practice))
    forget = accept_renamed_arguments(check_rebuild="reproduce")(remote_method(User.forget))
    pending = remote_method(User.pending)
    training_status = remote_method(User.training_status)
    compare = remote_method(User.compare)
    review_probation = remote_method(User.review_probation)
    rollback = remote_method(User.rollback)
    set_weight = remote_method(User.set_weight)
    scope = remote_method(User.scope)
    stack = remote_method(User.stack)
    layers = remote_method(User.layers)
    revisions = remote_method(User.revisions)
    history = remote_method(User.history)
    reports = remote_method(User.reports)
    conversations = remote_method(User.conversations)
    conversation = remote_method(User.conversation)
    turns = remote_method(User.turns)
    turn = remote_method(User.turn)
    signals = remote_method(User.signals)
    signal_statuses = remote_method(User.signal_statuses)
    why = remote_method(User.why)
    summary = remote_method(User.summary)

    def chat(self, prompt: Prompt, **options: Any) -> Reply:
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.reply

    def activity_summary(
        self, since: datetime | timedelta = timedelta(days=1), until: datetime | None = None
    ) -> ActivitySummary:
        begin = (
            {"seconds": since.total_seconds()} if isinstance(since, timedelta) else {"since": since}
        )
        query = {**begin, "until": until}
        return self._transport.call(do.ACTIVITY_SUMMARY, query, user=self.id)

    def export(self, file: str | Path, *, adapters: bool = True) -> ExportSummary:
        """Export as ``User.export``, to a file here."""
        target = Path(file).expanduser().absolute()
        summary = self._transport.download(do.EXPORT, {"adapters": adapters}, target, user=self.id)
        return ExportSummary(**{**summary, "path": target})

    def export_peft(self, folder: str | Path, *, layer: str | None = None) -> Path:
        """Export as ``User.export_peft``, to a folder here."""
        target = Path(folder).expanduser().absolute()
        with map_write_errors(target):
            if target.exists() and any(target.iterdir()):
                raise InvalidInput(f"{target} must be empty.", hint="Choose an empty folder.")
        with file_system.temporary_folder() as beside:
            archive = beside / "peft.zip"
            self._transport.download(do.EXPORT_PEFT, {"layer": layer}, archive, user=self.id)
            with map_write_errors(target):
                target.mkdir(parents=True, exist_ok=True)
                unzip_adapter(archive, target)
        return target

    def import_peft(self, folder: str | Path, *, layer: str = "style") -> Revision:
        """Import as ``User.import_peft``, from a folder here."""
        with file_system.temporary_folder() as beside:
            archive = beside / "peft.zip"
            zip_adapter(Path(folder).expanduser(), archive)
            data = archive.read_bytes()
        return self._transport.call(do.IMPORT_PEFT, {"layer": layer}, data, user=self.id)

    def export_gguf(self, file: str | Path, *, layer: str | None = None) -> Path:
        """Export as ``User.export_gguf``, to a file here."""
        target = Path(file).expanduser().absolute()
        self._transport.download(do.EXPORT_GGUF, {"layer": layer}, target, user=self.id)
        return target

    def import_gguf(self, file: str | Path, *, layer: str = "style") -> Revision:
        """Import as ``User.import_gguf``, from a file here."""
        data = read_file(Path(file).expanduser())
        return self._transport.call(do.IMPORT_GGUF, {"layer": layer}, data, user=self.id)
