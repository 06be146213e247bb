"""One training example of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

_WRITTEN_KINDS = SignalKind.EDIT, SignalKind.PREFERENCE, SignalKind.DEMONSTRATION


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

    def with_prompt(self, messages: tuple[Message, ...]) -> Lesson:
        """Return the lesson for a paraphrased prompt."""
        return replace(self, messages=messages)

    def scrubbed(self, countries: Sequence[str]) -> Lesson:
        """Return the lesson without personal data. Arguments and errors: ``find_personal_data``."""
        removed = list(self.removed)

        def scrub(text: str, part: LessonPart, message: int = 0) -> str:
            found = find_personal_data(text, countries)
            removed.extend(
                RemovedText(
                    self.signal,
                    part,
                    message,
                    each.kind,
                    each.start,
                    each.end,
                    text[each.start : each.end],
                )
                for each in found
            )
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
    def prompt_response(self) -> PromptResponse:
        """The last request and the chosen reply."""
        return PromptResponse(self.messages[-1].content, self.chosen)

    @property
    def answers_user(self) -> bool:
        """Whether its request is a user's, and not the result of a tool."""
        return self.messages[-1].role == "user"

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
        return (*before, Message("user", self.messages[-1].content))

    @property
    def example(self) -> PromptExample | None:
        """The lesson as an example in a prompt; None unless it is a whole answer by the user."""
        if self.kind not in _WRITTEN_KINDS or not (self.answers_user and self.ended):
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
        parts = [self.messages[-1].content, self.chosen]
        return f"{self.signal}/{canonical_digest(parts)[:8]}"
