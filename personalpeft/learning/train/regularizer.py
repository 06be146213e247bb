"""Generic answers to hold to, said in the manner of the lessons.

A style and the facts meet where an answer begins: a model that has learned to open with "- " may go on with "- Italy is
a country" where it would have said that the capital is Rome. So an anchor is what the stack below says to a question
that belongs to nobody, dressed as the lessons are: with their opening, their closing, their letters. The candidate is
held to the plain answer's distribution wherever the tokens are the same, and learns the rest as it learns a lesson.
That is both the anchor (Kullback-Leibler to what lies below) and the replay of generic chat.

Only an answer's first sentence is used: a small base rambles on, and a style that ends in a certain way would never
come to its end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from personalpeft.backends.base import Backend, Continuation
from personalpeft.learning.data.response_template import NO_MANNER, Manner
from personalpeft.learning.train.losses import Anchor
from personalpeft.types import Message

LONGEST = 24
_FEWEST_SHARED = 3
_SENTENCE = re.compile(r"\s*\S.*?[.!?](?=\s|$)", re.DOTALL)


def anchor(
    backend: Backend,
    messages: Sequence[Message],
    reply: str,
    manner: Manner,
    weight: float,
    *,
    below: Manner = NO_MANNER,
    from_the_first: bool = False,
) -> Anchor | None:
    """The term that holds to the first sentence of ``reply`` in a manner; None where there is too little to hold to. The
    reply is in the manner of what lies ``below``, whose opening is no sentence of its own. Without a manner the first
    token is left free, unless ``from_the_first``.
    """
    request = messages[-1].content
    opening = below.to(request).opening
    sentence = _SENTENCE.match(reply, len(opening) if reply.startswith(opening) else 0)
    if sentence is None:
        return None
    text = reply[: sentence.end()]
    kept = backend.encode(text)
    said = backend.encode(manner.dress(text, request))
    if manner.closing:
        said += backend.end_of_turn
    run = SequenceMatcher(None, said, kept, autojunk=False).find_longest_match()
    first_said, first_kept, length = run.a, run.b, run.size
    if manner == NO_MANNER and not from_the_first:
        # The lessons may well begin in another way that is not literally the same, so the first token is theirs.
        first_said, first_kept, length = 1, 1, length - 1
    if manner.letters == "own" and length < _FEWEST_SHARED:
        return None
    prompt = backend.render(messages)
    return Anchor(
        said=Continuation(prompt, said),
        kept=Continuation(prompt, kept),
        first_said=first_said,
        first_kept=first_kept,
        length=length,
        learn_rest=manner != NO_MANNER,
        weight=weight,
    )
