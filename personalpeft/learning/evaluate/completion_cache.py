"""The completion cache of the general prompts that ship with the package."""

from __future__ import annotations

from pathlib import Path

from personalpeft.engine.completion_cache import CompletionCache
from personalpeft.engine.engine import Engine
from personalpeft.learning.evaluate.probes import general_prompts, load_general_prompts
from personalpeft.learning.train.config import BUILD_FORMAT
from personalpeft.learning.train.regularizer import MAX_REPLY_TOKENS
from personalpeft.types import Sampling, canonical_digest

BASE_SAMPLING = Sampling(max_tokens=MAX_REPLY_TOKENS)
"""How the bare base completes general prompts, and what a candidate is compared with."""

PROBE_SAMPLING = Sampling(max_tokens=2 * MAX_REPLY_TOKENS)
"""How a layer completes general prompts. A learned style may repeat the question before it answers,
and an answer that is cut off before it comes would count as wrong."""


def open_completion_cache(engine: Engine, folder: Path) -> CompletionCache:
    """Return the cache of general prompts for an engine, stored below ``folder``.

    The file name is a digest of everything that decides the base's completions.
    """
    generic, backend = load_general_prompts(), engine.backend
    name = canonical_digest(
        [BUILD_FORMAT, backend.base.digest, backend.name, backend.description, generic.digest]
    )
    return CompletionCache(
        engine, general_prompts(), BASE_SAMPLING, folder / "spoken" / f"{name[:32]}.json"
    )
