"""A batch matches transformers' own generation, for every architecture of our cards."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from backend_makers import attach, generate, random_stack, row, torch_backend
from example_counts import all_cases

from personalpeft.base_models.types import Base

PROMPTS = ("hello", "what is this? " * 9, "x")
each_operations = pytest.mark.parametrize(
    ("base", "kernels"),
    all_cases(
        product(("llama", "qwen2", "qwen3", "gemma3_text"), ("plain", "native")),
        usual=[("llama", "plain"), ("gemma3_text", "native")],
    ),
    indirect=["base"],
)


@each_operations
def test_a_batch_matches_transformers(base: Base, kernels: str, shared_cache: Path) -> None:
    from transformers import AutoModelForCausalLM

    backend = torch_backend(
        base, slots=2, rows=8, **({"cache": shared_cache} if kernels == "native" else {})
    )
    rows = [row(backend, prompt, max_tokens=20) for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(
        base.folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = list(backend.end_of_turn)
    for each, reply in zip(rows, generate(backend, rows), strict=True):
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([each.prompt_tokens]),
                attention_mask=torch.ones(1, len(each.prompt_tokens), dtype=torch.long),
                max_new_tokens=20,
                do_sample=False,
                pad_token_id=0,
            )[0, len(each.prompt_tokens) :].tolist()
        assert list(reply.tokens) == [
            token for token in expected if token not in backend.end_of_turn
        ]


@each_operations
def test_rows_with_stacks_match_single_rows(base: Base, kernels: str, shared_cache: Path) -> None:
    backend = torch_backend(
        base, slots=2, rows=8, **({"cache": shared_cache} if kernels == "native" else {})
    )
    for seed in (1, 2):
        attach(backend, f"s{seed}", random_stack(backend, seed, rank=seed + 1, size=0.2))
    rows = [
        row(backend, prompt, stack, owner=f"{prompt}{stack}", max_tokens=12)
        for prompt in PROMPTS[:2]
        for stack in (None, "s1", "s2")
    ]
    together = [reply.tokens for reply in generate(backend, rows)]
    assert [generate(backend, [each])[0].tokens for each in rows] == together
    assert len(set(together)) > 3
