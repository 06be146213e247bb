"""The table of operations: what each takes and answers, and the errors that it can end in.

Routes, the OpenAPI document, docs/reference/http-api.md and the client are made from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import getdoc
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

from personalpeft.chat.compare import LabeledComparison
from personalpeft.errors import (
    AdapterError,
    BaseMismatch,
    Busy,
    Cancelled,
    CardError,
    Damaged,
    DeadlineExceeded,
    Forgotten,
    HomeError,
    InvalidInput,
    MissingPackage,
    NotFound,
    PersonalFileError,
    PersonalPeftError,
    PromptTooLong,
    QueueFull,
    ServingFailed,
    WeightsError,
)
from personalpeft.runtime import Runtime
from personalpeft.store.types import UserSummary
from personalpeft.types import Layer
from personalpeft.user import User
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.http.api_v1.serialization import RequestModel

PREFIX = "/api/v1"

Method: TypeAlias = Literal["GET", "POST", "PUT", "DELETE"]
Errors: TypeAlias = tuple[type[PersonalPeftError], ...]

PERSONAL = "application/octet-stream"
"""The media type of a ``.personal`` file."""

ANY: Errors = (InvalidInput, NotFound, Forgotten, Busy, HomeError, Damaged)
SERVING: Errors = (*ANY, BaseMismatch, ServingFailed, WeightsError, MissingPackage)
TALKING: Errors = (*SERVING, PromptTooLong, QueueFull, DeadlineExceeded, Cancelled)

PARAMETERS: Mapping[str, tuple[Any, str]] = {
    "user": (v.UserId, "The user."),
    "turn": (v.LedgerId, 'The id of a turn, the beginning of one, or "last".'),
    "conversation": (v.LedgerId, "The id of a conversation, or the beginning of one."),
    "layer": (v.LayerName, "style, memory or skill.<name>."),
    "item": (v.LedgerId, "The id of a rule or fact, or the beginning of one."),
    "job": (v.ServerId, "The id of a learn, practice, forget or rebase."),
    "stream": (v.ServerId, "The name in the first event of a streamed reply."),
    "comparison": (v.ServerId, "The id of a comparison."),
    "digest": (v.Sha256, "The digest of a stack."),
    "file": (v.PublishedFile, "adapter_config.json or adapter_model.safetensors."),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the table, from ``_operation``.

    Attributes:
        name: That of the library's method, of the handler and the operationId.
        text: What it does, in Markdown.
        answer: The type of the answer: None for none, bytes for a file that never changes.
        paged: Whether it answers a page of ``answer``.
        events: The type of each server-sent event by name, in place of one answer.
        makes_user: Whether the user is created on first use.
        admin: Whether it needs an admin API key.
        workers: Whether a worker's API key will do too.
        download: The file that it answers, in words, if it answers one.
        upload: The file that its body is, in words, if it is one.
        former_path: An old path that works for one release.
    """

    name: str
    method: Method
    path: str
    section: str
    text: str
    answer: Any
    body: type[RequestModel] | None
    query: type[RequestModel]
    status: int = 200
    paged: bool = False
    events: Mapping[str, type] = field(default_factory=dict)
    makes_user: bool = False
    admin: bool = False
    workers: bool = False
    download: str = ""
    upload: str = ""
    former_path: str = ""
    errors: Errors = ANY

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names in the path."""
        return tuple(re.findall(r"{(\w+)}", self.path))

    @property
    def response(self) -> Any:
        """The type of the whole answer."""
        page: Any = v.Page
        return page[self.answer] if self.paged else self.answer

    @property
    def needs_body(self) -> bool:
        """Whether its body has a field without a default."""
        return self.body is not None and any(
            each.is_required() for each in self.body.model_fields.values()
        )


_OF_LIBRARY: Any = object()


def _operation(
    section: str,
    name: str,
    method: Method,
    path: str,
    text: str = "",
    answer: Any = _OF_LIBRARY,
    *,
    body: type[RequestModel] | None = None,
    query: type[RequestModel] | None = None,
    types: Mapping[str, Any] | None = None,
    **more: Any,
) -> Operation:
    """Return an operation. What is not given comes from the library's method of the same name.

    Its parameters are the query of a GET, DELETE or upload, and else the body. ``types`` replace
    those in ``schemas.FIELDS``; ``more`` are further fields of ``Operation``.
    """
    of_library = getattr(User, name, None) or getattr(Runtime, name, None)
    if of_library is not None:
        returned = get_type_hints(of_library)["return"]
        if answer is _OF_LIBRARY:
            answer = get_args(returned)[0] if more.get("paged") else returned
            answer = None if answer is NoneType else answer
        text = text or _first_paragraph(of_library)
        in_path = {end for each in re.findall(r"{(\w+)}", path) for end in (each, f"{each}_id")}
        title = "".join(map(str.capitalize, name.split("_")))
        make = partial(v.request_model, method=of_library, without=in_path, types=types)
        if query is None and (method in ("GET", "DELETE") or more.get("upload")):
            query = make(f"{title}Query", base=v.PageQuery if more.get("paged") else RequestModel)
        elif query is None:
            body = body or make(f"{title}Body")
    if answer is v.Job and method == "POST":
        text += " It runs as a job. A user has one at a time."
    query = query or (v.PageQuery if more.get("paged") else RequestModel)
    return Operation(name, method, path, section, text, answer, body, query, **more)


def _first_paragraph(method: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring without what it raises, in Markdown."""
    text = " ".join((getdoc(method) or "").partition("\n\n")[0].split())
    return re.sub(r" (Raises|Also raises) .*", "", text).replace("``", "`")


_USER, _TURN, _LAYER = "/users/{user}", "/users/{user}/turns/{turn}", "/users/{user}/layers/{layer}"
_JOBS, _JOB = f"{_USER}/jobs", f"{_USER}/jobs/{{job}}"
_PERSONAL_FILE, _PEFT_ZIP = "a `.personal` file", "a zip of a PEFT folder"
_GGUF_FILE = "a GGUF LoRA"
_users = partial(_operation, "Users")
_chat = partial(_operation, "Chat")
_turns = partial(_operation, "Turns")
_feedback = partial(_operation, "Feedback")
_learn = partial(_operation, "Learn")
_stack = partial(_operation, "Stack")
_compare = partial(_operation, "Compare")
_files = partial(_operation, "Import and export")
_maintain = partial(_operation, "Maintenance")

# fmt: off
WHOAMI = _users(
    "whoami", "GET", "/whoami", "The user of the API key, and the base that answers.",
    v.ApiKeyInfo, former_path="/token", errors=(*ANY, WeightsError, MissingPackage),
)
USERS = _users(
    "users", "GET", "/users",
    "A page of the users by id; with `search` of those whose id contains it.",
    paged=True, admin=True,
)
MAKE_USER = _users(
    "make_user", "PUT", _USER, "Create a user unless it exists. Returns its summary.",
    UserSummary, makes_user=True,
)
SUMMARY = _users("summary", "GET", _USER)
SET_TRAINING = _users(
    "set_training", "PUT", f"{_USER}/training", "", UserSummary, makes_user=True,
)
FORGET_USER = _users("forget_user", "DELETE", _USER)

CHAT = _chat("chat", "POST", f"{_USER}/chat", makes_user=True, errors=TALKING)
STREAM = _chat(
    "stream", "POST", f"{_USER}/chat/stream",
    "Chat in pieces. An error after the first event is an event. A client that disconnects "
    "stops the reply, and the text so far is recorded as a cancelled turn.",
    None, body=CHAT.body, makes_user=True, errors=TALKING,
    events={
        "begun": v.StreamStarted,
        "piece": v.StreamText,
        "ended": v.StreamFinished,
        "error": v.ErrorResponse,
    },
)
STOP = _chat(
    "stop", "DELETE", f"{_USER}/streams/{{stream}}",
    "Stop a streamed reply. The stream ends with the turn so far, so feedback can follow.",
    v.StreamStopped,
)

CONVERSATIONS = _turns("conversations", "GET", f"{_USER}/conversations", paged=True)
CONVERSATION = _turns("conversation", "GET", f"{_USER}/conversations/{{conversation}}")
TURNS = _turns("turns", "GET", f"{_USER}/turns", "All turns, newest first.", paged=True)
TURN = _turns("turn", "GET", _TURN, "One turn.")
WHY = _turns("why", "GET", f"{_TURN}/why")

FEEDBACK = _feedback("feedback", "POST", f"{_TURN}/feedback", "", v.SignalCreated, status=201)
RECORD_IMPLICIT_FEEDBACK = _feedback(
    "record_implicit_feedback", "POST", f"{_TURN}/implicit-feedback",
    "Report implicit feedback. It is recorded only if the server was started with it.",
    v.SignalRecorded, former_path=f"{_TURN}/observe",
)
TEACH = _feedback(
    "teach", "POST", f"{_USER}/teach", "", v.SignalCreated, status=201, makes_user=True,
    types={"prompt": v.LongText, "answer": v.LongText},
)
REMEMBER = _feedback(
    "remember", "POST", f"{_USER}/remember", "", v.SignalCreated, status=201, makes_user=True,
)
RETRACT = _feedback("retract", "POST", f"{_USER}/retractions", status=201)
SIGNALS = _feedback("signals", "GET", f"{_USER}/signals", paged=True)
SIGNAL_STATUSES = _feedback(
    "signal_statuses", "GET", f"{_USER}/signal-statuses", paged=True,
    former_path=f"{_USER}/lessons",
)
ITEMS = _feedback("items", "GET", f"{_USER}/items", paged=True)
EDIT_ITEM = _feedback("edit_item", "PUT", f"{_USER}/items/{{item}}")
RETRACT_ITEM = _feedback("retract_item", "DELETE", f"{_USER}/items/{{item}}", status=204)

LEARN = _learn("learn", "POST", f"{_USER}/learns", "", v.Job, status=202)
LEARN_MANY = _learn("learn_many", "POST", "/learns", "", v.Job, status=202, admin=True)
PRACTICE = _learn(
    "practice", "POST", f"{_USER}/practices", "", v.Job, status=202,
    types={"verifier": v.PluginName},
)
FORGET = _learn("forget", "POST", f"{_USER}/forgets", "", v.Job, status=202)
REBASE = _learn(
    "rebase", "POST", f"{_USER}/rebases", "", v.Job, status=202, types={"to": v.BaseName},
)
BASES = _learn(
    "bases", "GET", "/bases",
    "The bases that a rebase can name: those whose weights this server has.",
    tuple[v.BaseInfo, ...], errors=(*ANY, CardError),
)
JOBS = _learn(
    "jobs", "GET", _JOBS, "The jobs of this server process, newest first.", v.Job, paged=True,
)
JOB = _learn("job", "GET", _JOB, "The progress of a job; at the end its report.", v.Job)
FOLLOW = _learn(
    "follow", "GET", f"{_JOB}/events", "Each change of a job, from its current state to its end.",
    None, events={"job": v.Job},
)
CANCEL = _learn(
    "cancel", "DELETE", _JOB,
    "Stop a job after the running step. The next one continues from there.", v.Job,
)
EVERY_JOB, ANY_JOB, FOLLOW_ANY, CANCEL_ANY = (
    replace(
        each, name=name, path=each.path.removeprefix(_USER), admin=True,
        text=f"{each.text} Of any user; for administrators.",
    )
    for each, name in (
        (JOBS, "every_job"), (JOB, "any_job"), (FOLLOW, "follow_any"), (CANCEL, "cancel_any"),
    )
)
PENDING = _learn("pending", "GET", f"{_USER}/pending")
TRAINING_STATUS = _learn(
    "training_status", "GET", f"{_USER}/training-status", former_path=f"{_USER}/learning",
)
REVIEW = _learn(
    "review_probation", "POST", f"{_USER}/review-probation", former_path=f"{_USER}/review",
)

STACK = _stack("stack", "GET", f"{_USER}/stack", errors=(*ANY, BaseMismatch, WeightsError))
LAYERS = _stack("layers", "GET", f"{_USER}/layers", paged=True)
SET_WEIGHT = _stack("set_weight", "PUT", f"{_LAYER}/weight", "", Layer)
SCOPE = _stack("scope", "PUT", f"{_LAYER}/scope", "", Layer)
ROLLBACK = _stack(
    "rollback", "POST", f"{_LAYER}/rollback", types={"to": v.RevisionName | None}, errors=SERVING,
)
REVISIONS = _stack("revisions", "GET", f"{_USER}/revisions", paged=True)
HISTORY = _stack("history", "GET", f"{_USER}/history", paged=True)
REPORTS = _stack("reports", "GET", f"{_USER}/reports", paged=True)
ACTIVITY_SUMMARY = _stack(
    "activity_summary", "GET", f"{_USER}/activity",
    "The activity in a period: signals, learns, moves, live revisions.", query=v.ActivityQuery,
    former_path=f"{_USER}/digest",
)

COMPARE = _compare(
    "compare", "POST", f"{_USER}/comparisons", "", v.BlindComparison, status=201, errors=TALKING,
)
CHOOSE = _compare(
    "choose", "POST", f"{_USER}/comparisons/{{comparison}}/choice",
    "Record the better answer as a preference. Returns which revisions answered.",
    LabeledComparison, body=v.ChooseBody, status=201,
)

EXPORT = _files(
    "export", "GET", f"{_USER}/export",
    "Export a user to one .personal file, not encrypted. The header X-Personalpeft-Exported "
    "holds a summary in JSON.", None, download=_PERSONAL_FILE,
)
IMPORT_USER = _files(
    "import_user", "POST", "/import", status=201, upload=_PERSONAL_FILE, admin=True,
    errors=(*ANY, PersonalFileError, WeightsError, MissingPackage),
)
EXPORT_PEFT = _files(
    "export_peft", "GET", f"{_USER}/peft",
    "Export the live stack, or one layer, as a zip of a folder that PEFT loads as one LoRA.",
    None, download=_PEFT_ZIP, errors=(*SERVING, AdapterError),
)
IMPORT_PEFT = _files(
    "import_peft", "POST", f"{_USER}/peft", status=201, upload=_PEFT_ZIP, makes_user=True,
    errors=(*ANY, AdapterError, BaseMismatch, WeightsError, MissingPackage),
)
EXPORT_GGUF = _files(
    "export_gguf", "GET", f"{_USER}/gguf", "", None,
    download=_GGUF_FILE, errors=(*SERVING, AdapterError),
)
IMPORT_GGUF = _files(
    "import_gguf", "POST", f"{_USER}/gguf", status=201, upload=_GGUF_FILE, makes_user=True,
    errors=(*ANY, AdapterError, BaseMismatch, WeightsError, MissingPackage),
)
READ_PUBLISHED_FILE = _files(
    "read_published_file", "GET", "/published/{digest}/{file}", admin=True, workers=True,
    former_path="/served/{digest}/{file}",
)

VERIFY = _maintain("verify", "POST", "/verify", admin=True)
COLLECT_GARBAGE = _maintain(
    "collect_garbage", "POST", "/gc", admin=True, former_path="/collect",
    query=v.request_model("CollectGarbageQuery", Runtime.collect_garbage),
)
# fmt: on

OPERATIONS: tuple[Operation, ...] = tuple(
    each for each in list(globals().values()) if isinstance(each, Operation)
)
