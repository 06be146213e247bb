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
from functools import partial

import numpy as np

from personalpeft.chat.examples import MIN_LESSONS, similarity_between
from personalpeft.engine.engine import Request
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.data.general_prompts import BASE_SAMPLING, is_degenerate
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.plan import Plan
from personalpeft.memory.types import Vectors
from personalpeft.services import Services
from personalpeft.types import Message, Sampling

MIN_PROMPTS, MAX_PROMPTS = 8, 16
"""Fewer similar prompts are similar by chance: none of them is answered. More take time."""

MAX_EXAMPLES = 8
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

    plain: Sequence[tuple[str, str]] = ()
    free_start: frozenset[str] = frozenset()
    few_shot: Sequence[tuple[tuple[Message, ...], str]] = ()


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
    results: dict[str, GeneralReplies | PersonalPeftError] = dict.fromkeys(plans, GeneralReplies())
    plans = {
        user: plan
        for user, plan in plans.items()
        if plan.recipe.kl_prompts or plan.recipe.few_shot_replies
    }
    ask = partial(services.completions.complete_for_users, cancelled=cancelled, paused=paused)
    held = {user: _regularizer_prompts(plan) for user, plan in plans.items()}
    plain = ask(
        {
            user: [
                Request(user, (Message("user", each),), plan.below, BASE_SAMPLING, background=True)
                for each in held[user]
            ]
            for user, plan in plans.items()
        }
    )
    few_shot = {user: _few_shot_requests(services, plan) for user, plan in plans.items()}
    few_shot_texts = ask(few_shot)
    for user, plan in plans.items():
        plain_texts, texts = plain[user], few_shot_texts[user]
        if isinstance(plain_texts, PersonalPeftError):
            results[user] = plain_texts
            continue
        if isinstance(texts, PersonalPeftError):
            results[user] = texts
            continue
        similar = frozenset(_similar(services, plan, held[user], _HELD_QUANTILE))
        replies = list(zip(held[user], plain_texts, strict=True))
        if len(replies) - len(similar) >= _MIN_DISTANT:
            replies = [(prompt, reply) for prompt, reply in replies if prompt not in similar]
            similar = frozenset()
        encode = services.learning_engine.backend.encode
        usable = [
            (tuple(request.messages), text)
            for request, text in zip(few_shot[user], texts, strict=True)
            if is_usable(text, _examples(plan), len(encode(text)), request.sampling.max_tokens)
        ]
        results[user] = GeneralReplies(replies, similar, usable)
    return results


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


def few_shot_messages(
    lessons: Sequence[Lesson],
    prompt: tuple[Message, ...],
    fits: Callable[[Sequence[Message]], bool],
) -> tuple[Message, ...]:
    """Return a conversation of the newest lessons that fit, which ends with a prompt.

    Args:
        lessons: Lessons with a chosen reply, oldest first.
        prompt: The messages to be answered.
        fits: Returns whether the model can read a conversation and reply to it.
    """
    conversation = prompt
    shown = [lesson for lesson in lessons if lesson.answers_user]
    for lesson in reversed(shown[-MAX_EXAMPLES:]):
        longer = (*lesson.conversation, Message("assistant", lesson.chosen), *conversation)
        if not fits(longer):
            break
        conversation = longer
    return conversation


def reply_limit(lessons: Sequence[Lesson], count_tokens: Callable[[str], int], most: int) -> int:
    """Return the tokens at which a few-shot reply is cut off.

    Args:
        lessons: The lessons that it imitates.
        count_tokens: Returns the tokens of a text.
        most: The limit in any case.
    """
    longest = max(count_tokens(lesson.chosen) for lesson in lessons)
    return min(most, int(_LENGTH_FACTOR * longest) + _EXTRA_TOKENS)


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


def _regularizer_prompts(plan: Plan) -> tuple[str, ...]:
    general = plan.general_prompts
    if plan.layer == "memory":
        # Facts are no way of answering. Held to short questions alone, a memory of five facts
        # answered a question about soup with "Sugar.".
        return (*general.regularizer_prompts, *general.everyday_prompts)
    return general.regularizer_prompts


def _similar(
    services: Services, plan: Plan, prompts: Sequence[str], quantile: float
) -> tuple[str, ...]:
    """Return the prompts that are like those of a plan's lessons."""
    if plan.layer == "memory":
        # Facts are no way of answering: nothing of them belongs into other replies.
        return ()
    lessons = [lesson.messages[-1].content for lesson in _examples(plan)]
    lesson_vectors = services.memory.embedder.embed(lessons)
    return similar_prompts(
        prompts, services.router.embed_general(prompts), lesson_vectors, quantile
    )


def _few_shot_requests(services: Services, plan: Plan) -> list[Request]:
    prompts = plan.general_prompts.everyday_prompts
    similar = _similar(services, plan, prompts, _FEW_SHOT_QUANTILE)
    if len(similar) < MIN_PROMPTS or not plan.recipe.few_shot_replies:
        return []
    backend = services.learning_engine.backend
    limit = reply_limit(
        _examples(plan), lambda text: len(backend.encode(text)), plan.recipe.max_length
    )

    def fits(messages: Sequence[Message]) -> bool:
        return len(backend.render(messages)) + limit <= backend.max_length

    conversations = (
        few_shot_messages(_examples(plan), (Message("user", prompt),), fits)
        for prompt in similar[:MAX_PROMPTS]
    )
    return [
        Request(plan.user, messages, plan.below, Sampling(max_tokens=limit), background=True)
        for messages in conversations
        if len(messages) > 1
    ]


def _examples(plan: Plan) -> Sequence[Lesson]:
    return (*plan.replay, *plan.new_examples)
