"""The batch says what transformers' own loop says, on every kind of model that our cards name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_makers import attach, composed, row, torch_backend, written

from personalpeft.bases.base import Base, Card, Source
from personalpeft.bases.prepare import prepare
from personalpeft.types import Sampling

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": None,
    # Tied, a random model says its last word again for ever.
    "tie_word_embeddings": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
PROMPTS = ("hello", "what is this? " * 9, "x")


@pytest.fixture(params=KINDS)
def base(request: pytest.FixtureRequest, tiny_base: Base, tmp_path: Path) -> Base:
    """A model of this kind with random weights, and the tiny base's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "weights"
    config = AutoConfig.for_model(
        request.param, **{**SHAPE, "vocab_size": _vocabulary(tiny_base), **KINDS[request.param]}
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            # As they begin, weights are so small that every token is as likely as any other.
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny_base.folder / name).exists():
            shutil.copy(tiny_base.folder / name, folder / name)
    card = Card(
        name=request.param,
        title="A tiny one",
        licence="Apache-2.0",
        source=Source("folder", path=folder),
        targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        context=512,
        template=tiny_base.template,
        stop_tokens=tiny_base.stop_tokens,
        sampling=Sampling(),
    )
    return prepare(card, cache=tmp_path / "cache")


def _vocabulary(base: Base) -> int:
    from tokenizers import Tokenizer

    return int(Tokenizer.from_file(str(base.folder / "tokenizer.json")).get_vocab_size())


@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
def test_a_batch_says_what_transformers_says_to_each(base: Base, native: bool, shared_cache: Path) -> None:
    from transformers import AutoModelForCausalLM

    backend = torch_backend(base, slots=2, rows=8, **({"cache": shared_cache} if native else {}))
    rows = [row(backend, prompt, max_tokens=20) for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = list(backend.end_of_turn)
    for each, reply in zip(rows, written(backend, rows), strict=True):
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([each.tokens]),
                attention_mask=torch.ones(1, len(each.tokens), dtype=torch.long),
                max_new_tokens=20,
                do_sample=False,
                pad_token_id=0,
            )[0, len(each.tokens) :].tolist()
        assert list(reply.tokens) == [token for token in expected if token not in backend.end_of_turn]


@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
def test_rows_with_stacks_say_alone_what_they_say_together(base: Base, native: bool, shared_cache: Path) -> None:
    backend = torch_backend(base, slots=2, rows=8, **({"cache": shared_cache} if native else {}))
    for seed in (1, 2):
        attach(backend, f"s{seed}", composed(backend, seed, rank=seed + 1, size=0.2))
    rows = [
        row(backend, prompt, stack, owner=f"{prompt}{stack}", max_tokens=12)
        for prompt in PROMPTS[:2]
        for stack in (None, "s1", "s2")
    ]
    together = [reply.tokens for reply in written(backend, rows)]
    assert [written(backend, [each])[0].tokens for each in rows] == together
    assert len(set(together)) > 3
