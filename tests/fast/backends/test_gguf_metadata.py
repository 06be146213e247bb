"""The model that learns computes what llama.cpp serves of the same file, whatever it says of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_makers import llamacpp_backend, torch_backend
from example_counts import all_cases
from gguf_models import write_model

from personalpeft.backends.base import Continuation
from personalpeft.base_models.local_models import inspect_local_model
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError

Change = Callable[[Any], Any]


def without(key: str) -> Change:
    return lambda writer: writer.kv_data[0].pop(key)


def number(key: str, value: float) -> Change:
    return lambda writer: writer.add_float32(key, value)


READ: dict[str, tuple[str, Change]] = {
    "no base of positions": ("gemma3_text", without("gemma3.rope.freq_base")),
    "a base of near positions": ("gemma3_text", number("gemma3.rope.freq_base_swa", 20000.0)),
    "a factor without a type": ("gemma3_text", without("gemma3.rope.scaling.type")),
    "a scaling that is off": ("qwen3", lambda w: w.add_string("qwen3.rope.scaling.type", "none")),
}
REFUSED: dict[str, tuple[str, Change]] = {
    "an old scale": ("qwen3", number("qwen3.rope.scale_linear", 4.0)),
    "a factor without a type": ("qwen3", number("qwen3.rope.scaling.factor", 4.0)),
    "no window": ("gemma3_text", without("gemma3.attention.sliding_window")),
    "another pattern": (
        "gemma3_text",
        lambda w: w.add_uint32("gemma3.attention.sliding_window_pattern", 3),
    ),
    "a cap": ("gemma3_text", number("gemma3.final_logit_softcapping", 2.0)),
}


@pytest.mark.parametrize("what", all_cases(READ, usual=["a scaling that is off"]))
def test_what_is_read_is_computed_by_both(
    what: str, tiny_base: Base, tmp_path: Path, shared_cache: Path
) -> None:
    kind, change = READ[what]
    write_model(kind, tiny_base, tmp_path / "model.gguf", change=change)
    card = inspect_local_model(tmp_path / "model.gguf", cache=tmp_path).card
    base = resolve_base(card, cache=tmp_path / "cache")
    torch, llamacpp = torch_backend(base, slots=1), llamacpp_backend(base, shared_cache, slots=1)
    try:
        tokens = torch.encode("the quick brown fox jumps over the lazy dog again and again " * 3)
        item = Continuation(tokens[:20], tokens[20:])
        (learned,), (served,) = torch.score([item], None), llamacpp.score([item], None)
        np.testing.assert_allclose(learned.token_logprobs, served.token_logprobs, atol=0.15)
    finally:
        torch.close()
        llamacpp.close()


@pytest.mark.parametrize("what", REFUSED)
def test_what_only_llamacpp_reads_is_refused(what: str, tiny_base: Base, tmp_path: Path) -> None:
    kind, change = REFUSED[what]
    write_model(kind, tiny_base, tmp_path / "model.gguf", change=change)
    with pytest.raises(WeightsError) as caught:
        inspect_local_model(tmp_path / "model.gguf", cache=tmp_path)
    assert caught.value.hint
