"""Builds the KL regularizer from what the stack below replies to general prompts.

A layer that has learned to open with "- " may go on with "- Italy is a country" where the stack
below says that the capital is Rome. So the reply is put into the lessons' template: the trained
stack is held to the plain reply's distribution where the tokens agree, and learns the rest. Only
the first sentence of a reply is used, so that a closing comes before a small base rambles on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from personalpeft.backends.base import Backend, Continuation
from personalpeft.learning.data.style import NO_TEMPLATE, ResponseTemplate
from personalpeft.learning.train.losses import KLRegularizer
from personalpeft.types import Message

MAX_REPLY_TOKENS = 24
"""Limit of a reply to a general prompt."""

_MIN_SHARED = 3
_SENTENCE = re.compile(r"\s*\S.*?[.!?](?=\s|$)", re.DOTALL)


def make_kl_regularizer(
    backend: Backend,
    messages: Sequence[Message],
    reply: str,
    template: ResponseTemplate,
    weight: float,
    *,
    below: ResponseTemplate = NO_TEMPLATE,
    from_the_first: bool = False,
) -> KLRegularizer | None:
    """Return the regularizer for the first sentence of a reply, None if too little is shared.

    Args:
        backend: renders and encodes the texts.
        messages: the general prompt.
        reply: what the stack below replies to it.
        template: the lessons' template.
        weight: weight of the loss.
        below: template of the stack below; its opening is not taken for a sentence.
        from_the_first: whether the first token is held too if there is no template.
    """
    request = messages[-1].content
    opening = below.for_request(request).opening
    sentence = _SENTENCE.match(reply, len(opening) if reply.startswith(opening) else 0)
    if sentence is None:
        return None
    text = reply[: sentence.end()]
    reference = backend.encode(text)
    student = backend.encode(template.apply(text, request))
    if template.closing:
        student += backend.end_of_turn
    run = SequenceMatcher(None, student, reference, autojunk=False).find_longest_match()
    student_start, reference_start, length = run.a, run.b, run.size
    if template == NO_TEMPLATE and not from_the_first:
        # The lessons may begin alike without a literal template, so the first token is left free.
        student_start, reference_start, length = 1, 1, length - 1
    if template.letters == "own" and length < _MIN_SHARED:
        return None
    prompt = backend.render(messages)
    return KLRegularizer(
        student=Continuation(prompt, student),
        reference=Continuation(prompt, reference),
        student_start=student_start,
        reference_start=reference_start,
        length=length,
        learn_rest=template != NO_TEMPLATE,
        weight=weight,
    )
