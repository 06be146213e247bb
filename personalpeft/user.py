"""One person's model: what they said, what was built from it, and everything that they can do with it.

Invariant: each method either does all that it says, durably, or raises and has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

from personalpeft.bases.base import Base
from personalpeft.clock import Clock
from personalpeft.comparing import BASE, Answer, Choice, Comparison, compared, keeper
from personalpeft.errors import BaseMismatch, InvalidInput, NotFound, PersonalPeftError, ServingFailed
from personalpeft.ids import SKILL_NAME, check_layer_name, check_source
from personalpeft.learning.account import Account, accounts
from personalpeft.learning.digest import Digest, digest
from personalpeft.learning.learner import Learner
from personalpeft.learning.lessons import SEEN
from personalpeft.learning.probation import look_again
from personalpeft.learning.recipe import Start
from personalpeft.learning.report import LearnReport
from personalpeft.learning.skills.coach import Coach
from personalpeft.memory.base import Item
from personalpeft.memory.items import Memory, check_text
from personalpeft.plugins import Plugins, Shaping, Verifier
from personalpeft.prompts import Prompt, check_prompt, check_sampling, check_timeout, check_written
from personalpeft.replies import Reply, Stream, Why, why
from personalpeft.scopes import Scopes
from personalpeft.serving.engine import Engine, Request
from personalpeft.settings import Observing
from personalpeft.store.base import Store, UserSummary
from personalpeft.transfer import take_folder, write_folder
from personalpeft.types import (
    APP,
    PERSON,
    HeadMove,
    Layer,
    Message,
    Revision,
    Scope,
    Signal,
    SignalKind,
    Stack,
    StackEntry,
    Turn,
)

Progress: TypeAlias = Callable[[str, float], None]

# What memory may add to a prompt, as a share of the base's context.
_MEMORY_SHARE = 8


@dataclass(frozen=True, slots=True)
class Parts:
    """What a user's methods work with. Base, engine and learner are made when first asked for, since a model takes a
    while to load; ``warm`` brings a stack into its slot where one is loaded. ``streams`` are those that somebody still
    holds.
    """

    store: Store
    memory: Memory
    scopes: Scopes
    clock: Clock
    base: Callable[[], Base]
    engine: Callable[[], Engine]
    warm: Callable[[Stack], None]
    learner: Callable[[], Learner]
    coach: Callable[[], Coach]
    plugins: Plugins
    streams: WeakSet[Stream] = field(default_factory=WeakSet)
    observing: Observing = "off"


class User:
    """One user of an open runtime; made by ``Runtime.user``. Safe to use from several threads."""

    def __init__(self, user_id: str, parts: Parts) -> None:
        self.id = user_id
        self._parts = parts

    def __repr__(self) -> str:
        return f"User({self.id!r})"

    # Talking

    def chat(
        self,
        prompt: Prompt,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        memory: bool = True,
        layers: Sequence[str] | None = None,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Reply:
        """Answers a string or OpenAI-style messages with the user's live stack, and appends the turn to the ledger.

        What is not given comes from the base's card. ``temperature=0`` is greedy; the same stack, prompt and seed give
        the same text. ``memory=False`` leaves rules and facts out; ``layers`` names the only layers to attach, whatever
        their scope, ``[]`` none: the bare base. ``timeout`` is how many seconds the reply may take; ``cancelled`` is
        asked between steps, by another thread, and must be quick. Raises ``InvalidInput`` for an empty prompt or a
        number out of range, ``PromptTooLong`` saying by how many tokens, ``NotFound`` for an unknown layer,
        ``BaseMismatch`` when the live stack was built on another base, ``Busy`` with ``retry_after`` when too many wait,
        ``DeadlineExceeded`` when time is up (what came until then is kept as a cancelled turn), ``ServingFailed``.
        """
        stream = self.stream(
            prompt,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            stop=stop,
            seed=seed,
            memory=memory,
            layers=layers,
            timeout=timeout,
            cancelled=cancelled,
        )
        for _ in stream:
            pass
        return stream.reply

    def stream(
        self,
        prompt: Prompt,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        memory: bool = True,
        layers: Sequence[str] | None = None,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Stream:
        """As ``chat``, in pieces: iterate over the text, then read ``.reply``. A stream that is closed early is kept as
        a cancelled turn. ``Busy``, ``DeadlineExceeded`` and ``ServingFailed`` are raised by the piece that they keep away;
        the time begins with the first that is asked for.
        """
        messages, timeout = check_prompt(prompt), check_timeout(timeout)
        engine = self._parts.engine()
        sampling = check_sampling(
            engine.backend.base.card.sampling,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            stop=stop,
            seed=seed,
        )
        # Before anything else is made of the request: its turn, its reply and the prompt caches all name this stack.
        scopes = self._parts.scopes
        stack = scopes.narrowed(self.id, self.stack(), messages) if layers is None else self._narrowed(layers)
        heard, used = self._recall(messages) if memory else (messages, ())
        request = Request(self.id, heard, stack, sampling, timeout)
        prompt_tokens = len(engine.tokens(request))

        def record(reply: Reply) -> Reply:
            turn = self._parts.store.ledger.add_turn(
                self.id,
                messages=messages,
                reply=reply.text,
                stack=stack,
                sampling=sampling,
                usage=reply.usage,
                finish_reason=reply.finish_reason,
                used=used,
            )
            return replace(reply, turn_id=turn.id)

        stream = Stream(engine.replies([request], cancelled=cancelled), stack, prompt_tokens, record)
        self._parts.streams.add(stream)
        return stream

    # Saying what was good and what was not

    def feedback(
        self,
        reply: Reply | Turn | str,
        *,
        rating: int | None = None,
        edit: str | None = None,
        prefer: str | None = None,
        comment: str | None = None,
        reward: float | None = None,
        source: str = PERSON,
    ) -> str:
        """Says one thing about a reply (or the id of its turn) and returns the signal's id; it is durable then.

        ``rating`` is 1 or -1, ``edit`` the reply as it should have been, ``prefer`` another text that is better,
        ``comment`` a rule to follow from now on, ``reward`` a number from -1 to 1. Said twice of one turn, the later
        counts and both are kept; comments add up. ``source`` is who says so, where that is not the person: kept apart
        from what the person says, and not trained on. Raises ``NotFound`` for an unknown turn, ``InvalidInput`` for
        anything else, such as an edit that changes nothing.
        """
        given = {
            k: v
            for k, v in {"rating": rating, "edit": edit, "prefer": prefer, "comment": comment, "reward": reward}.items()
            if v is not None
        }
        if len(given) != 1:
            raise InvalidInput(
                "Feedback says exactly one thing." if given else "There is no feedback in this.",
                hint="Give one of rating, edit, prefer, comment or reward; call again for another.",
            )
        check_source(source)
        turn = self.turn(reply)
        kind, payload = _signal_of(turn, *next(iter(given.items())))
        signal = self._parts.store.ledger.add_signal(self.id, kind, payload, turn=turn.id, source=source).id
        self._look_again()
        return signal

    def observe(self, reply: Reply | Turn | str, seen: str) -> str | None:
        """Tells what the app saw without asking: "copied", "regenerated", "contradicted" or "thanked". It is kept as a
        rating by the source "app", and its id returned, where the runtime was opened with ``observing="kept"`` or
        "learned"; else nothing is kept, and None returned, so that an app need not ask each time whether it may. Raises
        ``NotFound`` for an unknown turn, ``InvalidInput`` for anything else that might have been seen.
        """
        if seen not in SEEN:
            raise InvalidInput(f"{seen!a} is nothing to observe.", hint=f"Give one of {', '.join(SEEN)}.")
        turn = self.turn(reply)
        if self._parts.observing == "off":
            return None
        payload = {"value": SEEN[seen], "how": seen}
        ledger = self._parts.store.ledger
        return ledger.add_signal(self.id, SignalKind.RATING, payload, turn=turn.id, source=APP).id

    def teach(self, prompt: str, answer: str, *, skill: str | None = None) -> str:
        """Shows the answer that is wanted to a prompt, for the style or a skill of its own; returns the signal's id.
        Raises ``InvalidInput``.
        """
        if skill is not None:
            _check_skill(skill)
        payload = {
            "prompt": check_written(prompt, what="prompt"),
            "answer": check_written(answer, what="answer"),
            "skill": skill,
        }
        return self._parts.store.ledger.add_signal(self.id, SignalKind.DEMONSTRATION, payload).id

    def remember(self, text: str, *, questions: Sequence[str] = (), answer: str | None = None) -> str:
        """Keeps a fact, which is looked up from the next turn on; returns the signal's id. ``questions`` help to find
        it, and with ``answer`` they make it ready to be learned. Raises ``InvalidInput``.
        """
        payload: dict[str, Any] = {
            "text": check_text(text, what="fact"),
            "questions": [check_text(q, what="question") for q in questions],
            "answer": None if answer is None else check_text(answer, what="answer"),
        }
        return self._parts.store.ledger.add_signal(self.id, SignalKind.FACT, payload).id

    def items(self) -> tuple[Item, ...]:
        """The rules and facts that act now, oldest first."""
        return self._parts.memory.items(self.id)

    def edit_item(self, item_id: str, text: str) -> Item:
        """Says a rule or fact anew. Raises ``NotFound``, ``InvalidInput``."""
        return self._parts.memory.edit(self.id, item_id, text)

    def remove_item(self, item_id: str) -> None:
        """Switches a rule or fact off; the ledger keeps that it was there. Raises ``NotFound``."""
        self._parts.memory.remove(self.id, item_id)

    # Learning, and taking it back

    def learn(
        self,
        layer: str = "style",
        *,
        start: Start = "auto",
        seconds: float | None = None,
        dry_run: bool = False,
        accept: bool = False,
        progress: Progress = lambda stage, done: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> LearnReport:
        """Builds a candidate from what is new, has the gate judge it, and makes it live if the gate promotes it. A
        refusal is a report, not an error.

        ``start="nothing"`` builds from all lessons anew. ``seconds`` is a budget for training: where it ends early, the
        next learn goes on from there, as it does after a kill. ``dry_run`` only says what would be learned. ``accept``
        makes the candidate live whatever the gate says of it, which is recorded; not one that could not be measured.
        ``progress`` hears a stage and how much of it is done (0 to 1). Raises ``NothingToLearn``, ``Busy`` while
        another learn of this user runs, ``Cancelled`` when ``cancelled`` says so.
        """
        check_layer_name(layer)
        if start not in ("auto", "nothing"):
            raise InvalidInput(f"A build cannot start from {start!a}.", hint="Give 'auto' or 'nothing'.")
        if seconds is not None and not seconds > 0:
            raise InvalidInput(f"A budget of {seconds} seconds is no budget.", hint="Give a number above 0.")
        return self._parts.learner().learn(
            self.id,
            layer,
            start=start,
            seconds=seconds,
            dry_run=dry_run,
            accept=accept,
            progress=progress,
            cancelled=cancelled,
        )

    def compare(
        self,
        prompt: Prompt,
        a: str = "live",
        b: str = "previous",
        *,
        layer: str = "style",
        max_tokens: int | None = None,
        memory: bool = True,
        cancelled: Callable[[], bool] | None = None,
    ) -> Comparison:
        """Has two revisions of a layer answer the same prompt greedily, in an order drawn by chance: ``choose`` one of the
        answers, and it is kept as a preference. ``a`` and ``b`` are ids or beginnings of them, "live", "previous" (what
        was live before the last change) or "base". Raises as ``chat``; ``NotFound`` for an unknown revision and where
        nothing was learned yet, ``InvalidInput`` where both are the same one, ``Cancelled``.
        """
        messages = check_prompt(prompt)
        revisions = [self._named(layer, name) for name in (a, b)]
        if revisions[0] == revisions[1]:
            raise InvalidInput(f"Both are {revisions[0] or 'the bare base'}.", hint="Name another revision.")
        engine = self._parts.engine()
        sampling = check_sampling(
            engine.backend.base.card.sampling, temperature=0, top_p=None, max_tokens=max_tokens, stop=(), seed=0
        )
        heard, used = self._recall(messages) if memory else (messages, ())
        sides = [(revision or BASE, self._with_head(layer, revision)) for revision in revisions]
        first, second = compared(engine, self.id, heard, sides, sampling, cancelled)
        if self._parts.clock.entropy(1)[0] & 1:
            first, second = second, first
        keep = keeper(self._parts.store, self.id, layer, messages, sampling, used)

        def keep_and_look(chosen: Answer, other: Answer) -> Choice:
            choice = keep(chosen, other)
            self._look_again()
            return choice

        return Comparison(messages[-1].content, (first, second), keep_and_look)

    def practice(
        self,
        skill: str,
        *,
        verifier: str | Verifier,
        family: str = "",
        shaping: str | Shaping | None = None,
        rounds: int | None = None,
        seconds: float | None = None,
        progress: Progress = lambda stage, done: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> LearnReport:
        """Has a skill try tasks that a verifier sets and judges, so that what was right becomes likelier; then the gate
        compares what it makes of tasks held back, before and after. A refusal is a report, not an error.

        ``verifier`` and ``shaping`` are names of plugins or objects (``personalpeft.plugins``); ``family`` says which of
        a verifier's tasks. It goes on from the skill's head: teach and learn first where the base can do nothing of it.
        ``rounds`` or ``seconds`` of trying end it sooner, and what was practised until then is judged. Stopping it
        otherwise keeps nothing. Raises ``NotFound`` for an unknown plugin, ``PluginError``, ``InvalidInput``, ``Busy``
        while another learn of this user runs, ``Cancelled``.
        """
        _check_skill(skill)
        if rounds is not None and not rounds >= 1:
            raise InvalidInput(f"A practice of {rounds} rounds is none.", hint="Give 1 or more.")
        if seconds is not None and not seconds > 0:
            raise InvalidInput(f"A budget of {seconds} seconds is no budget.", hint="Give a number above 0.")
        plugins = self._parts.plugins
        verifying = plugins.verifier(verifier, family)
        shaped = None if shaping is None else plugins.shaping(shaping)
        return self._parts.coach().practise(
            self.id,
            f"skill.{skill}",
            verifying,
            shaped,
            rounds=rounds,
            seconds=seconds,
            progress=progress,
            cancelled=cancelled,
        )

    def rollback(self, layer: str, to: str | Literal["previous"] | None = "previous") -> HeadMove:
        """Makes another revision of a layer live: by default the one that was live before the last move, None the bare
        base. An id, or the beginning of one, may name any revision, a refused one too. Raises ``NotFound``, and
        ``BaseMismatch`` across a change of base.
        """
        store, base = self._parts.store, self._parts.base()
        if to == "previous":
            moves = store.catalog.history(self.id, layer=layer)
            if not moves:
                raise NotFound(f"The layer {layer} has never changed.", hint="There is nothing to roll back.")
            to = moves[-1].before
        # Loaded before the head moves, so that the next reply waits for nothing; undoing must also work where serving does
        # not.
        with suppress(BaseMismatch, ServingFailed):
            self._parts.warm(self._with_head(layer, to))
        return store.catalog.move_head(self.id, layer, to, base=base.digest, cause="rollback")

    def weigh(self, layer: str, weight: float) -> None:
        """How strongly a layer is added from now on: 1 as it was learned, 0 not at all; -2 to 2. Raises ``NotFound``,
        ``InvalidInput``.
        """
        if not isinstance(weight, int | float) or not -2 <= weight <= 2:
            raise InvalidInput(
                f"The weight {weight!r} is not between -2 and 2.", hint="1 is the layer as it was learned."
            )
        self._parts.store.catalog.set_weight(self.id, layer, float(weight))

    def scope(self, layer: str, scope: Scope) -> None:
        """When a layer is attached from now on: "always", "near" (when the request is near the lessons that it was built
        from) or "never". Before anybody says so a style is "always", a skill and the memory "near". Raises ``NotFound``,
        ``InvalidInput``.
        """
        self._parts.store.catalog.set_scope(self.id, layer, scope)

    # Looking at it

    def stack(self) -> Stack:
        """All that is live; the scope of each layer says which turns it answers. Raises ``BaseMismatch`` when a head was
        built on another base than the open one.
        """
        return self._parts.store.catalog.stack(self.id, self._parts.base().digest)

    def layers(self) -> tuple[Layer, ...]:
        """Every layer with its head, weight and scope, lowest first; those without a head too."""
        return self._parts.store.catalog.layers(self.id)

    def revisions(self, layer: str | None = None) -> tuple[Revision, ...]:
        """All revisions, oldest first, refused ones too. Raises ``NotFound`` for an unknown layer."""
        return self._parts.store.catalog.revisions(self.id, layer=layer)

    def history(self, layer: str | None = None) -> tuple[HeadMove, ...]:
        """Every time that a head moved, and why; oldest first."""
        return self._parts.store.catalog.history(self.id, layer=layer)

    def reports(self) -> tuple[Mapping[str, Any], ...]:
        """What every learn said, and every end of a probation, as data, oldest first."""
        return self._parts.store.catalog.reports(self.id)

    def digest(self, since: datetime | timedelta = timedelta(days=1)) -> Digest:
        """What learning did since a moment, or in so long a time until now: signals, learns with their reasons and
        examples, what was refused, how to undo each. Raises ``InvalidInput`` for a moment without a time zone or one that
        is still to come.
        """
        now = self._parts.clock.now()
        if isinstance(since, datetime) and since.tzinfo is None:
            raise InvalidInput("The moment has no time zone.", hint="Give an aware datetime, or a timedelta.")
        try:
            start = now - since if isinstance(since, timedelta) else since
        except OverflowError as error:
            raise InvalidInput("There is no time so long ago.", hint="Ask for a shorter while.") from error
        if start > now:
            raise InvalidInput("That is still to come.", hint="Ask for a while that has passed.")
        return digest(self._parts.store, self.id, start, now)

    def turns(self, limit: int | None = None) -> tuple[Turn, ...]:
        """The conversation so far, newest first."""
        return self._parts.store.ledger.turns(self.id, limit=limit)

    def turn(self, reply: Reply | Turn | str) -> Turn:
        """One turn, by a reply, its id or the beginning of it; "last" is the newest. Raises ``NotFound``."""
        if reply == "last":
            newest = self.turns(limit=1)
            if not newest:
                raise NotFound(f"{self.id} has no turn yet.", hint="Ask something first.")
            return newest[0]
        turn_id = reply.turn_id if isinstance(reply, Reply) else reply.id if isinstance(reply, Turn) else reply
        if not isinstance(turn_id, str):
            raise InvalidInput(f"{type(reply).__name__} is no reply.", hint="Give a reply, a turn, or the id of one.")
        return self._parts.store.ledger.turn(self.id, turn_id)

    def signals(self, *, current: bool = True) -> tuple[Signal, ...]:
        """What was said about replies, oldest first; ``current=False`` shows what was superseded or taken back too."""
        return self._parts.store.ledger.signals(self.id, current=current)

    def lessons(self, *, current: bool = True) -> tuple[Account, ...]:
        """Where each signal went and why, whether it was learned, and in which revision; oldest first. ``current=False``
        shows what was superseded or taken back too.
        """
        observed = self._parts.observing == "learned"
        return accounts(self._parts.store, self.id, current=current, observed=observed)

    def why(self, reply: Reply | Turn | str) -> Why:
        """Why a reply was as it was: the revisions that answered, the signals that each was built from, the rules and
        facts in the prompt.
        """
        return why(self._parts.store, self.turn(reply))

    def summary(self) -> UserSummary:
        """Since when, and how much there is."""
        return self._parts.store.catalog.user(self.id)

    # In and out

    def export(self, folder: str | Path, *, format: Literal["peft"] = "peft", layer: str | None = None) -> Path:
        """Writes the live stack (or one layer of it) as a folder that PEFT loads as one LoRA. Raises ``InvalidInput`` when
        the folder has something in it, ``NotFound`` when nothing is live.
        """
        if format != "peft":
            raise InvalidInput(f"There is no export format {format!a}.", hint="The format is peft.")
        entries = self._narrowed(None if layer is None else [layer]).entries
        if not entries:
            raise NotFound(f"{self.id} has nothing live to export.", hint="Learn first, or roll back to a revision.")
        return write_folder(self._parts.engine(), entries, Path(folder), whole=layer is None)

    def import_peft(self, folder: str | Path, *, layer: str = "style") -> Revision:
        """Takes a PEFT folder in as a revision of a layer and makes it live: naming it is the user's own word, so no gate
        is asked. Raises ``AdapterError`` for a folder that is damaged, hostile, of another kind or not for this base.
        """
        check_layer_name(layer)
        parts = self._parts
        return take_folder(parts.store, parts.base(), parts.clock, self.id, self.stack(), Path(folder), layer)

    def _narrowed(self, layers: Sequence[str] | None) -> Stack:
        stack = self.stack()
        if layers is None:
            return stack
        known = {layer.name for layer in self.layers()}
        for name in layers:
            if name not in known:
                check_layer_name(name)
                raise NotFound(
                    f"{self.id} has no layer {name}.", hint=f"There is {', '.join(sorted(known)) or 'none yet'}."
                )
        return replace(stack, entries=tuple(entry for entry in stack.entries if entry.layer in layers))

    def _look_again(self) -> None:
        """Whether what was just said ends a probation. What was said is durable already, so nothing of this may fail it:
        whoever learns next looks too.
        """
        with suppress(PersonalPeftError):
            look_again(self._parts.store, self.id, self._parts.clock.now)

    def _named(self, layer: str, name: str) -> str | None:
        """The id of a revision; None for the bare base. Raises ``NotFound``."""
        moves = self._parts.store.catalog.history(self.id, layer=layer)
        if not moves:
            raise NotFound(f"The layer {layer} has never changed.", hint="There is nothing to compare; learn first.")
        if name in ("live", "previous"):
            return moves[-1].after if name == "live" else moves[-1].before
        if name == BASE:
            return None
        revision = self._parts.store.catalog.revision(self.id, name)
        if revision.layer != layer:
            raise NotFound(f"{revision.id} is no revision of {layer}.", hint=f"It is one of {revision.layer}.")
        return revision.id

    def _with_head(self, layer: str, to: str | None) -> Stack:
        """The live stack as it would be with another head in one layer. Raises ``NotFound``, ``BaseMismatch``."""
        base = self._parts.base().digest
        entries = []
        for known in self.layers():
            head = to if known.name == layer else known.head
            if head is not None:
                revision = self._parts.store.catalog.revision(self.id, head)
                if revision.base != base:
                    raise BaseMismatch(f"{revision.id} was built on another base.", hint="Open that base.")
                entries.append(StackEntry(known.name, revision.id, revision.digest, known.weight))
        return Stack(base, tuple(entries))

    def _recall(self, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
        backend = self._parts.engine().backend
        recall = self._parts.memory.recall(
            self.id,
            messages,
            budget_tokens=backend.base.card.context // _MEMORY_SHARE,
            count=lambda text: len(backend.encode(text)),
            system=backend.base.card.system,
        )
        return recall.messages, recall.used


def _check_skill(name: str) -> None:
    if not isinstance(name, str) or SKILL_NAME.fullmatch(name) is None:
        raise InvalidInput(f"{ascii(name)[:80]} cannot be the name of a skill.", hint="Use a-z, 0-9, '_' and '-'.")


def _signal_of(turn: Turn, what: str, value: Any) -> tuple[SignalKind, dict[str, Any]]:
    match what:
        case "rating":
            if value not in (-1, 1) or isinstance(value, bool):
                raise InvalidInput(
                    f"A rating of {value!r} is neither 1 nor -1.", hint="1 is a thumb up, -1 a thumb down."
                )
            return SignalKind.RATING, {"value": int(value)}
        case "reward":
            if isinstance(value, bool) or not isinstance(value, int | float) or not -1 <= value <= 1:
                raise InvalidInput(f"A reward of {value!r} is not a number from -1 to 1.", hint="0 says nothing.")
            return SignalKind.REWARD, {"value": float(value)}
        case "comment":
            return SignalKind.COMMENT, {"text": check_text(value, what="comment")}
    text = check_written(value, what="edit" if what == "edit" else "preferred text")
    if text.strip() == turn.reply.strip():
        raise InvalidInput("That is the reply as it is.", hint="Change something in it, or rate it 1 if it is good.")
    return (SignalKind.EDIT if what == "edit" else SignalKind.PREFERENCE), {"text": text}
