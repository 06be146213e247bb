"""One request from its submission to its last chunk: what is asked for, and how far its reply is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from personalpeft.backends.detokenizer import Decoder, Detokenizer
from personalpeft.backends.sampler import Sampler, TokenLogprobs
from personalpeft.base_models.tool_calls import find_unfinished_call
from personalpeft.types import FinishReason, Message, Sampling, Stack, ToolFormat

Tokens: TypeAlias = tuple[int, ...]


def count_common_prefix(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two sequences have in common at the beginning."""
    if one[: len(other)] == other:
        return len(other)
    pairs = enumerate(zip(one, other, strict=False))
    return next((count for count, (a, b) in pairs if a != b), len(one))


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for: messages of one user, the stack that answers, and how to sample.

    Attributes:
        user: The owner of the request. Prompt caches are never shared between users.
        messages: The conversation as the model reads it.
        stack: The adapters to attach.
        sampling: Temperature, length, seed and stop strings.
        timeout: Seconds for the whole reply from submission; None for no limit.
        background: Never refused for a full queue, and never served before foreground requests.
        template: Whether to apply the chat template. Without it the text is read and continued.
        logprobs: Whether chunks carry the log-prob of each token.
        top_logprobs: How many of the likeliest tokens to report in each position, at most
            ``MAX_TOP_LOGPROBS``.
        tokens: The prompt as tokens, instead of messages.
        stop_tokens: Tokens that end the reply, besides those of the base.
    """

    user: str
    messages: tuple[Message, ...]
    stack: Stack
    sampling: Sampling
    timeout: float | None = None
    background: bool = False
    template: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    tokens: Tokens = ()
    stop_tokens: frozenset[int] = frozenset()

    def reply_prefix(self, tool_format: ToolFormat) -> str:
        """Return the text that the reply starts with, read after the prompt, not generated."""
        if self.tokens or not self.template:
            return ""
        return find_unfinished_call(self.messages[-1], tool_format)


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """What one step added to one sequence: the tokens, and the text that became certain with them.

    Attributes:
        index: The sequence's number in its batch; in a stream, the index of the request.
        text: New text, cut before a stop string; may be empty.
        tokens: New tokens.
        finish: Why the reply ended, in its last chunk.
        logprobs: The log-prob of each token (nats, at temperature 1), if asked for.
        top_logprobs: The likeliest tokens in the place of each, likeliest first, if asked for.
        stop_string: The stop string that ended the reply, if one did.
        stop_token: The token that ended the reply, if one did. It is not one of ``tokens``.
        stop_logprob: Its log-prob, if asked for.
        error: Why this sequence alone cannot go on. The caller must remove it.
    """

    index: int
    text: str
    tokens: Tokens
    finish: FinishReason | None = None
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    stop_string: str = ""
    stop_token: int | None = None
    stop_logprob: float | None = None
    error: Exception | None = None


# eq=False: two sequences with the same prompt are two sequences.
@dataclass(eq=False, slots=True)
class SequenceState:
    """A request as a backend sees it, with its reply so far: a row of one batch at a time.

    The reply ends with a stop token, a stop string or its longest length. After ``OutOfBlocks`` a
    sequence may be removed and admitted again, and continues where it was.

    Attributes:
        request: Whose it is, how tokens are picked, and what is reported of them.
        prompt_tokens: The prompt.
        adapter_key: The key of an attached stack, None for the bare base.
        number: The number of the sequence in its batch, -1 before its first admission.
        logprobs: Whether chunks carry the log-prob of each token.
        token_ids: The prompt and the tokens picked so far.
        sampler: The random state of its draws.
    """

    request: Request
    prompt_tokens: Tokens
    adapter_key: str | None
    number: int = field(init=False, default=-1)
    logprobs: bool = field(init=False)
    token_ids: list[int] = field(init=False)
    sampler: Sampler = field(init=False)
    # From the first admission on.
    _text: Detokenizer = field(init=False, repr=False)
    _stop_tokens: frozenset[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.logprobs = self.request.logprobs
        self.token_ids = list(self.prompt_tokens)
        self.sampler = Sampler(self.request.sampling)

    @property
    def owner(self) -> str:
        """The user whose prompt caches may be used."""
        return self.request.user

    @property
    def output_tokens(self) -> Tokens:
        """The tokens picked so far, without one that ended the reply."""
        return tuple(self.token_ids[len(self.prompt_tokens) :])

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been picked so far."""
        return len(self.token_ids) - len(self.prompt_tokens)

    @property
    def max_length(self) -> int:
        """How many tokens it may have in the end."""
        return len(self.prompt_tokens) + self.request.sampling.max_tokens

    def start(self, number: int, decoder: Decoder) -> None:
        """Begin the reply, or continue it under another number in the batch."""
        if self.number < 0:
            self._text = Detokenizer(decoder, self.request.sampling.stop)
            self._stop_tokens = decoder.stop_tokens | self.request.stop_tokens
        self.number = number

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> OutputChunk:
        """Add a token to a started reply. Return the new text, and whether the reply ends."""
        if token in self._stop_tokens:
            return replace(
                self.finish("stop"),
                stop_token=token,
                stop_logprob=logprobs.logprob if logprobs else None,
            )
        self.token_ids.append(token)
        text = self._text.push(token)
        finish: FinishReason | None = "stop" if self._text.stop_string else None
        if finish is None and len(self.token_ids) >= self.max_length:
            text += self._text.finish()
            finish = "stop" if self._text.stop_string else "length"
        return OutputChunk(
            self.number,
            text,
            (token,),
            finish,
            logprobs=(logprobs.logprob,) if logprobs else (),
            top_logprobs=(logprobs.top,) if logprobs and self.request.top_logprobs else (),
            stop_string=self._text.stop_string,
        )

    def finish(self, reason: FinishReason) -> OutputChunk:
        """Return the last chunk of a reply that something else ends: the text still held back."""
        text = "" if self.number < 0 else self._text.finish()
        return OutputChunk(self.number, text, (), reason)
