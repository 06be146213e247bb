"""Lessons: what a fact teaches, which lessons fit a layer, and which are held out to judge it.

A fact is used at once: it is looked up. It is learned as well where the user stated which questions
it answers, or where the lookup helped repeatedly. In the first case the target is the stated
answer. In the second it is the reply that the model gave with the fact in its prompt. The model
learns to give it without (context distillation; Snell et al. 2022, "Learning by Distilling
Context"). Each learned fact has one question that is never trained on and judges it.

Verbatim recall is near perfect below ``RECOMMENDED_TOKENS_PER_PARAMETER``. It falls off up to ten
times that, and collapses beyond (arXiv 2606.02437). So a memory takes the newest lessons up to the
configured ``tokens_per_parameter``. Lessons of one signal fit or stay out together. One that does
not fit leaves its room to older ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from personalpeft.backends.base import Backend
from personalpeft.learning.data.general_prompts import TEST_TEMPLATE
from personalpeft.learning.data.scrubber import (
    LessonPart,
    RemovedText,
    find_personal_data,
    replace_personal_data,
)
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.memory.conflicts import normalize, normalized_questions
from personalpeft.memory.words import has_spaces, split_words
from personalpeft.types import (
    USER_SOURCE,
    Architecture,
    Message,
    PromptExample,
    PromptResponse,
    Signal,
    SignalKind,
    Turn,
    canonical_digest,
    canonical_json,
    split_system,
)

MAX_HOLDOUT = 128
"""More held-out lessons decide nothing that so many do not, and each is scored at every learn."""

RECOMMENDED_TOKENS_PER_PARAMETER = 1e-3
# More than a chat template writes around the messages.
_TEMPLATE_BYTES = 4096

MIN_HELPFUL_TURNS = 2
"""A fact without a stated answer is learned once so many lookups of it helped."""

_MAX_HELPFUL_TURNS = 8
_MIN_QUESTIONS_TO_HOLD_OUT = 4
_MAX_FUNCTION_WORD = 3

MAX_EXAMPLES = 8
"""The most lessons that precede a prompt as examples."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """One training example of a layer: after these messages, ``chosen`` rather than ``rejected``.

    - ``kind``: the signal's kind. A reward counts as a rating.
    - ``chosen``: empty for a disliked reply.
    - ``is_users``: the user wrote or stated ``chosen``; False for a reply of the model to a fact.
    - ``is_test``: never trained on; judges what the other lessons of its signal teach.
    - ``teacher_messages``: for context distillation, the messages with the fact in the prompt.
    - ``ended``: whether ``chosen`` ended by itself and was not cut off.
    - ``rejected_ended``: the same of ``rejected``.
    - ``group``: what a demonstration is a part of. A group is held out as a whole.
    - ``removed``: personal data that was replaced in it.
    """

    signal: str
    kind: SignalKind
    messages: tuple[Message, ...]
    chosen: str
    rejected: str | None = None
    weight: float = 1.0
    is_users: bool = True
    is_test: bool = False
    teacher_messages: tuple[Message, ...] | None = None
    ended: bool = True
    rejected_ended: bool = True
    group: str | None = None
    removed: tuple[RemovedText, ...] = ()

    def with_question(self, question: str) -> Lesson:
        """Return the lesson for another wording of its question."""
        *before, last = self.messages
        return replace(self, messages=(*before, replace(last, content=question)))

    def as_test(self) -> Lesson:
        """Return the lesson as the test of its fact, in a template that nothing is trained on."""
        question = TEST_TEMPLATE.fill(self.question)
        return replace(self.with_question(question), is_test=True)

    def scrubbed(self, countries: Sequence[str]) -> Lesson:
        """Return the lesson without personal data. Arguments and errors: ``find_personal_data``."""
        removed = list(self.removed)

        def scrub(text: str, part: LessonPart, message: int = 0) -> str:
            found = find_personal_data(text, countries)
            for each in found:
                where = self.signal, part, message, each.kind, each.start, each.end
                removed.append(RemovedText(*where, text=text[each.start : each.end]))
            return replace_personal_data(text, found)

        def scrub_messages(messages: Sequence[Message], part: LessonPart) -> tuple[Message, ...]:
            return tuple(
                replace(each, content=scrub(each.content, part, number))
                for number, each in enumerate(messages)
            )

        teacher = self.teacher_messages
        scrubbed = replace(
            self,
            messages=scrub_messages(self.messages, LessonPart.PROMPT),
            chosen=scrub(self.chosen, LessonPart.ANSWER),
            rejected=self.rejected and scrub(self.rejected, LessonPart.REJECTED),
            teacher_messages=teacher and scrub_messages(teacher, LessonPart.TEACHER),
        )
        return replace(scrubbed, removed=tuple(removed))

    @property
    def question(self) -> str:
        """The text of the last message, which the reply answers."""
        return self.messages[-1].content

    @property
    def rated_reply(self) -> tuple[str, bool]:
        """The chosen reply, else the rejected one, and whether it ended by itself."""
        if self.chosen:
            return self.chosen, self.ended
        return self.rejected or "", self.rejected_ended

    @property
    def prompt_response(self) -> PromptResponse:
        """The last request and the chosen reply."""
        return PromptResponse(self.question, self.chosen)

    @property
    def answers_user(self) -> bool:
        """Whether its request is a user's, and not the result of a tool."""
        return self.messages[-1].role == "user"

    @property
    def is_written(self) -> bool:
        """Whether a user wrote or chose the whole reply.

        A fact's answer is a word or two, and a liked reply is the model's own.
        """
        return self.kind in (SignalKind.EDIT, SignalKind.PREFERENCE, SignalKind.DEMONSTRATION)

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The turns of user and assistant up to the request.

        It is the request alone if they do not take turns without tools.
        """
        spoken = [
            Message(each.role, each.content)
            for each in self.messages[:-1]
            if each.role in ("user", "assistant") and each.content
        ]
        takes_turns = all(
            each.role == ("assistant" if number % 2 else "user")
            for number, each in enumerate(spoken)
        )
        before = spoken if takes_turns and len(spoken) % 2 == 0 else []
        return (*before, Message("user", self.question))

    @property
    def example(self) -> PromptExample | None:
        """The lesson as an example in a prompt; None unless it is a whole answer by the user."""
        if not (self.is_written and self.answers_user and self.ended):
            return None
        system, _ = split_system(self.messages)
        turns = (*self.conversation, Message("assistant", self.chosen))
        return PromptExample(self.signal, system, turns)

    @property
    def key(self) -> str:
        """The key of its scores: the signal, and a digest of what decides them where that changes.

        It changes for test questions, and with what is replaced.
        """
        if not (self.is_test or self.removed):
            return self.signal
        parts = [self.question, self.chosen]
        return f"{self.signal}/{canonical_digest(parts)[:8]}"


def few_shot_messages(
    lessons: Sequence[Lesson],
    prompt: tuple[Message, ...],
    backend: Backend,
    max_tokens: int,
) -> tuple[Message, ...]:
    """Return a conversation of the newest lessons that fit, which ends with a prompt.

    Args:
        lessons: Lessons with a chosen reply, oldest first.
        prompt: The messages to be answered.
        backend: Renders the conversation, which must fit its context with the reply.
        max_tokens: The most tokens of the reply.
    """
    conversation = prompt
    shown = [lesson for lesson in lessons if lesson.answers_user]
    for lesson in reversed(shown[-MAX_EXAMPLES:]):
        longer = (*lesson.conversation, Message("assistant", lesson.chosen), *conversation)
        if len(backend.render(longer)) + max_tokens > backend.max_length:
            break
        conversation = longer
    return conversation


def fact_lessons(fact: Signal, helpful: Sequence[Turn]) -> tuple[Lesson, ...]:
    """Return the lessons of a fact, one for each question. The last one judges it.

    ``helpful``: turns in which its lookup helped, oldest first. A fact that is only looked up has
    no lessons.
    """
    answer: str = fact.payload.get("answer") or ""
    if answer and (stated := fact.payload.get("questions")):
        sentence = as_sentence(answer)
        lessons = _unique(
            Lesson(fact.id, fact.kind, (Message("user", question),), sentence)
            for question in stated
        )
        if len(lessons) >= _MIN_QUESTIONS_TO_HOLD_OUT:
            return (*lessons[:-1], replace(lessons[-1], is_test=True))
        return (*lessons, lessons[-1].as_test())
    if len(helpful) < MIN_HELPFUL_TURNS:
        return ()
    lessons = _unique(
        Lesson(fact.id, fact.kind, turn.messages, turn.reply, is_users=False, ended=turn.ended)
        for turn in helpful
    )
    # The oldest stay, so that the test question is the same from build to build and never trained on.
    return (*lessons[:_MAX_HELPFUL_TURNS], lessons[0].as_test())


def _unique(lessons: Iterable[Lesson]) -> list[Lesson]:
    """Return the first of the lessons that ask the same."""
    first: dict[str, Lesson] = {}
    for lesson in lessons:
        first.setdefault(normalize(lesson.question), lesson)
    return list(first.values())


def as_sentence(answer: str) -> str:
    """Return a short answer as a sentence: "walnuts" becomes "Walnuts.".

    A first or last word that is no plain word keeps its letters and its end: "iPhone", "kq7zX",
    "ada@example.org".
    """
    # Scripts without capital letters end a sentence in ways of their own, or not at all.
    if any(letter.isalpha() and letter.lower() == letter.upper() for letter in answer):
        return answer
    words = answer.split()
    # In title case, since Georgian has capitals for whole words only.
    capital = answer[0].title()
    # "\u00df" has no capital letter of its own.
    if _is_plain_word(words[0].rstrip(",;:")) and capital.lower() == answer[0]:
        answer = capital + answer[1:]
    return f"{answer}." if _is_plain_word(words[-1]) else answer


def _is_plain_word(word: str) -> bool:
    """Return whether a word has letters alone, all but the first small, and hyphens between."""
    return all(part.isalpha() and part[1:] == part[1:].lower() for part in re.split("[-'’]", word))


def helpful_turns(
    signals: Sequence[Signal],
    turns: Sequence[Turn],
    forbidden: Set[str] = frozenset(),
    continued: Set[str] = frozenset(),
) -> Mapping[str, tuple[Turn, ...]]:
    """Return by fact the turns, oldest first, in which its lookup helped.

    The reply contains what only the fact can have told the model. It was liked, or the conversation
    went on without a complaint. Only the user's own feedback counts as a like. Implicit feedback
    counts as a complaint as well. A complaint counts even if training on it is not allowed; such a
    like does not. A question that the user answered in a fact belongs to that fact alone.

    Args:
        signals: The current signals, oldest first.
        turns: Those that used facts, and the newest turn, oldest first.
        forbidden: Facts that training is not allowed on. No turn counts that had one in the prompt.
        continued: Turns after which their conversation went on.
    """
    facts = {signal.id: signal for signal in signals if signal.kind is SignalKind.FACT}
    owner = {
        question: fact.id
        for fact in facts.values()
        if fact.source == USER_SOURCE and fact.payload.get("answer")
        for question in normalized_questions(fact)
    }
    feedback: dict[str, list[Signal]] = {}
    for signal in signals:
        if signal.forbids_training and signal.rating > 0:
            continue
        counts = signal.source == USER_SOURCE or signal.rating < 0
        if signal.turn is not None and counts and not signal.is_unclear_reward:
            feedback.setdefault(signal.turn, []).append(signal)
    helpful: dict[str, list[Turn]] = {}
    for number, turn in enumerate(turns, 1):
        opinions = feedback.get(turn.id, [])
        # Earlier versions recorded no conversations.
        went_on = turn.id in continued if turn.conversation_id else number < len(turns)
        if not all(each.rating > 0 for each in opinions) or not (opinions or went_on):
            continue
        if not forbidden.isdisjoint(turn.used):
            continue
        owned_by = owner.get(normalize(turn.messages[-1].content))
        for fact in turn.used:
            is_candidate = fact in facts and owned_by in (None, fact)
            if is_candidate and reveals(facts[fact].payload["text"], turn):
                helpful.setdefault(fact, []).append(turn)
    return {fact: tuple(turns) for fact, turns in helpful.items()}


def reveals(fact: str, turn: Turn) -> bool:
    """Return whether a reply contains what it can only have from the fact.

    These are the names and numbers that were not in the question. Without any, they are other words
    of the fact: the last one, and at least half. Otherwise a wrong answer in the fact's own words
    ("is called Max") would be learned. Of a script without spaces half is enough, since the last
    n-gram is rarely the last of a name.
    """
    asked = _words(" ".join(message.content for message in turn.messages))
    said = split_words(fact)
    words = [word for word in said if word.casefold() not in asked]
    # The first word has a capital in any case, and a short one there is rarely a name.
    begins = said[0] if said and len(said[0]) <= _MAX_FUNCTION_WORD else ""
    names = [word for word in words if not word[0].islower() and word != begins]
    telling = names or [word for word in words if len(word) > _MAX_FUNCTION_WORD]
    reply = _words(turn.reply)
    found = [word for word in telling if word.casefold() in reply]
    has_last = found[-1:] == telling[-1:] or not has_spaces(fact)
    return bool(found) and has_last and 2 * len(found) >= len(telling)


def _words(text: str) -> set[str]:
    return set(split_words(text.casefold()))


def find_too_long(lessons: Iterable[Lesson], cut: int, backend: Backend) -> set[str]:
    """Return the signals that are too long to teach anything.

    A prompt that leaves no room for a reply in the context cannot be asked. Training on it would
    take as long as on a hundred others. A reply is cut at ``cut`` tokens, and an edit behind the
    cut changes nothing.
    """
    context = backend.base.card.context
    room = context - min(cut, context // 2)
    return {
        lesson.signal
        for lesson in lessons
        if (_bytes_of(lesson.messages) > room and len(backend.render(lesson.messages)) > room)
        or _is_same_before_cut(lesson, cut, backend)
    }


def _is_same_before_cut(lesson: Lesson, cut: int, backend: Backend) -> bool:
    """Return whether a lesson's wanted and rejected reply differ only behind the cut."""
    if not lesson.chosen or not lesson.rejected:
        return False
    replies = lesson.chosen, lesson.rejected
    # Each token has a byte at least, so a shorter text is not cut.
    if any(len(each.encode()) < cut for each in replies):
        return False
    chosen, rejected = (backend.encode(each)[:cut] for each in replies)
    return chosen == rejected


def _bytes_of(messages: Sequence[Message]) -> int:
    """Return more than the tokens that messages can have: each has a byte at least."""
    texts = (canonical_json(message.to_list()) for message in messages)
    return _TEMPLATE_BYTES + sum(len(text.encode()) for text in texts)


def fit_lessons(
    lessons: Sequence[Lesson],
    layer: str,
    config: TrainingConfig,
    architecture: Architecture,
    count_tokens: Callable[[str], int],
) -> tuple[tuple[Lesson, ...], dict[str, int]]:
    """Return the lessons that fit a layer, in their order, and its ``LearnReport.capacity``.

    A layer other than "memory" has none. Lessons are oldest first. Each counts by its last message
    and its answer.
    """
    if layer != "memory":
        return tuple(lessons), {}
    sizes: dict[str, int] = {}
    for lesson in lessons:
        answer = min(count_tokens(lesson.chosen), config.max_length)
        size = count_tokens(lesson.question) + answer
        sizes[lesson.signal] = max(size, sizes.get(lesson.signal, 0))
    parameters = config.count_parameters(architecture)
    max_tokens = int(parameters * config.tokens_per_parameter)
    tokens, fit = 0, set[str]()
    for signal in reversed(sizes):
        if tokens + sizes[signal] <= max_tokens:
            tokens += sizes[signal]
            fit.add(signal)
    kept = tuple(lesson for lesson in lessons if lesson.signal in fit)
    return kept, {
        "parameters": parameters,
        "tokens": tokens,
        "max_tokens": max_tokens,
        # Up to here recall is near perfect.
        "recommended_tokens": int(parameters * RECOMMENDED_TOKENS_PER_PARAMETER),
    }


def select_holdout(
    lessons: Sequence[Lesson],
    new: Sequence[Lesson],
    held_out: Set[str],
    fraction: float,
    *,
    leave_one: bool,
) -> tuple[str, ...]:
    """Return the newest signals that fill the held-out share. One that was trained on never is.

    A group is held out as a whole: an older part decides for all of it. ``new`` are lessons that no
    build has used. ``leave_one``: a new lesson must be left to train on.
    """
    fresh = {lesson.signal for lesson in new}
    older = [lesson for lesson in lessons if lesson.signal not in fresh and lesson.group]
    pinned = {str(lesson.group) for lesson in older if lesson.signal in held_out}
    trained = {str(lesson.group) for lesson in older} - pinned
    units: dict[str, list[str]] = {}
    for lesson in new:
        units.setdefault(lesson.group or lesson.signal, []).append(lesson.signal)
    chosen = {signal for group in pinned & units.keys() for signal in units.pop(group)}
    free = [unit for group, unit in units.items() if group not in trained]
    share = min(int(fraction * len(lessons)), MAX_HOLDOUT)
    missing = share - len(held_out & {lesson.signal for lesson in lessons}) - len(chosen)
    if len(free) == len(units) > (0 if leave_one else 1):
        free = free[1:]
    while free and missing > 0:
        unit = free.pop()
        chosen |= set(unit)
        missing -= len(unit)
    return tuple(lesson.signal for lesson in new if lesson.signal in chosen)
