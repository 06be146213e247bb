"""One user of a home: chat, feedback, learning, history, import and export.

Invariant: each method either completes durably, or raises and has changed nothing.

The class is long because it has one short method for each act of a user. Other modules implement
the acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from inspect import signature
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from personalpeft import adapter_io, archive, erasure, feedback, learn_bundles, stacks
from personalpeft.adapter_io import MergedForm
from personalpeft.archive import ExportSummary
from personalpeft.arguments import (
    check_choice,
    check_flags,
    check_functions,
    check_number,
    check_path,
    check_types,
)
from personalpeft.chat import compare, request, validation
from personalpeft.chat.compare import Comparison
from personalpeft.chat.conversation import (
    Conversation,
    ConversationSummary,
    list_conversations,
    read_conversation,
)
from personalpeft.chat.reply import Reply, Stream, resolve_turn
from personalpeft.chat.validation import Prompt, Tool, Truncation
from personalpeft.deprecation import RenamedAttributes, accept_renamed_arguments
from personalpeft.erasure import ForgetReport
from personalpeft.errors import InvalidInput
from personalpeft.ids import LAST, check_layer_name, check_skill_name
from personalpeft.learning.activity_summary import ActivitySummary, summarize_activity
from personalpeft.learning.gate.probation import review_probation_with_lease
from personalpeft.learning.learner import Learner
from personalpeft.learning.options import LearnOptions, no_progress, not_cancelled
from personalpeft.learning.report import LearnReport, outcome_reports
from personalpeft.learning.status import (
    Pending,
    SignalStatus,
    TrainingStatus,
    list_signal_status,
    pending,
    training_status,
)
from personalpeft.learning.train.config import Start
from personalpeft.memory.types import Item
from personalpeft.plugins import Shaping, Verifier
from personalpeft.provenance import Provenance, build_provenance
from personalpeft.reproduction import ReproductionReport, reproduce
from personalpeft.services import Services
from personalpeft.store.types import UserSummary
from personalpeft.types import (
    MAX_TOP_LOGPROBS,
    USER_SOURCE,
    Demonstration,
    HeadMove,
    Layer,
    Progress,
    Revision,
    Scope,
    Signal,
    Stack,
    Turn,
)

P = ParamSpec("P")
R = TypeVar("R")

_MAX_TIMEOUT = 10**9  # seconds


def _same_parameters_as(
    method: Callable[P, object],
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a method the parameters of another for ``inspect`` and type checkers."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        returned = signature(function).return_annotation
        shown = signature(method).replace(return_annotation=returned)
        function.__signature__ = shown  # type: ignore[attr-defined]  # read by ``inspect``
        return function

    return decorate


def _check_layer(layer: str | None, *, needed: bool) -> None:
    if layer is not None:
        check_layer_name(layer)
    elif needed:
        raise InvalidInput(
            "A recipe or a verifier needs a layer.", hint="Name the layer that it is for."
        )


RENAMED_ATTRIBUTES = {
    "digest": "activity_summary",
    "learning": "training_status",
    "lessons": "signal_statuses",
    "observe": "record_implicit_feedback",
    "remove_item": "retract_item",
    "review": "review_probation",
    "weigh": "set_weight",
}
"""Deprecated attributes of a user, here and in the client of a server, and their names now."""


class User(RenamedAttributes, renamed={**RENAMED_ATTRIBUTES, "check_rebuild": "reproduce"}):
    """One user of an open runtime, made by ``Runtime.user``. Thread-safe.

    Signals, turns and revisions are named by their id or the beginning of it. A turn is also named
    by its reply, and the newest by "last".

    Long methods take ``progress``, which is called with a stage and the share of it that is done, 0
    to 1. They take ``cancelled``, which is called between steps and returns True to cancel. They
    raise ``Cancelled`` for that, ``Busy`` while a learn of this user runs, and ``ServingFailed`` if
    the model fails, perhaps for lack of memory.
    """

    def __init__(self, user_id: str, services: Services) -> None:
        self.id = user_id
        self._services = services

    def __repr__(self) -> str:
        return f"User({self.id!r})"

    # Chat

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
        seed: int | None = None,
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
        cancelled: Callable[[], bool] | None = None,
    ) -> Stream:
        """Start a reply as ``chat`` does, and return its text in pieces.

        Iterate over the stream, then read ``.reply``. Closing it early records a cancelled turn.
        ``.turn_id`` is known at once, and names the turn as soon as the reply has ended.
        ``QueueFull``, ``DeadlineExceeded`` and ``ServingFailed`` are raised while iterating. The
        timeout starts with the first piece.
        """
        messages = validation.attach_tools(
            validation.check_prompt(prompt), validation.check_tools(tools), must_call
        )
        check_flags(memory=memory, template=template, logprobs=logprobs)
        if cancelled is not None:
            check_functions(cancelled=cancelled)
        continues = conversation_id is not None or replaces is not None
        if truncation is not None:
            check_choice("truncation", truncation, Truncation)
        if continues:
            validation.check_continuation(messages)
        if timeout is not None:
            check_number("timeout", timeout, 0, _MAX_TIMEOUT, above=True)
        if revision is not None and layers is not None:
            raise InvalidInput("layers and revision exclude each other.", hint="Give one of them.")
        if not template and (continues or not isinstance(prompt, str)):
            raise InvalidInput(
                "Without the template the prompt must be a string, and in no conversation.",
                hint="Give one string, and leave conversation_id and replaces out.",
            )
        replaced = None if replaces is None else self.turn(replaces)
        if seed is None:
            # The seed of the replaced turn could give its text again.
            seed = 0 if replaced is None else (replaced.sampling.seed + 1) % 2**63
        default = self._services.base.card.sampling
        sampling = validation.check_sampling(
            default,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            stop=stop,
            seed=seed,
        )
        check_number("top_logprobs", top_logprobs, 0, MAX_TOP_LOGPROBS, whole=True)
        chat = request.ChatRequest(
            messages,
            sampling,
            memory=memory and template,
            layers=layers,
            timeout=timeout,
            revision=revision,
            template=template,
            logprobs=logprobs or top_logprobs > 0,
            top_logprobs=top_logprobs,
            conversation_id=conversation_id,
            replaces=None if replaced is None else replaced.id,
            truncate=truncation == "auto" or (truncation is None and continues),
        )
        return request.start_stream(self._services, self.id, chat, cancelled)

    @_same_parameters_as(stream)
    def chat(self, prompt: Prompt, **options: Any) -> Reply:
        """Answer a prompt with the user's live stack, and append the turn to the ledger.

        The same stack, prompt, sampling and seed give the same text.

        Args:
            prompt: A string, or OpenAI-style messages.
            tools: OpenAI-style tools that the reply may call. Run ``reply.tool_calls``, then chat
                again with ``reply.message`` and a message of role "tool" for each result.
            must_call: Start the reply as a tool call: True for any tool, or the name of one. A
                small model may still write an invalid call, so check ``tool_calls``.
            temperature: 0 is greedy. This and the next three default to the base's card.
            top_p: Nucleus size, in (0, 1].
            max_tokens: The most new tokens.
            stop: Texts that end the reply.
            seed: Seed of sampling. Defaults to 0, with ``replaces`` to that turn's seed plus one.
            memory: Whether to add rules, relevant facts and examples to the prompt.
            layers: The only layers to attach, whatever their scope. ``[]`` is the bare base.
            revision: A revision that replaces the head of its layer. Excludes ``layers``.
            template: Without it, a string prompt is continued as it is, and nothing is added.
            logprobs: Report the log-prob of each token.
            top_logprobs: Also report this many of the likeliest tokens in each place, at most 20.
            conversation_id: The conversation to continue, from ``reply.conversation_id``. Its
                history is added to the prompt. Without it a list of messages that repeats the end
                of a conversation continues that, and any other prompt starts one.
            replaces: A turn to answer again: the reply takes its place in the conversation.
            truncation: "auto" drops the oldest messages of a prompt that exceeds the context;
                "disabled" raises ``PromptTooLong``. Defaults to "auto" with a conversation.
            timeout: Seconds that the reply may take.
            cancelled: Called by another thread between steps, so it must be quick.

        Returns:
            The reply. Its ``turn_id`` names it in feedback.

        Raises:
            InvalidInput: An argument has a wrong value.
            PromptTooLong: The prompt exceeds the base's context; the message says by how much.
            NotFound: A layer or revision is unknown.
            BaseMismatch: The live stack was built on another base.
            QueueFull: Too many requests wait; see ``retry_after``.
            DeadlineExceeded: The timeout ended the reply. If it had begun, it is recorded as a
                cancelled turn.
            ServingFailed: The model failed.
            Forgotten: The user forgot something meanwhile, so the reply is not recorded.
        """
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.reply

    # Feedback

    def feedback(
        self,
        reply: Reply | Turn | str,
        *,
        rating: int | None = None,
        edit: str | None = None,
        prefer: str | None = None,
        comment: str | None = None,
        reward: float | None = None,
        source: str = USER_SOURCE,
        train: bool | None = None,
    ) -> str:
        """Record one feedback signal on a reply and return its id. It is durable on return.

        Give exactly one kind. The latest of each kind counts and all are kept; comments accumulate.
        Repeating the latest signal of the same source returns the id of that.

        Args:
            reply: A reply, a turn, or a turn's id.
            rating: 1 (thumb up) or -1 (thumb down).
            edit: The reply as it should have been.
            prefer: Another text that is better.
            comment: A rule to follow from now on.
            reward: A graded rating, from -1 to 1.
            source: Who gives the feedback, if not the user. It is kept apart and not trained on.
            train: Whether layers may be trained on it. Otherwise a comment acts in the prompt, and
                everything else is only recorded. Defaults to ``set_training`` and the setting of
                ``personalpeft.open``.

        Raises:
            NotFound: The turn is unknown.
            InvalidInput: A value is wrong, not exactly one is given, or an edit changes nothing.
        """
        return feedback.feedback(
            self._services,
            self.id,
            reply,
            source,
            train,
            rating=rating,
            edit=edit,
            prefer=prefer,
            comment=comment,
            reward=reward,
        )

    def set_training(self, allowed: bool) -> None:
        """Set whether layers may be trained on this user's feedback from now on, by any program.

        ``train`` of one signal comes before it, and a runtime with ``train=False`` trains on
        nothing by default. Earlier signals stay as they are; ``retract`` with ``training_only``
        withdraws them. ``summary`` shows it. Raises ``InvalidInput``.
        """
        check_types("User.set_training", allowed=(allowed, bool))
        self._services.store.catalog.set_training(self.id, allowed)

    @accept_renamed_arguments(seen="event")
    def record_implicit_feedback(
        self, reply: Reply | Turn | str, event: str, *, train: bool | None = None
    ) -> str | None:
        """Record implicit feedback on a reply: what the user did with it.

        It becomes a rating of the source "app", if the runtime was opened with
        ``implicit_feedback="kept"`` or "learned". Only with "learned" is it trained on, as a weak
        rating.

        Args:
            reply, train: As for ``feedback``.
            event: "copied", "regenerated", "contradicted" or "thanked".

        Returns:
            The id of the signal, or None if nothing was recorded.

        Raises:
            NotFound, InvalidInput: As for ``feedback``.
        """
        return feedback.record_implicit_feedback(self._services, self.id, reply, event, train)

    def teach(
        self,
        prompt: str,
        answer: str,
        *,
        skill: str | None = None,
        source: str = USER_SOURCE,
        train: bool | None = None,
    ) -> str:
        """Record a demonstration and return its id.

        Args:
            prompt: A prompt.
            answer: The wanted answer.
            skill: The skill to teach; None teaches the style.
            source: As for ``feedback``.
            train: As for ``feedback``. A demonstration that must not train is listed but not used.
                To use it later, give it again.

        Raises:
            InvalidInput: A text is empty or too long, or the skill has an invalid name.
        """
        demonstration = Demonstration(validation.check_text(prompt, what="prompt"), answer)
        return self.teach_many([demonstration], skill=skill, source=source, train=train)[0]

    def teach_many(
        self,
        demonstrations: Iterable[Demonstration],
        *,
        skill: str | None = None,
        source: str = USER_SOURCE,
        train: bool | None = None,
    ) -> tuple[str, ...]:
        """Record many demonstrations in one transaction, and return their ids in order.

        Args:
            demonstrations: ``personalpeft.types.Demonstration``: prompts, which may be messages,
                with their answers. Those of one group are trained on or held out together.
            skill, source, train: As for ``teach``.

        Raises:
            InvalidInput: As for ``teach``.
        """
        return feedback.teach_many(self._services, self.id, demonstrations, skill, source, train)

    def remember(
        self,
        text: str,
        *,
        questions: Sequence[str] = (),
        answer: str | None = None,
        source: str = USER_SOURCE,
        train: bool | None = None,
    ) -> str:
        """Record a fact and return its id. Prompts can contain it from the next turn on.

        A fact that repeats one of the same source is not added beside it. The earlier id is
        returned, or the new fact supersedes the earlier one.

        Args:
            text: The fact.
            questions: Questions that the fact answers; they help to find it.
            answer: A short answer to the questions. With it, the next learn trains the fact into
                the ``memory`` layer. Without it, the fact is trained once its lookup helped twice.
            source: Who states the fact, if not the user. Such a fact is looked up but not learned,
                and yields to the user's own facts.
            train: As for ``feedback``. A fact that must not train is only looked up. Replies with
                it in the prompt are not trained on either.

        Raises:
            InvalidInput: A text is empty or too long, or an answer has no question.
        """
        return feedback.remember(self._services, self.id, text, questions, answer, source, train)

    def retract(self, *signals: str, training_only: bool = False) -> tuple[Signal, ...]:
        """Retract signals of any kind and source, all or none, and return them.

        They no longer count, and the next learn rebuilds without them. The ledger keeps them;
        ``forget`` erases. A signal that they superseded stays superseded. A weaker signal on the
        same reply counts again, such as the thumb beside an edit.

        Args:
            signals: Their ids. "last" is the newest signal that counts.
            training_only: Withdraw the consent to train, and nothing else: facts and rules stay in
                the prompt. To give it again, give the signal again.

        Raises:
            NotFound: A signal is unknown, superseded or retracted.
            Forgotten: A signal was erased.
            InvalidInput: No signal is named, or an id fits several.
        """
        return feedback.retract(self._services, self.id, signals, training_only=training_only)

    def items(self) -> tuple[Item, ...]:
        """Return the rules and facts in effect, oldest first."""
        return self._services.memory.items(self.id)

    def edit_item(
        self,
        item_id: str,
        text: str,
        *,
        questions: Sequence[str] | None = None,
        answer: str | None = None,
    ) -> Item:
        """Supersede a rule or fact with a new text, and return the new item.

        The new text may be trained on if the old one may, and the runtime's setting allows it.

        Args:
            item_id: Id of the rule or fact, or "last" for the newest.
            text: The new text.
            questions: For a fact, its questions. None drops the old ones, or keeps them if an
                ``answer`` is given.
            answer: For a fact, the answer to the questions.

        Raises:
            NotFound: No rule or fact in effect has this id.
            InvalidInput: A text is invalid, or a rule was given questions.
        """
        return self._services.memory.edit(
            self.id,
            item_id,
            text,
            questions=questions,
            answer=answer,
            train=self._services.allows_training(self.id),
        )

    def retract_item(self, item_id: str) -> None:
        """Retract a rule or fact; the ledger keeps it. Raises ``NotFound``."""
        self._services.memory.retract(self.id, item_id)

    # Learning

    @accept_renamed_arguments(memory="max_memory_mb")
    def learn(
        self,
        layer: str | None = None,
        *,
        start: Start = "auto",
        seconds: float | None = None,
        steps: int | None = None,
        max_memory_mb: float | None = None,
        dry_run: bool = False,
        accept: bool = False,
        recipe: Mapping[str, Any] | None = None,
        verifier: str | Verifier | None = None,
        progress: Progress = no_progress,
        cancelled: Callable[[], bool] = not_cancelled,
        paused: Callable[[], bool] = not_cancelled,
    ) -> LearnReport:
        """Build a candidate from new signals, judge it, and make it live if the gate promotes it.

        A refusal is a report, not an error, also one for too few lessons. An interrupted learn is
        resumed by the next one. Layers above a changed one are judged again, and rebuilt if they
        no longer hold.

        Args:
            layer: The layer to learn. None learns all with something new, lowest first.
            start: "auto" continues the live revision where possible; "scratch" builds from all
                lessons.
            seconds: Budget of training time. The next learn continues.
            steps: Budget of training steps a layer. The next learn continues.
            max_memory_mb: The most MB that training may take beside the base, 40 bytes a trained
                parameter. What needs more is not built.
            dry_run: Only report what would be learned. The home may be read-only.
            accept: Make the candidate live although the gate refuses it or abstains. The verdict is
                recorded. A candidate that could not be measured is not accepted.
            recipe: Fields of ``TrainingConfig`` for this layer, such as {"max_steps": 4000}. Later
                learns of the layer keep them. {} returns to those of the base's card.
            verifier: A plugin's name or a ``personalpeft.plugins.Verifier``. With it the gate
                judges answers to held-out prompts, and not log-probs. The verifier says which are
                right. The ``about`` of its tasks has the "answer". Later learns of the layer keep a
                plugin's name, until a learn with ``recipe={}``.
            progress, cancelled: See ``User``.
            paused: Called between steps; training waits while it returns True.

        Returns:
            The report of the first layer; ``above`` holds those of the others.

        Raises:
            NothingToLearn: There is nothing new.
            InvalidInput: An argument has a wrong value.
            NotFound, PluginError: As for ``practice``.
            Busy, Cancelled, ServingFailed: See ``User``. What was judged before is kept.
        """
        _check_layer(layer, needed=recipe is not None or verifier is not None)
        options = LearnOptions(
            start=start,
            seconds=seconds,
            steps=steps,
            max_memory_mb=max_memory_mb,
            dry_run=dry_run,
            accept=accept,
            recipe=recipe,
            verifier=None if verifier is None else self._services.plugins.verifier(verifier),
            progress=progress,
            cancelled=cancelled,
            paused=paused,
        )
        return Learner.from_services(self._services).learn(self.id, layer, options)

    def review_probation(self) -> tuple[LearnReport, ...]:
        """End the probations that the feedback so far decides, and return a report of each.

        Feedback, retractions and learns do this too, unless another learn runs. Raises ``Busy``
        while a learn of this user runs.
        """
        return review_probation_with_lease(self._services, self.id)

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
        """Answer a prompt greedily with two revisions, in random order, for a blind choice.

        ``choose`` on the result records the choice as a preference.

        Args:
            prompt, memory: As for ``chat``.
            a: A revision: its id, "live", "previous" (live before the last change) or "base".
            b: Another revision.
            layer: The layer of both.
            max_tokens: The most new tokens of each answer. Defaults to the base's card.
            cancelled: See ``User``.

        Raises:
            NotFound: A revision is unknown, or the layer has never changed.
            InvalidInput: Both are the same revision, or an argument has a wrong value.
            Cancelled: ``cancelled`` returned True.
            QueueFull, ServingFailed, PromptTooLong: As for ``chat``.
        """
        check_flags(memory=memory)
        if cancelled is not None:
            check_functions(cancelled=cancelled)
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

    @accept_renamed_arguments(memory="max_memory_mb")
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
        max_memory_mb: float | None = None,
        accept: bool = False,
        progress: Progress = no_progress,
        cancelled: Callable[[], bool] = not_cancelled,
        paused: Callable[[], bool] = not_cancelled,
    ) -> LearnReport:
        """Train a skill by reinforcement learning on tasks that a verifier sets and scores.

        The gate compares held-out tasks before and after. A refusal is a report, not an error.
        Training continues the skill's head, so teach and learn first if the base cannot solve any
        task. A budget that ends it early has the result judged. An interrupted practice of the same
        tasks is resumed.

        Args:
            skill: The name of the skill.
            verifier: A plugin's name, or a ``personalpeft.plugins.Verifier``.
            family: Selects among the tasks of the verifier.
            shaping: Reward shaping: a plugin's name, or a ``personalpeft.plugins.Shaping``.
            rounds: Budget of rounds.
            seconds: Budget of time.
            steps: Budget of training steps.
            max_memory_mb, accept, progress, cancelled, paused: As for ``learn``.

        Raises:
            NotFound: A plugin is unknown.
            PluginError: A plugin failed.
            InvalidInput: An argument has a wrong value.
            Busy, Cancelled, ServingFailed: See ``User``.
        """
        check_skill_name(skill)
        if rounds is not None:
            check_number("rounds", rounds, 1, whole=True)
        options = LearnOptions(
            seconds=seconds,
            steps=steps,
            max_memory_mb=max_memory_mb,
            accept=accept,
            progress=progress,
            cancelled=cancelled,
            paused=paused,
        )
        plugins = self._services.plugins
        checked_verifier = plugins.verifier(verifier, family)
        checked_shaping = None if shaping is None else plugins.shaping(shaping)
        return Learner.from_services(self._services).practice(
            self.id, f"skill.{skill}", checked_verifier, checked_shaping, rounds, options
        )

    def rollback(
        self, layer: str, to: str | Literal["previous", "base"] | None = "previous"
    ) -> HeadMove:
        """Make another revision of a layer live, and return the move.

        ``to`` is "previous", "base" or a revision's id. "previous" was live before the last move.
        None is the base too. A refused revision may be named too. Raises ``NotFound``, and
        ``BaseMismatch`` for a revision of another base.
        """
        return stacks.rollback(self._services, self.id, layer, to)

    def reproduce(
        self,
        revision: str,
        *,
        progress: Progress = no_progress,
        cancelled: Callable[[], bool] = not_cancelled,
    ) -> ReproductionReport:
        """Build a revision again from the ledger, and compare its digest. Changes nothing.

        On the same kind of processor, with the same versions of libraries, the bytes are the same.
        Otherwise the report says how near they came. Imported and practiced revisions cannot be
        built again. Takes as long as the learn did.

        Args:
            revision: Its id or a unique prefix.
            progress, cancelled: See ``User``.

        Returns:
            The outcome, both digests, and what of the environment differs.

        Raises:
            NotFound: The revision is unknown.
            Forgotten: It was forgotten.
            Cancelled, ServingFailed: See ``User``.
        """
        check_functions(progress=progress, cancelled=cancelled)
        return reproduce(self._services, self.id, revision, progress=progress, cancelled=cancelled)

    def set_weight(self, layer: str, weight: float) -> None:
        """Set how strongly a layer is added: 1 as trained, 0 not at all, from -2 to 2.

        Raises ``NotFound``, ``InvalidInput``.
        """
        self._services.store.catalog.set_weight(self.id, layer, weight)

    def scope(self, layer: str, scope: Scope) -> None:
        """Set when a layer is attached: "always", "near" (similar to its lessons) or "never".

        A style defaults to "always", other layers to "near". A skill has a scope as
        soon as it was taught. Raises ``NotFound``, ``InvalidInput``.
        """
        self._services.store.catalog.set_scope(self.id, layer, scope)

    @accept_renamed_arguments(check_rebuild="reproduce")
    def forget(
        self,
        item: Reply | Turn | str,
        *,
        conversation: bool = False,
        rebuild: bool = True,
        dry_run: bool = False,
        certificate: bool = False,
        reproduce: bool = False,
        progress: Progress = no_progress,
        cancelled: Callable[[], bool] = not_cancelled,
    ) -> ForgetReport:
        """Erase an item and everything derived from it, and rebuild the layers it was in.

        Erased are its text, the revisions that saw it, reports about it, and replies that had it in
        the prompt. Layers that lose their head return to the head before the item. They are rebuilt
        from the remaining lessons and judged as in a learn. docs/explanation/privacy.md lists all
        effects of an erasure.

        Args:
            item: A reply, a turn, or the id of a turn or signal. Or a layer, which is erased with
                all that it was taught.
            conversation: Erase the whole conversation that the turn is in, regenerated replies
                too. ``item`` may be the id of the conversation.
            rebuild: Rebuild now. Otherwise the next learn does.
            dry_run: Only report what would be erased.
            certificate: Make a signed certificate, ``report.certificate``. It measures how far the
                model knew the items, before and after, which takes a minute or more. After a kill
                there is none.
            reproduce: Build each live revision again for the certificate, and state whether the
                bytes are equal. That takes as long as the learns did.
            progress: See ``User``.
            cancelled: Return True to cancel. After the erasure it only stops the rebuilding.

        Raises:
            NotFound: No turn or signal has this id, or there is no such layer.
            Forgotten: It was forgotten before.
            Busy: See ``User``.
            Cancelled: ``cancelled`` returned True before anything was erased.
            InvalidInput: ``item`` is no reply, turn, id or layer, the turn is in no conversation,
                or ``reproduce`` is given without ``certificate``.
            HomeError: The home cannot be written.
            MissingPackage: A certificate needs the package cryptography.
        """
        check_flags(
            conversation=conversation,
            rebuild=rebuild,
            dry_run=dry_run,
            certificate=certificate,
            reproduce=reproduce,
        )
        check_functions(progress=progress, cancelled=cancelled)
        if reproduce and not certificate:
            raise InvalidInput(
                "reproduce is a part of a certificate.", hint="Give certificate=True as well."
            )
        item_id = item if isinstance(item, str) and item != LAST else self.turn(item).id

        def reproduce_revision(revision: str) -> Mapping[str, str | None]:
            report = self.reproduce(revision, progress=progress, cancelled=cancelled)
            return {"outcome": str(report.outcome), "rebuilt": report.reproduced}

        return erasure.forget(
            self._services,
            self.id,
            item_id,
            conversation=conversation,
            rebuild=rebuild,
            dry_run=dry_run,
            certificate=certificate,
            reproduce=reproduce_revision if reproduce else None,
            progress=progress,
            cancelled=cancelled,
        )

    # History and state

    def stack(self) -> Stack:
        """Return all live layers, whatever their scope. Raises ``BaseMismatch``."""
        return stacks.live_stack(self._services, self.id)

    def layers(self) -> tuple[Layer, ...]:
        """Return every layer with its head, weight and scope, lowest first."""
        return self._services.store.catalog.layers(self.id)

    def revisions(self, layer: str | None = None) -> tuple[Revision, ...]:
        """Return all revisions, oldest first, refused ones too. Raises ``NotFound``."""
        return self._services.store.catalog.revisions(self.id, layer=layer)

    def history(self, layer: str | None = None) -> tuple[HeadMove, ...]:
        """Return every move of a head and its cause, oldest first."""
        return self._services.store.catalog.head_moves(self.id, layer=layer)

    def reports(self) -> tuple[Mapping[str, Any], ...]:
        """Return the reports of all learns and ends of probations as data, oldest first."""
        return tuple(outcome_reports(self._services.store.catalog.reports(self.id)))

    def activity_summary(
        self, since: datetime | timedelta = timedelta(days=1), until: datetime | None = None
    ) -> ActivitySummary:
        """Summarize what learning did since a time, or in a duration, until a time (None: now).

        Raises ``InvalidInput`` for a time without a time zone, or an end before the beginning.
        """
        return summarize_activity(
            self._services.store, self.id, since, self._services.clock.now(), until
        )

    def turns(self, limit: int | None = None, *, before: str | None = None) -> tuple[Turn, ...]:
        """Return the turns, newest first: at most ``limit``, older than the turn ``before``.

        Raises ``NotFound`` for an unknown turn, ``InvalidInput`` for a negative limit.
        """
        return self._services.store.ledger.turns(self.id, limit=limit, before=before)

    def conversations(
        self, limit: int | None = None, *, before: str | None = None
    ) -> tuple[ConversationSummary, ...]:
        """Return the conversations, the one with the newest turn first.

        At most ``limit``, after the conversation ``before``. Raises ``NotFound`` for an unknown
        conversation, ``InvalidInput`` for a negative limit.
        """
        return list_conversations(self._services.store, self.id, limit, before)

    def conversation(self, conversation_id: str) -> Conversation:
        """Return one conversation, by its id or a unique prefix: turns and the feedback on them.

        Raises ``NotFound``.
        """
        return read_conversation(self._services.store, self.id, conversation_id)

    def turn(self, reply: Reply | Turn | str) -> Turn:
        """Return one turn, by a reply, an id, or "last" for the newest. Raises ``NotFound``."""
        return resolve_turn(self._services.store, self.id, reply)

    def signals(self, *, current: bool = True) -> tuple[Signal, ...]:
        """Return the signals, oldest first.

        ``current=False`` includes superseded and retracted ones.
        """
        check_flags(current=current)
        return self._services.store.ledger.signals(self.id, current=current)

    def signal_statuses(self, *, current: bool = True) -> tuple[SignalStatus, ...]:
        """Return the use of each signal, and the revision that learned it. Oldest first.

        ``current=False`` includes superseded and retracted signals.
        """
        check_flags(current=current)
        # Otherwise a head may be forgotten between two reads.
        with self._services.store.database.snapshot():
            return list_signal_status(self._services.store, self.id, current=current)

    def pending(self) -> Pending:
        """Return what the next learn would train on. Reads the ledger and loads no model."""
        with self._services.store.database.snapshot():
            return pending(self._services.store, self.id)

    def training_status(self) -> TrainingStatus | None:
        """Return what is being trained now by any program on this home, or None.

        Cheap enough to poll every second.
        """
        return training_status(self._services.store, self.id)

    def why(self, reply: Reply | Turn | str) -> Provenance:
        """Return the provenance of a reply: its revisions with their signals, and the rules and
        facts in its prompt. Raises ``NotFound``.
        """
        return build_provenance(self._services.store, self.turn(reply))

    def summary(self) -> UserSummary:
        """Return when the user was created, and the numbers of turns, signals and revisions."""
        return self._services.store.catalog.user(self.id)

    # Learning in another home

    def bundle_learn(
        self,
        layer: str | None = None,
        *,
        start: Start = "auto",
        accept: bool = False,
        recipe: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return what a learn of this user needs, for ``Runtime.learn_bundles`` on any machine.

        It holds all that the user wrote and the adapters that were ever live, not encrypted. Loads
        no model. Nothing is locked: ``apply_learn`` decides later whether the result still fits.

        Args:
            layer, start, accept, recipe: As for ``learn``.

        Raises:
            InvalidInput: An argument has a wrong value.
            WeightsError, CardError: The base cannot be used.
        """
        _check_layer(layer, needed=recipe is not None)
        options = LearnOptions(start=start, accept=accept, recipe=recipe)
        return learn_bundles.make_bundle(self._services, self.id, layer, options)

    def apply_learn(self, result: bytes) -> LearnReport:
        """Record a result of ``Runtime.learn_bundles``, all of it in one transaction.

        Turns and signals that came meanwhile stay for the next learn. Every digest is recomputed
        and every adapter validated first. Loads no model.

        Args:
            result: The result of a bundle that ``bundle_learn`` made of this user.

        Returns:
            The report, as ``learn`` returns it. A learn that failed has an ``error`` in it.

        Raises:
            LedgerMoved: Since the bundle was made a head moved, a signal was retracted or something
                was forgotten. Also if this result was recorded before. Drop the result.
            BaseMismatch, BuildMismatch: It was learned on another base or by another recipe.
            PersonalFileError: It is damaged or hostile.
            InvalidInput: It is of another user.
            Busy: See ``User``.
            HomeError: The home cannot be written.
        """
        check_types("User.apply_learn", result=(result, bytes))
        return learn_bundles.apply_result(self._services, self.id, result)

    # Import and export

    def export(self, file: str | Path, *, adapters: bool = True) -> ExportSummary:
        """Write all data of this user to one new file, usually named ``<name>.personal``.

        ``Runtime.import_user`` reads it, on this machine or another. It is not encrypted and holds
        all that the user wrote. ``adapters=False`` leaves the adapter files out. Returns what is in
        it. Raises ``InvalidInput`` if the file exists or cannot be written, or is too large to be
        imported.
        """
        check_flags(adapters=adapters)
        return archive.export_user(
            self._services.store, self.id, check_path("file", file), adapters=adapters
        )

    def export_peft(self, folder: str | Path, *, layer: str | None = None) -> Path:
        """Write the live stack, or one layer of it, as a new folder that PEFT loads as one LoRA.

        Returns the absolute path. Raises ``InvalidInput`` if the folder is not empty, ``NotFound``
        if nothing is live.
        """
        return adapter_io.export_peft_folder(
            self._services, self.id, check_path("folder", folder), layer
        )

    def import_peft(self, folder: str | Path, *, layer: str = "style") -> Revision:
        """Import a PEFT folder as a revision of a layer and make it live, without a gate.

        Returns the revision. Raises ``AdapterError`` for an adapter that is damaged, hostile,
        unsupported or not for this base.
        """
        return adapter_io.import_peft_folder(
            self._services, self.id, check_path("folder", folder), layer
        )

    def copy_layer(self, layer: str, new_layer: str) -> Revision:
        """Copy what is live of a layer into another layer and make it live there, without a gate.

        What is forgotten from the first layer is forgotten from the copy too: it is erased with the
        revision that it was copied from.

        Returns the new revision. Raises ``NotFound`` if nothing of the layer is live.
        """
        return adapter_io.copy_layer(self._services, self.id, layer, new_layer)

    def propose_peft(
        self,
        folder: str | Path,
        *,
        layer: str = "style",
        accept: bool = False,
        progress: Progress = no_progress,
        cancelled: Callable[[], bool] = not_cancelled,
    ) -> LearnReport:
        """Judge a PEFT folder as a learn's candidate, and make it live if the gate promotes it.

        It is judged on the lessons of the layer that nothing live was trained on, and on the gate's
        probes. Without such lessons the gate abstains. It counts as imported: a learn on top keeps
        what it knows. A refused adapter is kept as a revision that is not live.

        Args:
            folder: The adapter.
            layer: The layer that it becomes.
            accept, progress, cancelled: As for ``learn``.

        Returns:
            The report, also of a refusal.

        Raises:
            AdapterError: As for ``import_peft``.
            Busy, Cancelled, ServingFailed: See ``User``.
        """
        options = LearnOptions(accept=accept, progress=progress, cancelled=cancelled)
        adapter = adapter_io.read_peft_folder(self._services, check_path("folder", folder), layer)
        return Learner.from_services(self._services).propose(self.id, adapter, options)

    def export_gguf(self, file: str | Path, *, layer: str | None = None) -> Path:
        """Write the live stack, or one layer of it, as a GGUF LoRA for llama.cpp.

        Returns the absolute path. Raises as ``export_peft``, and ``InvalidInput`` for a base that
        has no GGUF form here.
        """
        return adapter_io.export_gguf(self._services, self.id, check_path("file", file), layer)

    def import_gguf(self, file: str | Path, *, layer: str = "style") -> Revision:
        """Import a GGUF LoRA as ``import_peft`` imports a folder. Also raises ``InvalidInput``."""
        return adapter_io.import_gguf(self._services, self.id, check_path("file", file), layer)

    def export_merged(self, folder: str | Path, *, form: MergedForm = "safetensors") -> Path:
        """Write the base with the live stack merged into its weights, into a new folder.

        ``form`` is "safetensors" for transformers, or "gguf" for a model.gguf with an Ollama
        Modelfile. The copy is as large as the base, and later learns do not change it. Returns the
        absolute path. Raises as ``export_gguf``.
        """
        return adapter_io.export_merged(self._services, self.id, check_path("folder", folder), form)
