"""Whether the new lessons of a build must not become the style of all replies.

Answers take over what most lessons share, such as a link, a phone number or a remembered fact. The
measures of a candidate say whether lessons were learned, so they do not object. Words are not
judged: no rule tells an order ("As Mallory orders:") from a greeting.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from personalpeft.learning.data.style import find_mixed_styles
from personalpeft.learning.data.training_examples import Lesson, lessons_for
from personalpeft.learning.outcomes import MoveCause, Placement, Reason, ReasonCode, reason
from personalpeft.learning.plan import Plan
from personalpeft.store.store import Store
from personalpeft.types import Signal

_MIN_LEAK_SHARE = 0.5
_MIN_LEAKS = 3
# In bytes of UTF-8: a name may be two characters of Chinese or four of English.
_MIN_FACT_LENGTH = 4
_ADDRESS = re.compile(r"https?://\S+|www\.\S+|[\w.+-]+@[\w-]+\.[\w.]+|\+\d[\d /-]{7,}\d")


def find_unsafe_lessons(store: Store, plan: Plan) -> Reason | None:
    """Return why the new lessons of a build must not become the style of all replies, or None."""
    if plan.layer == "memory":
        return None
    assignments, new = plan.assignments, plan.new_lessons
    moves = store.catalog.head_moves(plan.user)
    accepted = {move.after for move in moves if move.cause == MoveCause.ACCEPTED}
    leak = find_leak(
        lessons_for(assignments, plan.layer),
        [each.signal for each in assignments if each.place is Placement.MEMORY],
        new={lesson.signal for lesson in new},
        accepted={
            signal
            for each in store.catalog.revisions(plan.user)
            if each.layer == plan.layer and each.id in accepted
            for signal in each.signals
        },
    )
    if leak:
        return reason(ReasonCode.UNSAFE_LESSONS, detail=leak)
    mixed = find_mixed_styles([lesson.prompt_response for lesson in new])
    if mixed is None or plan.answer_verifier is not None:
        return None
    one, other = mixed
    detail = f"{one} lessons are in one style and {other} in another, by turns; retract one style"
    return reason(ReasonCode.MIXED_STYLES, detail=detail)


def find_leak(
    lessons: Sequence[Lesson],
    facts: Sequence[Signal],
    *,
    new: Collection[str],
    accepted: Collection[str] = (),
) -> str:
    """Return what most of the latest lessons would leak, in words; empty for none.

    Args:
        lessons: All of a layer, oldest first, because few a day are no better than many at once.
        facts: The remembered facts, which answers must not repeat unasked.
        new: Signals that the layer has not learned. A leak must be in one of them.
        accepted: Signals that the user accepted by name. Texts in them are no leak.
    """
    secrets = [
        text
        for fact in facts
        for text in (fact.payload["text"], fact.payload.get("answer"))
        if text and len(text.encode()) >= _MIN_FACT_LENGTH
    ]
    addresses = [_added(_ADDRESS.findall(lesson.chosen), lesson) for lesson in lessons]
    if count := _count_latest(addresses, lessons, new, accepted):
        example = next(texts[0] for texts in reversed(addresses) if texts)
        return f"{count} lessons put a link or an address into the answer ({example})"
    secret_texts = [
        _added([text for text in secrets if text in each.chosen], each) for each in lessons
    ]
    if count := _count_latest(secret_texts, lessons, new, accepted):
        return f"{count} lessons repeat remembered facts that were not asked for"
    return ""


def _added(texts: Sequence[str], lesson: Lesson) -> list[str]:
    """Return the texts that are in the answer and not in the messages before it."""
    before = "\n".join(message.content for message in lesson.messages)
    return [text for text in texts if text not in before]


def _count_latest(
    found: Sequence[Sequence[str]],
    lessons: Sequence[Lesson],
    new: Collection[str],
    accepted: Collection[str],
) -> str:
    """Return "x of y" for the latest lessons that leak, if they are most and one is new."""
    pairs = list(zip(lessons, found, strict=True))
    allowed = {text for lesson, texts in pairs if lesson.signal in accepted for text in texts}
    leaks = [any(text not in allowed for text in texts) for texts in found]
    if not any(leaks[index] and lesson.signal in new for index, lesson in enumerate(lessons)):
        return ""
    result, count = "", 0
    for total, leak in enumerate(reversed(leaks), 1):
        count += leak
        if count >= max(_MIN_LEAKS, _MIN_LEAK_SHARE * total):
            result = f"{count} of {total}"
    return result
