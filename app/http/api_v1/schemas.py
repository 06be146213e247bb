"""What is sent to our own API, and what it answers where the library has no value for it. Only frozen values and their bounds;
what each field means is said by the library's method of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeAlias, TypeVar

from personalpeft.chat.reply import Reply
from personalpeft.chat.validation import MAX_TEXT_LENGTH, MAX_TOOLS
from personalpeft.erasure import ForgetReport
from personalpeft.errors import InvalidId, NotFound
from personalpeft.ids import LAYER_NAME, SKILL_NAME, SOURCE, TOOL_NAME, USER_ID
from personalpeft.learning.report import LearnReport
from personalpeft.learning.train.config import Start
from personalpeft.memory.items import MAX_ITEM_LENGTH
from personalpeft.types import MAX_TOP_LOGPROBS, Json, Message, Scope
from personalpeft_app.http.api_v1.serialization import Many, Range, Text

T = TypeVar("T")

UserId: TypeAlias = Annotated[str, Text(64, 1, USER_ID.pattern, InvalidId)]
LayerName: TypeAlias = Annotated[str, Text(38, 1, LAYER_NAME.pattern, InvalidId)]
SkillName: TypeAlias = Annotated[str, Text(32, 1, SKILL_NAME.pattern)]
SourceName: TypeAlias = Annotated[str, Text(32, 1, SOURCE.pattern, InvalidId)]
ToolName: TypeAlias = Annotated[str, Text(64, 1, TOOL_NAME.pattern)]
TurnId: TypeAlias = Annotated[str, Text(64, 1, "[a-z0-9_]+", NotFound)]
ItemId: TypeAlias = Annotated[str, Text(64, 1, "[a-z0-9_]+", NotFound)]
OwnId: TypeAlias = Annotated[str, Text(64, 1, "[a-z]+_[a-z0-9]+", NotFound)]
RevisionName: TypeAlias = Annotated[str, Text(128, 1, "[a-z0-9@._-]+", NotFound)]
Sha256: TypeAlias = Annotated[str, Text(64, 64, "[0-9a-f]+", NotFound)]
ServedFile: TypeAlias = Annotated[
    str, Text(64, 1, "adapter_config[.]json|adapter_model[.]safetensors", NotFound)
]
PluginName: TypeAlias = Annotated[str, Text(64, 1, "[A-Za-z0-9._-]+", NotFound)]

Written: TypeAlias = Annotated[str, Text(MAX_TEXT_LENGTH, 1)]
Short: TypeAlias = Annotated[str, Text(MAX_ITEM_LENGTH, 1)]
Prompt: TypeAlias = Written | Annotated[tuple[Message, ...], Many(1000, 1)]
Seconds: TypeAlias = Annotated[float, Range(above=0, most=1e9)]
Megabytes: TypeAlias = Annotated[float, Range(above=0, most=1e9)]
Count: TypeAlias = Annotated[int, Range(1, 1_000_000)]
JobKind: TypeAlias = Literal["learn", "learn_many", "practice", "forget"]
PageSize: TypeAlias = Annotated[int, Range(1, 1000)]
Cursor: TypeAlias = Annotated[str, Text(128, 1, "[a-z0-9@._-]+")]


# What is sent


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A question, and how to answer it; see ``User.chat``."""

    prompt: Prompt
    tools: Annotated[tuple[Json, ...], Many(MAX_TOOLS)] = ()
    must_call: bool | ToolName = False
    temperature: Annotated[float, Range(0, 10)] | None = None
    top_p: Annotated[float, Range(above=0, most=1)] | None = None
    max_tokens: Count | None = None
    stop: Annotated[tuple[Annotated[str, Text(1000, 1)], ...], Many(16)] = ()
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    memory: bool = True
    layers: Annotated[tuple[LayerName, ...], Many(100)] | None = None
    revision: RevisionName | None = None
    template: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Range(0, MAX_TOP_LOGPROBS)] = 0
    timeout: Annotated[float, Range(0.1, 1e9)] | None = None


@dataclass(frozen=True, slots=True)
class FeedbackBody:
    """One thing about a reply: exactly one of rating, edit, prefer, comment and reward; see ``User.feedback``."""

    rating: Literal[1, -1] | None = None
    edit: Written | None = None
    prefer: Written | None = None
    comment: Short | None = None
    reward: Annotated[float, Range(-1, 1)] | None = None
    source: SourceName = "person"


@dataclass(frozen=True, slots=True)
class ObserveBody:
    """What the app saw without asking; see ``User.observe``."""

    seen: Literal["copied", "regenerated", "contradicted", "thanked"]


@dataclass(frozen=True, slots=True)
class TeachBody:
    """A prompt and the answer that is wanted; see ``User.teach``."""

    prompt: Written
    answer: Written
    skill: SkillName | None = None
    source: SourceName = "person"


@dataclass(frozen=True, slots=True)
class RememberBody:
    """A fact, and questions that it answers; see ``User.remember``."""

    text: Short
    questions: Annotated[tuple[Short, ...], Many(100)] = ()
    answer: Short | None = None
    source: SourceName = "person"


@dataclass(frozen=True, slots=True)
class RetractBody:
    """The ids of the signals to take back, or the beginnings of them; see ``User.retract``."""

    signals: Annotated[tuple[ItemId, ...], Many(1000, 1)]


@dataclass(frozen=True, slots=True)
class EditItemBody:
    """A rule or fact said anew; see ``User.edit_item``."""

    text: Short
    questions: Annotated[tuple[Short, ...], Many(100)] | None = None
    answer: Short | None = None


@dataclass(frozen=True, slots=True)
class LearnBody:
    """What to learn and how much it may take; see ``User.learn``."""

    layer: LayerName | None = None
    start: Start = "auto"
    seconds: Seconds | None = None
    steps: Count | None = None
    memory: Megabytes | None = None
    dry_run: bool = False
    accept: bool = False


@dataclass(frozen=True, slots=True)
class LearnManyBody(LearnBody):
    """Who learns, and as of one; ``seconds`` and ``memory`` are for all of them together; see ``Runtime.learn_many``."""

    users: Annotated[tuple[UserId, ...], Many(10_000)] = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class PracticeBody:
    """What to practise and how much it may take: verifier and shaping are names of plugins; see ``User.practice``."""

    skill: SkillName
    verifier: PluginName
    family: Annotated[str, Text(200)] = ""
    shaping: PluginName | None = None
    rounds: Count | None = None
    seconds: Seconds | None = None
    steps: Count | None = None
    memory: Megabytes | None = None
    accept: bool = False


@dataclass(frozen=True, slots=True)
class ForgetBody:
    """What to forget: the id of a turn, a signal, a rule or a fact, the beginning of one, or "last"; see ``User.forget``."""

    item: ItemId
    rebuild: bool = True
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class CompareBody:
    """A question for two revisions of a layer; see ``User.compare``."""

    prompt: Prompt
    a: RevisionName = "live"
    b: RevisionName = "previous"
    layer: LayerName = "style"
    max_tokens: Count | None = None
    memory: bool = True


@dataclass(frozen=True, slots=True)
class ChooseBody:
    """The better answer: the first (1), the second (2), or one by its name."""

    which: Literal[1, 2] | Annotated[str, Text(64, 1, "[0-9a-f]+")]


@dataclass(frozen=True, slots=True)
class RollbackBody:
    """Which revision comes back: an id or the beginning of one, "previous", or null for the bare base."""

    to: RevisionName | None = "previous"


@dataclass(frozen=True, slots=True)
class WeightBody:
    """How strongly a layer is added; see ``User.weigh``."""

    weight: Annotated[float, Range(-2, 2)]


@dataclass(frozen=True, slots=True)
class ScopeBody:
    """When a layer is attached; see ``User.scope``."""

    scope: Scope


# What is asked for in the address


@dataclass(frozen=True, slots=True)
class Empty:
    """No parameters."""


@dataclass(frozen=True, slots=True)
class PageQuery:
    """A page: at most ``limit`` of what comes after ``after``, which is the ``next`` of the page before."""

    after: Cursor | None = None
    limit: PageSize = 100


@dataclass(frozen=True, slots=True)
class LayerQuery:
    """A page, of one layer or of all."""

    layer: LayerName | None = None
    after: Cursor | None = None
    limit: PageSize = 100


@dataclass(frozen=True, slots=True)
class CurrentQuery:
    """A page; ``current=false`` shows what was superseded or taken back too."""

    current: bool = True
    after: Cursor | None = None
    limit: PageSize = 100


@dataclass(frozen=True, slots=True)
class DigestQuery:
    """Since a moment, or for so many seconds until now (a day, where nothing is said); ``until`` another moment than now."""

    since: datetime | None = None
    seconds: Annotated[float, Range(above=0, most=1e11)] | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class CollectQuery:
    """``dry_run=true`` only says what there is."""

    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class ExportQuery:
    """``adapters=false`` leaves the adapters out; the next learn builds them from what was said."""

    adapters: bool = True


@dataclass(frozen=True, slots=True)
class PeftQuery:
    """One layer, or the whole stack."""

    layer: LayerName | None = None


@dataclass(frozen=True, slots=True)
class PeftImportQuery:
    """The layer that it becomes a revision of."""

    layer: LayerName = "style"


@dataclass(frozen=True, slots=True)
class ImportQuery:
    """Another name than the file's own for the user who comes in."""

    as_user: UserId | None = None


# What is answered


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong: ``kind`` is the name of the error's class, ``hint`` a way out."""

    kind: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The body of every answer that is an error."""

    error: Fault


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose a token is; ``user`` null is administration, which may act for everybody. ``base`` is the title of the model that
    everybody's is made of.
    """

    user: str | None
    base: str


@dataclass(frozen=True, slots=True)
class SignalCreated:
    """The id of the signal that was kept."""

    signal: str


@dataclass(frozen=True, slots=True)
class Observed:
    """The id of the signal that was kept, or null where what an app sees is not kept."""

    signal: str | None


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file that goes out: what it is called and how large it is."""

    path: Path
    bytes: int


@dataclass(frozen=True, slots=True)
class BlindAnswer:
    """One of two answers, without saying whose it is."""

    number: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class BlindComparison:
    """Two answers to a question, to choose from while the server remembers them."""

    id: str
    prompt: str
    answers: tuple[BlindAnswer, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A learn, a practice or a forgetting that the server runs: how far it is, and in the end its report (``forgotten`` of a
    forgetting) or why there is none. ``progress`` is how much of the ``stage`` is done, 0 to 1. A learn of many has no ``user`` but
    ``users``, and a report for each of them in ``reports``, in the same order.
    """

    id: str
    user: str | None
    kind: JobKind
    state: Literal["running", "stopping", "done", "failed", "cancelled"]
    stage: str
    progress: float
    begun: datetime
    ended: datetime | None = None
    report: LearnReport | None = None
    forgotten: ForgetReport | None = None
    error: Fault | None = None
    users: tuple[str, ...] = ()
    reports: tuple[LearnReport, ...] = ()

    @property
    def over(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.ended is not None


@dataclass(frozen=True, slots=True)
class StreamStarted:
    """The first event of a streamed reply: the name by which it can be stopped."""

    stream: str


@dataclass(frozen=True, slots=True)
class StreamText:
    """A piece of a reply's text."""

    text: str


@dataclass(frozen=True, slots=True)
class StreamFinished:
    """The last event of a streamed reply: all of it, with its turn id and stack."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class StreamStopped:
    """Whether there was something to stop."""

    stopped: bool


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Part of a list; ``next`` is the ``after`` of the page that follows, null on the last one."""

    items: tuple[T, ...]
    next: str | None = None
