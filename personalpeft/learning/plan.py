"""What a build of a layer will be made of, decided before anything is trained.

Invariants: a pinned signal is never among the training lessons; equal ``inputs`` mean an equal build, and nothing that
is not in ``inputs`` (ids, times, the machine's load) reaches the bytes of a revision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace

from personalpeft.errors import NothingToLearn
from personalpeft.formatting import pluralize
from personalpeft.learning.data.assignment import (
    Lesson,
    Assignment,
    rejected_lessons_for,
    lessons_for,
    load_assignments,
)
from personalpeft.learning.data.capacity import Room, fitting
from personalpeft.learning.data.facts import paraphrases_digest
from personalpeft.learning.data.response_template import NO_MANNER, Manner, manner_of
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.learning.staleness import ground_of, said_anew, taken_back, trained_on
from personalpeft.learning.train.config import Recipe, Start
from personalpeft.store.base import Store
from personalpeft.types import (
    Architecture,
    Message,
    Revision,
    SignalKind,
    Stack,
    StackEntry,
    canonical_digest,
)

# To be raised with every change to the code that decides a revision's bytes: what an older one would have built, or has
# half built, then passes for nothing else.
BUILD_FORMAT = 7
FEWEST = 4
HOLDS_ON = "holds_on"
"""In a revision's scores: the digest of the stack below on which it was last found to hold."""

_MOST_OLDER = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """``fresh`` lessons are new to the parent, ``older`` ones are replayed; ``questions`` are all that is pinned for
    this layer, of which ``pins`` are pinned by this build. ``disliked`` are replies to unlearn, ``left_out`` the signals
    that the layer has no ``room`` for. ``live`` is the stack as it is, ``below`` the part of it under this layer, in whose
    ``manner`` short answers are said. ``because`` says in words why it is built where no new lesson is the reason. ``gone`` is
    what was taken back of what the head learned, of a build that is to be without it.
    """

    user: str
    layer: str
    recipe: Recipe
    assignments: tuple[Assignment, ...]
    new_examples: tuple[Lesson, ...]
    replay: tuple[Lesson, ...]
    holdout: tuple[Lesson, ...]
    new_holdout: tuple[str, ...]
    parent: Revision | None
    live: Stack
    below: Stack
    rejected_examples: tuple[Lesson, ...] = ()
    excluded: frozenset[str] = frozenset()
    capacity: Room | None = None
    rebuild_reason: str = ""
    retracted: frozenset[str] = frozenset()
    template: Manner = NO_MANNER

    @property
    def has_enough(self) -> bool:
        """A first build needs lessons to learn from and one to be judged by; a fact brings both."""
        if (
            self.parent is not None
            or self.rebuild_reason
            or self.retracted
            or any(lesson.is_probe for lesson in self.holdout)
        ):
            return True
        return len(self.new_examples) + len(self.holdout) >= FEWEST

    @property
    def head(self) -> str | None:
        """The layer's live revision."""
        return next(
            (entry.revision for entry in self.live.entries if entry.layer == self.layer), None
        )

    @property
    def is_incremental(self) -> bool:
        """Whether it is built on what is live."""
        return self.parent is not None and self.parent.id == self.head

    @property
    def unlearned(self) -> str:
        """In words what it is to be without; empty where that is nothing."""
        count = len(self.retracted)
        were = "were" if count > 1 else "was"
        return f"{pluralize(count, 'lesson')} that it learned {were} taken back" if count else ""

    @property
    def steps(self) -> int:
        """More lessons take more steps, in proportion beyond the recipe's measure."""
        recipe = self.recipe
        share = len(self.new_examples) / (recipe.batch * 3)
        if self.is_incremental:
            # On a parent, a few new lessons need only a few steps; eight still let the schedule warm up and cool down.
            return max(8, min(recipe.most_steps, round(recipe.steps * share)))
        return max(recipe.steps, min(recipe.most_steps, round(recipe.steps * share)))

    @property
    def lessons_digest(self) -> str:
        """What is learned, by content: the same words in another home give the same digest."""
        parts = [self.new_examples, self.replay, *([self.rejected_examples] if self.rejected_examples else [])]
        return canonical_digest([[_content(lesson) for lesson in part] for part in parts])

    @property
    def inputs(self) -> str:
        """Names everything that the build depends on."""
        return canonical_digest(
            {
                "format": BUILD_FORMAT,
                "generic": load_general_prompts().digest,
                "ways": paraphrases_digest(),
                "base": self.live.base,
                "layer": self.layer,
                "lessons": self.lessons_digest,
                "recipe": self.recipe.as_json(),
                "steps": self.steps,
                "manner": asdict(self.template),
                "parent": self.parent.digest if self.parent else None,
                "below": self.below.digest,
            }
        )

    @property
    def signal_roles(self) -> dict[str, str]:
        """Each signal of the build by its role."""
        # Who is judged by a probe is trained on, in this build or in one that it stands on.
        pinned = {lesson.signal: "pinned" for lesson in self.holdout if not lesson.is_probe}
        return pinned | {
            lesson.signal: "train" for lesson in (*self.replay, *self.new_examples, *self.rejected_examples)
        }

    def with_candidate(self, entry: StackEntry) -> Stack:
        """The live stack with this layer's entry in place."""
        return in_its_place(self.live, entry)


def make_plan(
    store: Store,
    user: str,
    layer: str,
    recipe: Recipe,
    base: str,
    start: Start,
    *,
    force: bool = False,
    architecture: Architecture,
    count: Callable[[str], int],
    heard: Callable[[str, Sequence[Message]], tuple[Message, ...]],
) -> Plan:
    """Reads the ledger and decides. ``count`` says how many tokens a text has, ``heard`` how messages are heard with a
    fact in the prompt. What cannot be built on the head starts from nothing, or from what the head was built on in the end and
    no lesson would bring back.

    Raises ``NothingToLearn`` when no signal has come since the layer's last learn, unless it is to be built ``anyway`` or from
    nothing; ``NotFound`` for an unknown user, ``BaseMismatch`` when the live stack is of another base.
    """
    catalog = store.catalog
    live = catalog.stack(user, base)
    routings = load_assignments(store, user)
    considered = catalog.considered(user, layer)
    pinned = still_pinned(store, user, routings, set(catalog.pinned(user, layer)))
    disliked = tuple(
        lesson for lesson in rejected_lessons_for(routings, layer) if lesson.signal not in pinned
    )
    below = stack_below(store, user, live, layer)
    manner = _manner_below(routings, below)
    shown = [lesson.apply_template(manner) for lesson in lessons_for(routings, layer)]
    fit, room = fitting(
        [each for each in shown if each.signal not in pinned], layer, recipe, architecture, count
    )
    left_out = frozenset(each.signal for each in shown) - pinned - {each.signal for each in fit}
    lessons = [each for each in shown if each.signal not in left_out]
    new = [lesson for lesson in lessons if lesson.signal not in considered]
    nothing_new = not new and all(lesson.signal in considered for lesson in disliked)
    if not lessons or (nothing_new and start != "nothing" and not force):
        raise _nothing(routings, layer, learned_before=bool(lessons), left_out=len(left_out))

    head = head_of(store, user, layer, live)
    parent = head
    if start == "nothing":
        parent = None
    elif head is not None and not _can_be_built_on(
        store, head, below, routings, {each.signal for each in (*lessons, *disliked)}
    ):
        parent = ground_of(store, head)
    # A lesson that brings a probe is judged by that, and all else that it says is learned.
    unprobed, new_unprobed = (
        [each for each in some if each.kind is not SignalKind.FACT] for some in (lessons, new)
    )
    pins = _new_pins(unprobed, new_unprobed, pinned, recipe.held_out)
    held = pinned | set(pins)
    questions = [lesson for lesson in lessons if lesson.is_probe or lesson.signal in held]
    open_lessons = [lesson for lesson in lessons if not lesson.is_probe and lesson.signal not in held]
    probed = tuple(lesson.signal for lesson in new if lesson.is_probe)
    open_lessons = [_with_teacher(lesson, heard) for lesson in open_lessons]
    if not open_lessons and not disliked:
        raise NothingToLearn(
            f"Nothing to learn for {layer}: all that is left of it is held back to judge by.",
            hint="Give it more lessons, or roll it back to the base.",
        )
    learned = trained_on(store, parent)
    if parent is not None:
        # A child has its parent's shape; only its numbers change.
        shape = {key: parent.recipe[key] for key in ("rank", "alpha")}
        recipe = replace(recipe, **shape, targets=tuple(parent.recipe["targets"]))
    return Plan(
        user=user,
        layer=layer,
        recipe=recipe,
        assignments=routings,
        new_examples=tuple(lesson for lesson in open_lessons if lesson.signal not in learned),
        replay=_newest([lesson for lesson in open_lessons if lesson.signal in learned]),
        holdout=tuple(questions),
        new_holdout=(*pins, *probed),
        parent=parent,
        live=live,
        below=below,
        rejected_examples=disliked,
        excluded=left_out,
        capacity=room,
        retracted=taken_back(store, user, head, routings)
        if head is not None and parent is not head
        else frozenset(),
        template=manner,
    )


def stack_below(store: Store, user: str, live: Stack, layer: str) -> Stack:
    """What a layer stands on: style lies under skills, skills under memory; a skill stands on the style alone. Of these only
    what answers whatever is asked: built over a layer that is switched off, or there for its own subject alone, it would be
    made for a stack that answers nobody.
    """
    scopes = {each.name: each.scope for each in store.catalog.layers(user)}

    def answers(entry: StackEntry) -> bool:
        return (
            rank_of(entry.layer) < rank_of(layer)
            and scopes[entry.layer] == "always"
            and entry.weight != 0
        )

    return replace(live, entries=tuple(filter(answers, live.entries)))


def in_its_place(stack: Stack, entry: StackEntry) -> Stack:
    """A stack with an entry for its layer, above what that may stand on."""
    rest = [each for each in stack.entries if each.layer != entry.layer]
    under = sum(rank_of(each.layer) < rank_of(entry.layer) for each in rest)
    return replace(stack, entries=(*rest[:under], entry, *rest[under:]))


def questions_of(
    store: Store, user: str, live: Stack, layer: str, routings: Sequence[Assignment]
) -> tuple[Lesson, ...]:
    """What was held back to judge a layer: pinned lessons, and the probes of what its head learned."""
    pinned = set(store.catalog.pinned(user, layer))
    learned = trained_on(store, head_of(store, user, layer, live))
    manner = _manner_below(routings, stack_below(store, user, live, layer))
    return tuple(
        lesson.apply_template(manner)
        for lesson in lessons_for(routings, layer)
        if lesson.signal in pinned or (lesson.is_probe and lesson.signal in learned)
    )


def _nothing(
    routings: Sequence[Assignment], layer: str, *, learned_before: bool, left_out: int
) -> NothingToLearn:
    if left_out and not learned_before:
        return NothingToLearn(
            f"Nothing to learn for {layer}: it has no room for any of the {left_out} signals that are meant for it.",
            hint="A larger rank or capacity in the base's card makes room; facts are looked up all the same.",
        )
    if learned_before:
        return NothingToLearn(
            f"Nothing new for {layer}: no lesson has come since the last learn.",
            hint=f"{_how_to_teach(layer).removesuffix('.')}, or build from nothing to learn the same lessons again.",
        )
    what = "there is no feedback"
    if routings:
        went = Counter(
            r.layer or {"kept": "only kept"}.get(r.place, "acting at once") for r in routings
        )
        where = ", ".join(
            f"{count} {'for ' if '.' in to or to in ('style', 'memory') else ''}{to}"
            for to, count in went.items()
        )
        what = f"of {pluralize(len(routings), 'signal')} none is for it ({where})"
    return NothingToLearn(f"Nothing to learn for {layer} yet: {what}.", hint=_how_to_teach(layer))


def _how_to_teach(layer: str) -> str:
    if layer == "memory":
        return "Remember facts with the questions that they answer and the answer."
    if layer == "style":
        return "Edit, prefer or like some replies first."
    return f"Show it some: teach with the skill {layer.partition('.')[2]}."


def still_pinned(
    store: Store, user: str, routings: Sequence[Assignment], pinned: Set[str]
) -> set[str]:
    """The pinned signals and those that took the place of one: a question does not become a lesson by being said anew."""
    heirs = set(pinned)
    for routing in routings:
        older = routing.signal.supersedes
        while older is not None and older not in pinned:
            older = store.ledger.signal(user, older).supersedes
        if older is not None:
            heirs.add(routing.signal.id)
    # Whatever is the lesson now in the place of a question, on the same turn or to the same request.
    instead = {routing.signal.id: routing.superseded_by for routing in routings}
    for signal in tuple(heirs):
        while (taken_by := instead.get(signal)) is not None and taken_by not in heirs:
            heirs.add(taken_by)
            signal = taken_by
    return heirs


def _newest(lessons: Sequence[Lesson]) -> tuple[Lesson, ...]:
    """The lessons of the newest signals, as many as are replayed."""
    kept = set(list(dict.fromkeys(lesson.signal for lesson in lessons))[-_MOST_OLDER:])
    return tuple(lesson for lesson in lessons if lesson.signal in kept)


def _manner_below(routings: Sequence[Assignment], below: Stack) -> Manner:
    """How the stack below answers, as far as it can be put on other words: what was asked of the style."""
    if not any(entry.layer == "style" for entry in below.entries):
        return NO_MANNER
    return manner_of([lesson.prompt_response.pattern for lesson in lessons_for(routings, "style")])


def _with_teacher(
    lesson: Lesson, heard: Callable[[str, Sequence[Message]], tuple[Message, ...]]
) -> Lesson:
    """A lesson that the model taught itself, when a fact was in its prompt, with what it heard then."""
    if lesson.kind is not SignalKind.FACT or lesson.is_short or lesson.is_probe:
        return lesson
    return replace(lesson, heard=heard(lesson.signal, lesson.messages))


def _new_pins(
    lessons: Sequence[Lesson], new: Sequence[Lesson], pinned: set[str], held_out: float
) -> tuple[str, ...]:
    """The newest lessons become questions until the held-out share is reached; what was already seen never does."""
    missing = int(held_out * len(lessons)) - len(pinned & {lesson.signal for lesson in lessons})
    count = max(0, min(missing, len(new) - 1))
    return tuple(lesson.signal for lesson in new[len(new) - count :])


def head_of(store: Store, user: str, layer: str, live: Stack) -> Revision | None:
    """What is live of a layer; None where the base answers."""
    entry = next((entry for entry in live.entries if entry.layer == layer), None)
    return store.catalog.revision(user, entry.revision) if entry is not None else None


def _can_be_built_on(
    store: Store, head: Revision, below: Stack, routings: Sequence[Assignment], lessons: Set[str]
) -> bool:
    """Whether it stands on what lies below now, and all that it learned is a lesson or was said anew."""
    known = trained_on(store, head)
    return stands_on(head, below) and known <= lessons | said_anew(
        store, head.user, known, routings
    )


def stands_on(revision: Revision, below: Stack) -> bool:
    """Whether a revision was built on a stack, or was found to hold on it."""
    return below.digest in (Stack(below.base, revision.below).digest, revision.scores.get(HOLDS_ON))


def rank_of(layer: str) -> int:
    """How high a layer lies: what has the same rank does not stand on one another."""
    return {"style": 0, "memory": 2}.get(layer, 1)


def _content(lesson: Lesson) -> list[object]:
    spoken = [message.plain() for message in lesson.messages]
    taught = [message.plain() for message in lesson.teacher_messages] if lesson.teacher_messages else []
    cut_off = [] if lesson.ended else ["cut off"]
    return [lesson.kind, spoken, lesson.chosen, lesson.rejected, lesson.weight, *taught, *cut_off]
