"""The table: every operation of our own API, what it takes, what it answers, and which errors it can end in.

Routes, the OpenAPI document, docs/api.md and the client are made from it, so an operation that is not here does not exist, and
none of them can say something else than another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeAlias

from personalpeft.archive import ImportSummary
from personalpeft.chat.compare import LabeledComparison
from personalpeft.chat.conversation import Conversation, ConversationSummary
from personalpeft.chat.reply import Reply
from personalpeft.errors import (
    AdapterError,
    BaseMismatch,
    Busy,
    Cancelled,
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
from personalpeft.learning.status import SignalStatus
from personalpeft.learning.training_status import TrainingStatus
from personalpeft.learning.triggers import Pending
from personalpeft.memory.types import Item
from personalpeft.provenance import Provenance
from personalpeft.store.types import GarbageReport, Problem, UserSummary
from personalpeft.types import HeadMove, Json, Layer, Revision, Signal, Stack, Turn
from personalpeft_app.http.api_v1 import schemas as v

PREFIX = "/api/v1"

Method: TypeAlias = Literal["GET", "POST", "PUT", "DELETE"]
Errors: TypeAlias = tuple[type[PersonalPeftError], ...]

PERSONAL = "application/octet-stream"
"""The media type of a ``.personal`` file."""

ANY: Errors = (InvalidInput, NotFound, Forgotten, Busy, HomeError, Damaged)
SERVING: Errors = (*ANY, BaseMismatch, ServingFailed, WeightsError, MissingPackage)
TALKING: Errors = (*SERVING, PromptTooLong, QueueFull, DeadlineExceeded, Cancelled)

PARAMETERS: Mapping[str, tuple[Any, str]] = {
    "user": (v.UserId, "Whose."),
    "turn": (v.TurnId, 'The id of a turn, the beginning of one, or "last".'),
    "conversation": (v.ConversationId, "The id of a conversation, or the beginning of one."),
    "layer": (v.LayerName, "style, memory or skill.<name>."),
    "item": (v.ItemId, "The id of a rule or fact, or the beginning of one."),
    "job": (v.ServerId, "The id of a learn, a practice or a forgetting."),
    "stream": (v.ServerId, "The name that the first event of a streamed reply gave."),
    "comparison": (v.ServerId, "The id of a comparison."),
    "digest": (v.Sha256, "The digest of a stack, which is its name after `personalpeft:`."),
    "file": (v.PublishedFile, "adapter_config.json or adapter_model.safetensors."),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the table.

    ``name`` is the function that does it (``acts``) and the operationId. ``answer`` is the type of the answer, None for none,
    bytes for a file that is the same for ever; ``paged`` answers a page of them; ``events`` answers server-sent events, by
    name, in place of one value. ``makes_user``: the user is made on first use, as the library does. ``everybody``: only for
    who may act for all users; ``workers``: for workers that serve stacks elsewhere, too. ``download`` answers a
    file, ``upload`` takes one as its body; ``file`` says what it is.
    """

    name: str
    method: Method
    path: str
    section: str
    text: str
    answer: Any = None
    body: type | None = None
    query: type = v.Empty
    status: int = 200
    paged: bool = False
    events: Mapping[str, type] = field(default_factory=dict)
    makes_user: bool = False
    everybody: bool = False
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
        needed = (MISSING, MISSING)
        return self.body is not None and any(
            (each.default, each.default_factory) == needed for each in fields(self.body)
        )


_USER, _TURN, _LAYER = "/users/{user}", "/users/{user}/turns/{turn}", "/users/{user}/layers/{layer}"
_JOB = "/jobs/{job}"

WHOAMI = Operation(
    "whoami", "GET", "/token", "Users", "Whose the token of this request is, and the base that answers.", v.Holder,
    errors=(*ANY, WeightsError, MissingPackage),
)  # fmt: skip
USERS = Operation(
    "users", "GET", "/users", "Users", "A page of the users by id; with `search` of those whose id contains it.",
    UserSummary, query=v.UsersQuery, paged=True, everybody=True,
)  # fmt: skip
MAKE_USER = Operation(
    "make_user", "PUT", _USER, "Users", "Makes a user where there is none yet; says since when, and how much there is.",
    UserSummary, makes_user=True,
)  # fmt: skip
SUMMARY = Operation(
    "summary", "GET", _USER, "Users", "Since when, and how much there is of a user.", UserSummary
)

CHAT = Operation(
    "chat", "POST", f"{_USER}/chat", "Talk", "Answers a question with the user's live stack and keeps the turn.",
    Reply, v.ChatBody, makes_user=True, errors=TALKING,
)  # fmt: skip
STREAM = Operation(
    "stream", "POST", f"{_USER}/chat/stream", "Talk",
    "As chat, in pieces. What goes wrong after the first piece is an event too; a client that goes away stops the reply, and what "
    "came is kept as a cancelled turn.",
    body=v.ChatBody, makes_user=True, errors=TALKING,
    events={"begun": v.StreamStarted, "piece": v.StreamText, "ended": v.StreamFinished, "error": v.Refusal},
)  # fmt: skip
STOP = Operation(
    "stop", "DELETE", f"{_USER}/streams/{{stream}}", "Talk",
    "Stops a streamed reply. The stream then ends with the turn as far as it came, so that feedback can follow.", v.StreamStopped,
)  # fmt: skip

CONVERSATIONS = Operation(
    "conversations", "GET", f"{_USER}/conversations", "Turns",
    "The conversations, the one with the newest turn first.",
    ConversationSummary, query=v.PageQuery, paged=True,
)  # fmt: skip
CONVERSATION = Operation(
    "conversation", "GET", f"{_USER}/conversations/{{conversation}}", "Turns",
    "One conversation: its turns, oldest first, without regenerated ones, and the edits of them.",
    Conversation,
)  # fmt: skip
TURNS = Operation(
    "turns", "GET", f"{_USER}/turns", "Turns", "All turns, newest first.",
    Turn, query=v.PageQuery, paged=True,
)  # fmt: skip
TURN = Operation("turn", "GET", _TURN, "Turns", "One turn.", Turn)
WHY = Operation(
    "why", "GET", f"{_TURN}/why", "Turns",
    "Why a reply was as it was: the revisions that answered, the signals behind them, the rules and facts in the prompt.", Provenance,
)  # fmt: skip

FEEDBACK = Operation(
    "feedback", "POST", f"{_TURN}/feedback", "Say", "Says one thing about a reply; it is durable when this answers.",
    v.SignalCreated, v.FeedbackBody, status=201,
)  # fmt: skip
OBSERVE = Operation(
    "observe", "POST", f"{_TURN}/observe", "Say", "Tells what the app saw; kept only where the server was opened so.",
    v.Observed, v.ObserveBody,
)  # fmt: skip
TEACH = Operation(
    "teach", "POST", f"{_USER}/teach", "Say", "Shows the answer that is wanted to a prompt.",
    v.SignalCreated, v.TeachBody, status=201, makes_user=True,
)  # fmt: skip
REMEMBER = Operation(
    "remember", "POST", f"{_USER}/remember", "Say", "Keeps a fact, which is looked up from the next turn on.",
    v.SignalCreated, v.RememberBody, status=201, makes_user=True,
)  # fmt: skip
RETRACT = Operation(
    "retract", "POST", f"{_USER}/retractions", "Say",
    "Takes back what was said, all that is named or none: it counts no more. Answers what it was; the ledger keeps it.",
    tuple[Signal, ...], v.RetractBody, status=201,
)  # fmt: skip
SIGNALS = Operation(
    "signals", "GET", f"{_USER}/signals", "Say", "What was said, oldest first.", Signal, query=v.CurrentQuery, paged=True,
)  # fmt: skip
LESSONS = Operation(
    "lessons", "GET", f"{_USER}/lessons", "Say", "Where each signal went and why, oldest first.",
    SignalStatus, query=v.CurrentQuery, paged=True,
)  # fmt: skip
ITEMS = Operation(
    "items", "GET", f"{_USER}/items", "Say", "The rules and facts that act now, oldest first.", Item, query=v.PageQuery, paged=True,
)  # fmt: skip
EDIT_ITEM = Operation(
    "edit_item", "PUT", f"{_USER}/items/{{item}}", "Say", "Says a rule or fact anew; answers the one that acts now.",
    Item, v.EditItemBody,
)  # fmt: skip
REMOVE_ITEM = Operation(
    "remove_item", "DELETE", f"{_USER}/items/{{item}}", "Say", "Switches a rule or fact off.", status=204,
)  # fmt: skip

LEARN = Operation(
    "learn", "POST", f"{_USER}/learns", "Learn",
    "Begins a learn and answers at once; it goes on in the server. One build of a user at a time.",
    v.Job, v.LearnBody, status=202,
)  # fmt: skip
LEARN_MANY = Operation(
    "learn_many", "POST", "/learns", "Learn",
    "Begins a learn of several users, whose layers train in one pass over the base. What one of them cannot do is that one's report.",
    v.Job, v.LearnManyBody, status=202, everybody=True,
)  # fmt: skip
PRACTICE = Operation(
    "practice", "POST", f"{_USER}/practices", "Learn", "Begins a practice, likewise.", v.Job, v.PracticeBody, status=202,
)  # fmt: skip
FORGET = Operation(
    "forget", "POST", f"{_USER}/forgets", "Learn",
    "Begins to destroy something that was said, with all that came of it, for good; then what lost its revision is built anew.",
    v.Job, v.ForgetBody, status=202,
)  # fmt: skip
JOBS = Operation(
    "jobs", "GET", f"{_USER}/jobs", "Learn", "The jobs that the server remembers, newest first.",
    v.Job, query=v.PageQuery, paged=True,
)  # fmt: skip
JOB = Operation(
    "job",
    "GET",
    f"{_USER}/jobs/{{job}}",
    "Learn",
    "How far a job is; in the end its report.",
    v.Job,
)
FOLLOW = Operation(
    "follow", "GET", f"{_USER}/jobs/{{job}}/events", "Learn",
    "Each change of a job as it comes, beginning with how it is now; ends with the job.", events={"job": v.Job},
)  # fmt: skip
CANCEL = Operation(
    "cancel", "DELETE", f"{_USER}/jobs/{{job}}", "Learn",
    "Stops a job after the running step; what was done is kept, and the next one goes on from there.", v.Job,
)  # fmt: skip

EVERY_JOB = Operation(
    "every_job", "GET", "/jobs", "Learn", "The jobs that the server remembers, of one user or of many, newest first.",
    v.Job, query=v.PageQuery, paged=True, everybody=True,
)  # fmt: skip
ANY_JOB = Operation(
    "any_job", "GET", _JOB, "Learn", "As of a user, whosever it is.", v.Job, everybody=True
)
FOLLOW_ANY = Operation(
    "follow_any", "GET", f"{_JOB}/events", "Learn", "As of a user, whosever it is.", events={"job": v.Job}, everybody=True,
)  # fmt: skip
CANCEL_ANY = Operation(
    "cancel_any", "DELETE", _JOB, "Learn", "As of a user, whosever it is.", v.Job, everybody=True,
)  # fmt: skip

PENDING = Operation(
    "pending", "GET", f"{_USER}/pending", "Learn", "What the next learn would have to go by.", Pending,
)  # fmt: skip
LEARNING = Operation(
    "learning", "GET", f"{_USER}/learning", "Learn",
    "What is being learned now, by this server or another program on its home: the layer and how many steps are done, or null.",
    TrainingStatus | None,
)  # fmt: skip
REVIEW = Operation(
    "review", "POST", f"{_USER}/review", "Learn", "Ends the probations that what was said until now decides; each end is a report.",
    tuple[LearnReport, ...],
)  # fmt: skip

STACK = Operation(
    "stack", "GET", f"{_USER}/stack", "Stack", "All that is live, lowest first.", Stack, errors=(*ANY, BaseMismatch, WeightsError),
)  # fmt: skip
LAYERS = Operation(
    "layers", "GET", f"{_USER}/layers", "Stack", "Every layer with its head, weight and scope, lowest first.",
    Layer, query=v.PageQuery, paged=True,
)  # fmt: skip
WEIGH = Operation(
    "weigh", "PUT", f"{_LAYER}/weight", "Stack", "How strongly a layer is added from now on.", Layer, v.WeightBody,
)  # fmt: skip
SCOPE = Operation(
    "scope", "PUT", f"{_LAYER}/scope", "Stack", "When a layer is attached from now on.", Layer, v.ScopeBody,
)  # fmt: skip
ROLLBACK = Operation(
    "rollback", "POST", f"{_LAYER}/rollback", "Stack", "Makes another revision of a layer live.",
    HeadMove, v.RollbackBody, errors=SERVING,
)  # fmt: skip
REVISIONS = Operation(
    "revisions", "GET", f"{_USER}/revisions", "Stack", "Everything that was built, oldest first, refused revisions too.",
    Revision, query=v.LayerQuery, paged=True,
)  # fmt: skip
HISTORY = Operation(
    "history", "GET", f"{_USER}/history", "Stack", "Every time that a head moved, and why; oldest first.",
    HeadMove, query=v.LayerQuery, paged=True,
)  # fmt: skip
REPORTS = Operation(
    "reports", "GET", f"{_USER}/reports", "Stack", "What every learn said as it was recorded, oldest first.",
    Json, query=v.PageQuery, paged=True,
)  # fmt: skip
DIGEST = Operation(
    "digest", "GET", f"{_USER}/digest", "Stack", "What learning did in a while: signals, learns, moves, what is live.",
    ActivitySummary, query=v.DigestQuery,
)  # fmt: skip

COMPARE = Operation(
    "compare", "POST", f"{_USER}/comparisons", "Compare", "Has two revisions answer the same question, blind.",
    v.BlindComparison, v.CompareBody, status=201, errors=TALKING,
)  # fmt: skip
CHOOSE = Operation(
    "choose", "POST", f"{_USER}/comparisons/{{comparison}}/choice", "Compare",
    "Says which answer is better; that is kept as a preference, and whose they were is told.", LabeledComparison, v.ChooseBody, status=201,
)  # fmt: skip

EXPORT = Operation(
    "export", "GET", f"{_USER}/export", "Move",
    "All of a user in one .personal file, not encrypted. The header X-Personalpeft-Exported says in JSON what it holds.",
    query=v.ExportQuery, download=True,
)  # fmt: skip
IMPORT = Operation(
    "import_user", "POST", "/import", "Move",
    "Takes in the user of a .personal file, of whom there must be none yet; every digest and adapter in it is checked first.",
    ImportSummary, query=v.ImportQuery, status=201, upload=True, everybody=True,
    errors=(*ANY, PersonalFileError, WeightsError, MissingPackage),
)  # fmt: skip

EXPORT_PEFT = Operation(
    "export_peft", "GET", f"{_USER}/peft", "Move",
    "The live stack, or one layer of it, as the folder that PEFT loads as one LoRA, in a zip.",
    query=v.PeftQuery, download=True, file="a zip of a PEFT folder", errors=(*SERVING, AdapterError),
)  # fmt: skip
IMPORT_PEFT = Operation(
    "import_peft", "POST", f"{_USER}/peft", "Move",
    "Takes a PEFT folder in, sent as a zip, as a revision of a layer and makes it live. Read as a stranger's, and not judged.",
    Revision, query=v.PeftImportQuery, status=201, upload=True, makes_user=True, file="a zip of a PEFT folder",
    errors=(*ANY, AdapterError, BaseMismatch, WeightsError, MissingPackage),
)  # fmt: skip

EXPORT_GGUF = Operation(
    "export_gguf", "GET", f"{_USER}/gguf", "Move",
    "The live stack, or one layer of it, as a GGUF LoRA, which llama.cpp loads beside the base's GGUF file.",
    query=v.PeftQuery, download=True, file="a GGUF LoRA", errors=(*SERVING, AdapterError),
)  # fmt: skip
IMPORT_GGUF = Operation(
    "import_gguf", "POST", f"{_USER}/gguf", "Move",
    "Takes a GGUF LoRA in as a revision of a layer and makes it live. Read as a stranger's, and not judged.",
    Revision, query=v.PeftImportQuery, status=201, upload=True, makes_user=True, file="a GGUF LoRA",
    errors=(*ANY, AdapterError, BaseMismatch, WeightsError, MissingPackage),
)  # fmt: skip

SERVED = Operation(
    "served", "GET", "/served/{digest}/{file}", "Move",
    "A file of a stack that is served now or was published, for vLLM servers elsewhere, which know it by `personalpeft:<digest>` "
    "(plugins/vllm_resolver).",
    bytes, everybody=True, workers=True,
)  # fmt: skip

VERIFY = Operation(
    "verify", "POST", "/verify", "Care",
    "Derives every digest in the home again and says what is not as it should be; nothing is changed. It can take a while.",
    tuple[Problem, ...], everybody=True,
)  # fmt: skip
COLLECT = Operation(
    "collect", "POST", "/collect", "Care", "Takes away what nothing needs, while others use the home.",
    GarbageReport, query=v.CollectQuery, everybody=True,
)  # fmt: skip

OPERATIONS: tuple[Operation, ...] = tuple(
    each for each in list(globals().values()) if isinstance(each, Operation)
)
