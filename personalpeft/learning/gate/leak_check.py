"""Find what lessons would put into every reply: links, addresses and remembered facts. Pure.

Replies take over what most lessons share. Evaluation measures whether lessons were learned, so it
does not object to that.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.outcomes import Reason, ReasonCode
from personalpeft.memory.words import contains, split_words
from personalpeft.types import Signal

_MIN_LEAK_SHARE = 0.5
_MIN_LEAKS = 3
# In bytes of UTF-8: a name may be two characters of Chinese or four of English.
_MIN_FACT_LENGTH = 4
_DASH = re.compile(r"[—–―]|--| - |^- ")
_MAX_SIGNATURE = 4
"""The most words of a line that is a signature."""
_ADDRESS = re.compile(r"https?://\S+|www\.\S+|[\w.+-]+@[\w-]+\.[\w.]+|\+\d[\d /-]{7,}\d")


def find_leak(
    lessons: Sequence[Lesson],
    facts: Sequence[Signal],
    *,
    new: Collection[str],
    accepted: Collection[str] = (),
) -> Reason | None:
    """Return what most of the latest lessons would put into every reply, or None.

    Args:
        lessons: All of a layer, oldest first, because few a day are no better than many at once.
        facts: The remembered facts, which answers must not repeat unasked.
        new: Signals that the layer has not learned. A leak must be in one of them.
        accepted: Signals that the user accepted by name. Texts in them are no leak.
    """
    addresses = [_find_addresses(each) for each in lessons]
    if counts := _count_latest(addresses, lessons, new, accepted):
        newest = next(texts[0] for texts in reversed(addresses) if texts)
        return Reason(ReasonCode.ADDRESSES_LEAKED, {**counts, "address": newest})
    secrets = [
        text
        for fact in facts
        for text in (fact.payload["text"], fact.payload.get("answer"))
        if text and len(text.encode()) >= _MIN_FACT_LENGTH
    ]
    repeated = [_find_secrets(secrets, each) for each in lessons]
    if counts := _count_latest(repeated, lessons, new, accepted):
        return Reason(ReasonCode.FACTS_LEAKED, counts)
    return None


def _find_addresses(lesson: Lesson) -> list[str]:
    """Return the links and addresses in the answer that are not in the messages before it."""
    before = "\n".join(message.content for message in lesson.messages)
    return [text for text in _ADDRESS.findall(lesson.chosen) if text not in before]


def _find_secrets(secrets: Sequence[str], lesson: Lesson) -> list[str]:
    """Return the secrets whose words are in the answer, but not in the messages before it.

    The name that an answer is signed with is none.
    """
    before = [word for message in lesson.messages for word in split_words(message.content)]
    answer, name = split_words(lesson.chosen), split_words(_find_signature(lesson.chosen))
    found = []
    for text in secrets:
        words = split_words(text)
        is_name = words == name and not any(map(str.isdigit, text))
        if words and contains(answer, words) and not contains(before, words) and not is_name:
            found.append(text)
    return found


def _find_signature(text: str) -> str:
    """Return what follows the last dash, or a short last line after its last comma."""
    last_line = text.strip().rpartition("\n")[2]
    if _DASH.search(last_line):
        return _DASH.split(last_line)[-1]
    is_short = "\n" in text.strip() and len(last_line.split()) <= _MAX_SIGNATURE
    return re.split("[,，、]", last_line)[-1] if is_short else ""


def _count_latest(
    found: Sequence[Sequence[str]],
    lessons: Sequence[Lesson],
    new: Collection[str],
    accepted: Collection[str],
) -> dict[str, int] | None:
    """Return how many of how many latest lessons leak, if they are most and one is new."""
    pairs = list(zip(lessons, found, strict=True))
    allowed = {text for lesson, texts in pairs if lesson.signal in accepted for text in texts}
    leaks = [any(text not in allowed for text in texts) for texts in found]
    if not any(leak and lesson.signal in new for leak, lesson in zip(leaks, lessons, strict=True)):
        return None
    result, count = None, 0
    for total, leak in enumerate(reversed(leaks), 1):
        count += leak
        if count >= max(_MIN_LEAKS, _MIN_LEAK_SHARE * total):
            result = {"count": count, "total": total}
    return result
