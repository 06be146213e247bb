"""A backend without a model, for the tests of apps: quick, deterministic, and true to the interface.

Its replies are a few plain words chosen by the prompt, or the call of a tool that the user's last message names, or that the reply
was begun with; a stack changes them visibly, by words that depend on the adapters' numbers. Everything is likelier afterwards the more
was learned, so a learn of something new is promoted; undoing it brings back the former replies to the letter.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.compose import merged
from personalpeft.adapters.types import Composed, Pair
from personalpeft.backends.base import (
    Continuation,
    Occupancy,
    Piece,
    Row,
    Score,
    Session,
    SessionSpec,
    Staged,
    Loss,
    Tokens,
)
from personalpeft.backends.batch_invariance import BatchInvariance
from personalpeft.backends.stop_strings import StopStrings
from personalpeft.base_models.chat_template import chat_text
from personalpeft.base_models.types import Base, Card, Source
from personalpeft.types import Architecture, FinishReason, Message, canonical_digest

_WORDS = (
    *(
        "amber",
        "birch",
        "cloud",
        "dune",
        "ember",
        "fern",
        "grove",
        "harbour",
        "island",
        "jade",
        "kelp",
        "lark",
    ),
    *("as", "in"),
)
_CHOICES, _AS, _IN = 12, 12, 13
# Tokens: the 256 bytes, each word with a space before it, each word without.
_END, _BYTES = 0, 256
_SAID = (*(f" {word}" for word in _WORDS), *_WORDS)
# How many tokens of a prompt one step reads.
_CHUNK = 256
# A line for each message, and one that no message can write for the tools.
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
    """A base that has no files: bytes are its tokens, a template of plain lines its chat format, which takes tools."""
    card = Card(
        name="fake",
        title="No model at all",
        licence="Apache-2.0",
        source=Source("random"),
        targets=("q_proj", "v_proj"),
        context=4096,
        # So small a layer could hold no fact by a real one's measure.
        learning={"tokens_per_parameter": 100.0},
    )
    architecture = Architecture("fake", "blocks", 2, _PROJECTIONS)
    return Base(
        card,
        canonical_digest("fake base, format 1"),
        Path(),
        _TEMPLATE,
        architecture,
        control=("\1",),
    )


@dataclass(frozen=True, slots=True)
class _Stack:
    """What a slot holds: its numbers' digest, and how much was learned, which is the size of its B."""

    digest: str
    strength: float
    nbytes: int


class _Output(StopStrings):
    """See ``RowOutput``."""

    def end(self, finish: FinishReason) -> Piece:
        return Piece(-1, self.finish(), (), finish)


# eq=False: two rows that ask for the same are two rows.
@dataclass(eq=False, slots=True)
class _Live:
    """A row in the batch: how many of its tokens are still to be read, and its whole reply."""

    row: Row
    prompt: Tokens
    stack: _Stack | None
    unread: int
    reply: tuple[int, ...]
    output: _Output


class FakeBackend:
    """See ``personalpeft.backends.base.Backend``; one byte of UTF-8 is one token, so is each word that it says, and byte
    0 ends a turn.
    """

    name = "fake"
    description = "no model: replies are made up from the prompt"
    tolerance = 1e-6
    batch_invariance = BatchInvariance.HOLDS
    end_of_turn: Tokens = (_END,)
    beginning: Tokens = ()

    def __init__(self, base: Base, *, slots: int = 8, rows: int = 16) -> None:
        self.base = base
        self.slots = slots
        self.rows = rows
        self.longest = base.card.context
        self._turn = threading.Lock()
        self._attached: dict[str, _Stack] = {}
        self._live: dict[int, _Live] = {}
        self._numbers = itertools.count()

    def render(self, messages: Sequence[Message]) -> Tokens:
        return self.encode(chat_text(self.base, messages))

    def encode(self, text: str) -> Tokens:
        return tuple(text.replace("\0", "").encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(
            _SAID[t - _BYTES].encode() if t >= _BYTES else bytes([t]) for t in tokens if t != _END
        ).decode(errors="replace")

    def stage(self, adapter: Composed) -> _Stack:
        pairs = merged(adapter)
        digest = hashlib.sha256()
        for name, pair in sorted(pairs.items()):
            digest.update(name.encode() + pair.a.tobytes() + pair.b.tobytes())
        nbytes = sum(pair.a.nbytes + pair.b.nbytes for pair in pairs.values())
        return _Stack(digest.hexdigest(), _strength(pairs), nbytes)

    def attach(self, key: str, staged: Staged) -> None:
        if not isinstance(staged, _Stack):
            raise TypeError("this was staged by another backend")
        with self._turn:
            if key in self._attached:
                return
            if len(self._attached) >= self.slots:
                raise RuntimeError(f"all {self.slots} slots are taken")
            self._attached[key] = replace(staged)

    def detach(self, key: str) -> None:
        with self._turn:
            if any(live.row.stack == key for live in self._live.values()):
                raise RuntimeError("a row of the batch uses this stack")
            self._attached.pop(key, None)

    def admit(self, row: Row) -> int | None:
        if len(row.tokens) + row.sampling.max_tokens > self.longest:
            raise ValueError(f"a row longer than {self.longest} tokens")
        with self._turn:
            stack = None if row.stack is None else self._attached[row.stack]
            if len(self._live) >= self.rows:
                return None
            number = next(self._numbers)
            if not isinstance(row.output, _Output):
                row.output = _Output(row.sampling.stop)
            self._live[number] = _Live(
                row,
                row.tokens,
                stack,
                len(row.token_ids),
                self._reply(row, stack),
                row.output,
            )
            return number

    def step(self) -> Sequence[Piece]:
        with self._turn:
            pieces = [
                piece
                for number, live in self._live.items()
                if (piece := self._advance(number, live))
            ]
            for piece in pieces:
                if piece.finish:
                    del self._live[piece.row]
            return pieces

    def remove(self, number: int) -> None:
        with self._turn:
            self._live.pop(number, None)

    def forget(self) -> None:
        """Keeps nothing of rows that have left."""

    def occupancy(self) -> Occupancy:
        with self._turn:
            used = sum(len(live.row.token_ids) - live.unread for live in self._live.values())
            return Occupancy(len(self._live), used, 0, self.rows * self.longest, 0)

    def check_integrity(self) -> None:
        if len(self._attached) > self.slots or len(self._live) > self.rows:
            raise RuntimeError("more stacks than slots, or more rows than fit")

    def score(
        self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False
    ) -> tuple[Score, ...]:
        attached = None if stack is None else self._attached[stack]
        scores = []
        for item in items:
            said = _logprobs(item.prompt, item.completion, attached)
            apart = 0.1 if attached else 0.0
            scores.append(Score(sum(said) / max(1, len(said)), apart if kl else None, said))
        return tuple(scores)

    def session(self, spec: SessionSpec) -> Session:
        if spec.below is not None and spec.below not in self._attached:
            raise KeyError(spec.below)
        return _FakeSession(spec)

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Loss]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        return tuple(s.step(t, rate) for s, t, rate in zip(sessions, terms, rates, strict=True))

    def fingerprint(self) -> str:
        return self.base.digest

    def close(self) -> None:
        with self._turn:
            self._attached.clear()

    def _advance(self, number: int, live: _Live) -> Piece | None:
        """One step of one row: a part of its prompt, with the last part of it the first token."""
        live.unread = max(0, live.unread - _CHUNK)
        if live.unread:
            return None
        row, output = live.row, live.output
        said = len(row.token_ids) - len(row.tokens)
        if said == len(live.reply):
            return replace(output.end("stop"), row=number)
        token = live.reply[said]
        row.token_ids.append(token)
        text = output.push(self.decode([token]))
        finish: FinishReason | None = "stop" if output.met else None
        if not finish and said + 1 >= row.sampling.max_tokens:
            finish, text = "length", text + output.finish()
        known = (
            _logprobs(live.prompt, live.reply[: said + 1], live.stack)[-1:] if row.logprobs else ()
        )
        top = (_likeliest(token, known[0])[: row.top],) if known and row.top else ()
        return Piece(number, text, (token,), finish, known, top, output.met)

    def _reply(self, row: Row, stack: _Stack | None) -> tuple[int, ...]:
        """Four words by the prompt and the seed; two more by the stack. A tool that the last question names is called instead."""
        if call := _called(self.decode(row.tokens)):
            return self.encode(call)
        seed = row.sampling.seed if row.sampling.temperature else 0
        words = _words(canonical_digest([list(row.tokens), seed]), 4)
        if stack is not None:
            words += [_AS, _IN, *_words(stack.digest, 2)]
        # The first word has no space before it.
        return (_BYTES + len(_WORDS) + words[0], *(_BYTES + word for word in words[1:]))


class _FakeSession:
    """Numbers that depend on the spec and on everything that was learned, in order."""

    def __init__(self, spec: SessionSpec) -> None:
        unknown = set(spec.targets) - set(_PROJECTIONS)
        if unknown:
            raise ValueError(f"the base has no projection {sorted(unknown)}")
        self._spec = spec
        start = {p: pair.b.tobytes().hex() for p, pair in (spec.start or {}).items()}
        self._seen = np.frombuffer(
            hashlib.sha256(
                canonical_digest([spec.seed, spec.rank, spec.below, start]).encode()
            ).digest(),
            np.uint8,
        ).astype(np.float32)
        self._strength = 1.0 + (_strength(spec.start) * spec.scaling if spec.start else 0.0)

    def precompute_ref_log_probs(self, terms: Sequence[Loss]) -> None:
        """There is no model to read; but a build from nothing is as strong as it has different things to learn."""
        if self._spec.start is None:
            self._strength = 1.0 + len({said for term in terms for said in term.continuations})

    def step(self, terms: Sequence[Loss], learning_rate: float) -> float:
        said = [[list(c.prompt), list(c.completion)] for term in terms for c in term.continuations]
        digest = hashlib.sha256(self._seen.tobytes() + canonical_digest(said).encode()).digest()
        self._seen = np.frombuffer(digest, np.uint8).astype(np.float32)
        return 1.0

    def pairs(self) -> Mapping[str, Pair]:
        chance = np.random.default_rng([int(value) for value in self._seen])
        pairs = {
            projection: Pair(
                chance.standard_normal((2, self._spec.rank, inputs), dtype=np.float32),
                chance.standard_normal((2, outputs, self._spec.rank), dtype=np.float32),
            )
            for projection, (inputs, outputs) in _PROJECTIONS.items()
            if projection in self._spec.targets
        }
        wanted = np.float32(self._strength / self._spec.scaling / _strength(pairs))
        return {projection: Pair(pair.a, pair.b * wanted) for projection, pair in pairs.items()}

    def state(self) -> Mapping[str, npt.NDArray[np.float32]]:
        return {"seen": self._seen.copy(), "strength": np.array([self._strength], np.float32)}

    def restore(self, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
        if (
            {"seen", "strength"} - set(state)
            or state["seen"].shape != (32,)
            or not np.isin(state["seen"], range(256)).all()
        ):
            raise ValueError("the saved session does not fit")
        self._seen = state["seen"].copy()
        if self._spec.start is None:
            # A whole number, which no rounding changes.
            self._strength = float(state["strength"][0])

    def close(self) -> None:
        """Holds nothing."""


def _called(prompt: str) -> str | None:
    """A call of the first tool that the last message names, if that is the user's, or the rest of one that was begun; every
    argument is a word.
    """
    offered, found, rest = prompt.partition(_TOOLS_END)
    said, _, begun = rest.rpartition("assistant: ")
    last = said.rpartition("\nuser: ")[2] if "\nuser: " in said else said.removeprefix("user: ")
    if not found or not offered.startswith(_TOOLS) or ("\ntool: " in last and not begun):
        return None
    tools = [each["function"] for each in json.loads(offered[len(_TOOLS) :])]
    for tool in sorted(tools, key=lambda each: each["name"] not in last):
        arguments = dict.fromkeys((tool.get("parameters") or {}).get("properties", {}), _WORDS[0])
        call = f"<tool_call>\n{json.dumps({'name': tool['name'], 'arguments': arguments})}\n</tool_call>"
        if call.startswith(begun) and (begun or tool["name"] in last):
            return call[len(begun) :]
    return None


def _strength(pairs: Mapping[str, Pair]) -> float:
    return float(np.sqrt(sum(np.square(pair.b, dtype=np.float64).sum() for pair in pairs.values())))


def _logprobs(prompt: Tokens, completion: Tokens, stack: _Stack | None) -> tuple[float, ...]:
    """Of each token: the likelier the more was learned, and a little up or down by all the tokens before it."""
    level = min((stack.strength / 20 if stack else 0.0) - 8.0, -0.5)
    seen = zlib.crc32(repr(prompt).encode())
    said = []
    for token in completion:
        seen = zlib.crc32(b"%d" % token, seen)
        said.append(level + (seen % 1024 - 512) / 2048)
    return tuple(said)


def _likeliest(token: int, logprob: float) -> tuple[tuple[int, float], ...]:
    """The token itself, and words that might have been: less and less likely, and all together never more than certain."""
    others = (_BYTES + word for word in range(len(_SAID)) if _BYTES + word != token)
    return ((token, logprob), *((other, logprob - 2 - n) for n, other in enumerate(others)))


def _words(digest: str, count: int) -> list[int]:
    return [int(digest[2 * i : 2 * i + 2], 16) % _CHOICES for i in range(count)]
