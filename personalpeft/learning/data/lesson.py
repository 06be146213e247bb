"""A lesson: one training example that a signal became."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from personalpeft.backends.base import Backend
from personalpeft.learning.data.question_bank import TEST_TEMPLATE
from personalpeft.learning.data.scrubber import (
    LessonPart,
    RemovedText,
    find_personal_data,
    replace_personal_data,
)
from personalpeft.types import (
    Message,
    PromptExample,
    PromptResponse,
    SignalKind,
    canonical_digest,
    split_system,
)

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
