"""The architectures of the cards are served and trained as transformers computes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from backend_makers import attach, continuation, generate, random_stack, row, torch_backend
from example_counts import all_cases
from safetensors.torch import load_file, save_file
from test_training_gradients import (
    CLOSE,
    assert_close,
    gradients,
    parent,
    plain_gradients,
    terms_of,
)
from tiny_models import SHAPES, card_of, make_base, make_model

from personalpeft.adapters.merge import write_merged_folder
from personalpeft.backends.base import Backend
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base, Source
from personalpeft.errors import CardError, WeightsError

PROMPTS = ("hello", "what is this? " * 14, "x")


@pytest.fixture(params=all_cases(SHAPES, usual=["smollm3", "phi4-mini", "phi3-mini"]))
def shaped(request: pytest.FixtureRequest, tiny_base: Base, tmp_path: Path) -> Base:
    """A base of each shape."""
    return make_base(request.param, tiny_base, tmp_path)


@pytest.fixture
def serving(shaped: Base, shared_cache: Path) -> Backend:
    return torch_backend(shaped, slots=2, rows=8, cache=shared_cache)


def test_each_architecture_replies_and_learns_as_transformers(
    shaped: Base, serving: Backend
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        shaped.folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = [row(serving, prompt, max_tokens=20) for prompt in PROMPTS]
    for each, reply in zip(rows, generate(serving, rows), strict=True):
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([each.prompt_tokens]),
                attention_mask=torch.ones(1, len(each.prompt_tokens), dtype=torch.long),
                max_new_tokens=20,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=list(serving.end_of_turn),
            )[0, len(each.prompt_tokens) :].tolist()
        assert list(reply.tokens) == [t for t in expected if t not in serving.end_of_turn]

    start = parent(serving, 8)
    found = gradients(serving, terms_of(serving), initial_weights=start)
    expected_gradients = plain_gradients(shaped, terms_of(serving), start, None)
    assert_close(found, expected_gradients, CLOSE)


@pytest.mark.parametrize("kernels", ["plain", "native"])
@pytest.mark.parametrize("name", all_cases(SHAPES, usual=["smollm3", "phi3-mini"]))
def test_scores_see_as_far_back_as_the_model(
    name: str, kernels: str, tiny_base: Base, tmp_path: Path, shared_cache: Path
) -> None:
    model = make_model(name, tiny_base, tmp_path / "weights")
    card = card_of(name, tiny_base, tmp_path / "weights")
    backend = torch_backend(
        resolve_base(card, cache=tmp_path / "cache"),
        slots=1,
        **({"cache": shared_cache} if kernels == "native" else {}),
    )
    item = continuation(backend, "what is this? " * 4, "It is a thing.")
    (score,) = backend.score([item], None)
    tokens = torch.tensor([[*item.prompt, *item.completion]])
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        logits = model(tokens).logits[0, len(item.prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(item.completion)[:, None])[:, 0]
    assert score.token_logprobs == pytest.approx(expected.tolist(), abs=2e-3)


def test_a_context_in_which_rows_would_change_each_other_is_refused(
    tiny_base: Base, tmp_path: Path
) -> None:
    """LongRoPE rotates all rows by other factors once one of them is longer than the original."""
    make_model("phi4-mini", tiny_base, tmp_path / "weights")
    card = card_of("phi4-mini", tiny_base, tmp_path / "weights")
    assert find_card(tmp_path / "weights").context == 512
    with pytest.raises(CardError, match="must be at most 512"):
        resolve_base(replace(card, context=513), cache=tmp_path / "cache")


def test_only_the_text_part_of_a_multimodal_model_is_kept(tiny_base: Base, tmp_path: Path) -> None:
    base = make_base("gemma3-4b", tiny_base, tmp_path)
    whole = make_model("gemma3-4b", tiny_base, tmp_path / "whole")
    backend = torch_backend(base, slots=1, rows=1)
    assert set(base.architecture.projections) >= {"self_attn.q_proj", "mlp.down_proj"}
    assert base.architecture.block_path == "model.language_model.layers"
    kept = sum(p.numel() for p in backend._model.module.parameters())  # type: ignore[attr-defined]
    vision = sum(p.numel() for p in whole.model.vision_tower.parameters())
    assert vision > 0
    assert kept <= sum(p.numel() for p in whole.parameters()) - vision


def test_a_merged_model_scores_like_the_base_with_the_stack(
    shaped: Base, serving: Backend, tmp_path: Path
) -> None:
    stack = random_stack(serving, 3)
    attach(serving, "stack", stack)
    write_merged_folder(shaped, stack, tmp_path / "merged")
    card = replace(shaped.card, source=Source("folder", path=tmp_path / "merged"))
    merged = torch_backend(resolve_base(card, cache=tmp_path / "cache"), slots=1, rows=1)
    item = continuation(serving, "what is this?", "It is a thing.")
    (with_stack,), (bare,) = serving.score([item], "stack"), serving.score([item], None)
    (alone,) = merged.score([item], None)
    assert alone.token_logprobs == pytest.approx(with_stack.token_logprobs, abs=1e-3)
    assert alone.token_logprobs != pytest.approx(bare.token_logprobs, abs=1e-2)


def test_a_folder_with_other_names_of_weights_is_not_merged(
    tiny_base: Base, tmp_path: Path
) -> None:
    base = make_base("gemma3-4b", tiny_base, tmp_path)
    stack = random_stack(torch_backend(base, slots=1, rows=1), 3)
    file = base.folder / "model.safetensors"
    weights = {name.replace("self_attn", "other"): each for name, each in load_file(file).items()}
    save_file(weights, file)
    with pytest.raises(WeightsError, match="have no weight called"):
        write_merged_folder(base, stack, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
