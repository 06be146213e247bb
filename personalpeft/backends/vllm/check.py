"""Whether a server is one that a home on this base can be served by: that it has the base, and not another one of the same shape.

A server does not say what weights it has. So how likely it finds what it writes after a fixed text is compared with how likely
torch finds that here, which is asked once for each base and kept.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from personalpeft.backends.base import Continuation, Tokens
from personalpeft.backends.text import Text
from personalpeft.backends.vllm.server import Listed
from personalpeft.backends.vllm.wire import Answer, Wire
from personalpeft.bases.base import Base
from personalpeft.errors import BaseMismatch, InvalidInput, ServingFailed, nearest

# In it lie what tokenizers part on: two scripts, digits, spaces, line ends.
_SPELLED = "It's 1,024 o'clock;  naïve café\n\n\tприветствие."
_TEXT = (
    "The morning train leaves the old station at a quarter past seven, and on most days it is late. People stand on the "
    "platform with their bags and their paper cups, looking at the clock as if it could be persuaded."
)
# Nats a token, on average: bfloat16 explains a tenth of it, another model of the same family gives several times as much.
_APART = 0.25
Said: TypeAlias = tuple[tuple[int, float], ...]
"""Tokens, each with its log-prob (nats)."""

_SLOTS = re.compile(r'^vllm:lora_requests_info\{[^}]*max_lora="(\d+)"', re.MULTILINE)


async def listed(wire: Wire) -> list[Listed]:
    """All models that the server lists. Raises ``ServingFailed``."""
    answer = await wire.ask("GET", "/v1/models")
    try:
        models = answer.data["data"]
        return [Listed(str(each["id"]), not each.get("parent"), int(each.get("max_model_len") or 0)) for each in models]
    except (TypeError, KeyError, ValueError) as error:
        raise ServingFailed(
            f"What listens at {wire.server.url} lists no models: {answer.message}",
            hint="PERSONALPEFT_VLLM_URL is the address of vLLM's OpenAI server.",
        ) from error


def the_base(models: Sequence[Listed], wanted: str | None, url: str) -> Listed:
    """The base among what a server lists: the one of that name, or its only one. Raises ``InvalidInput``."""
    bases = {each.name: each for each in models if each.is_base}
    if wanted is not None:
        if wanted not in bases:
            raise InvalidInput(
                f"The vLLM server at {url} has no base called {wanted!a}.", hint=nearest(wanted, bases, what="base")
            )
        return bases[wanted]
    if len(bases) != 1:
        raise InvalidInput(
            f"The vLLM server at {url} has {len(bases)} bases.",
            hint=f"Set PERSONALPEFT_VLLM_MODEL to one of them: {', '.join(sorted(bases)) or 'it lists none'}.",
        )
    return next(iter(bases.values()))


async def slots_there(wire: Wire) -> int | None:
    """How many stacks can be in one of the server's batches; None where it does not say, as before it has written anything."""
    answer: Answer = await wire.ask("GET", "/metrics", needed=False)
    said = _SLOTS.search(answer.text)
    return int(said[1]) if said else None


async def same_tokens(wire: Wire, called: str, base: Base, text: Text) -> None:
    """That the server's tokenizer splits text as the base's does. Raises ``BaseMismatch``, ``ServingFailed``."""
    asked = {"model": called, "prompt": _SPELLED, "add_special_tokens": False}
    spelled = await wire.ask("POST", "/tokenize", asked, needed=False)
    # Gateways need not pass the question on; the numbers are asked for by token, so they would tell as well.
    said = spelled.data.get("tokens") if isinstance(spelled.data, dict) else None
    if isinstance(said, list) and tuple(said) != text.encode(_SPELLED):
        raise _another(base, called, "its tokenizer splits text otherwise")


def written_on(text: Text) -> Tokens:
    """What a server writes on, to be compared, as tokens."""
    return text.beginning + text.encode(_TEXT)


def same_numbers(
    said: Said, reference: Callable[[Continuation], Said], called: str, base: Base, text: Text, kept: Path
) -> None:
    """That the server finds what it ``said`` after ``written_on`` as likely as torch does here, where ``reference`` is asked once for
    each base and what it says is kept in the file. Raises ``BaseMismatch``, and what ``reference`` raises.
    """
    if not said:
        raise _another(base, called, "it has nothing to say on a text")
    asked = Continuation(written_on(text), tuple(token for token, _ in said))
    ours = _kept(kept, asked) or _keep(kept, reference(asked))
    apart = statistics.fmean(abs(own - their) for (_, own), (_, their) in zip(ours, said, strict=True))
    if apart > _APART:
        raise _another(base, called, f"it finds the tokens of a text {apart:.2f} nats more or less likely")


def _kept(file: Path, asked: Continuation) -> Said | None:
    with suppress(OSError, ValueError, TypeError):
        found = tuple((int(token), float(logprob)) for token, logprob in json.loads(file.read_text("utf-8")))
        return found if tuple(token for token, _ in found) == asked.completion else None
    return None


def _keep(file: Path, said: Said) -> Said:
    # Where nothing can be written, torch is asked again the next time.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, which goes whatever happens.
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            half = Path(folder, file.name)
            half.write_text(json.dumps(said), "utf-8")
            half.replace(file)
    return said


def _another(base: Base, called: str, why: str) -> BaseMismatch:
    return BaseMismatch(
        f"The vLLM server's {called} is not {base.card.name} as it is here: {why}.",
        hint=f"Start it with --model {base.folder}, or open the base that it serves.",
    )
