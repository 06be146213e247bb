"""The table of operations: what each takes and answers, and the errors that it can end in.

Routes, the OpenAPI document, docs/reference/http-api.md and the client are made from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from personalpeft.archive import ImportSummary
from personalpeft.chat.compare import LabeledComparison
from personalpeft.chat.conversation import Conversation, ConversationSummary
from personalpeft.chat.reply import Reply
from personalpeft.erasure import ForgetUserReport
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
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft.learning.report import LearnReport
from personalpeft.learning.status import Pending, SignalStatus, TrainingStatus
from personalpeft.memory.types import Item
from personalpeft.provenance import Provenance
from personalpeft.store.types import GarbageReport, Problem, UserSummary
from personalpeft.types import HeadMove, Json, Layer, Revision, Signal, Stack, Turn
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
    "turn": (v.TurnId, 'The id of a turn, the beginning of one, or "last".'),
    "conversation": (v.ConversationId, "The id of a conversation, or the beginning of one."),
    "layer": (v.LayerName, "style, memory or skill.<name>."),
    "item": (v.ItemId, "The id of a rule or fact, or the beginning of one."),
    "job": (v.ServerId, "The id of a learn, practice, forget or rebase."),
    "stream": (v.ServerId, "The name in the first event of a streamed reply."),
    "comparison": (v.ServerId, "The id of a comparison."),
    "digest": (v.Sha256, "The digest of a stack."),
    "file": (v.PublishedFile, "adapter_config.json or adapter_model.safetensors."),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the table.

    Attributes:
        name: That of the library's method, of the handler and the operationId.
        answer: The type of the answer: None for none, bytes for a file that never changes.
        paged: Whether it answers a page of ``answer``.
        events: The type of each server-sent event by name, in place of one answer.
        makes_user: Whether the user is created on first use.
        admin: Whether it needs an admin token.
        workers: Whether a worker's token will do too.
        download: Whether it answers a file.
        upload: Whether its body is a file.
        file: What the file is.
    """

    name: str
    method: Method
    path: str
    section: str
    text: str
    answer: Any = None
    body: type[RequestModel] | None = None
    query: type[RequestModel] = v.Empty
    status: int = 200
    paged: bool = False
    events: Mapping[str, type] = field(default_factory=dict)
    makes_user: bool = False
    admin: bool = False
    workers: bool = False
    download: bool = False
    upload: bool = False
    file: str = "a `.personal` file"
    errors: Errors = ANY

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names in the path."""
        return tuple(re.findall(r"{(\w+)}", self.path))

    @property
    def response(self) -> Any:
        """The type of the whole answer."""
        return v.Page[self.answer] if self.paged else self.answer

    @property
    def needs_body(self) -> bool:
        """Whether its body has a field without a default."""
        return self.body is not None and any(
            each.is_required() for each in self.body.model_fields.values()
        )


_USER, _TURN, _LAYER = "/users/{user}", "/users/{user}/turns/{turn}", "/users/{user}/layers/{layer}"
_JOB = "/jobs/{job}"

WHOAMI = Operation(
    "whoami", "GET", "/token", "Users", "The user of the token, and the base that answers.",
    v.TokenInfo, errors=(*ANY, WeightsError, MissingPackage),
)  # fmt: skip
USERS = Operation(
    "users", "GET", "/users", "Users",
    "A page of the users by id; with `search` of those whose id contains it.",
    UserSummary, query=v.UsersQuery, paged=True, admin=True,
)  # fmt: skip
MAKE_USER = Operation(
    "make_user", "PUT", _USER, "Users", "Create a user unless it exists. Returns its summary.",
    UserSummary, makes_user=True,
)  # fmt: skip
SUMMARY = Operation(
    "summary", "GET", _USER, "Users", "When a user was created, and how much is recorded.",
    UserSummary,
)  # fmt: skip
SET_TRAINING = Operation(
    "set_training", "PUT", f"{_USER}/training", "Users",
    "Set whether layers may be trained on the user's feedback from now on.",
    UserSummary, v.TrainingBody, makes_user=True,
)  # fmt: skip
FORGET_USER = Operation(
    "forget_user", "DELETE", _USER, "Users",
    "Erase a user for good: ledger, layers, published copies and tokens.",
    ForgetUserReport, query=v.ForgetUserQuery,
)  # fmt: skip

CHAT = Operation(
    "chat", "POST", f"{_USER}/chat", "Chat",
    "Answer a prompt with the user's live stack, and record the turn.",
    Reply, v.ChatBody, makes_user=True, errors=TALKING,
)  # fmt: skip
STREAM = Operation(
    "stream", "POST", f"{_USER}/chat/stream", "Chat",
    "Chat in pieces. An error after the first piece is an event. A client that disconnects "
    "stops the reply, and the text so far is recorded as a cancelled turn.",
    body=v.ChatBody, makes_user=True, errors=TALKING,
    events={
        "begun": v.StreamStarted,
        "piece": v.StreamText,
        "ended": v.StreamFinished,
        "error": v.ErrorResponse,
    },
)  # fmt: skip
STOP = Operation(
    "stop", "DELETE", f"{_USER}/streams/{{stream}}", "Chat",
    "Stop a streamed reply. The stream ends with the turn so far, so feedback can follow.",
    v.StreamStopped,
)  # fmt: skip

CONVERSATIONS = Operation(
    "conversations", "GET", f"{_USER}/conversations", "Turns",
    "The conversations, the one with the newest turn first.",
    ConversationSummary, query=v.PageQuery, paged=True,
)  # fmt: skip
CONVERSATION = Operation(
    "conversation", "GET", f"{_USER}/conversations/{{conversation}}", "Turns",
    "One conversation: its turns, oldest first, without regenerated ones, and the user's own "
    "feedback on them.", Conversation,
)  # fmt: skip
TURNS = Operation(
    "turns", "GET", f"{_USER}/turns", "Turns", "All turns, newest first.",
    Turn, query=v.PageQuery, paged=True,
)  # fmt: skip
TURN = Operation(
    "turn", "GET", _TURN, "Turns", "One turn.", Turn,
)  # fmt: skip
WHY = Operation(
    "why", "GET", f"{_TURN}/why", "Turns",
    "The provenance of a reply: the revisions that answered, the signals that they were built "
    "from, the rules and facts in the prompt.", Provenance,
)  # fmt: skip

FEEDBACK = Operation(
    "feedback", "POST", f"{_TURN}/feedback", "Feedback",
    "Record one feedback signal on a reply. The signal is durable on return.",
    v.SignalCreated, v.FeedbackBody, status=201,
)  # fmt: skip
OBSERVE = Operation(
    "observe", "POST", f"{_TURN}/observe", "Feedback",
    "Report implicit feedback. It is recorded only if the server was started with it.",
    v.SignalRecorded, v.ObserveBody,
)  # fmt: skip
TEACH = Operation(
    "teach", "POST", f"{_USER}/teach", "Feedback", "Record the wanted answer to a prompt.",
    v.SignalCreated, v.TeachBody, status=201, makes_user=True,
)  # fmt: skip
REMEMBER = Operation(
    "remember", "POST", f"{_USER}/remember", "Feedback",
    "Record a fact. It is retrieved from the next turn on.",
    v.SignalCreated, v.RememberBody, status=201, makes_user=True,
)  # fmt: skip
RETRACT = Operation(
    "retract", "POST", f"{_USER}/retractions", "Feedback",
    "Retract signals, or only their training, all of them or none. Returns them; the ledger "
    "still holds them.",
    tuple[Signal, ...], v.RetractBody, status=201,
)  # fmt: skip
SIGNALS = Operation(
    "signals", "GET", f"{_USER}/signals", "Feedback", "The signals, oldest first.",
    Signal, query=v.CurrentQuery, paged=True,
)  # fmt: skip
SIGNAL_STATUSES = Operation(
    "signal_statuses", "GET", f"{_USER}/lessons", "Feedback",
    "The use of each signal and why, oldest first.", SignalStatus, query=v.CurrentQuery, paged=True,
)  # fmt: skip
ITEMS = Operation(
    "items", "GET", f"{_USER}/items", "Feedback", "The active rules and facts, oldest first.",
    Item, query=v.PageQuery, paged=True,
)  # fmt: skip
EDIT_ITEM = Operation(
    "edit_item", "PUT", f"{_USER}/items/{{item}}", "Feedback",
    "Replace a rule or fact. Returns the new one.", Item, v.EditItemBody,
)  # fmt: skip
RETRACT_ITEM = Operation(
    "retract_item", "DELETE", f"{_USER}/items/{{item}}", "Feedback",
    "Remove a rule or fact from prompts.", status=204,
)  # fmt: skip

LEARN = Operation(
    "learn", "POST", f"{_USER}/learns", "Learn",
    "Start a learn as a job. A user has one build at a time.", v.Job, v.LearnBody, status=202,
)  # fmt: skip
LEARN_MANY = Operation(
    "learn_many", "POST", "/learns", "Learn",
    "Start a learn of several users, whose layers train in one pass over the base. An error "
    "of one user is in the report of that user.", v.Job, v.LearnManyBody, status=202, admin=True,
)  # fmt: skip
PRACTICE = Operation(
    "practice", "POST", f"{_USER}/practices", "Learn", "Start a practice as a job.",
    v.Job, v.PracticeBody, status=202,
)  # fmt: skip
FORGET = Operation(
    "forget", "POST", f"{_USER}/forgets", "Learn",
    "Start to erase an item and everything derived from it, for good. Then layers that lost "
    "their revision are rebuilt.", v.Job, v.ForgetBody, status=202,
)  # fmt: skip
REBASE = Operation(
    "rebase", "POST", f"{_USER}/rebases", "Learn",
    "Start to build all layers anew on another base, as a job. Both bases answer the same "
    "held-out questions. One rebase runs at a time.", v.Job, v.RebaseBody, status=202,
)  # fmt: skip
BASES = Operation(
    "bases", "GET", "/bases", "Learn",
    "The bases that a rebase can name: those whose weights this server has.",
    tuple[v.BaseInfo, ...], errors=(*ANY, CardError),
)  # fmt: skip
JOBS = Operation(
    "jobs", "GET", f"{_USER}/jobs", "Learn", "The jobs of this server process, newest first.",
    v.Job, query=v.PageQuery, paged=True,
)  # fmt: skip
JOB = Operation(
    "job", "GET", f"{_USER}/jobs/{{job}}", "Learn", "The progress of a job; at the end its report.",
    v.Job,
)  # fmt: skip
FOLLOW = Operation(
    "follow", "GET", f"{_USER}/jobs/{{job}}/events", "Learn",
    "Each change of a job, from its current state to its end.", events={"job": v.Job},
)  # fmt: skip
CANCEL = Operation(
    "cancel", "DELETE", f"{_USER}/jobs/{{job}}", "Learn",
    "Stop a job after the running step. The next one continues from there.", v.Job,
)  # fmt: skip

EVERY_JOB = Operation(
    "every_job", "GET", "/jobs", "Learn", "The jobs of all users, newest first.",
    v.Job, query=v.PageQuery, paged=True, admin=True,
)  # fmt: skip
ANY_JOB = Operation(
    "any_job", "GET", _JOB, "Learn", "The same for a job of any user.", v.Job, admin=True,
)  # fmt: skip
FOLLOW_ANY = Operation(
    "follow_any", "GET", f"{_JOB}/events", "Learn", "The same for a job of any user.",
    events={"job": v.Job}, admin=True,
)  # fmt: skip
CANCEL_ANY = Operation(
    "cancel_any", "DELETE", _JOB, "Learn", "The same for a job of any user.", v.Job, admin=True,
)  # fmt: skip

PENDING = Operation(
    "pending", "GET", f"{_USER}/pending", "Learn", "What the next learn would train on.", Pending,
)  # fmt: skip
TRAINING_STATUS = Operation(
    "training_status", "GET", f"{_USER}/learning", "Learn",
    "The training that runs now, by any program on the home: its layer and steps, or null.",
    TrainingStatus | None,
)  # fmt: skip
REVIEW = Operation(
    "review", "POST", f"{_USER}/review", "Learn",
    "End the probations that feedback has decided. Returns a report for each.",
    tuple[LearnReport, ...],
)  # fmt: skip

STACK = Operation(
    "stack", "GET", f"{_USER}/stack", "Stack", "The live stack, lowest layer first.",
    Stack, errors=(*ANY, BaseMismatch, WeightsError),
)  # fmt: skip
LAYERS = Operation(
    "layers", "GET", f"{_USER}/layers", "Stack",
    "Every layer with its head, weight and scope, lowest first.",
    Layer, query=v.PageQuery, paged=True,
)  # fmt: skip
SET_WEIGHT = Operation(
    "set_weight", "PUT", f"{_LAYER}/weight", "Stack", "Set the weight of a layer.",
    Layer, v.WeightBody,
)  # fmt: skip
SCOPE = Operation(
    "scope", "PUT", f"{_LAYER}/scope", "Stack", "Set when a layer is active.", Layer, v.ScopeBody,
)  # fmt: skip
ROLLBACK = Operation(
    "rollback", "POST", f"{_LAYER}/rollback", "Stack", "Make another revision of a layer live.",
    HeadMove, v.RollbackBody, errors=SERVING,
)  # fmt: skip
REVISIONS = Operation(
    "revisions", "GET", f"{_USER}/revisions", "Stack",
    "The revisions, oldest first, refused ones too.", Revision, query=v.LayerQuery, paged=True,
)  # fmt: skip
HISTORY = Operation(
    "history", "GET", f"{_USER}/history", "Stack",
    "The moves of the heads and their causes, oldest first.",
    HeadMove, query=v.LayerQuery, paged=True,
)  # fmt: skip
REPORTS = Operation(
    "reports", "GET", f"{_USER}/reports", "Stack", "The recorded reports of learns, oldest first.",
    Json, query=v.PageQuery, paged=True,
)  # fmt: skip
ACTIVITY_SUMMARY = Operation(
    "activity_summary", "GET", f"{_USER}/digest", "Stack",
    "The activity in a period: signals, learns, moves, live revisions.",
    ActivitySummary, query=v.DigestQuery,
)  # fmt: skip

COMPARE = Operation(
    "compare", "POST", f"{_USER}/comparisons", "Compare",
    "Answer a prompt with two revisions, without saying which is which.",
    v.BlindComparison, v.CompareBody, status=201, errors=TALKING,
)  # fmt: skip
CHOOSE = Operation(
    "choose", "POST", f"{_USER}/comparisons/{{comparison}}/choice", "Compare",
    "Record the better answer as a preference. Returns which revisions answered.",
    LabeledComparison, v.ChooseBody, status=201,
)  # fmt: skip

EXPORT = Operation(
    "export", "GET", f"{_USER}/export", "Import and export",
    "Export a user to one .personal file, not encrypted. The header X-Personalpeft-Exported "
    "holds a summary in JSON.", query=v.ExportQuery, download=True,
)  # fmt: skip
IMPORT_USER = Operation(
    "import_user", "POST", "/import", "Import and export",
    "Import the user of a .personal file. The user must be new. Digests and adapters are "
    "checked first.", ImportSummary, query=v.ImportQuery, status=201, upload=True, admin=True,
    errors=(*ANY, PersonalFileError, WeightsError, MissingPackage),
)  # fmt: skip

EXPORT_PEFT = Operation(
    "export_peft", "GET", f"{_USER}/peft", "Import and export",
    "Export the live stack, or one layer, as a zip of a folder that PEFT loads as one LoRA.",
    query=v.PeftQuery, download=True, file="a zip of a PEFT folder",
    errors=(*SERVING, AdapterError),
)  # fmt: skip
IMPORT_PEFT = Operation(
    "import_peft", "POST", f"{_USER}/peft", "Import and export",
    "Import a zip of a PEFT folder as the live revision of a layer. It is validated, and not "
    "gated.", Revision, query=v.PeftImportQuery, status=201, upload=True, makes_user=True,
    file="a zip of a PEFT folder",
    errors=(*ANY, AdapterError, BaseMismatch, WeightsError, MissingPackage),
)  # fmt: skip

EXPORT_GGUF = Operation(
    "export_gguf", "GET", f"{_USER}/gguf", "Import and export",
    "Export the live stack, or one layer, as a GGUF LoRA for llama.cpp.",
    query=v.PeftQuery, download=True, file="a GGUF LoRA", errors=(*SERVING, AdapterError),
)  # fmt: skip
IMPORT_GGUF = Operation(
    "import_gguf", "POST", f"{_USER}/gguf", "Import and export",
    "Import a GGUF LoRA as the live revision of a layer. It is validated, and not gated.",
    Revision, query=v.PeftImportQuery, status=201, upload=True, makes_user=True,
    file="a GGUF LoRA", errors=(*ANY, AdapterError, BaseMismatch, WeightsError, MissingPackage),
)  # fmt: skip

READ_PUBLISHED_FILE = Operation(
    "read_published_file", "GET", "/served/{digest}/{file}", "Import and export",
    "A file of a live or published stack, for vLLM servers elsewhere, which name it "
    "`personalpeft:<digest>` (plugins/vllm_resolver).", bytes, admin=True, workers=True,
)  # fmt: skip

VERIFY = Operation(
    "verify", "POST", "/verify", "Maintenance",
    "Recompute every digest in the home and report the problems. Changes nothing; can take "
    "minutes.", tuple[Problem, ...], admin=True,
)  # fmt: skip
COLLECT_GARBAGE = Operation(
    "collect_garbage", "POST", "/collect", "Maintenance",
    "Delete unreferenced files. Other programs may use the home meanwhile.",
    GarbageReport, query=v.DryRunQuery, admin=True,
)  # fmt: skip

OPERATIONS: tuple[Operation, ...] = tuple(
    each for each in list(globals().values()) if isinstance(each, Operation)
)
