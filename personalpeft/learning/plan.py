"""Decide what a build of a layer is made of, before anything is trained.

Invariants: a held-out signal is never among the training lessons. Equal ``inputs`` mean an equal
build, and nothing that is not in ``inputs`` (ids, times, the load) reaches the revision's bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from personalpeft.errors import NothingCause, NothingToLearn
from personalpeft.formatting import pluralize, to_json
from personalpeft.learning.data.assignment import (
    Assignment,
    Lesson,
    lessons_for,
    load_assignments,
    undesirable_lessons_for,
)
from personalpeft.learning.data.capacity import LayerCapacity, fit_lessons
from personalpeft.learning.data.facts import paraphrases_digest
from personalpeft.learning.data.style import (
    NO_TEMPLATE,
    ResponseTemplate,
    infer_template,
)
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.learning.layers import is_valid_on, live_revision, stack_below
from personalpeft.learning.outcomes import Placement, Reason, ReasonCode, reason
from personalpeft.learning.staleness import restated, retracted_signals, root_revision, trained_on
from personalpeft.learning.train.config import BUILD_FORMAT, Start, TrainingConfig
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import (
    Revision,
    SignalKind,
    Stack,
    canonical_digest,
)

MIN_LESSONS = 4
_MAX_REPLAY = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What one build is made of.

    - ``new_examples`` and ``replay``: lessons that the parent was not, and was, trained on.
    - ``rejected_examples``: lessons with a rejected reply only.
    - ``new_holdout``: signals that this build holds out; ``holdout`` has all such lessons.
    - ``below``: the part of the live stack that the layer is built on; ``template`` is the response
      template of it, which short answers are put into.
    - ``excluded``: signals that the layer has no ``capacity`` for.
    - ``rebuild_reason``: why it is built where new lessons are not the reason.
    - ``retracted``: signals that the live revision was trained on and that this build excludes.
    """

    user: str
    layer: str
    recipe: TrainingConfig
    assignments: tuple[Assignment, ...]
    new_examples: tuple[Lesson, ...]
    replay: tuple[Lesson, ...]
    holdout: tuple[Lesson, ...]
    new_holdout: tuple[str, ...]
    parent: Revision | None
    live: Stack
    below: Stack
    undesirable_examples: tuple[Lesson, ...] = ()
    excluded: frozenset[str] = frozenset()
    capacity: LayerCapacity | None = None
    rebuild_reason: Reason | None = None
    retracted: frozenset[str] = frozenset()
    template: ResponseTemplate = NO_TEMPLATE

    @property
    def has_enough(self) -> bool:
        """Whether a first build has lessons to train on and one to be judged by."""
        if self.parent is not None or self.build_reasons:
            return True
        has_probe = any(lesson.is_probe for lesson in self.holdout)
        return has_probe or self.lesson_count >= MIN_LESSONS

    @property
    def lesson_count(self) -> int:
        """How many lessons a first build would have."""
        return len(self.new_examples) + len(self.holdout)

    @property
    def new_lessons(self) -> tuple[Lesson, ...]:
        """The lessons that arrived since the last learn, oldest first."""
        new = {*_signals(self.new_examples), *self.new_holdout}
        lessons = lessons_for(self.assignments, self.layer)
        return tuple(each for each in lessons if each.signal in new)

    @property
    def build_reasons(self) -> tuple[Reason, ...]:
        """Why it is built beside new lessons: retracted ones, or a changed stack below."""
        if self.retracted:
            return (reason(ReasonCode.LESSONS_RETRACTED, count=len(self.retracted)),)
        return (self.rebuild_reason,) if self.rebuild_reason else ()

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
        """The steps of the build, which grow in proportion to new lessons."""
        recipe = self.recipe
        share = len(self.new_examples) / (recipe.batch_size * 3)
        scaled = round(recipe.min_steps * share)
        # On a parent a few lessons need a few steps; eight still let the rate warm up and decay.
        least = 8 if self.is_incremental else recipe.min_steps
        return max(least, min(recipe.max_steps, scaled))

    @property
    def lessons_digest(self) -> str:
        """Digest of what is trained on, by content: equal words give it in any home."""
        parts = [self.new_examples, self.replay]
        parts += [self.undesirable_examples] if self.undesirable_examples else []
        return canonical_digest([[_content(lesson) for lesson in part] for part in parts])

    @property
    def inputs(self) -> str:
        """Digest of everything that the build depends on. Its keys are stored in the digest."""
        return canonical_digest(
            {
                "format": BUILD_FORMAT,
                "generic": load_general_prompts().digest,
                "ways": paraphrases_digest(),
                "base": self.live.base,
                "layer": self.layer,
                "lessons": self.lessons_digest,
                "recipe": self.recipe.to_stored(),
                "steps": self.steps,
                "manner": to_json(self.template),
                "parent": self.parent.digest if self.parent else None,
                "below": self.below.digest,
            }
        )

    @property
    def signal_roles(self) -> dict[str, str]:
        """The role of each signal of the build, "train" or "pinned". They are stored."""
        # A signal with a probe is trained on, in this build or in an ancestor.
        held_out = {lesson.signal: "pinned" for lesson in self.holdout if not lesson.is_probe}
        trained = (*self.replay, *self.new_examples, *self.undesirable_examples)
        return held_out | {lesson.signal: "train" for lesson in trained}


def build_plan(
    services: Services,
    user: str,
    layer: str,
    recipe: TrainingConfig,
    start: Start,
    *,
    force: bool = False,
) -> Plan:
    """Read the ledger and decide what a build is made of. ``force``: though no signal is new.

    A build that cannot extend the head starts from nothing, or from the head's imported or
    practised root, which no lesson would bring back.

    Raises:
        NothingToLearn: No signal has arrived since the layer's last learn.
        NotFound: The user is unknown.
        BaseMismatch: The live stack is of another base.
    """
    store, catalog, backend = services.store, services.store.catalog, services.engine.backend
    live = catalog.stack(user, backend.base.digest)
    assignments = load_assignments(store, user)
    considered = catalog.used_signals(user, layer)
    held_out = inherited_holdout(store, user, assignments, set(catalog.holdout(user, layer)))
    rejected = tuple(
        each for each in undesirable_lessons_for(assignments, layer) if each.signal not in held_out
    )
    below = stack_below(store, user, live, layer)
    template = _template_below(assignments, below)
    known = [lesson.apply_template(template) for lesson in lessons_for(assignments, layer)]
    trainable = [lesson for lesson in known if lesson.signal not in held_out]
    fitting, capacity = fit_lessons(
        trainable, layer, recipe, backend.base.architecture, lambda text: len(backend.encode(text))
    )
    excluded = _signals(known) - held_out - _signals(fitting)
    lessons = [lesson for lesson in known if lesson.signal not in excluded]
    new = [lesson for lesson in lessons if lesson.signal not in considered]
    is_nothing_new = not new and _signals(rejected) <= considered
    if not lessons or (is_nothing_new and start != "nothing" and not force):
        raise _nothing_to_learn(
            assignments, layer, is_learned=bool(lessons), excluded=len(excluded)
        )

    head = live_revision(store, user, layer, live)
    parent = head
    if start == "nothing":
        parent = None
    elif head is not None:
        # It must be valid on the stack below, and all that it learned still be a lesson.
        learned = trained_on(store, head)
        current = _signals((*lessons, *rejected)) | restated(store, user, learned, assignments)
        if not (is_valid_on(head, below) and learned <= current):
            parent = root_revision(store, head)
    # A fact is judged by its probe, and its other lessons are trained on.
    unprobed, new_unprobed = (
        [lesson for lesson in some if lesson.kind is not SignalKind.FACT] for some in (lessons, new)
    )
    new_holdout = _select_holdout(unprobed, new_unprobed, held_out, recipe.eval_fraction)
    held_out |= set(new_holdout)
    training = [
        _add_teacher(services, user, lesson)
        for lesson in lessons
        if not lesson.is_probe and lesson.signal not in held_out
    ]
    if not training and not rejected:
        raise NothingToLearn(
            f"Nothing to learn for {layer}: all of its lessons are held back to judge by.",
            hint="Give it more lessons, or roll it back to the base.",
            cause=NothingCause.ALL_HELD_OUT,
        )
    learned = trained_on(store, parent)
    is_new_root = head is not None and parent is not head
    return Plan(
        user=user,
        layer=layer,
        # A child has its parent's shape; only its numbers change.
        recipe=recipe.with_shape_of(parent.recipe) if parent is not None else recipe,
        assignments=assignments,
        new_examples=tuple(lesson for lesson in training if lesson.signal not in learned),
        replay=_newest([lesson for lesson in training if lesson.signal in learned]),
        holdout=tuple(each for each in lessons if each.is_probe or each.signal in held_out),
        new_holdout=(*new_holdout, *(lesson.signal for lesson in new if lesson.is_probe)),
        parent=parent,
        live=live,
        below=below,
        undesirable_examples=rejected,
        excluded=frozenset(excluded),
        capacity=capacity,
        retracted=retracted_signals(store, user, head, assignments)
        if head is not None and is_new_root
        else frozenset(),
        template=template,
    )


def holdout_of(
    store: Store, user: str, live: Stack, layer: str, assignments: Sequence[Assignment]
) -> tuple[Lesson, ...]:
    """Return a layer's held-out lessons, and the probes of the facts that its head learned."""
    held_out = set(store.catalog.holdout(user, layer))
    learned = trained_on(store, live_revision(store, user, layer, live))
    template = _template_below(assignments, stack_below(store, user, live, layer))
    return tuple(
        lesson.apply_template(template)
        for lesson in lessons_for(assignments, layer)
        if lesson.signal in held_out or (lesson.is_probe and lesson.signal in learned)
    )


def inherited_holdout(
    store: Store, user: str, assignments: Sequence[Assignment], held_out: Set[str]
) -> set[str]:
    """Return the held-out signals and their successors: a restated one is not trained on either."""
    found = set(held_out)
    for each in assignments:
        older = each.signal.supersedes
        while older is not None and older not in held_out:
            older = store.ledger.signal(user, older).supersedes
        if older is not None:
            found.add(each.signal.id)
    # And what is the lesson in their place, on the same turn or the same request.
    superseded_by = {each.signal.id: each.superseded_by for each in assignments}
    for signal in tuple(found):
        while (newer := superseded_by.get(signal)) is not None and newer not in found:
            found.add(newer)
            signal = newer
    return found


def _signals(lessons: Iterable[Lesson]) -> set[str]:
    return {lesson.signal for lesson in lessons}


def _nothing_to_learn(
    assignments: Sequence[Assignment], layer: str, *, is_learned: bool, excluded: int
) -> NothingToLearn:
    hint = {
        "memory": "Remember facts with the questions that they answer and the answer.",
        "style": "Edit, prefer or like some replies first.",
    }.get(layer, f"Show it some: teach with the skill {layer.partition('.')[2]}.")
    if excluded and not is_learned:
        return NothingToLearn(
            f"Nothing to learn for {layer}: it has no room for any of its {excluded} signals.",
            hint="A larger rank or tokens_per_parameter in the base's card makes room; facts are"
            " looked up all the same.",
            cause=NothingCause.NO_CAPACITY,
        )
    if is_learned:
        again = "or build from nothing to learn the same lessons again."
        return NothingToLearn(
            f"Nothing new for {layer}: no lesson has come since the last learn.",
            hint=f"{hint.removesuffix('.')}, {again}",
        )
    what, cause = "there is no feedback", NothingCause.NO_FEEDBACK
    if assignments:
        cause = NothingCause.NOT_FOR_LAYER
        uses = Counter(
            f"for {each.layer}"
            if each.layer
            else "only kept"
            if each.place is Placement.UNUSED
            else "acting at once"
            for each in assignments
        )
        counts = ", ".join(f"{count} {use}" for use, count in uses.items())
        what = f"of {pluralize(len(assignments), 'signal')} none is for it ({counts})"
    return NothingToLearn(f"Nothing to learn for {layer} yet: {what}.", hint=hint, cause=cause)


def _newest(lessons: Sequence[Lesson]) -> tuple[Lesson, ...]:
    """Return the lessons of the newest signals, as many as are replayed."""
    kept = set(list(dict.fromkeys(lesson.signal for lesson in lessons))[-_MAX_REPLAY:])
    return tuple(lesson for lesson in lessons if lesson.signal in kept)


def _template_below(assignments: Sequence[Assignment], below: Stack) -> ResponseTemplate:
    """Return the response template of the stack below, from the lessons of the style."""
    if not any(entry.layer == "style" for entry in below.entries):
        return NO_TEMPLATE
    lessons = lessons_for(assignments, "style")
    return infer_template([lesson.prompt_response.pattern for lesson in lessons])


def _add_teacher(services: Services, user: str, lesson: Lesson) -> Lesson:
    """Return the lesson, with its fact in the teacher's prompt where the reply is the model's."""
    if lesson.kind is not SignalKind.FACT or lesson.is_short or lesson.is_probe:
        return lesson
    teacher = services.render_with_item(user, lesson.signal, lesson.messages)
    return replace(lesson, teacher_messages=teacher)


def _select_holdout(
    lessons: Sequence[Lesson], new: Sequence[Lesson], held_out: Set[str], fraction: float
) -> tuple[str, ...]:
    """Return the newest signals that fill the held-out share. One that was trained on never is."""
    missing = int(fraction * len(lessons)) - len(held_out & _signals(lessons))
    count = max(0, min(missing, len(new) - 1))
    return tuple(lesson.signal for lesson in new[len(new) - count :])


def _content(lesson: Lesson) -> list[object]:
    messages = [message.to_list() for message in lesson.messages]
    teacher = [message.to_list() for message in lesson.teacher_messages or ()]
    cut_off = [] if lesson.ended else ["cut off"]
    texts = [lesson.kind, messages, lesson.chosen, lesson.rejected, lesson.weight]
    return [*texts, *teacher, *cut_off]
