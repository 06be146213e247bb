"""``personalpeft.User`` over HTTP, with the same methods, values and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from personalpeft.adapters.safe_io import read_file
from personalpeft.archive import ExportSummary
from personalpeft.chat.compare import LabeledComparison
from personalpeft.chat.conversation import Conversation, ConversationSummary
from personalpeft.chat.reply import Reply
from personalpeft.chat.validation import Prompt, Tool, Truncation, check_prompt, check_tools
from personalpeft.deprecation import RenamedAttributes
from personalpeft.erasure import ForgetReport
from personalpeft.errors import InvalidInput
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft.learning.options import Condition, no_progress, not_cancelled
from personalpeft.learning.report import LearnReport
from personalpeft.learning.status import SignalStatus
from personalpeft.learning.train.config import Start
from personalpeft.learning.training_status import TrainingStatus
from personalpeft.learning.triggers import Pending
from personalpeft.memory.types import Item
from personalpeft.provenance import Provenance
from personalpeft.store.types import UserSummary
from personalpeft.types import (
    USER_SOURCE,
    HeadMove,
    Layer,
    Progress,
    Revision,
    Scope,
    Signal,
    Stack,
    Turn,
)
from personalpeft_app.client.comparing import Comparison
from personalpeft_app.client.streaming import RemoteStream, connection_lost, follow
from personalpeft_app.client.transport import Transport, write_errors
from personalpeft_app.http.api_v1 import operations as do
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.peft_archive import unzip_adapter, zip_adapter

_PAGE = 1000


class RemoteUser(
    RenamedAttributes,
    renamed={"digest": "activity_summary", "learning": "training_status", "weigh": "set_weight"},
):
    """One user of a server, from ``Client.user``.

    ``personalpeft.User`` documents each method.
    """

    def __init__(self, user_id: str, transport: Transport) -> None:
        self.id = user_id
        self._transport = transport

    def __repr__(self) -> str:
        return f"RemoteUser({self.id!r})"

    def stream(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Tool] = (),
        must_call: bool | str = False,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        memory: bool = True,
        layers: Sequence[str] | None = None,
        revision: str | None = None,
        template: bool = True,
        logprobs: bool = False,
        top_logprobs: int = 0,
        conversation_id: str | None = None,
        replaces: Reply | Turn | str | None = None,
        truncation: Truncation | None = None,
        timeout: float | None = None,
        cancelled: Condition | None = None,
    ) -> RemoteStream:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        named = None if layers is None else tuple(layers)
        body = v.ChatBody(
            prompt=_prompt(prompt),
            tools=check_tools(tools),
            must_call=must_call,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            stop=stops,
            seed=seed,
            memory=memory,
            layers=named,
            revision=revision,
            template=template,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            conversation_id=conversation_id,
            replaces=None if replaces is None else _turn(replaces),
            truncation=truncation,
            timeout=timeout,
        )
        return RemoteStream(self._transport, self.id, body, cancelled)

    def chat(self, prompt: Prompt, **asked: Any) -> Reply:
        stream = self.stream(prompt, **asked)
        for _ in stream:
            pass
        return stream.reply

    def feedback(
        self,
        reply: Reply | Turn | str,
        *,
        rating: Literal[1, -1] | None = None,
        edit: str | None = None,
        prefer: str | None = None,
        comment: str | None = None,
        reward: float | None = None,
        source: str = USER_SOURCE,
    ) -> str:
        body = v.FeedbackBody(rating, edit, prefer, comment, reward, source)
        return self._call(do.FEEDBACK, body, turn=_turn(reply)).signal

    def observe(self, reply: Reply | Turn | str, seen: str) -> str | None:
        return self._call(do.OBSERVE, {"seen": seen}, turn=_turn(reply)).signal

    def teach(
        self, prompt: str, answer: str, *, skill: str | None = None, source: str = USER_SOURCE
    ) -> str:
        return self._call(do.TEACH, v.TeachBody(prompt, answer, skill, source)).signal

    def remember(
        self,
        text: str,
        *,
        questions: Sequence[str] = (),
        answer: str | None = None,
        source: str = USER_SOURCE,
    ) -> str:
        body = v.RememberBody(text, tuple(questions), answer, source)
        return self._call(do.REMEMBER, body).signal

    def retract(self, *signals: str) -> tuple[Signal, ...]:
        return self._call(do.RETRACT, v.RetractBody(signals))

    def items(self) -> tuple[Item, ...]:
        return self._all(do.ITEMS, v.PageQuery(limit=_PAGE))

    def edit_item(
        self,
        item_id: str,
        text: str,
        *,
        questions: Sequence[str] | None = None,
        answer: str | None = None,
    ) -> Item:
        asked = None if questions is None else tuple(questions)
        return self._call(do.EDIT_ITEM, v.EditItemBody(text, asked, answer), item=item_id)

    def remove_item(self, item_id: str) -> None:
        self._call(do.REMOVE_ITEM, item=item_id)

    def learn(
        self,
        layer: str | None = None,
        *,
        start: Start = "auto",
        seconds: float | None = None,
        steps: int | None = None,
        memory: float | None = None,
        dry_run: bool = False,
        accept: bool = False,
        progress: Progress = no_progress,
        cancelled: Condition = not_cancelled,
    ) -> LearnReport:
        """Learn as ``User.learn``, in the server. Leaving this call early stops the learn."""
        body = v.LearnBody(layer, start, seconds, steps, memory, dry_run, accept)
        return self._learned(self._call(do.LEARN, body), progress, cancelled)

    def practice(
        self,
        skill: str,
        *,
        verifier: str,
        family: str = "",
        shaping: str | None = None,
        rounds: int | None = None,
        seconds: float | None = None,
        steps: int | None = None,
        memory: float | None = None,
        accept: bool = False,
        progress: Progress = no_progress,
        cancelled: Condition = not_cancelled,
    ) -> LearnReport:
        """Practise as ``User.practice``, in the server, with plugins by name."""
        body = v.PracticeBody(
            skill, verifier, family, shaping, rounds, seconds, steps, memory, accept
        )
        return self._learned(self._call(do.PRACTICE, body), progress, cancelled)

    def forget(
        self,
        item: Reply | Turn | str,
        *,
        rebuild: bool = True,
        dry_run: bool = False,
        progress: Progress = no_progress,
        cancelled: Condition = not_cancelled,
    ) -> ForgetReport:
        """Forget as ``User.forget``, in the server."""
        job = self._followed(
            self._call(do.FORGET, v.ForgetBody(_turn(item), rebuild, dry_run)), progress, cancelled
        )
        if job.forgotten is None:
            raise connection_lost("a forgetting")
        return job.forgotten

    def pending(self) -> Pending:
        return self._call(do.PENDING)

    def training_status(self) -> TrainingStatus | None:
        return self._call(do.LEARNING)

    def review(self) -> tuple[LearnReport, ...]:
        return self._call(do.REVIEW)

    def compare(
        self,
        prompt: Prompt,
        a: str = "live",
        b: str = "previous",
        *,
        layer: str = "style",
        max_tokens: int | None = None,
        memory: bool = True,
    ) -> Comparison:
        body = v.CompareBody(_prompt(prompt), a, b, layer, max_tokens, memory)
        found: v.BlindComparison = self._call(do.COMPARE, body)

        def keep(which: int | str) -> LabeledComparison:
            return self._call(do.CHOOSE, {"which": which}, comparison=found.id)

        return Comparison(found.prompt, found.answers, found.same, keep)

    def rollback(self, layer: str, to: str | Literal["previous"] | None = "previous") -> HeadMove:
        return self._call(do.ROLLBACK, v.RollbackBody(to), layer=layer)

    def set_weight(self, layer: str, weight: float) -> None:
        self._call(do.WEIGH, v.WeightBody(weight), layer=layer)

    def scope(self, layer: str, scope: Scope) -> None:
        self._call(do.SCOPE, v.ScopeBody(scope), layer=layer)

    def stack(self) -> Stack:
        return self._call(do.STACK)

    def layers(self) -> tuple[Layer, ...]:
        return self._all(do.LAYERS, v.PageQuery(limit=_PAGE))

    def revisions(self, layer: str | None = None) -> tuple[Revision, ...]:
        return self._all(do.REVISIONS, v.LayerQuery(layer, limit=_PAGE))

    def history(self, layer: str | None = None) -> tuple[HeadMove, ...]:
        return self._all(do.HISTORY, v.LayerQuery(layer, limit=_PAGE))

    def reports(self) -> tuple[Mapping[str, Any], ...]:
        return self._all(do.REPORTS, v.PageQuery(limit=_PAGE))

    def activity_summary(
        self, since: datetime | timedelta = timedelta(days=1), until: datetime | None = None
    ) -> ActivitySummary:
        seconds = since.total_seconds() if isinstance(since, timedelta) else None
        query = v.DigestQuery(None if isinstance(since, timedelta) else since, seconds, until)
        return self._transport.call(do.DIGEST, None, query, user=self.id)

    def conversations(
        self, limit: int | None = None, *, before: str | None = None
    ) -> tuple[ConversationSummary, ...]:
        return self._all(do.CONVERSATIONS, v.PageQuery(before, _PAGE), limit=limit)

    def conversation(self, conversation_id: str) -> Conversation:
        return self._call(do.CONVERSATION, conversation=conversation_id)

    def turns(self, limit: int | None = None, *, before: str | None = None) -> tuple[Turn, ...]:
        return self._all(do.TURNS, v.PageQuery(before, _PAGE), limit=limit)

    def turn(self, reply: Reply | Turn | str) -> Turn:
        return self._call(do.TURN, turn=_turn(reply))

    def signals(self, *, current: bool = True) -> tuple[Signal, ...]:
        return self._all(do.SIGNALS, v.CurrentQuery(current, limit=_PAGE))

    def lessons(self, *, current: bool = True) -> tuple[SignalStatus, ...]:
        return self._all(do.LESSONS, v.CurrentQuery(current, limit=_PAGE))

    def why(self, reply: Reply | Turn | str) -> Provenance:
        return self._call(do.WHY, turn=_turn(reply))

    def summary(self) -> UserSummary:
        return self._call(do.SUMMARY)

    def export(self, file: str | Path, *, adapters: bool = True) -> ExportSummary:
        """Export as ``User.export``, to a file here."""
        target = Path(file).expanduser().absolute()
        told = self._transport.download(do.EXPORT, v.ExportQuery(adapters), target, user=self.id)
        return ExportSummary(**{**told, "path": target})

    def export_peft(self, folder: str | Path, *, layer: str | None = None) -> Path:
        """Export as ``User.export_peft``, to a folder here."""
        target = Path(folder).expanduser().absolute()
        with write_errors(target):
            if target.exists() and any(target.iterdir()):
                raise InvalidInput(f"{target} must be empty.", hint="Choose an empty folder.")
        with TemporaryDirectory(prefix="personal-") as beside:
            archive = Path(beside) / "peft.zip"
            self._transport.download(do.EXPORT_PEFT, v.PeftQuery(layer), archive, user=self.id)
            with write_errors(target):
                target.mkdir(parents=True, exist_ok=True)
                unzip_adapter(archive, target)
        return target

    def import_peft(self, folder: str | Path, *, layer: str = "style") -> Revision:
        """Import as ``User.import_peft``, from a folder here."""
        with TemporaryDirectory(prefix="personal-") as beside:
            archive = Path(beside) / "peft.zip"
            zip_adapter(Path(folder).expanduser(), archive)
            data = archive.read_bytes()
        return self._transport.call(do.IMPORT_PEFT, data, v.PeftImportQuery(layer), user=self.id)

    def export_gguf(self, file: str | Path, *, layer: str | None = None) -> Path:
        """Export as ``User.export_gguf``, to a file here."""
        target = Path(file).expanduser().absolute()
        self._transport.download(do.EXPORT_GGUF, v.PeftQuery(layer), target, user=self.id)
        return target

    def import_gguf(self, file: str | Path, *, layer: str = "style") -> Revision:
        """Import as ``User.import_gguf``, from a file here."""
        data = read_file(Path(file).expanduser())
        return self._transport.call(do.IMPORT_GGUF, data, v.PeftImportQuery(layer), user=self.id)

    def _call(self, operation: do.Operation, body: Any = None, /, **path: str) -> Any:
        return self._transport.call(operation, body, None, user=self.id, **path)

    def _all(
        self, operation: do.Operation, query: Any, *, limit: int | None = None
    ) -> tuple[Any, ...]:
        """Return the values of all pages, or the first ``limit``."""
        found: tuple[Any, ...] = ()
        while limit is None or len(found) < limit or limit < 0:
            # The server refuses a negative number.
            size = query.limit if limit is None else min(query.limit, limit - len(found))
            page: v.Page[Any] = self._transport.call(
                operation, None, replace(query, limit=size), user=self.id
            )
            found += page.items
            if page.next is None:
                break
            query = replace(query, after=page.next)
        return found

    def _learned(self, job: v.Job, progress: Progress, cancelled: Condition) -> LearnReport:
        job = self._followed(job, progress, cancelled)
        if job.report is None:
            raise connection_lost("a learn")
        return job.report

    def _followed(self, job: v.Job, progress: Progress, cancelled: Condition) -> v.Job:
        return follow(self._transport, job, progress, cancelled)


def _prompt(prompt: Prompt) -> Any:
    """Return a prompt as it is sent. Raises ``InvalidInput``."""
    return prompt if isinstance(prompt, str) else check_prompt(prompt)


def _turn(reply: Reply | Turn | str) -> str:
    if isinstance(reply, Reply | Turn):
        return reply.turn_id if isinstance(reply, Reply) else reply.id
    if not isinstance(reply, str):
        raise InvalidInput(
            f"A reply, a turn or its id is needed, got {type(reply).__name__}.",
            hint="Give what chat returned, or its turn_id.",
        )
    return reply
