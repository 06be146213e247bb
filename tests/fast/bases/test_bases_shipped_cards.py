"""The shipped cards of hub models fit their architectures and chats."""

from __future__ import annotations

from pathlib import Path

import pytest

from personalpeft.base_models.chat_template import end_of_turn, find_tool_format, render_chat
from personalpeft.base_models.local_models import recipe
from personalpeft.base_models.registry import all_cards, find_card
from personalpeft.base_models.types import Base, ModelCard
from personalpeft.learning.train.config import load_training_configs
from personalpeft.types import Architecture, Message, ToolFormat

_SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
HUB = [card for card in all_cards() if card.source.kind == "hub"]
# Millions of parameters. The rates of Gemma 3 270M were measured, and follow no rule.
SIZES = {
    "gemma3-1b-it": 1000,
    "gemma3-4b-it": 3880,
    "llama3.2-1b-instruct": 1236,
    "llama3.2-3b-instruct": 3213,
    "phi4-mini-instruct": 3836,
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1721,
    "qwen3-4b": 4022,
    "smollm2-1.7b-instruct": 1711,
    "smollm2-360m-instruct": 362,
    "smollm3-3b": 3075,
}


def base_of(card: ModelCard) -> Base:
    projections = {f"mlp.{name}": (8, 8) for name in card.targets}
    architecture = Architecture("any", "model.layers", 1, projections)
    assert card.template is not None
    control = (*card.stop_tokens, "<|im_start|>")
    return Base(card, "0" * 64, Path(), Path(), card.template, architecture, control=control)


def test_there_is_a_card_for_each_base_that_people_have() -> None:
    assert {card.name for card in HUB} == {"gemma3-270m-it", *SIZES}


@pytest.mark.parametrize("card", HUB, ids=lambda card: card.name)
def test_a_card_names_targets_stops_and_a_recipe(card: ModelCard) -> None:
    assert card.targets == (_FUSED if card.name.startswith("phi") else _SPLIT)
    assert card.stop_tokens
    assert card.licence != "unknown"
    assert card.tool_format is not None
    architecture = {f"mlp.{name}": (8, 8) for name in card.targets}
    recipes = load_training_configs(card.name, card.learning, architecture)
    style, memory = card.learning["learning_rate"], card.learning["memory"]["learning_rate"]
    assert recipes
    assert 0 < style < memory


@pytest.mark.parametrize("name", SIZES)
def test_the_rates_of_a_card_are_those_of_its_size(name: str) -> None:
    assert find_card(name).learning == recipe(SIZES[name] * 10**6)


@pytest.mark.parametrize(
    "card", [card for card in HUB if card.template], ids=lambda card: card.name
)
def test_a_template_of_a_card_answers_at_once_and_calls_tools(card: ModelCard) -> None:
    base = base_of(card)
    chat = [Message("system", "Be kind."), Message("user", "Hi")]
    prompt = render_chat(base, chat)
    assert "Be kind." in prompt
    assert prompt.rstrip().endswith("<think>\n\n</think>")
    assert "<think>" not in render_chat(base, chat, add_generation_prompt=False)
    assert end_of_turn(base) == "<|im_end|>"
    assert find_tool_format(base) is card.tool_format is ToolFormat.HERMES
