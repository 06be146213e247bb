"""Have the stack below a layer reply to general prompts, before the layer is trained on it.

Plain replies regularise: the trained stack is held to them. Few-shot replies teach. A dozen lessons
say little about other prompts. But with the lessons as earlier turns, even a small model answers
the next prompt in the same way. The layer learns to answer so without them. This is context
distillation (Askell et al. 2021, arXiv 2112.00861) on generated texts (Kim and Rush 2016, arXiv
1606.07947).

Only prompts similar to those of the lessons are answered so. A user who edits notes into JSON wants
no JSON from other questions. Similarity is the cosine of sentence embeddings. The lessons set its
scale, so it holds for any topic, language and kind of request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from personalpeft.chat.examples import MIN_LESSONS, similarity_between
from personalpeft.engine.engine import Request
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.data.general_prompts import BASE_SAMPLING, is_degenerate
from personalpeft.learning.data.lesson import Lesson, few_shot_messages
from personalpeft.learning.plan import Plan
from personalpeft.memory.types import Vectors
from personalpeft.services import Services
from personalpeft.types import Message, Sampling

MIN_PROMPTS, MAX_PROMPTS = 8, 16
"""Fewer similar prompts are similar by chance: none of them is answered. More take time."""

# A reply may be longer than the longest lesson by a half; one that still goes on is left out.
_LENGTH_FACTOR, _EXTRA_TOKENS = 1.5, 4
# Of four lessons three are at least so similar to another: prompts like them begin as they do.
_HELD_QUANTILE = 0.25
# Fewer distant prompts are too few to hold the layer to the stack below.
_MIN_DISTANT = 24
# Half of the lessons are this similar. Few-shot replies need closer prompts.
_FEW_SHOT_QUANTILE = 0.5


@dataclass(frozen=True, slots=True)
class GeneralReplies:
    """Prompts with the replies of the stack below.

    - ``plain``: replies that the trained stack is held to, to prompts unlike the lessons'.
    - ``free_start``: where nearly all prompts are like the lessons', these are in ``plain`` as
      well. Their first token is not held, so that a reply may begin in the new style.
    - ``few_shot``: conversations of lessons and a prompt, with the reply, which are distilled.
    """

    plain: Sequence[tuple[str, str]]
    free_start: frozenset[str]
    few_shot: Sequence[tuple[tuple[Message, ...], str]]


def generate_general_replies(
    services: Services,
    plans: Mapping[str, Plan],
    *,
    cancelled: Callable[[], bool],
    paused: Callable[[], bool],
) -> dict[str, GeneralReplies | PersonalPeftError]:
    """Return the general replies for each user's plan, or the error that concerns one user.

    Args:
        services: The wired parts.
        plans: By user, what is to be built.
        cancelled: Returns whether to stop. Callers check it again: replies may then be cut off.
        paused: Returns whether to wait.
    """
    prompts = {user: _regularizer_prompts(plan) for user, plan in plans.items()}
    few_shot = {user: _few_shot_requests(services, plan) for user, plan in plans.items()}
    completed = services.completions.complete_for_users(
        {
            user: [
                *(_ask(plan, (Message("user", each),), BASE_SAMPLING) for each in prompts[user]),
                *few_shot[user],
            ]
            for user, plan in plans.items()
        },
        cancelled=cancelled,
        paused=paused,
    )
    return {
        user: texts
        if isinstance(texts, PersonalPeftError)
        else _select_replies(services, plans[user], prompts[user], few_shot[user], texts)
        for user, texts in completed.items()
    }


def _ask(plan: Plan, messages: tuple[Message, ...], sampling: Sampling) -> Request:
    return Request(plan.user, messages, plan.below, sampling, background=True)


def _regularizer_prompts(plan: Plan) -> tuple[str, ...]:
    if not plan.recipe.kl_prompts:
        return ()
    general = plan.general_prompts
    if plan.layer == "memory":
        # Facts are no way of answering. Held to short questions alone, a memory of five facts
        # answered a question about soup with "Sugar.".
        return (*general.regularizer_prompts, *general.everyday_prompts)
    return general.regularizer_prompts


def _few_shot_requests(services: Services, plan: Plan) -> list[Request]:
    if not plan.recipe.few_shot_replies:
        return []
    prompts = plan.general_prompts.everyday_prompts
    similar = _similar(services, plan, prompts, _FEW_SHOT_QUANTILE)
    if len(similar) < MIN_PROMPTS:
        return []
    backend, lessons = services.learning_engine.backend, _examples(plan)
    longest = max(len(backend.encode(lesson.chosen)) for lesson in lessons)
    limit = min(plan.recipe.max_length, int(_LENGTH_FACTOR * longest) + _EXTRA_TOKENS)
    conversations = (
        few_shot_messages(lessons, (Message("user", prompt),), backend, limit)
        for prompt in similar[:MAX_PROMPTS]
    )
    sampling = Sampling(max_tokens=limit)
    return [_ask(plan, messages, sampling) for messages in conversations if len(messages) > 1]


def _select_replies(
    services: Services,
    plan: Plan,
    prompts: Sequence[str],
    few_shot: Sequence[Request],
    texts: Sequence[str],
) -> GeneralReplies:
    """Return the usable ones of a user's replies: ``texts`` to ``prompts``, then to ``few_shot``."""
    plain = list(zip(prompts, texts, strict=False))
    similar = frozenset(_similar(services, plan, prompts, _HELD_QUANTILE))
    if len(plain) - len(similar) >= _MIN_DISTANT:
        plain = [(prompt, reply) for prompt, reply in plain if prompt not in similar]
        similar = frozenset()
    encode, lessons = services.learning_engine.backend.encode, _examples(plan)
    usable = [
        (tuple(request.messages), text)
        for request, text in zip(few_shot, texts[len(prompts) :], strict=True)
        if is_usable(text, lessons, len(encode(text)), request.sampling.max_tokens)
    ]
    return GeneralReplies(plain, similar, usable)


def is_usable(reply: str, lessons: Sequence[Lesson], tokens: int, limit: int) -> bool:
    """Return whether a few-shot reply can be trained on.

    Left out are replies that were cut off, that repeat themselves, or that repeat a lesson.

    Args:
        reply: The reply.
        lessons: The lessons that it imitates.
        tokens: How many tokens the reply has.
        limit: The tokens at which it was cut off.
    """
    repeats = any(reply.strip() == lesson.chosen.strip() for lesson in lessons)
    return tokens < limit and not repeats and not is_degenerate(reply)


def _similar(
    services: Services, plan: Plan, prompts: Sequence[str], quantile: float
) -> tuple[str, ...]:
    """Return the prompts that are like those of a plan's lessons."""
    if plan.layer == "memory" or not prompts:
        # Facts are no way of answering: nothing of them belongs into other replies.
        return ()
    lessons = services.memory.embedder.embed([lesson.question for lesson in _examples(plan)])
    return similar_prompts(prompts, services.router.embed_general(prompts), lessons, quantile)


def similar_prompts(
    prompts: Sequence[str], vectors: Vectors, lessons: Vectors, quantile: float
) -> tuple[str, ...]:
    """Return the prompts that are as similar to lessons as these are to one another.

    Args:
        prompts: General prompts.
        vectors: ``[len(prompts), size]``, their embeddings, each of length 1.
        lessons: ``[n, size]``, the embeddings of the lessons' prompts, each of length 1.
        quantile: Which of the lessons' similarities to their nearest other lesson is enough.

    Returns:
        The most similar prompt first; none where there are too few lessons to compare.
    """
    if len(lessons) < MIN_LESSONS:
        return ()
    enough = similarity_between(lessons, quantile)
    nearest = (vectors @ lessons.T).max(axis=1)
    order = np.argsort(-nearest, kind="stable")
    return tuple(prompts[index] for index in order if nearest[index] >= enough)


def _examples(plan: Plan) -> Sequence[Lesson]:
    return (*plan.replay, *plan.new_examples)
