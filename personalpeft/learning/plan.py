"""Decide the inputs of a build before anything is trained.

Invariants: a held-out signal is never among the training lessons. An equal
``inputs_digest`` means an equal build. Nothing outside of it (ids, times, the load) reaches the
revision's bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from personalpeft.errors import NothingCause, NothingToLearn
from personalpeft.formatting import pluralize
from personalpeft.learning.data.general_prompts import (
    GeneralPrompts,
    load_general_prompts,
    prompt_languages,
)
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.data.lesson_assignment import (
    Assignment,
    lessons_for,
    scrub_assignments,
    undesirable_lessons_for,
)
from personalpeft.learning.data.lesson_selection import find_too_long, fit_lessons, select_holdout
from personalpeft.learning.data.question_bank import paraphrases_digest
from personalpeft.learning.data.scrubber import RemovedText, scrubber_version
from personalpeft.learning.layers import LayerState, held_out_signals, root_revision, trained_on
from personalpeft.learning.outcomes import MoveCause, Reason, ReasonCode, reason
from personalpeft.learning.train.config import BUILD_FORMAT, Start, TrainingConfig
from personalpeft.memory.languages import find_languages
from personalpeft.plugins import CheckedVerifier
from personalpeft.services import Services
from personalpeft.types import Json, Revision, SignalKind, SignalRole, Stack, canonical_digest

MIN_LESSONS = 4
VERIFIER = "verifier"
"""Key in a revision's scores: the name of the verifier that judges its layer's answers."""

_MAX_REPLAY = 64
_STYLE_CHANGED = frozenset({ReasonCode.STYLE_CHANGED_SINCE, ReasonCode.STYLE_CHANGED_BEFORE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one build is made of. ``rl.loop.PracticePlan`` is the plan of a practice.

    - ``recipe``: how the layer is trained.
    - ``live``: the user's stack; ``below`` is the part of it that the layer is built on.
    - ``parent``: the revision that the build continues.
    - ``holdout``: held-out lessons of the layer.
    - ``new_holdout``: the signals of these that this build holds out.
    - ``rated_holdout``: its held-out rated replies, if the layer is trained on dislikes. They are
      not in ``holdout``, since generated replies judge what thumbs teach.
    - ``other_holdout``: held-out lessons of all other layers of the stack.
    - ``new_examples`` and ``replay``: lessons that the parent was not, and was, trained on.
    - ``undesirable_examples``: lessons with a rejected reply only. ``desirable_examples`` are all
      liked replies that the layer was or will be trained on, to compare them with.
    - ``embedder``: name of the model that finds general prompts and question forms like the lessons.
    - ``excluded``: signals that the layer has no ``capacity`` for.
    - ``too_long``: signals whose prompt does not fit the base's context, or whose change of a reply
      is behind the cut.
    - ``rebuild_reason``: why it is built where new lessons are not the reason.
    - ``live_signals``: signals that the live revision was trained on. ``outdated`` are those of them
      that are no longer lessons.
    - ``began``: when its learn began, on the timer.
    - ``overrides``: the fields of ``recipe`` that the caller of a learn set. They stay with the layer.
    - ``answer_verifier``: judges the answers to held-out prompts, in the place of their log-probs.
      One that was given by its name stays with the layer.
    - ``maps_weights``: whether the base's weights are read as its file stores them.
    - ``move_cause``: why the head moves where the gate promotes the build.
    """

    user: str
    layer: str
    recipe: TrainingConfig
    live: Stack
    below: Stack
    parent: Revision | None
    began: float
    holdout: tuple[Lesson, ...]
    other_holdout: tuple[Lesson, ...]
    new_holdout: tuple[str, ...] = ()
    rated_holdout: tuple[Lesson, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    new_examples: tuple[Lesson, ...] = ()
    replay: tuple[Lesson, ...] = ()
    undesirable_examples: tuple[Lesson, ...] = ()
    desirable_examples: tuple[Lesson, ...] = ()
    embedder: str = ""
    excluded: frozenset[str] = frozenset()
    too_long: frozenset[str] = frozenset()
    capacity: Mapping[str, int] = field(default_factory=dict)
    rebuild_reason: Reason | None = None
    live_signals: frozenset[str] = frozenset()
    outdated: frozenset[str] = frozenset()
    overrides: Json = field(default_factory=dict)
    answer_verifier: CheckedVerifier | None = None
    maps_weights: bool = False
    move_cause: MoveCause = MoveCause.LEARN

    @property
    def has_enough(self) -> bool:
        """Whether a first build has lessons to train on and one to be judged by."""
        if self.parent is not None or self.build_reasons:
            return True
        has_test = any(lesson.is_test for lesson in self.holdout)
        return has_test or self.lesson_count >= MIN_LESSONS

    @property
    def lesson_count(self) -> int:
        """How many lessons a first build would have."""
        return len(self.new_examples) + len(self.holdout)

    @property
    def arrived_lessons(self) -> tuple[Lesson, ...]:
        """The lessons that arrived since the live revision was built, oldest first."""
        new = {*_signals(self.new_examples), *self.new_holdout} - self.live_signals
        lessons = lessons_for(self.assignments, self.layer)
        return tuple(each for each in lessons if each.signal in new)

    @property
    def build_reasons(self) -> tuple[Reason, ...]:
        """Why it is built beside new lessons: outdated ones, or a changed stack below."""
        if self.outdated:
            return (reason(ReasonCode.LESSONS_RETRACTED, count=len(self.outdated)),)
        return (self.rebuild_reason,) if self.rebuild_reason else ()

    @property
    def removes_lessons(self) -> bool:
        """Whether an outdated lesson went without another in its place."""
        lessons = {each.signal.id for each in self.assignments if each.layer == self.layer}
        replaced = {
            each.signal.id
            for each in self.assignments
            if each.superseded_by in lessons or each.reason.code in _STYLE_CHANGED
        }
        return not self.outdated <= replaced

    @property
    def head(self) -> str | None:
        """The layer's live revision."""
        entries = (entry for entry in self.live.entries if entry.layer == self.layer)
        return next((entry.revision for entry in entries), None)

    @property
    def is_incremental(self) -> bool:
        """Whether it is built on the live revision."""
        return self.parent is not None and self.parent.id == self.head

    @property
    def steps(self) -> int:
        """The steps of the build, which grow in proportion to the new signals."""
        recipe = self.recipe
        # A fact counts once, however many questions it has.
        share = len(_signals(self.new_examples)) / (recipe.batch_size * recipe.min_steps_batches)
        scaled = round(recipe.min_steps * share)
        # On a parent a few lessons need a few steps; eight still let the rate warm up and decay.
        least = 8 if self.is_incremental else recipe.min_steps
        return max(least, min(recipe.max_steps, scaled))

    @property
    def progress(self) -> int:
        """How far a finished training came, in the steps or rounds that its status counts."""
        return self.steps

    @property
    def stored_recipe(self) -> Json:
        """How the layer is built, as a revision stores it."""
        overrides = {"overrides": dict(self.overrides)} if self.overrides else {}
        return {**self.recipe.to_stored(), "steps": self.steps, **overrides, **self.build_variants}

    @property
    def build_variants(self) -> Json:
        """How the base's weights and the lessons' texts are read, if they differ from the default."""
        scrubber = {"scrubber": scrubber_version()} if self.recipe.scrub else {}
        return {**self.weights_form, **scrubber}

    @property
    def weights_form(self) -> Json:
        """The form of the base's weights, if it is not the default: the bytes may differ."""
        return {"weights": "mapped"} if self.maps_weights else {}

    @property
    def trained_lessons(self) -> tuple[Lesson, ...]:
        """All lessons that the build is trained on."""
        return (*self.replay, *self.new_examples, *self.undesirable_examples)

    @property
    def removed(self) -> tuple[RemovedText, ...]:
        """The personal data that was replaced in its lessons."""
        lessons = (*self.trained_lessons, *self.holdout, *self.rated_holdout)
        # The lessons of a fact have the same answer.
        return tuple(dict.fromkeys(each for lesson in lessons for each in lesson.removed))

    @property
    def general_prompts(self) -> GeneralPrompts:
        """The general prompts, also in the languages that its lessons are about."""
        prompts = dict.fromkeys(lesson.messages[-1].content for lesson in self.trained_lessons)
        newest = list(prompts)[-_MAX_REPLAY:]
        return load_general_prompts(find_languages(newest, prompt_languages()))

    @property
    def figures(self) -> Json:
        """What the plan itself adds to the scores of a revision."""
        verifier = self.answer_verifier
        return {VERIFIER: verifier.name} if verifier and verifier.is_named else {}

    def undecided(self, decided: Set[str]) -> tuple[Lesson, ...]:
        """Return the held-out lessons that are not in ``decided``."""
        return tuple(each for each in self.holdout if each.signal not in decided)

    @property
    def data_digest(self) -> str:
        """Digest of the lessons by content. Equal texts give the same digest in any home."""
        parts = [self.new_examples, self.replay]
        if self.undesirable_examples:
            parts += [self.undesirable_examples, self.desirable_examples]
        return canonical_digest([[_content(lesson) for lesson in part] for part in parts])

    @property
    def inputs_digest(self) -> str:
        """Digest of everything that the build depends on. The names of its keys never change."""
        general = self.general_prompts
        return canonical_digest(
            {
                "format": BUILD_FORMAT,
                "generic": general.digest,
                "ways": paraphrases_digest(general.languages),
                "base": self.live.base,
                "layer": self.layer,
                "lessons": self.data_digest,
                "recipe": self.recipe.to_digest(),
                "steps": self.steps,
                "parent": self.parent.digest if self.parent else None,
                "below": self.below.digest,
                "embedder": self.embedder,
                **self._fact_texts,
                **self.build_variants,
            }
        )

    @property
    def _fact_texts(self) -> Json:
        """Digest of all facts, of a memory layer: they choose its questions without an answer."""
        if self.layer != "memory":
            return {}
        payloads = [
            each.signal.payload for each in self.assignments if each.signal.kind is SignalKind.FACT
        ]
        texts = [[each["text"], *(each.get("questions") or ())] for each in payloads]
        return {"facts": canonical_digest(texts)}

    @property
    def holdout_signals(self) -> frozenset[str]:
        """The held-out signals. A signal with a test question is trained on."""
        lessons = [each for each in self.holdout if not each.is_test]
        return frozenset(_signals((*lessons, *self.rated_holdout)))

    @property
    def signal_roles(self) -> dict[str, SignalRole]:
        """The role of each signal of the build."""
        held_out = dict.fromkeys(self.holdout_signals, SignalRole.HELD_OUT)
        return held_out | {lesson.signal: SignalRole.TRAINED for lesson in self.trained_lessons}


def build_plan(
    services: Services,
    state: LayerState,
    recipe: TrainingConfig,
    start: Start,
    began: float,
    *,
    force: bool = False,
) -> Plan:
    """Decide what a build is made of.

    A build that cannot extend the head starts from its imported or practiced root, which no lesson
    would bring back. Without such a root it starts from scratch.

    Args:
        services: The wired parts.
        state: The layer to build, as it is now.
        recipe: The training configuration of the layer.
        start: As for ``User.learn``.
        began: When the learn began, on the timer.
        force: Whether to plan a build although no signal is new.

    Returns:
        The plan.

    Raises:
        NothingToLearn: No signal has arrived since the layer's last learn.
        InvalidInput: ``recipe.scrub`` names an unknown country.
        MissingPackage: ``recipe.scrub`` needs an extra that is not installed.
    """
    store, backend = services.store, services.learning_engine.backend
    user, layer = state.user, state.layer
    assignments = scrub_assignments(state.assignments, layer, recipe.scrub)
    considered = store.catalog.used_signals(user, layer)
    held_out = held_out_signals(store, user, layer, assignments)
    known, disliked = lessons_for(assignments, layer), undesirable_lessons_for(assignments, layer)
    too_long = find_too_long((*known, *disliked), recipe.max_length, backend)
    disliked = tuple(each for each in disliked if each.signal not in too_long)
    known = tuple(each for each in known if each.signal not in too_long)
    trainable = [lesson for lesson in known if lesson.signal not in held_out]
    fitting, capacity = fit_lessons(
        trainable, layer, recipe, backend.base.architecture, lambda text: len(backend.encode(text))
    )
    excluded = _signals(known) - held_out - _signals(fitting)
    lessons = [lesson for lesson in known if lesson.signal not in excluded]
    new = [lesson for lesson in lessons if lesson.signal not in considered]
    is_nothing_new = not new and _signals(disliked) <= considered | held_out
    if not lessons or (is_nothing_new and start != "scratch" and not force):
        raise _nothing_to_learn(
            assignments,
            layer,
            is_learned=bool(lessons),
            excluded=excluded,
            too_long=too_long - considered,
        )

    beside = state.holdout_beside
    too_long_beside = find_too_long(beside, recipe.max_length, backend)
    parent = state.head
    if start == "scratch":
        parent = None
    elif parent is not None and (state.is_stale or trained_on(store, parent) & excluded):
        parent = root_revision(store, parent)
    # A fact is judged by its test question, and its other lessons are trained on.
    without_facts, new_without_facts = (
        [lesson for lesson in some if lesson.kind is not SignalKind.FACT] for some in (lessons, new)
    )
    # What was trained on never judges, also where it was given again.
    repeated = state.repeated_signals
    new_without_facts = [lesson for lesson in new_without_facts if lesson.signal not in repeated]
    # The only new lesson may be held out where the head stays; the next learn trains on another.
    may_wait = parent is not None and parent is state.head and start != "scratch" and not force
    new_holdout = select_holdout(
        without_facts, new_without_facts, held_out, recipe.eval_fraction, leave_one=not may_wait
    )
    new_disliked = [each for each in disliked if each.signal not in considered | repeated]
    new_holdout += select_holdout(
        disliked, new_disliked, held_out, recipe.eval_fraction, leave_one=True
    )
    held_out |= set(new_holdout)
    rejected = tuple(each for each in disliked if each.signal not in held_out)
    rated = _rated_replies(assignments, layer, held_out) if rejected else ()
    judging = held_out - _signals(rated)
    training = [
        add_teacher(services, user, lesson, recipe.scrub)
        for lesson in lessons
        if not lesson.is_test and lesson.signal not in held_out
    ]
    if not training and not rejected:
        raise NothingToLearn(
            f"Nothing to learn for {layer}: all of its lessons are held out to judge.",
            hint="Give it more lessons, or roll it back to the base.",
            cause=NothingCause.ALL_HELD_OUT,
        )
    learned = trained_on(store, parent)
    if may_wait and new_holdout and _signals([*training, *rejected]) <= learned:
        raise NothingToLearn(
            f"Nothing to learn for {layer} yet: its only new lesson is to judge the next learn.",
            hint="Give it one more lesson.",
            cause=NothingCause.ALL_HELD_OUT,
        )
    return Plan(
        user=user,
        layer=layer,
        # A child has its parent's shape; only its numbers change.
        recipe=recipe.with_shape_of(parent.recipe) if parent is not None else recipe,
        live=state.live,
        below=state.below,
        parent=parent,
        began=began,
        holdout=tuple(each for each in lessons if each.is_test or each.signal in judging),
        rated_holdout=rated,
        other_holdout=tuple(each for each in beside if each.signal not in too_long_beside),
        new_holdout=(*new_holdout, *(lesson.signal for lesson in new if lesson.is_test)),
        assignments=assignments,
        new_examples=tuple(lesson for lesson in training if lesson.signal not in learned),
        replay=_newest([lesson for lesson in training if lesson.signal in learned]),
        undesirable_examples=rejected,
        desirable_examples=liked(training),
        embedder=services.memory.embedder.name,
        excluded=frozenset(excluded),
        too_long=frozenset(too_long),
        capacity=capacity,
        live_signals=frozenset(trained_on(store, state.head)),
        outdated=frozenset() if parent is state.head else state.outdated,
        maps_weights=services.training_backend.maps_weights,
    )


def add_teacher(services: Services, user: str, lesson: Lesson, countries: Sequence[str]) -> Lesson:
    """Return the lesson, with its fact in the teacher's prompt where the reply is the model's.

    Args:
        services: The wired parts.
        user: The user.
        lesson: The lesson.
        countries: As for ``scrub_assignments``.
    """
    if lesson.kind is not SignalKind.FACT or lesson.is_users or lesson.is_test:
        return lesson
    fact, system = services.store.ledger.signal(user, lesson.signal), services.base.card.system
    messages = services.memory.render_with_signal(fact, lesson.messages, system=system)
    taught = replace(lesson, teacher_messages=messages)
    return taught.scrubbed(countries) if countries else taught


def liked(lessons: Iterable[Lesson]) -> tuple[Lesson, ...]:
    """Return the lessons that are liked replies."""
    return tuple(each for each in lessons if each.kind is SignalKind.RATING and each.chosen)


def _rated_replies(
    assignments: Iterable[Assignment], layer: str, signals: Set[str]
) -> tuple[Lesson, ...]:
    """Return a layer's rated replies among some signals, oldest first."""
    return tuple(
        each.lesson
        for each in assignments
        if each.lesson is not None
        and each.layer == layer
        and each.lesson.kind is SignalKind.RATING
        and each.signal.id in signals
    )


def _signals(lessons: Iterable[Lesson]) -> set[str]:
    return {lesson.signal for lesson in lessons}


def _nothing_to_learn(
    assignments: Sequence[Assignment],
    layer: str,
    *,
    is_learned: bool,
    excluded: Collection[str],
    too_long: Collection[str],
) -> NothingToLearn:
    hint = {
        "memory": "Remember facts with the questions that they answer and the answer.",
        "style": "Edit, prefer or like some replies first.",
    }.get(layer, f"Give it demonstrations: teach with the skill {layer.partition('.')[2]}.")
    if excluded and not is_learned:
        return NothingToLearn(
            f"Nothing to learn for {layer}: it has no capacity for any of its {len(excluded)} signals.",
            hint="A larger rank or tokens_per_parameter in the base's card adds capacity; facts are"
            " retrieved in any case.",
            cause=NothingCause.NO_CAPACITY,
            signals=excluded,
        )
    if too_long:
        return NothingToLearn(
            f"Nothing to learn for {layer}: of its new signals, {len(too_long)} are too long. A prompt"
            " and a reply must fit the base's context, and an edit change what is read of a reply.",
            hint="Give it shorter lessons, or learn with a larger max_length in the recipe.",
            cause=NothingCause.TOO_LONG,
            signals=too_long,
        )
    if is_learned:
        again = 'or learn the same lessons again with start="scratch" (--from-scratch)'
        return NothingToLearn(
            f"Nothing new for {layer}: there is no lesson since the last learn.",
            hint=f"{hint.removesuffix('.')}, {again}",
        )
    what, cause = "there is no feedback", NothingCause.NO_FEEDBACK
    if assignments:
        count, cause = pluralize(len(assignments), "signal"), NothingCause.NOT_FOR_LAYER
        what = f"of {count} none is for this layer; see what each is for with signals"
    return NothingToLearn(f"Nothing to learn for {layer} yet: {what}.", hint=hint, cause=cause)


def _newest(lessons: Sequence[Lesson]) -> tuple[Lesson, ...]:
    """Return the lessons of the newest signals, as many as are replayed."""
    kept = set(list(dict.fromkeys(lesson.signal for lesson in lessons))[-_MAX_REPLAY:])
    return tuple(lesson for lesson in lessons if lesson.signal in kept)


def _content(lesson: Lesson) -> list[object]:
    messages = [message.to_list() for message in lesson.messages]
    teacher = [message.to_list() for message in lesson.teacher_messages or ()]
    cut_off = [] if lesson.ended else ["cut off"]
    if lesson.rejected is not None and not lesson.rejected_ended:
        cut_off.append("rejected cut off")
    texts = [lesson.kind, messages, lesson.chosen, lesson.rejected, lesson.weight]
    return [*texts, *teacher, *cut_off]
