"""Whether a server is one that a home on this base can be served by: that it has the base, and not another one of the same shape.

A server does not say what weights it has. So how likely it finds what it writes after a fixed text is compared with how likely
torch finds that here, which is asked once for each base and kept.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from personalpeft.backends.base import Continuation, SequenceState, Tokens
from personalpeft.backends.tokenizer import Tokenizer
from personalpeft.backends.vllm.client import Listed, Server
from personalpeft.backends.vllm.transport import Answer, Wire
from personalpeft.base_models.types import Base
from personalpeft.errors import BaseMismatch, InvalidInput, suggest_nearest
from personalpeft.types import Sampling

# In it lie what tokenizers part on: two scripts, digits, spaces, line ends.
_SPELLED = "It's 1,024 o'clock;  naïve café\n\n\tприветствие."
_TEXT = (
    "The morning train leaves the old station at a quarter past seven, and on most days it is late. People stand on the "
    "platform with their bags and their paper cups, looking at the clock as if it could be persuaded."
)
# How many tokens of a reply tell one base from another.
_SAID = 24
# Nats a token, on average: bfloat16 explains a tenth of it, another model of the same family gives several times as much.
_APART = 0.25
Said: TypeAlias = tuple[tuple[int, float], ...]
"""Tokens, each with its log-prob (nats)."""

_SLOTS = re.compile(r'^vllm:lora_requests_info\{[^}]*max_lora="(\d+)"', re.MULTILINE)


class Check:
    """Of one server, as often as it may have become another. ``reference`` says how likely torch finds a text; what it says is
    ``kept`` in a file. ``salt`` is what the server keeps the text under. Runs on the wire's thread.
    """

    def __init__(
        self,
        wire: Wire,
        server: Server,
        base: Base,
        text: Tokenizer,
        *,
        salt: Callable[[], str],
        reference: Callable[[Continuation], Said],
        kept: Path,
    ) -> None:
        self._wire, self._server, self._base, self._text = wire, server, base, text
        self._salt, self._reference, self._kept = salt, reference, kept

    async def found(self) -> Listed:
        """The server's base of the right name, whose tokenizer splits text as it should. Raises ``InvalidInput`` where there is no
        such name, ``BaseMismatch``, ``ServingFailed``.
        """
        there = _the_base(
            await self._server.listed(), self._wire.server.model, self._wire.server.url
        )
        asked = {"model": there.name, "prompt": _SPELLED, "add_special_tokens": False}
        spelled = await self._wire.ask("POST", "/tokenize", asked, needed=False)
        # Gateways need not pass the question on; the numbers are asked for by token, so they would tell as well.
        said = spelled.data.get("tokens") if isinstance(spelled.data, dict) else None
        if isinstance(said, list) and tuple(said) != self._text.encode(_SPELLED):
            raise self._another(there.name, "its tokenizer splits text otherwise")
        return there

    async def numbers(self, called: str, bare: str) -> None:
        """That the base of that name, asked by that of a stack which changes nothing, finds a text as likely as torch does here.
        Raises ``BaseMismatch``, ``UnknownName``, ``ServingFailed``, and what ``reference`` raises.
        """
        said = await self.said(bare)
        if not said:
            raise self._another(called, "it has nothing to say on a text")
        # Torch may have to be loaded for it.
        apart = await asyncio.to_thread(self._apart, said)
        if apart > _APART:
            raise self._another(
                called, f"it finds the tokens of a text {apart:.2f} nats more or less likely"
            )

    async def said(self, bare: str) -> Said:
        """What is written greedily after the text, and how likely that is found. Raises ``UnknownName``, ``ServingFailed``."""
        row = SequenceState(
            self._asked, None, Sampling(temperature=0, max_tokens=_SAID), logprobs=True
        )
        written = [each async for each in self._server.write(row, bare, self._salt(), ())]
        return tuple(
            (token, known.logprob)
            for each in written
            for token, known in zip(each.tokens, each.known, strict=True)
        )

    @property
    def _asked(self) -> Tokens:
        return written_on(self._text)

    def _apart(self, said: Said) -> float:
        """Nats a token. What torch says is kept of the right base alone: another one's tokens are no use to anybody."""
        asked = Continuation(self._asked, tuple(token for token, _ in said))
        kept = _kept(self._kept, asked)
        ours = kept or self._reference(asked)
        apart = statistics.fmean(
            abs(own - their) for (_, own), (_, their) in zip(ours, said, strict=True)
        )
        if not kept and apart <= _APART:
            _keep(self._kept, ours)
        return apart

    def _another(self, called: str, why: str) -> BaseMismatch:
        return BaseMismatch(
            f"The vLLM server's {called} is not {self._base.card.name} as it is here: {why}.",
            hint=f"Start it with --model {self._base.folder}, or open the base that it serves.",
        )


def written_on(text: Tokenizer) -> Tokens:
    """What a server writes on, to be compared, as tokens."""
    return text.beginning + text.encode(_TEXT)


async def slots_there(wire: Wire) -> int | None:
    """How many stacks can be in one of the server's batches; None where it does not say, as before it has written anything."""
    answer: Answer = await wire.ask("GET", "/metrics", needed=False)
    said = _SLOTS.search(answer.text)
    return int(said[1]) if said else None


def _the_base(models: Sequence[Listed], wanted: str | None, url: str) -> Listed:
    """The base among what a server lists: the one of that name, or its only one. Raises ``InvalidInput``."""
    bases = {each.name: each for each in models if each.is_base}
    if wanted is not None:
        if wanted not in bases:
            raise InvalidInput(
                f"The vLLM server at {url} has no base called {wanted!a}.",
                hint=suggest_nearest(wanted, bases, what="base"),
            )
        return bases[wanted]
    if len(bases) != 1:
        raise InvalidInput(
            f"The vLLM server at {url} has {len(bases)} bases.",
            hint=f"Set PERSONALPEFT_VLLM_MODEL to one of them: {', '.join(sorted(bases)) or 'it lists none'}.",
        )
    return next(iter(bases.values()))


def _kept(file: Path, asked: Continuation) -> Said | None:
    with suppress(OSError, ValueError, TypeError):
        found = tuple(
            (int(token), float(logprob)) for token, logprob in json.loads(file.read_text("utf-8"))
        )
        return found if tuple(token for token, _ in found) == asked.completion else None
    return None


def _keep(file: Path, said: Said) -> None:
    # Where nothing can be written, torch is asked again the next time.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, which goes whatever happens.
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            half = Path(folder, file.name)
            half.write_text(json.dumps(said), "utf-8")
            half.replace(file)
