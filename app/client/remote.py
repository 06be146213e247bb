"""``personalpeft.User`` over a line: the same methods, and the same values and errors come back."""

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
from personalpeft_app.client.transport import Transport
from personalpeft_app.http.api_v1 import operations as do
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.peft_archive import unzip_adapter, zip_adapter

_PAGE = 1000


class RemoteUser(
    RenamedAttributes,
    renamed={"digest": "activity_summary", "learning": "training_status", "weigh": "set_weight"},
):
    """One user of a server; made by ``Client.user``. Each method as the one of its name of ``personalpeft.User``."""

    def __init__(self, user_id: str, line: Transport) -> None:
        self.id = user_id
        self._line = line

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
            prompt=_asked(prompt),
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
        return RemoteStream(self._line, self.id, body, cancelled)

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
        said: v.SignalCreated = self._call(do.FEEDBACK, body, turn=_turn(reply))
        return said.signal

    def observe(self, reply: Reply | Turn | str, seen: str) -> str | None:
        told: v.Observed = self._call(do.OBSERVE, {"seen": seen}, turn=_turn(reply))
        return told.signal

    def teach(
        self, prompt: str, answer: str, *, skill: str | None = None, source: str = USER_SOURCE
    ) -> str:
        said: v.SignalCreated = self._call(do.TEACH, v.TeachBody(prompt, answer, skill, source))
        return said.signal

    def remember(
        self,
        text: str,
        *,
        questions: Sequence[str] = (),
        answer: str | None = None,
        source: str = USER_SOURCE,
    ) -> str:
        said: v.SignalCreated = self._call(
            do.REMEMBER, v.RememberBody(text, tuple(questions), answer, source)
        )
        return said.signal

    def retract(self, *signals: str) -> tuple[Signal, ...]:
        taken: tuple[Signal, ...] = self._call(do.RETRACT, v.RetractBody(signals))
        return taken

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
        item: Item = self._call(do.EDIT_ITEM, v.EditItemBody(text, asked, answer), item=item_id)
        return item

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
        """As ``User.learn``; it runs in the server. Whoever leaves this call in the middle stops it there."""
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
        """As ``User.practice``, with plugins by name; it runs in the server."""
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
        """As ``User.forget``; it runs in the server."""
        job = self._followed(
            self._call(do.FORGET, v.ForgetBody(_turn(item), rebuild, dry_run)), progress, cancelled
        )
        if job.forgotten is None:
            raise connection_lost("a forgetting")
        return job.forgotten

    def pending(self) -> Pending:
        pending: Pending = self._call(do.PENDING)
        return pending

    def training_status(self) -> TrainingStatus | None:
        learning: TrainingStatus | None = self._call(do.LEARNING)
        return learning

    def review(self) -> tuple[LearnReport, ...]:
        reports: tuple[LearnReport, ...] = self._call(do.REVIEW)
        return reports

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
        body = v.CompareBody(_asked(prompt), a, b, layer, max_tokens, memory)
        found: v.BlindComparison = self._call(do.COMPARE, body)

        def keep(which: int | str) -> LabeledComparison:
            choice: LabeledComparison = self._call(do.CHOOSE, {"which": which}, comparison=found.id)
            return choice

        return Comparison(found.prompt, found.answers, found.same, keep)

    def rollback(self, layer: str, to: str | Literal["previous"] | None = "previous") -> HeadMove:
        move: HeadMove = self._call(do.ROLLBACK, v.RollbackBody(to), layer=layer)
        return move

    def set_weight(self, layer: str, weight: float) -> None:
        self._call(do.WEIGH, v.WeightBody(weight), layer=layer)

    def scope(self, layer: str, scope: Scope) -> None:
        self._call(do.SCOPE, v.ScopeBody(scope), layer=layer)

    def stack(self) -> Stack:
        stack: Stack = self._call(do.STACK)
        return stack

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
        digest: ActivitySummary = self._line.call(do.DIGEST, None, query, user=self.id)
        return digest

    def conversations(
        self, limit: int | None = None, *, before: str | None = None
    ) -> tuple[ConversationSummary, ...]:
        return self._all(do.CONVERSATIONS, v.PageQuery(before, _PAGE), most=limit)

    def conversation(self, conversation_id: str) -> Conversation:
        found: Conversation = self._call(do.CONVERSATION, conversation=conversation_id)
        return found

    def turns(self, limit: int | None = None, *, before: str | None = None) -> tuple[Turn, ...]:
        return self._all(do.TURNS, v.PageQuery(before, _PAGE), most=limit)

    def turn(self, reply: Reply | Turn | str) -> Turn:
        turn: Turn = self._call(do.TURN, turn=_turn(reply))
        return turn

    def signals(self, *, current: bool = True) -> tuple[Signal, ...]:
        return self._all(do.SIGNALS, v.CurrentQuery(current, limit=_PAGE))

    def lessons(self, *, current: bool = True) -> tuple[SignalStatus, ...]:
        return self._all(do.LESSONS, v.CurrentQuery(current, limit=_PAGE))

    def why(self, reply: Reply | Turn | str) -> Provenance:
        why: Provenance = self._call(do.WHY, turn=_turn(reply))
        return why

    def summary(self) -> UserSummary:
        summary: UserSummary = self._call(do.SUMMARY)
        return summary

    def export(self, file: str | Path, *, adapters: bool = True) -> ExportSummary:
        """As ``User.export``; the file is written here."""
        target = Path(file).expanduser().absolute()
        told = self._line.download(do.EXPORT, v.ExportQuery(adapters), target, user=self.id)
        return ExportSummary(**{**told, "path": target})

    def export_peft(self, folder: str | Path, *, layer: str | None = None) -> Path:
        """As ``User.export_peft``; the folder is written here."""
        target = Path(folder).expanduser().absolute()
        try:
            filled = target.exists() and any(target.iterdir())
        except OSError as error:
            why = error.strerror or error
            raise InvalidInput(
                f"{target} cannot be written: {why}.", hint="Choose another place."
            ) from error
        if filled:
            raise InvalidInput(
                f"There is something in {target} already.", hint="Choose an empty folder."
            )
        with TemporaryDirectory(prefix="personal-") as beside:
            archive = Path(beside) / "peft.zip"
            self._line.download(do.EXPORT_PEFT, v.PeftQuery(layer), archive, user=self.id)
            try:
                target.mkdir(parents=True, exist_ok=True)
                unzip_adapter(archive, target)
            except OSError as error:
                why = error.strerror or error
                raise InvalidInput(
                    f"{target} cannot be written: {why}.", hint="Choose another place."
                ) from error
        return target

    def import_peft(self, folder: str | Path, *, layer: str = "style") -> Revision:
        """As ``User.import_peft``, of a folder that lies here."""
        with TemporaryDirectory(prefix="personal-") as beside:
            archive = Path(beside) / "peft.zip"
            zip_adapter(Path(folder).expanduser(), archive)
            data = archive.read_bytes()
        revision: Revision = self._line.call(
            do.IMPORT_PEFT, data, v.PeftImportQuery(layer), user=self.id
        )
        return revision

    def export_gguf(self, file: str | Path, *, layer: str | None = None) -> Path:
        """As ``User.export_gguf``; the file is written here."""
        target = Path(file).expanduser().absolute()
        self._line.download(do.EXPORT_GGUF, v.PeftQuery(layer), target, user=self.id)
        return target

    def import_gguf(self, file: str | Path, *, layer: str = "style") -> Revision:
        """As ``User.import_gguf``, of a file that lies here."""
        data = read_file(Path(file).expanduser())
        revision: Revision = self._line.call(
            do.IMPORT_GGUF, data, v.PeftImportQuery(layer), user=self.id
        )
        return revision

    def _call(self, operation: do.Operation, body: Any = None, /, **path: str) -> Any:
        return self._line.call(operation, body, None, user=self.id, **path)

    def _all(
        self, operation: do.Operation, query: Any, *, most: int | None = None
    ) -> tuple[Any, ...]:
        """Every page, one after another, or the first ``most``."""
        found: tuple[Any, ...] = ()
        while most is None or len(found) < most or most < 0:
            # A number below 0 goes to the server, which says what is wrong with it.
            size = query.limit if most is None else min(query.limit, most - len(found))
            page: v.Page[Any] = self._line.call(
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
        return follow(self._line, job, progress, cancelled)


def _asked(prompt: Prompt) -> Any:
    """A prompt as it is sent. Raises ``InvalidInput`` for what is none."""
    return prompt if isinstance(prompt, str) else check_prompt(prompt)


def _turn(reply: Reply | Turn | str) -> str:
    if isinstance(reply, Reply | Turn):
        return reply.turn_id if isinstance(reply, Reply) else reply.id
    if not isinstance(reply, str):
        raise InvalidInput(
            f"{type(reply).__name__} is no reply.", hint="Give a reply, a turn, or the id of one."
        )
    return reply
