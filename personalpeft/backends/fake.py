"""A backend without a model, for tests of apps: quick, deterministic, and true to the interface.

A reply is a few words chosen by the prompt, or a call of the tool that the user names. A stack
changes replies by words that depend on its weights. All completions become likelier with the number
of trained continuations, so the gate promotes. Undoing brings back the former replies.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.compose import concatenate
from personalpeft.adapters.types import AdapterStack, LoRAWeights
from personalpeft.backends.base import (
    AdamParams,
    Continuation,
    ForwardResult,
    Loss,
    Occupancy,
    Score,
    Session,
    SessionSpec,
    StagedStack,
)
from personalpeft.backends.batch_backend import SequenceBatch
from personalpeft.backends.sampler import TokenLogprobs
from personalpeft.backends.sequence import OutputChunk, SequenceState, Tokens
from personalpeft.base_models.chat_template import render_chat
from personalpeft.base_models.types import Base, ModelCard, Source
from personalpeft.types import Architecture, Message, ToolFormat, canonical_digest

_WORDS = (
    *("amber", "birch", "cloud", "dune", "ember", "fern"),
    *("grove", "harbour", "island", "jade", "kelp", "lark"),
    *("as", "in"),
)
_CHOICES, _AS, _IN = 12, 12, 13
# Tokens: the 256 bytes, each word with a space before it, each word without.
_END, _BYTES = 0, 256
_WORD_TEXTS = (*(f" {word}" for word in _WORDS), *_WORDS)
# Prompt tokens that one step reads.
_CHUNK = 256
# Control characters, so that no message can forge the list of tools.
_TOOLS, _TOOLS_END = "\x01tools: ", "\x01\n"
_TEMPLATE = f"""
{{%- if tools %}}{{{{ '{_TOOLS}' + tools|tojson + '{_TOOLS_END}' }}}}{{% endif -%}}
{{%- for message in messages -%}}
{{{{- message.role + ': ' + message.content -}}}}
{{%- for call in message.tool_calls or [] -%}}
{{{{- '<tool_call>' + call.function|tojson + '</tool_call>' -}}}}
{{%- endfor -%}}
{{{{- '\n' -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- 'assistant: ' -}}}}{{%- endif -%}}
"""
_PROJECTIONS = {"self_attn.q_proj": (8, 8), "self_attn.v_proj": (8, 4)}


def fake_base() -> Base:
    """Return a base without files. Its tokens are bytes, and it knows tools."""
    card = ModelCard(
        name="fake",
        title="No model at all",
        licence="Apache-2.0",
        source=Source("random"),
        targets=("q_proj", "v_proj"),
        context=4096,
        # With a real base's value, a layer of this size could hold no fact.
        learning={"tokens_per_parameter": 100.0},
    )
    architecture = Architecture("fake", "blocks", 2, _PROJECTIONS)
    return Base(
        card,
        canonical_digest("fake base, format 1"),
        Path(),
        Path(),
        _TEMPLATE,
        architecture,
        control=("\1",),
        tool_format=ToolFormat.HERMES,
    )


@dataclass(frozen=True, slots=True)
class _Stack:
    """The digest of a stack's weights, and the norm of its B: how much was learned."""

    digest: str
    norm: float
    nbytes: int


# eq=False: two sequences with the same fields are two sequences.
@dataclass(eq=False, slots=True)
class _FakeSequence:
    """A sequence in the batch, how many of its tokens are unread, and its whole reply."""

    state: SequenceState
    stack: _Stack | None
    num_unread: int
    reply: tuple[int, ...]


class FakeBackend(SequenceBatch[_FakeSequence]):
    """See ``Backend``. A byte of UTF-8 is one token, so is each word; byte 0 ends a turn."""

    name = "fake"
    description = "no model: replies are made up from the prompt"
    logprob_tolerance = 1e-6
    batch_invariant = True
    maps_weights = False
    end_of_turn: Tokens = (_END,)
    stop_tokens = frozenset({_END})
    bos_tokens: Tokens = ()

    def __init__(self, base: Base, *, slots: int = 8, rows: int = 16) -> None:
        super().__init__(self, rows=rows, max_length=base.card.context)
        self.base = base
        self.slots = slots
        self._attached: dict[str, _Stack] = {}

    def render(self, messages: Sequence[Message]) -> Tokens:
        return self.encode(render_chat(self.base, messages))

    def encode(self, text: str) -> Tokens:
        return tuple(text.replace("\0", "").encode())

    def decode(self, tokens: Sequence[int]) -> str:
        parts = (
            _WORD_TEXTS[token - _BYTES].encode() if token >= _BYTES else bytes([token])
            for token in tokens
            if token != _END
        )
        return b"".join(parts).decode(errors="replace")

    def stage(self, adapter: AdapterStack) -> _Stack:
        weights = concatenate(adapter)
        digest = hashlib.sha256()
        for name, pair in sorted(weights.items()):
            digest.update(name.encode() + pair.a.tobytes() + pair.b.tobytes())
        nbytes = sum(pair.a.nbytes + pair.b.nbytes for pair in weights.values())
        return _Stack(digest.hexdigest(), _norm(weights), nbytes)

    def attach(self, key: str, staged: StagedStack) -> None:
        if not isinstance(staged, _Stack):
            raise TypeError("the stack was staged for another backend")
        self._attached[key] = staged

    def detach(self, key: str) -> None:
        self._attached.pop(key, None)

    def step(self) -> Sequence[OutputChunk]:
        advanced = map(self._advance, self._running.values())
        chunks = [chunk for chunk in advanced if chunk]
        for chunk in chunks:
            if chunk.finish:
                del self._running[chunk.index]
        return chunks

    def clear_cache(self) -> None:
        """Nothing is cached."""

    def occupancy(self) -> Occupancy:
        used = [len(s.state.token_ids) - s.num_unread for s in tuple(self._running.values())]
        return Occupancy(len(used), sum(used), self.rows * self.max_length, 0)

    def check_integrity(self) -> None:
        if len(self._running) > self.rows:
            raise RuntimeError("more sequences than rows")

    def score(
        self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False, top: int = 0
    ) -> tuple[Score, ...]:
        attached = None if stack is None else self._attached[stack]
        scores = []
        for item in items:
            logprobs = _logprobs(item.prompt, item.completion, attached)
            divergence = (0.1 if attached else 0.0) if kl else None
            likeliest = tuple(
                _top_logprobs(token, logprob)[:top]
                for token, logprob in zip(item.completion, logprobs, strict=True)
                if top
            )
            mean = sum(logprobs) / max(1, len(logprobs))
            scores.append(Score(mean, divergence, logprobs, likeliest))
        return tuple(scores)

    def session(self, spec: SessionSpec) -> Session:
        if spec.base_key is not None and spec.base_key not in self._attached:
            raise KeyError(spec.base_key)
        return FakeSession(spec)

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Loss]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        return tuple(s.step(t, rate) for s, t, rate in zip(sessions, terms, rates, strict=True))

    def forward_backward(
        self,
        sessions: Sequence[Session],
        terms: Sequence[Sequence[Loss]],
        *,
        backward: bool = True,
        logprobs: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> tuple[tuple[ForwardResult, ...], ...]:
        results = []
        for session, own in zip(sessions, terms, strict=True):
            if not isinstance(session, FakeSession):
                raise ValueError("sessions must be sessions of this backend")
            between()
            if backward:
                session.add(own)
            results.append(
                tuple(
                    ForwardResult(
                        1.0,
                        tuple(
                            np.array(_logprobs(c.prompt, c.scored, None), np.float32)
                            for c in term.continuations
                        )
                        if logprobs
                        else (),
                    )
                    for term in own
                )
            )
        return tuple(results)

    def reply(self, sequence: SequenceState, stack: _Stack | None) -> tuple[int, ...]:
        """Return the tokens of a reply. A test may replace it to fix the reply.

        A reply is a tool call, or four words by prompt and seed and two more by the stack.
        """
        if call := _find_tool_call(self.decode(sequence.prompt_tokens)):
            return self.encode(call)
        sampling = sequence.request.sampling
        seed = sampling.seed if sampling.temperature else 0
        words = _pick_words(canonical_digest([list(sequence.prompt_tokens), seed]), 4)
        if stack is not None:
            words += [_AS, _IN, *_pick_words(stack.digest, 2)]
        # The first word has no space before it.
        return (_BYTES + len(_WORDS) + words[0], *(_BYTES + word for word in words[1:]))

    def close(self) -> None:
        self._attached.clear()

    def _allocate(self, sequence: SequenceState) -> _FakeSequence:
        key = sequence.adapter_key
        stack = None if key is None else self._attached[key]
        return _FakeSequence(sequence, stack, len(sequence.token_ids), self.reply(sequence, stack))

    def _advance(self, sequence: _FakeSequence) -> OutputChunk | None:
        sequence.num_unread = max(0, sequence.num_unread - _CHUNK)
        if sequence.num_unread:
            return None
        state, done = sequence.state, sequence.state.num_output_tokens
        token = sequence.reply[done] if done < len(sequence.reply) else _END
        logprobs = None
        if state.logprobs:
            tokens = (*state.output_tokens, token)
            logprob = _logprobs(state.prompt_tokens, tokens, sequence.stack)[-1]
            likeliest = _top_logprobs(token, logprob)[: state.request.top_logprobs]
            logprobs = TokenLogprobs(logprob, likeliest)
        return state.append(token, logprobs)


class FakeSession:
    """Weights that depend on the spec and on all that was trained, in order."""

    def __init__(self, spec: SessionSpec) -> None:
        unknown = set(spec.target_modules) - set(_PROJECTIONS)
        if unknown:
            raise ValueError(f"the base has no projection {sorted(unknown)}")
        self._spec = spec
        initial = {p: pair.b.tobytes().hex() for p, pair in (spec.initial_weights or {}).items()}
        self._digest = _digest(canonical_digest([spec.seed, spec.rank, spec.base_key, initial]))
        self._added: list[list[list[int]]] = []
        self._norm = 1.0
        if spec.initial_weights:
            self._norm += _norm(spec.initial_weights) * spec.scaling

    def precompute_ref_log_probs(self, terms: Sequence[Loss]) -> None:
        """Set the norm of a layer built from scratch: how many different continuations it learns."""
        if self._spec.initial_weights is None:
            learned = {c for term in terms if not term.is_general for c in term.continuations}
            self._norm = 1.0 + len(learned)

    def step(self, terms: Sequence[Loss], learning_rate: float) -> float:
        self.add(terms)
        return self.optim_step(AdamParams(learning_rate))

    def add(self, terms: Sequence[Loss]) -> None:
        """Keep what ``optim_step`` learns."""
        self._added += [
            [list(c.prompt), list(c.completion)] for term in terms for c in term.continuations
        ]

    def optim_step(self, params: AdamParams) -> float:
        if self._added:
            self._digest = _digest(canonical_digest(self._added), self._digest.tobytes())
            self._added = []
        return 1.0

    def weights(self) -> Mapping[str, LoRAWeights]:
        random = np.random.default_rng([int(value) for value in self._digest])
        weights = {
            projection: LoRAWeights(
                random.standard_normal((2, self._spec.rank, inputs), dtype=np.float32),
                random.standard_normal((2, outputs, self._spec.rank), dtype=np.float32),
            )
            for projection, (inputs, outputs) in _PROJECTIONS.items()
            if projection in self._spec.target_modules
        }
        factor = np.float32(self._norm / self._spec.scaling / _norm(weights))
        return {p: LoRAWeights(pair.a, pair.b * factor) for p, pair in weights.items()}

    def state(self) -> Mapping[str, npt.NDArray[np.float32]]:
        return {"seen": self._digest.copy(), "strength": np.array([self._norm], np.float32)}

    def restore(self, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
        halves = [f"{name}.{half}" for name in self._spec.target_modules for half in "AB"]
        if halves and set(halves) <= set(state):
            # Saved weights, with or without the state of an optimizer.
            values = "".join(state[half].tobytes().hex() for half in sorted(halves))
            self._digest = _digest(values)
            return
        if (
            {"seen", "strength"} - set(state)
            or state["seen"].shape != (32,)
            or not np.isin(state["seen"], range(256)).all()
        ):
            raise ValueError("the saved session does not fit")
        self._digest = state["seen"].copy()
        if self._spec.initial_weights is None:
            # A whole number, which no rounding changes.
            self._norm = float(state["strength"][0])

    def close(self) -> None:
        """A session holds no memory."""


def _digest(text: str, prefix: bytes = b"") -> npt.NDArray[np.float32]:
    digest = hashlib.sha256(prefix + text.encode()).digest()
    return np.frombuffer(digest, np.uint8).astype(np.float32)


def _find_tool_call(prompt: str) -> str | None:
    """Return a call of the first tool that the user's last message names, or None.

    Return the rest of a call that the prompt begins. Every argument is a word.
    """
    tools_json, found, rest = prompt.partition(_TOOLS_END)
    history, _, begun = rest.rpartition("assistant: ")
    last = history.rpartition("\nuser: ")[2]
    if "\nuser: " not in history:
        last = history.removeprefix("user: ")
    if not found or not tools_json.startswith(_TOOLS) or ("\ntool: " in last and not begun):
        return None
    tools = [each["function"] for each in json.loads(tools_json[len(_TOOLS) :])]
    for tool in sorted(tools, key=lambda each: each["name"] not in last):
        arguments = dict.fromkeys((tool.get("parameters") or {}).get("properties", {}), _WORDS[0])
        content = json.dumps({"name": tool["name"], "arguments": arguments})
        call = f"<tool_call>\n{content}\n</tool_call>"
        if call.startswith(begun) and (begun or tool["name"] in last):
            return call[len(begun) :]
    return None


def _norm(weights: Mapping[str, LoRAWeights]) -> float:
    squares = (np.square(pair.b, dtype=np.float64).sum() for pair in weights.values())
    return float(np.sqrt(sum(squares)))


def _logprobs(prompt: Tokens, completion: Tokens, stack: _Stack | None) -> tuple[float, ...]:
    """Return log-probs that rise with the stack's norm, and vary with all tokens before."""
    mean = min((stack.norm / 4 if stack else 0.0) - 40.0, -0.5)
    checksum = zlib.crc32(repr(prompt).encode())
    logprobs = []
    for token in completion:
        checksum = zlib.crc32(b"%d" % token, checksum)
        logprobs.append(mean + (checksum % 1024 - 512) / 2048)
    return tuple(logprobs)


def _top_logprobs(token: int, logprob: float) -> tuple[tuple[int, float], ...]:
    """Return the token and less likely words. Their probabilities sum to at most one."""
    others = (_BYTES + word for word in range(len(_WORD_TEXTS)) if _BYTES + word != token)
    return ((token, logprob), *((other, logprob - 2 - n) for n, other in enumerate(others)))


def _pick_words(digest: str, count: int) -> list[int]:
    return [int(digest[2 * i : 2 * i + 2], 16) % _CHOICES for i in range(count)]
