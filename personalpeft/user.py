"""One person's model: what they said, what was built from it, and everything that they can do with it.

Invariant: each method either does all that it says, durably, or raises and has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from inspect import signature
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from personalpeft import archive, erasure, feedback, stacks
from personalpeft.adapter_io import (
    MergedForm,
    take_folder,
    take_gguf,
    write_folder,
    write_gguf,
    write_merged,
)
from personalpeft.archive import Exported
from personalpeft.chat import compare, request
from personalpeft.chat.compare import Comparison
from personalpeft.chat.reply import Reply, Stream, turn_of
from personalpeft.chat.validation import (
    Prompt,
    Tool,
    check_prompt,
    check_sampling,
    check_timeout,
    check_tools,
    check_top_logprobs,
    with_tools,
)
from personalpeft.erasure import ForgetReport
from personalpeft.errors import InvalidInput, NotFound
from personalpeft.ids import check_layer_name, check_skill
from personalpeft.learning.activity_summary import Digest, digest
from personalpeft.learning.gate.probation import review_probation_locked
from personalpeft.learning.learner import Learner
from personalpeft.learning.options import Order, check_budget, never, silent
from personalpeft.learning.progress import Learning, underway
from personalpeft.learning.report import LearnReport, recorded
from personalpeft.learning.rl.trainer import Coach
from personalpeft.learning.status import Account, accounts
from personalpeft.learning.train.config import Start
from personalpeft.learning.triggers import Pending, pending
from personalpeft.memory.types import Item
from personalpeft.plugins import Shaping, Verifier
from personalpeft.provenance import Why, why
from personalpeft.services import Services
from personalpeft.store.base import UserSummary
from personalpeft.types import (
    PERSON,
    HeadMove,
    Layer,
    Progress,
    Revision,
    Scope,
    Signal,
    Stack,
    StackEntry,
    Turn,
)

P = ParamSpec("P")
R = TypeVar("R")


def _asked_as(method: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Gives a method the parameters of another, for readers of its help and for type checkers, so that a long list of
    them stands only once.
    """

    def borrow(own: Callable[..., R]) -> Callable[P, R]:
        returned = signature(own).return_annotation
        own.__signature__ = signature(method).replace(return_annotation=returned)  # type: ignore[attr-defined]  # ``inspect`` looks for it
        return own

    return borrow


class User:
    """One user of an open runtime; made by ``Runtime.user``. Safe to use from several threads."""

    def __init__(self, user_id: str, services: Services) -> None:
        self.id = user_id
        self._services = services

    def __repr__(self) -> str:
        return f"User({self.id!r})"

    # Talking

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
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Stream:
        """As ``chat``, in pieces: iterate over the text, then read ``.reply``. A stream that is closed early is kept as
        a cancelled turn. ``QueueFull``, ``DeadlineExceeded`` and ``ServingFailed`` are raised by the piece that they keep away;
        the time begins with the first that is asked for.
        """
        messages = with_tools(check_prompt(prompt), check_tools(tools), must_call)
        timeout = check_timeout(timeout)
        if revision is not None and layers is not None:
            raise InvalidInput("There are layers and a revision.", hint="Give one of the two.")
        if not template and not isinstance(prompt, str):
            raise InvalidInput(
                "Without the template there are no messages.", hint="Give the prompt as one string."
            )
        default = self._services.engine.backend.base.card.sampling
        sampling = check_sampling(
            default,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            stop=stop,
            seed=seed,
        )
        likely = check_top_logprobs(top_logprobs)
        asked = request.Asked(
            messages,
            sampling,
            memory and template,
            layers,
            timeout,
            revision,
            template,
            logprobs or likely > 0,
            likely,
        )
        return request.begin(self._services, self.id, asked, cancelled)

    @_asked_as(stream)
    def chat(self, prompt: Prompt, **asked: Any) -> Reply:
        """Answers a string or OpenAI-style messages with the user's live stack, and appends the turn to the ledger.

        What is not given comes from the base's card. ``temperature=0`` is greedy; the same stack, prompt and seed give
        the same text. ``tools`` are what the reply may call, as OpenAI's API writes them, where the base's chat template knows
        tools: do what ``reply.tool_calls`` say, and ask again with ``reply.message`` and a message of the role "tool" for each result.
        With ``must_call`` the reply begins as the call of a tool: True of any, a name of that one. What follows is the model's own, so a
        small one may still write what is no call; look at ``tool_calls``.
        ``memory=False`` leaves rules and facts out; ``layers`` names the only layers to attach, whatever
        their scope, ``[]`` none: the bare base. ``revision`` is one that stands for its layer's head, by its id or the
        beginning of it. Without ``template`` a string is read as it is, without rules and facts, and continued. With ``logprobs``
        the reply says how likely each token was, with ``top_logprobs`` also so many of the likeliest in its place (at most 20).
        ``timeout`` is how many seconds the reply may take; ``cancelled`` is asked between steps, by another thread, and must be
        quick. Raises ``InvalidInput`` for an empty prompt or a
        number out of range, ``PromptTooLong`` saying by how many tokens, ``NotFound`` for an unknown layer or revision,
        ``BaseMismatch`` when the live stack was built on another base, ``QueueFull`` with ``retry_after`` when too many wait,
        ``DeadlineExceeded`` when time is up (what came until then is kept as a cancelled turn), ``ServingFailed``.
        ``Forgotten`` where the user forgets something while the reply is written; the reply is not kept then.
        """
        stream = self.stream(prompt, **asked)
        for _ in stream:
            pass
        return stream.reply

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
        ``comment`` a rule to follow from now on, ``reward`` a thumb of some size, from -1 to 1. Said twice of one turn, the
        later counts and both are kept; comments add up. What repeats the last word on a turn is that one. ``source`` is who
        says so, where that is not the person: kept apart from what the person says, and not trained on. Raises ``NotFound``
        for an unknown turn, ``InvalidInput`` for anything else, such as an edit that changes nothing.
        """
        return feedback.feedback(
            self._services,
            self.id,
            reply,
            source,
            rating=rating,
            edit=edit,
            prefer=prefer,
            comment=comment,
            reward=reward,
        )

    def observe(self, reply: Reply | Turn | str, seen: str) -> str | None:
        """Tells what the app saw without asking: "copied", "regenerated", "contradicted" or "thanked". It is kept as a
        rating by the source "app", and its id returned, where the runtime was opened with ``observing="kept"`` or, to be learned
        as a weak one, "learned"; else nothing is kept, and None returned, so that an app need not ask each time whether it may. Raises
        ``NotFound`` for an unknown turn, ``InvalidInput`` for anything else that might have been seen.
        """
        return feedback.observe(self._services, self.id, reply, seen)

    def teach(
        self, prompt: str, answer: str, *, skill: str | None = None, source: str = PERSON
    ) -> str:
        """Shows the answer that is wanted to a prompt, for the style or a skill of its own; returns the signal's id.
        ``source`` as in ``feedback``. Raises ``InvalidInput``.
        """
        return feedback.teach(self._services, self.id, prompt, answer, skill, source)

    def remember(
        self,
        text: str,
        *,
        questions: Sequence[str] = (),
        answer: str | None = None,
        source: str = PERSON,
    ) -> str:
        """Keeps a fact, which is looked up from the next turn on; returns the signal's id. ``questions`` help to find
        it, and with a short ``answer`` to them the next learn takes it into the ``memory`` layer. Without, it is learned once
        looking it up has helped twice. ``source`` is who tells it, where that is not the person: then it is looked up, never
        learned, and gives way to what the person told. Raises ``InvalidInput``.
        """
        return feedback.remember(self._services, self.id, text, questions, answer, source)

    def retract(self, *signals: str) -> tuple[Signal, ...]:
        """Takes back what was said, whatever it was and whoever gave it, by the ids of signals or their beginnings; returns what
        they named. All of it or none: from now on it counts no more, and the next learn builds without it what has learned of it.
        The ledger keeps that it was said; ``forget`` destroys it. What it superseded stays off, since that was given
        up too; what only gave way to it counts again, such as the thumb beside an edit or the fact that it contradicted. Raises
        ``NotFound``, also for what was superseded or taken back already, ``Forgotten``, ``InvalidInput``.
        """
        return feedback.retract(self._services, self.id, signals)

    def items(self) -> tuple[Item, ...]:
        """The rules and facts that act now, oldest first."""
        return self._services.memory.items(self.id)

    def edit_item(
        self,
        item_id: str,
        text: str,
        *,
        questions: Sequence[str] | None = None,
        answer: str | None = None,
    ) -> Item:
        """Says a rule or fact anew; the old one counts no more, neither when facts are looked up nor for the next learn. A
        fact's questions go with the old text, unless a new ``answer`` to them is given. Raises ``NotFound``,
        ``InvalidInput``.
        """
        return self._services.memory.edit(
            self.id, item_id, text, questions=questions, answer=answer
        )

    def remove_item(self, item_id: str) -> None:
        """Switches a rule or fact off, as ``retract`` does; the ledger keeps that it was there. Raises ``NotFound``."""
        self._services.memory.remove(self.id, item_id)

    # Learning, and taking it back

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
        progress: Progress = silent,
        cancelled: Callable[[], bool] = never,
        paused: Callable[[], bool] = never,
    ) -> LearnReport:
        """Builds a candidate from what is new, has the gate judge it, and makes it live if the gate promotes it. A
        refusal is a report, not an error. Without a ``layer`` it learns all that have something new, lowest first, and
        returns the report of the first, with the others in its ``above``. Whatever stands over a layer that has changed
        is judged again, and built anew where it no longer holds.

        ``start="nothing"`` builds from all lessons anew. ``seconds`` and ``steps`` are budgets for training: where one
        ends it early, the next learn goes on from there, as it does after a kill. ``memory`` is how many MB training may
        take beside the base (40 bytes for each parameter that is trained); what needs more is not built. ``dry_run`` only
        says what would be learned. ``accept`` makes the candidate live whatever the gate says of it, which is recorded;
        not one that could not be measured. ``progress`` hears a stage and how much of it is done (0 to 1). ``cancelled`` and ``paused`` are
        asked between steps. Raises ``NothingToLearn``, ``Busy`` while another learn of this user runs, ``Cancelled`` when
        ``cancelled`` says so before anything was judged, ``ServingFailed`` where the model fails, for want of memory perhaps.
        """
        if layer is not None:
            check_layer_name(layer)
        order = Order(
            start=start,
            seconds=seconds,
            steps=steps,
            memory=memory,
            dry_run=dry_run,
            accept=accept,
            progress=progress,
            cancelled=cancelled,
            paused=paused,
        )
        return Learner.from_services(self._services).learn(self.id, layer, order)

    def review(self) -> tuple[LearnReport, ...]:
        """Ends the probations that what was said until now decides; each end is a report. That happens by itself with feedback,
        with what is taken back and with a learn, unless somebody else was just learning. Raises ``Busy`` while a learn of this user runs.
        """
        return review_probation_locked(self._services.store, self.id, self._services.clock.now)

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
        return compare.compare(
            self._services,
            self.id,
            prompt,
            (a, b),
            layer=layer,
            max_tokens=max_tokens,
            memory=memory,
            cancelled=cancelled,
        )

    def practice(
        self,
        skill: str,
        *,
        verifier: str | Verifier,
        family: str = "",
        shaping: str | Shaping | None = None,
        rounds: int | None = None,
        seconds: float | None = None,
        steps: int | None = None,
        memory: float | None = None,
        accept: bool = False,
        progress: Progress = silent,
        cancelled: Callable[[], bool] = never,
        paused: Callable[[], bool] = never,
    ) -> LearnReport:
        """Has a skill try tasks that a verifier sets and judges, so that what was right becomes likelier; then the gate
        compares what it makes of tasks held back, before and after. A refusal is a report, not an error.

        ``verifier`` and ``shaping`` are names of plugins or objects (``personalpeft.plugins``); ``family`` says which of
        a verifier's tasks. It goes on from the skill's head: teach and learn first where the base can do nothing of it.
        ``rounds``, ``seconds`` or ``steps`` end it sooner, and what was practised until then is judged. Stopped otherwise, it
        goes on from what was done when the same tasks are practised again: a kill costs the step that ran, or the replies of
        the round that was being tried. ``memory``, ``accept``, ``progress``, ``cancelled`` and ``paused`` are as for ``learn``.
        Raises ``NotFound`` for an unknown plugin, ``PluginError``, ``InvalidInput``, ``Busy`` while another learn of this user
        runs, ``Cancelled``, ``ServingFailed``.
        """
        check_skill(skill)
        check_budget(rounds, "rounds", whole=True)
        order = Order(
            seconds=seconds,
            steps=steps,
            memory=memory,
            accept=accept,
            progress=progress,
            cancelled=cancelled,
            paused=paused,
        )
        plugins = self._services.plugins
        verifying = plugins.verifier(verifier, family)
        shaped = None if shaping is None else plugins.shaping(shaping)
        return Coach.from_services(self._services).practise(
            self.id, f"skill.{skill}", verifying, shaped, rounds, order
        )

    def rollback(self, layer: str, to: str | Literal["previous"] | None = "previous") -> HeadMove:
        """Makes another revision of a layer live: by default the one that was live before the last move, None the bare
        base. An id, or the beginning of one, may name any revision, a refused one too. Raises ``NotFound``, and
        ``BaseMismatch`` across a change of base.
        """
        return stacks.roll_back(self._services, self.id, layer, to)

    def weigh(self, layer: str, weight: float) -> None:
        """How strongly a layer is added from now on: 1 as it was learned, 0 not at all; -2 to 2. Raises ``NotFound``,
        ``InvalidInput``.
        """
        if not isinstance(weight, int | float) or not -2 <= weight <= 2:
            raise InvalidInput(
                f"The weight {weight!r} is not between -2 and 2.",
                hint="1 is the layer as it was learned.",
            )
        self._services.store.catalog.set_weight(self.id, layer, float(weight))

    def scope(self, layer: str, scope: Scope) -> None:
        """When a layer is attached from now on: "always", "near" (when the request is near the lessons that it was built
        from) or "never". Before anybody says so a style is "always", a skill and the memory "near". Raises ``NotFound``,
        ``InvalidInput``.
        """
        self._services.store.catalog.set_scope(self.id, layer, scope)

    def forget(
        self,
        item: Reply | Turn | str,
        *,
        rebuild: bool = True,
        dry_run: bool = False,
        progress: Progress = silent,
        cancelled: Callable[[], bool] = never,
    ) -> ForgetReport:
        """Destroys something that was said, for good: a turn, or a piece of feedback, a fact or a rule by its id. Not switched
        off, as ``retract`` does, but gone: its words, every revision that saw them, what was reported of it, and
        what was answered with it in view. Then the layers that lost their live revision are built again from what is
        left, and judged as in any learn; until that is done, or where it is refused, they are as they were before the
        item. ``docs/privacy.md`` says what goes with what.

        ``dry_run`` only says what would go. Without ``rebuild`` the next learn builds what is missing. ``progress`` hears a
        stage and how much of it is done (0 to 1). Once anything is destroyed nothing brings it back: ``cancelled`` then
        only stops the building, as a kill does. Raises ``NotFound``, ``Forgotten`` for what was forgotten already,
        ``InvalidInput``, ``Busy`` while a learn of this user runs, ``Cancelled`` before anything was destroyed, ``HomeError``.
        """
        wanted = item if isinstance(item, str) and item != "last" else self.turn(item).id
        return erasure.forget(
            self._services,
            self.id,
            wanted,
            rebuild=rebuild,
            dry_run=dry_run,
            progress=progress,
            cancelled=cancelled,
        )

    # Looking at it

    def stack(self) -> Stack:
        """All that is live; the scope of each layer says which turns it answers. Raises ``BaseMismatch`` when a head was
        built on another base than the open one.
        """
        return stacks.live(self._services, self.id)

    def layers(self) -> tuple[Layer, ...]:
        """Every layer with its head, weight and scope, lowest first; those without a head too."""
        return self._services.store.catalog.layers(self.id)

    def revisions(self, layer: str | None = None) -> tuple[Revision, ...]:
        """All revisions, oldest first, refused ones too. Raises ``NotFound`` for an unknown layer."""
        return self._services.store.catalog.revisions(self.id, layer=layer)

    def history(self, layer: str | None = None) -> tuple[HeadMove, ...]:
        """Every time that a head moved, and why; oldest first."""
        return self._services.store.catalog.history(self.id, layer=layer)

    def reports(self) -> tuple[Mapping[str, Any], ...]:
        """What every learn said, and every end of a probation, as data, oldest first."""
        return tuple(recorded(self._services.store.catalog.reports(self.id)))

    def digest(
        self, since: datetime | timedelta = timedelta(days=1), until: datetime | None = None
    ) -> Digest:
        """What learning did since a moment, or in so long a time, until another (None: now): signals, learns with their
        reasons and examples, what was refused, how to undo each. Raises ``InvalidInput`` for a moment without a time zone and
        for a while that ends before it begins.
        """
        return digest(self._services.store, self.id, since, self._services.clock.now(), until)

    def turns(self, limit: int | None = None, *, before: str | None = None) -> tuple[Turn, ...]:
        """The conversation so far, newest first; with ``before`` what is older than the turn of that id, so that a long one can be
        read in parts. Raises ``NotFound`` for an unknown turn, ``InvalidInput`` for a limit below 0.
        """
        return self._services.store.ledger.turns(self.id, limit=limit, before=before)

    def turn(self, reply: Reply | Turn | str) -> Turn:
        """One turn, by a reply, its id or the beginning of it; "last" is the newest. Raises ``NotFound``."""
        return turn_of(self._services.store, self.id, reply)

    def signals(self, *, current: bool = True) -> tuple[Signal, ...]:
        """What was said about replies, oldest first; ``current=False`` shows what was superseded or taken back too."""
        return self._services.store.ledger.signals(self.id, current=current)

    def lessons(self, *, current: bool = True) -> tuple[Account, ...]:
        """Where each signal went and why, whether it was learned, and in which revision; oldest first. ``current=False``
        shows what was superseded or taken back too.
        """
        return accounts(self._services.store, self.id, current=current)

    def pending(self) -> Pending:
        """What the next learn would have to go by, from the ledger alone, so that an app can choose its moment: no model is
        loaded for it.
        """
        return pending(self._services.store, self.id)

    def learning(self) -> Learning | None:
        """What is being learned at this moment, by this program or another one on the same home: a server, the daemon, a
        terminal. None where nobody learns, also once a learner was killed. Cheap enough to be asked every second.
        """
        return underway(self._services.store, self.id)

    def why(self, reply: Reply | Turn | str) -> Why:
        """Why a reply was as it was: the revisions that answered, the signals that each was built from, the rules and
        facts in the prompt.
        """
        return why(self._services.store, self.turn(reply))

    def summary(self) -> UserSummary:
        """Since when, and how much there is."""
        return self._services.store.catalog.user(self.id)

    # In and out

    def export(self, file: str | Path, *, adapters: bool = True) -> Exported:
        """Writes all of this user into one file, by custom ``<name>.personal``: turns, signals, revisions with their
        reports, settings of the layers, and the adapters unless they are left out. ``Runtime.import_user`` takes it in, on this
        machine or another. Whoever has the file has everything that was ever said: it is not encrypted. Raises
        ``InvalidInput`` where there is something at that place already or nothing can be written there.
        """
        return archive.write(self._services.store, self.id, Path(file), adapters=adapters)

    def export_peft(self, folder: str | Path, *, layer: str | None = None) -> Path:
        """Writes the live stack (or one layer of it) as a folder that PEFT loads as one LoRA. Raises ``InvalidInput`` when
        the folder has something in it, ``NotFound`` when nothing is live.
        """
        return write_folder(
            self._services.engine, self._live(layer), Path(folder), whole=layer is None
        )

    def import_peft(self, folder: str | Path, *, layer: str = "style") -> Revision:
        """Takes a PEFT folder in as a revision of a layer and makes it live: naming it is the user's own word, so no gate
        is asked. Raises ``AdapterError`` for a folder that is damaged, hostile, of another kind or not for this base.
        """
        check_layer_name(layer)
        services = self._services
        return take_folder(
            services.store,
            services.base,
            services.clock,
            self.id,
            self.stack(),
            Path(folder),
            layer,
        )

    def export_gguf(self, file: str | Path, *, layer: str | None = None) -> Path:
        """Writes the live stack (or one layer of it) as a GGUF LoRA, which llama.cpp loads beside the base's GGUF file.
        Raises as ``export_peft``, and ``InvalidInput`` for a base of a kind that is not written as GGUF here.
        """
        return write_gguf(self._services.engine, self._live(layer), Path(file))

    def import_gguf(self, file: str | Path, *, layer: str = "style") -> Revision:
        """Takes a GGUF LoRA in, as ``import_peft`` takes a folder. Raises as that, and ``InvalidInput``."""
        check_layer_name(layer)
        services = self._services
        return take_gguf(
            services.store, services.base, services.clock, self.id, self.stack(), Path(file), layer
        )

    def export_merged(self, folder: str | Path, *, form: MergedForm = "safetensors") -> Path:
        """Writes the base with the live stack in its weights, for programs that know of no layers: a folder that transformers
        loads, or with ``form="gguf"`` a model.gguf and a Modelfile for Ollama. It is a copy, as large as the base, which nothing
        that is learned later changes. Raises as ``export_gguf``.
        """
        return write_merged(self._services.engine, self._live(None), Path(folder), form)

    def _live(self, layer: str | None) -> tuple[StackEntry, ...]:
        """What is live of one layer, or of all that are not switched off ("never"). Raises ``NotFound``."""
        stack = (
            stacks.switched_on(self._services, self.id)
            if layer is None
            else stacks.only(self._services, self.id, [layer])
        )
        if not stack.entries:
            raise NotFound(
                f"{self.id} has nothing live to export.",
                hint="Learn first, or roll back to a revision.",
            )
        return stack.entries
