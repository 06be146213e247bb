"""Our Llama decoder computes transformers' bits and leaves other models to transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from backend_makers import generate, torch_backend
from backend_makers import row as row_of
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from personalpeft.backends.torch.llama import load_llama
from personalpeft.base_models.types import Base

TOKENS = torch.arange(40)[None] % 23
POSITIONS = torch.arange(40)[None]


def causal_mask(dtype: torch.dtype) -> torch.Tensor:
    return torch.full((40, 40), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]


@pytest.fixture
def folder(tiny_base: Base, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base.folder, tmp_path / "model"))


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_have_the_bits_of_transformers(folder: Path, dtype: torch.dtype, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    if tied:
        change_config(folder, tie_word_embeddings=True)
        weights = load_file(folder / "model.safetensors")
        del weights["lm_head.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ours = load_llama(folder, dtype)
    assert ours is not None
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        arguments = {
            "input_ids": TOKENS,
            "position_ids": POSITIONS,
            "attention_mask": causal_mask(dtype),
            "use_cache": False,
        }
        keep = torch.tensor([3, 39])
        found = ours(**arguments, logits_to_keep=keep).logits
        assert torch.equal(found, theirs(**arguments, logits_to_keep=keep).logits)
    names = [[name for name, _ in each.named_parameters()] for each in (ours, theirs)]
    assert sorted(names[0]) == sorted(names[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"model_type": "mistral"},
    ],
)
def test_another_architecture_is_left_to_transformers(
    folder: Path, changes: dict[str, object]
) -> None:
    change_config(folder, **changes)
    assert load_llama(folder, torch.float32) is None


def test_a_model_with_scaled_rotary_embeddings_replies(folder: Path, tiny_base: Base) -> None:
    change_config(
        folder,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    )
    scaled, plain = torch_backend(replace(tiny_base, folder=folder)), torch_backend(tiny_base)
    replies = [generate(each, [row_of(each, "hello there")])[0].tokens for each in (scaled, plain)]
    assert all(replies)
    assert replies[0] != replies[1]
