"""Bodies and queries of the API, and its answers where the library has no value for them.

The library's method of the same name documents what each field means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Le, Len
from pydantic import (
    AfterValidator,
    BeforeValidator,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from personalpeft.chat.reply import Reply
from personalpeft.chat.validation import MAX_TEXT_LENGTH, MAX_TOOLS, Truncation
from personalpeft.erasure import ForgetReport
from personalpeft.errors import InvalidId, InvalidInput, NotFound, PersonalPeftError
from personalpeft.ids import LAYER_NAME, SKILL_NAME, SOURCE, TOOL_NAME, USER_ID
from personalpeft.learning.report import LearnReport
from personalpeft.learning.train.config import Start
from personalpeft.memory.items import MAX_ITEM_LENGTH
from personalpeft.types import MAX_TOP_LOGPROBS, Json, Message, Scope
from personalpeft_app.http.api_v1.serialization import Request

T = TypeVar("T")


def _name(
    pattern: str, max_length: int, error: type[PersonalPeftError] = NotFound, min_length: int = 1
) -> tuple[Any, ...]:
    """Return the constraints of a name. Another text raises ``error``."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            message = f"must be {min_length} to {max_length} characters that match {pattern}"
            raise PydanticCustomError(error.__name__, "{message}", {"message": message}) from None

    constraints = StringConstraints(
        min_length=min_length, max_length=max_length, pattern=f"^(?:{pattern})$"
    )
    return constraints, WrapValidator(check)


def _plain_text(value: str) -> str:
    if "\0" in value:
        raise PydanticCustomError("plain_text", "must be plain text, without NUL")
    return value


def _whole_number(value: Any) -> Any:
    """Return 1.0 as 1: JSON has one sort of numbers. Python counts true as 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("whole_number", "must be a whole number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


PlainText: TypeAlias = Annotated[str, AfterValidator(_plain_text)]
_WHOLE = BeforeValidator(_whole_number)

UserId: TypeAlias = Annotated[str, *_name(USER_ID.pattern, 64, InvalidId)]
LayerName: TypeAlias = Annotated[str, *_name(LAYER_NAME.pattern, 38, InvalidId)]
SkillName: TypeAlias = Annotated[str, *_name(SKILL_NAME.pattern, 32, InvalidInput)]
SourceName: TypeAlias = Annotated[str, *_name(SOURCE.pattern, 32, InvalidId)]
ToolName: TypeAlias = Annotated[str, *_name(TOOL_NAME.pattern, 64, InvalidInput)]
TurnId: TypeAlias = Annotated[str, *_name("[a-z0-9_]+", 64)]
ConversationId: TypeAlias = Annotated[str, *_name("[a-z0-9_]+", 64)]
ItemId: TypeAlias = Annotated[str, *_name("[a-z0-9_]+", 64)]
ServerId: TypeAlias = Annotated[str, *_name("[a-z]+_[a-z0-9]+", 64)]
RevisionName: TypeAlias = Annotated[str, *_name("[a-z0-9@._-]+", 128)]
Sha256: TypeAlias = Annotated[str, *_name("[0-9a-f]+", 64, min_length=64)]
PublishedFile: TypeAlias = Annotated[
    str, *_name("adapter_config[.]json|adapter_model[.]safetensors", 64)
]
PluginName: TypeAlias = Annotated[str, *_name("[A-Za-z0-9._-]+", 64)]
Cursor: TypeAlias = Annotated[str, *_name("[a-z0-9@._-]+", 128, InvalidInput)]

LongText: TypeAlias = Annotated[PlainText, Len(1, MAX_TEXT_LENGTH)]
ShortText: TypeAlias = Annotated[PlainText, Len(1, MAX_ITEM_LENGTH)]
Prompt: TypeAlias = LongText | Annotated[tuple[Message, ...], Len(1, 1000)]
Seconds: TypeAlias = Annotated[float, Gt(0), Le(1e9)]
Megabytes: TypeAlias = Annotated[float, Gt(0), Le(1e9)]
Count: TypeAlias = Annotated[int, Ge(1), Le(1_000_000), _WHOLE]
JobKind: TypeAlias = Literal["learn", "learn_many", "practice", "forget"]
PageSize: TypeAlias = Annotated[int, Ge(1), Le(1000), _WHOLE]


# What is sent


@dataclass(frozen=True, slots=True)
class ChatBody(Request):
    """A prompt and how to answer it; see ``User.chat``."""

    prompt: Prompt
    tools: Annotated[tuple[Json, ...], Len(0, MAX_TOOLS)] = ()
    must_call: bool | ToolName = False
    temperature: Annotated[float, Ge(0), Le(10)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    max_tokens: Count | None = None
    stop: Annotated[tuple[Annotated[PlainText, Len(1, 1000)], ...], Len(0, 16)] = ()
    seed: Annotated[int, Ge(0), Le(2**63 - 1), _WHOLE] = 0
    memory: bool = True
    layers: Annotated[tuple[LayerName, ...], Len(0, 100)] | None = None
    revision: RevisionName | None = None
    template: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS), _WHOLE] = 0
    conversation_id: ConversationId | None = None
    replaces: TurnId | None = None
    truncation: Truncation | None = None
    timeout: Annotated[float, Ge(0.1), Le(1e9)] | None = None


@dataclass(frozen=True, slots=True)
class FeedbackBody(Request):
    """One thing about a reply: exactly one of rating, edit, prefer, comment and reward; see ``User.feedback``."""

    rating: Annotated[Literal[1, -1], _WHOLE] | None = None
    edit: LongText | None = None
    prefer: LongText | None = None
    comment: ShortText | None = None
    reward: Annotated[float, Ge(-1), Le(1)] | None = None
    source: SourceName = "person"


@dataclass(frozen=True, slots=True)
class ObserveBody(Request):
    """What the app saw without asking; see ``User.observe``."""

    seen: Literal["copied", "regenerated", "contradicted", "thanked"]


@dataclass(frozen=True, slots=True)
class TeachBody(Request):
    """A prompt and the answer that is wanted; see ``User.teach``."""

    prompt: LongText
    answer: LongText
    skill: SkillName | None = None
    source: SourceName = "person"


@dataclass(frozen=True, slots=True)
class RememberBody(Request):
    """A fact, and questions that it answers; see ``User.remember``."""

    text: ShortText
    questions: Annotated[tuple[ShortText, ...], Len(0, 100)] = ()
    answer: ShortText | None = None
    source: SourceName = "person"


@dataclass(frozen=True, slots=True)
class RetractBody(Request):
    """The ids of the signals to take back, or the beginnings of them; see ``User.retract``."""

    signals: Annotated[tuple[ItemId, ...], Len(1, 1000)]


@dataclass(frozen=True, slots=True)
class EditItemBody(Request):
    """A rule or fact said anew; see ``User.edit_item``."""

    text: ShortText
    questions: Annotated[tuple[ShortText, ...], Len(0, 100)] | None = None
    answer: ShortText | None = None


@dataclass(frozen=True, slots=True)
class LearnBody(Request):
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

    users: Annotated[tuple[UserId, ...], Len(0, 10_000)] = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class PracticeBody(Request):
    """What to practise and how much it may take: verifier and shaping are names of plugins; see ``User.practice``."""

    skill: SkillName
    verifier: PluginName
    family: Annotated[PlainText, Len(0, 200)] = ""
    shaping: PluginName | None = None
    rounds: Count | None = None
    seconds: Seconds | None = None
    steps: Count | None = None
    memory: Megabytes | None = None
    accept: bool = False


@dataclass(frozen=True, slots=True)
class ForgetBody(Request):
    """What to forget: the id of a turn, a signal, a rule or a fact, the beginning of one, or "last"; see ``User.forget``."""

    item: ItemId
    rebuild: bool = True
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class CompareBody(Request):
    """A question for two revisions of a layer; see ``User.compare``."""

    prompt: Prompt
    a: RevisionName = "live"
    b: RevisionName = "previous"
    layer: LayerName = "style"
    max_tokens: Count | None = None
    memory: bool = True


@dataclass(frozen=True, slots=True)
class ChooseBody(Request):
    """The better answer: the first (1), the second (2), or one by its name."""

    which: Annotated[Literal[1, 2], _WHOLE] | Annotated[str, *_name("[0-9a-f]+", 64, InvalidInput)]


@dataclass(frozen=True, slots=True)
class RollbackBody(Request):
    """Which revision comes back: an id or the beginning of one, "previous", or null for the bare base."""

    to: RevisionName | None = "previous"


@dataclass(frozen=True, slots=True)
class WeightBody(Request):
    """How strongly a layer is added; see ``User.weigh``."""

    weight: Annotated[float, Ge(-2), Le(2)]


@dataclass(frozen=True, slots=True)
class ScopeBody(Request):
    """When a layer is attached; see ``User.scope``."""

    scope: Scope


# What is asked for in the address


@dataclass(frozen=True, slots=True)
class Empty(Request):
    """No parameters."""


@dataclass(frozen=True, slots=True)
class PageQuery(Request):
    """A page: at most ``limit`` of what comes after ``after``, which is the ``next`` of the page before."""

    after: Cursor | None = None
    limit: PageSize = 100


@dataclass(frozen=True, slots=True)
class UsersQuery(Request):
    """A page of the users whose id contains ``search``."""

    after: Cursor | None = None
    limit: PageSize = 100
    search: Annotated[PlainText, Len(0, 64)] = ""


@dataclass(frozen=True, slots=True)
class LayerQuery(Request):
    """A page, of one layer or of all."""

    layer: LayerName | None = None
    after: Cursor | None = None
    limit: PageSize = 100


@dataclass(frozen=True, slots=True)
class CurrentQuery(Request):
    """A page; ``current=false`` shows what was superseded or taken back too."""

    current: bool = True
    after: Cursor | None = None
    limit: PageSize = 100


@dataclass(frozen=True, slots=True)
class DigestQuery(Request):
    """Since a moment, or for so many seconds until now (a day, where nothing is said); ``until`` another moment than now."""

    since: datetime | None = None
    seconds: Annotated[float, Gt(0), Le(1e11)] | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class CollectQuery(Request):
    """``dry_run=true`` only says what there is."""

    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class ExportQuery(Request):
    """``adapters=false`` leaves the adapters out; the next learn builds them from what was said."""

    adapters: bool = True


@dataclass(frozen=True, slots=True)
class PeftQuery(Request):
    """One layer, or the whole stack."""

    layer: LayerName | None = None


@dataclass(frozen=True, slots=True)
class PeftImportQuery(Request):
    """The layer that it becomes a revision of."""

    layer: LayerName = "style"


@dataclass(frozen=True, slots=True)
class ImportQuery(Request):
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
