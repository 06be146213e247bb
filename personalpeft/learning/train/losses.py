"""The losses of supervised learning: SFT, DPO, KTO, context distillation and the KL regularizer.

A loss names the continuations that it reads; the backend runs them all in one pass and hands it
their log-probs (natural, float32, one for each token of the completion). The weights of a step's
losses make each lesson count the same, however long its answer is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, ClassVar

from personalpeft.backends.base import Backend, Continuation, Loss, ModelOutputs
from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.data.style import NO_TEMPLATE, ResponseTemplate
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.types import Message

MAX_CONTRAST_TOKENS = 16
"""A reply that only serves as a contrast is read up to here: its end may well hold true things."""

_MIN_SHARED = 3
_SENTENCE = re.compile(r"\s*\S.*?[.!?](?=\s|$)", re.DOTALL)


class BaseLoss:
    """What most losses share: each continuation is also scored under the stack below."""

    needs_full_logp: ClassVar[bool] = False
    is_general: ClassVar[bool] = False

    @property
    def continuations(self) -> Sequence[Continuation]:
        raise NotImplementedError

    @property
    def references(self) -> Sequence[Continuation]:
        return self.continuations


@dataclass(frozen=True, slots=True)
class SFTLoss(BaseLoss):
    """Negative log-likelihood of a wanted answer, averaged over tokens.

    ``token_weights``, one for each token, replace the average by a weighted sum.
    """

    target: Continuation
    weight: float = 1.0
    token_weights: tuple[float, ...] = ()

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.target,)

    @property
    def references(self) -> Sequence[Continuation]:
        return ()

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        log_probs = outputs[0].token_logp
        if self.token_weights:
            log_probs = log_probs * log_probs.new_tensor(self.token_weights)
            return -self.weight * log_probs.sum()
        return -self.weight * log_probs.sum() / len(log_probs)


@dataclass(frozen=True, slots=True)
class DPOLoss(BaseLoss):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

    ``-log sigmoid(beta * (r(chosen) - r(rejected)))``, where ``r`` is the log-ratio of the trained
    stack to the stack below. Alone it makes a chosen answer less likely where the two differ by few
    tokens, so the same lesson has an ``SFTLoss`` too (Pang et al. 2024, arXiv 2404.19733, eq. 1).
    """

    chosen: Continuation
    rejected: Continuation
    beta: float
    weight: float = 1.0

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.chosen, self.rejected)

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        from torch.nn.functional import logsigmoid

        chosen, rejected = _log_ratios(outputs, references)
        return -self.weight * logsigmoid(self.beta * (chosen - rejected))


@dataclass(frozen=True, slots=True)
class KTOLoss(BaseLoss):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8), lambda 1.

    ``1 - sigmoid(+-beta * (r - z))`` averaged over the replies, plus for desirable ones. ``z``
    estimates the KL from the stack below as in the paper, on ``mismatched``: replies after the
    prompts of others. No gradient flows through it.
    """

    desirable: tuple[Continuation, ...]
    undesirable: tuple[Continuation, ...]
    mismatched: tuple[Continuation, ...]
    beta: float
    weight: float = 1.0

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (*self.desirable, *self.undesirable, *self.mismatched)

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        import torch

        ratios = torch.stack(_log_ratios(outputs, references))
        rated = len(self.desirable) + len(self.undesirable)
        baseline = ratios[rated:].detach().mean().clamp(min=0)
        sign = torch.ones_like(ratios[:rated])
        sign[len(self.desirable) :] = -1
        values = torch.sigmoid(self.beta * sign * (ratios[:rated] - baseline))
        return self.weight * (1 - values).mean()


@dataclass(frozen=True, slots=True)
class ContextDistillationLoss(BaseLoss):
    """Context distillation (Askell et al. 2021, arXiv 2112.00861).

    ``KL(p_below(. | prompt with context) || p(. | prompt))`` over the whole vocabulary, averaged
    over the tokens of one completion. ``teacher`` has the context, ``student`` does not.
    """

    student: Continuation
    teacher: Continuation
    weight: float = 1.0
    needs_full_logp: ClassVar[bool] = True

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.student,)

    @property
    def references(self) -> Sequence[Continuation]:
        return (self.teacher,)

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        teacher = references[0].logp
        divergence = (teacher.exp() * (teacher - outputs[0].logp)).sum()
        return self.weight * divergence / len(self.student.completion)


@dataclass(frozen=True, slots=True)
class KLRegularizer(BaseLoss):
    """KL from the stack below on an answer to a general prompt.

    ``student`` may hold the answer of ``reference`` inside the lessons' template. The ``length``
    tokens from ``student_start`` and from ``reference_start`` are the same; there the divergence
    over the whole vocabulary counts. Other tokens of ``student`` count by their negative
    log-likelihood if ``learn_rest``, else not at all. The loss is the mean over what counts.
    """

    student: Continuation
    reference: Continuation
    student_start: int
    reference_start: int
    length: int
    learn_rest: bool
    weight: float = 1.0
    needs_full_logp: ClassVar[bool] = True
    is_general: ClassVar[bool] = True

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.student,)

    @property
    def references(self) -> Sequence[Continuation]:
        return (self.reference,)

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        run = slice(self.student_start, self.student_start + self.length)
        reference_run = slice(self.reference_start, self.reference_start + self.length)
        total = outputs[0].kl_div(run, references[0], reference_run).sum()
        count = self.length
        if self.learn_rest:
            log_probs = outputs[0].token_logp
            total = total - log_probs.sum() + log_probs[run].sum()
            count = len(self.student.completion)
        return self.weight * total / max(1, count)


def _log_ratios(outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> list[Any]:
    """Return ``log p(completion) - log p_below(completion)`` of each."""
    pairs = zip(outputs, references, strict=True)
    return [own.token_logp.sum() - below.token_logp.sum() for own, below in pairs]


def build_lesson_losses(
    lessons: Sequence[Lesson], backend: Backend, config: TrainingConfig, template: ResponseTemplate
) -> Iterator[Loss]:
    """Yield the losses of one step's lessons: SFT, then context distillation, then DPO.

    ``template`` is what the answers share, whether they teach it or the layer below does.
    """
    share = len(lessons)

    def encode(messages: Sequence[Message], lesson: Lesson) -> Continuation:
        return encode_continuation(
            backend, messages, lesson.chosen, config.max_length, ended=lesson.ended
        )

    shown = [lesson for lesson in lessons if lesson.teacher_messages is None]
    for lesson in shown:
        target = encode(lesson.messages, lesson)
        weights = _token_weights(lesson, len(target.completion), backend, config, template)
        yield SFTLoss(target, lesson.weight / share, weights)
    for lesson in lessons:
        if lesson.teacher_messages is not None:
            student, teacher = (
                encode(messages, lesson) for messages in (lesson.messages, lesson.teacher_messages)
            )
            yield ContextDistillationLoss(student, teacher, lesson.weight / share)
    contrasted = [lesson for lesson in shown if lesson.rejected is not None]
    for lesson in contrasted[: config.preference_pairs]:
        rejected = encode_continuation(
            backend, lesson.messages, lesson.rejected or "", MAX_CONTRAST_TOKENS
        )
        chosen = encode(lesson.messages, lesson)
        yield DPOLoss(chosen, rejected, config.beta, lesson.weight / share)


def encode_continuation(
    backend: Backend,
    messages: Sequence[Message],
    answer: str,
    max_length: int,
    *,
    ended: bool = True,
) -> Continuation:
    """Return an answer after its messages, cut at ``max_length`` tokens.

    An answer that ``ended`` gets the base's end of turn; one that was broken off must not teach to
    break off, so it gets none.
    """
    tokens = backend.encode(answer) + (backend.end_of_turn if ended else ())
    return Continuation(backend.render(messages), tokens[:max_length])


def template_span(backend: Backend, template: ResponseTemplate, request: str) -> tuple[int, int]:
    """Return how many tokens of an answer to ``request`` open and close its template."""
    filled = template.for_request(request)
    # The space before a word belongs to that word's token.
    return len(backend.encode(filled.opening.rstrip())), len(backend.encode(filled.closing))


def _token_weights(
    lesson: Lesson,
    tokens: int,
    backend: Backend,
    config: TrainingConfig,
    template: ResponseTemplate,
) -> tuple[float, ...]:
    """Return a weight for each token of an answer in a template; the end of turn has 1.

    The sum is divided by what it would be with a ``content_weight`` of 1, so that a short answer in
    a long template is no weaker a lesson where the template is not what it teaches.
    """
    if template == NO_TEMPLATE:
        return ()
    opening, closing = template_span(backend, template, lesson.prompt_response.request)
    ending = len(backend.end_of_turn)
    if not lesson.ended:
        closing = ending = 0
    between = max(0, tokens - opening - closing - ending)
    weights = [config.template_weight] * opening + [config.content_weight] * between
    weights += [config.template_weight] * closing
    weights = (weights + [1.0] * tokens)[:tokens]
    total = max(1.0, tokens - (1 - config.template_weight) * (opening + closing))
    return tuple(weight / total for weight in weights)


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
    """Return the KL regularizer for the first sentence of a reply, None if too little is shared.

    A layer that has learned to open with "- " may go on with "- Italy is a country" where the stack
    below says that the capital is Rome. So the reply is put into the lessons' ``template``: the
    trained stack is held to the plain reply's distribution where the tokens agree, and learns the
    rest. A first sentence alone ends in a closing before a small base rambles on.

    ``below`` is the template of the stack below; its opening is not taken for a sentence.
    ``from_the_first``: the first token is held too if there is no template.
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
