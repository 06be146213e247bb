"""Bodies and queries of the API, and its answers where the library has no value for them.

The library's method of the same name documents what each field means.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Le, Len
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
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
from personalpeft.rebase import RebaseReport
from personalpeft.types import MAX_TOP_LOGPROBS, Json, Message, Scope
from personalpeft_app.http.api_v1.serialization import RequestModel

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
ForgetItem: TypeAlias = Annotated[str, *_name("[a-z0-9._-]+", 64)]
ServerId: TypeAlias = Annotated[str, *_name("[a-z]+_[a-z0-9]+", 64)]
RevisionName: TypeAlias = Annotated[str, *_name("[a-z0-9@._-]+", 128)]
Sha256: TypeAlias = Annotated[str, *_name("[0-9a-f]+", 64, min_length=64)]
PublishedFile: TypeAlias = Annotated[
    str, *_name("adapter_config[.]json|adapter_model[.]safetensors", 64)
]
BaseName: TypeAlias = Annotated[str, *_name("[A-Za-z0-9][A-Za-z0-9._-]*", 64)]
PluginName: TypeAlias = Annotated[str, *_name("[A-Za-z0-9._-]+", 64)]
Cursor: TypeAlias = Annotated[str, *_name("[a-z0-9@._-]+", 128, InvalidInput)]

LongText: TypeAlias = Annotated[PlainText, Len(1, MAX_TEXT_LENGTH)]
ShortText: TypeAlias = Annotated[PlainText, Len(1, MAX_ITEM_LENGTH)]
Prompt: TypeAlias = LongText | Annotated[tuple[Message, ...], Len(1, 1000)]
Seconds: TypeAlias = Annotated[float, Gt(0), Le(1e9)]
Megabytes: TypeAlias = Annotated[float, Gt(0), Le(1e9)]
# ``memory`` is the old name, for one release.
MemoryBudget: TypeAlias = Annotated[
    Megabytes | None, Field(validation_alias=AliasChoices("max_memory_mb", "memory"))
]
Count: TypeAlias = Annotated[int, Ge(1), Le(1_000_000), _WHOLE]
JobKind: TypeAlias = Literal["learn", "learn_many", "practice", "forget", "rebase"]
PageSize: TypeAlias = Annotated[int, Ge(1), Le(1000), _WHOLE]


# Bodies


class ChatBody(RequestModel):
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


class FeedbackBody(RequestModel):
    """Feedback on a reply: exactly one field beside source and train; see ``User.feedback``."""

    rating: Annotated[Literal[1, -1], _WHOLE] | None = None
    edit: LongText | None = None
    prefer: LongText | None = None
    comment: ShortText | None = None
    reward: Annotated[float, Ge(-1), Le(1)] | None = None
    source: SourceName = "person"
    train: bool | None = None


class ObserveBody(RequestModel):
    """Implicit feedback; see ``User.observe``."""

    seen: Literal["copied", "regenerated", "contradicted", "thanked"]
    train: bool | None = None


class TeachBody(RequestModel):
    """A prompt and the wanted answer; see ``User.teach``."""

    prompt: LongText
    answer: LongText
    skill: SkillName | None = None
    source: SourceName = "person"
    train: bool | None = None


class RememberBody(RequestModel):
    """A fact and the questions that it answers; see ``User.remember``."""

    text: ShortText
    questions: Annotated[tuple[ShortText, ...], Len(0, 100)] = ()
    answer: ShortText | None = None
    source: SourceName = "person"
    train: bool | None = None


class RetractBody(RequestModel):
    """The ids of signals to retract, or unique prefixes; see ``User.retract``."""

    signals: Annotated[tuple[ItemId, ...], Len(1, 1000)]
    training_only: bool = False


class EditItemBody(RequestModel):
    """The new text of a rule or fact; see ``User.edit_item``."""

    text: ShortText
    questions: Annotated[tuple[ShortText, ...], Len(0, 100)] | None = None
    answer: ShortText | None = None


class LearnBody(RequestModel):
    """What to learn, and the budget; see ``User.learn``."""

    layer: LayerName | None = None
    start: Start = "auto"
    seconds: Seconds | None = None
    steps: Count | None = None
    max_memory_mb: MemoryBudget = None
    dry_run: bool = False
    accept: bool = False


class LearnManyBody(LearnBody):
    """The users, and the budget of all of them together; see ``Runtime.learn_many``."""

    users: Annotated[tuple[UserId, ...], Len(0, 10_000)]


class PracticeBody(RequestModel):
    """What to practise, the names of plugins, and the budget; see ``User.practice``."""

    skill: SkillName
    verifier: PluginName
    family: Annotated[PlainText, Len(0, 200)] = ""
    shaping: PluginName | None = None
    rounds: Count | None = None
    seconds: Seconds | None = None
    steps: Count | None = None
    max_memory_mb: MemoryBudget = None
    accept: bool = False


class RebaseBody(RequestModel):
    """The name of a base, and whether to switch; see ``Runtime.rebase``."""

    to: BaseName
    accept: bool = False
    compare_only: bool = False


class ForgetBody(RequestModel):
    """The id of a turn, signal, rule or fact, a prefix, "last", or a layer; see ``User.forget``."""

    item: ForgetItem
    conversation: bool = False
    rebuild: bool = True
    dry_run: bool = False
    certificate: bool = False
    check_rebuild: bool = False


class CompareBody(RequestModel):
    """A prompt for two revisions of a layer; see ``User.compare``."""

    prompt: Prompt
    a: RevisionName = "live"
    b: RevisionName = "previous"
    layer: LayerName = "style"
    max_tokens: Count | None = None
    memory: bool = True


class ChooseBody(RequestModel):
    """The better answer: 1, 2, or its name."""

    which: Annotated[Literal[1, 2], _WHOLE] | Annotated[str, *_name("[0-9a-f]+", 64, InvalidInput)]


class RollbackBody(RequestModel):
    """The revision to go back to: an id, a prefix, "previous", or null for the bare base."""

    to: RevisionName | None = "previous"


class TrainingBody(RequestModel):
    """Whether feedback may be trained on; see ``User.set_training``."""

    allowed: bool


class WeightBody(RequestModel):
    """The weight of a layer; see ``User.set_weight``."""

    weight: Annotated[float, Ge(-2), Le(2)]


class ScopeBody(RequestModel):
    """When a layer is active; see ``User.scope``."""

    scope: Scope


# Queries


class Empty(RequestModel):
    """No parameters."""


class PageQuery(RequestModel):
    """At most ``limit`` values after ``after``, the ``next`` of the page before."""

    after: Cursor | None = None
    limit: PageSize = 100


class UsersQuery(PageQuery):
    """A page of the users whose id contains ``search``."""

    search: Annotated[PlainText, Len(0, 64)] = ""


class DryRunQuery(RequestModel):
    """``dry_run=true`` only reports."""

    dry_run: bool = False


class ForgetUserQuery(DryRunQuery):
    """``certificate=true`` makes a signed certificate; see ``Runtime.forget_user``."""

    certificate: bool = False


class LayerQuery(PageQuery):
    """A page of one layer or of all."""

    layer: LayerName | None = None


class CurrentQuery(PageQuery):
    """A page; ``current=false`` includes superseded and retracted signals."""

    current: bool = True


class DigestQuery(RequestModel):
    """A period: from ``since``, or the last ``seconds`` (one day by default), to ``until``."""

    since: datetime | None = None
    seconds: Annotated[float, Gt(0), Le(1e11)] | None = None
    until: datetime | None = None


class ExportQuery(RequestModel):
    """``adapters=false`` omits the adapters. The next learn rebuilds them from the signals."""

    adapters: bool = True


class PeftQuery(RequestModel):
    """One layer, or the whole stack."""

    layer: LayerName | None = None


class PeftImportQuery(RequestModel):
    """The layer of the imported revision."""

    layer: LayerName = "style"


class ImportQuery(RequestModel):
    """Another id than the file's for the imported user."""

    as_user: UserId | None = None


# Answers


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """An error: ``kind`` is the name of its class, ``hint`` says what to do."""

    kind: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """The body of every error response."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """The user of a token, null for an admin token, and the title of the base."""

    user: str | None
    base: str


@dataclass(frozen=True, slots=True)
class BaseInfo:
    """The name and the title of a base, and whether it is the one that answers."""

    name: str
    title: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class SignalCreated:
    """The id of the new signal."""

    signal: str


@dataclass(frozen=True, slots=True)
class SignalRecorded:
    """The id of the new signal, null if implicit feedback is off."""

    signal: str | None


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file to download: its path and size."""

    path: Path
    bytes: int


@dataclass(frozen=True, slots=True)
class BlindAnswer:
    """One of two answers, without its revision."""

    number: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class BlindComparison:
    """Two answers to a prompt, to choose from until the comparison expires."""

    id: str
    prompt: str
    answers: tuple[BlindAnswer, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A learn, practice, forget or rebase that the server runs.

    ``progress`` is the share of ``stage`` that is done, 0 to 1. At the end there is a ``report``
    (``forgotten`` for a forget, ``rebased`` for a rebase) or an ``error``. A learn of several users has ``users`` and, in
    the same order, ``reports``; its ``user`` is null.
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
    error: ErrorDetails | None = None
    users: tuple[str, ...] = ()
    reports: tuple[LearnReport, ...] = ()
    rebased: RebaseReport | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.ended is not None


@dataclass(frozen=True, slots=True)
class StreamStarted:
    """The first event of a streamed reply: its name, to stop it by."""

    stream: str


@dataclass(frozen=True, slots=True)
class StreamText:
    """A piece of the text of a reply."""

    text: str


@dataclass(frozen=True, slots=True)
class StreamFinished:
    """The last event of a streamed reply: the whole reply."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class StreamStopped:
    """Whether the stream existed."""

    stopped: bool


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list. ``next`` is the ``after`` of the next page, null on the last."""

    items: tuple[T, ...]
    next: str | None = None
