"""Read a model's shape, control tokens and chat template from its folder.

Invariant: the same files give the same facts, so the cache keeps them. Reading them from the cache
imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from personalpeft.base_models.files import FRESH_COPY, read_json, read_text
from personalpeft.base_models.types import ModelCard
from personalpeft.errors import CardError, WeightsError, suggest_nearest
from personalpeft.types import Architecture, is_number

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn

# The version of the cache's entries; raise it with every change of how they are made.
FACTS = 2
# Models have 130 blocks at most. A billion of them would take all memory.
_BLOCKS_LIMIT = 1024
_BLOCK_COUNT = re.compile(r"(num_|n_)(hidden_)?layers?")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model that its files hold."""

    architecture: Architecture  # with every linear layer that all blocks share
    control: tuple[str, ...]
    bos: str  # the template's ``bos_token``
    eos: str  # the template's ``eos_token``
    stops: tuple[str, ...]  # end a reply, by the configuration
    template: str | None  # None if the files have none


def inspect_model(folder: Path) -> ModelFacts:
    """Read the facts of a folder; raise ``WeightsError`` if transformers cannot build its model."""
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    settings = _optional(folder / "tokenizer_config.json")
    config = read_json(folder / "config.json")
    added = tokenizer.get_added_tokens_decoder().values()
    ends = _optional(folder / "generation_config.json").get(
        "eos_token_id", config.get("eos_token_id")
    )
    stops = _token_names(tokenizer, ends if isinstance(ends, list) else [ends])
    eos = _token_text(settings.get("eos_token")) or next(iter(stops), "")
    bos = _token_text(settings.get("bos_token")) or next(
        iter(_token_names(tokenizer, [config.get("bos_token_id")])), ""
    )
    return ModelFacts(
        architecture=_architecture(folder, config),
        control=tuple(each.content for each in added if each.special and each.content),
        bos=bos,
        eos=eos,
        stops=tuple(dict.fromkeys((*stops, *([eos] if eos else ())))),
        template=_template(folder, settings),
    )


def restrict_to_targets(architecture: Architecture, card: ModelCard) -> Architecture:
    """Keep only the projections of the card's targets, such as ``q_proj``."""
    matched: set[str] = set()
    for target in card.targets:
        paths = {
            path
            for path in architecture.projections
            if path == target or path.endswith(f".{target}")
        }
        if not paths:
            layers = {path.rpartition(".")[2] for path in architecture.projections}
            raise CardError(
                f"target_modules of {card.name} name {target!r}, "
                f"and no block of {architecture.model_type} has such a linear layer.",
                hint=suggest_nearest(target, layers, what="linear layer"),
            )
        matched |= paths
    projections = {path: size for path, size in architecture.projections.items() if path in matched}
    return replace(architecture, projections=projections)


def _architecture(folder: Path, config: Mapping[str, Any]) -> Architecture:
    if "quantization_config" in config:
        raise WeightsError(
            f"The weights in {folder} are quantised.",
            hint="Get the model with plain weights (bf16 or fp32).",
        )

    for part in (config, *(each for each in config.values() if isinstance(each, dict))):
        for key, value in part.items():
            if _BLOCK_COUNT.fullmatch(key) and is_number(value) and value > _BLOCKS_LIMIT:
                raise WeightsError(
                    f"{key} in {folder / 'config.json'} must be at most {_BLOCKS_LIMIT}, "
                    f"got {value!a:.40}.",
                    hint=FRESH_COPY,
                )

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        auto_config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                auto_config, trust_remote_code=False
            )
    except Exception as error:  # transformers raises any kind for a wrong configuration.
        reason = str(error).partition("\n")[0]
        raise WeightsError(
            f"{folder / 'config.json'} does not describe a model that transformers can build: "
            f"{reason}",
            hint="The model's code must be part of transformers; a newer release may have it.",
        ) from error
    return architecture_of(model, str(config.get("model_type", "")))


def architecture_of(model: nn.Module, model_type: str) -> Architecture:
    """Return the linear layers that all blocks share.

    The blocks are the list of modules with the most weights in linear layers.
    """
    from torch import nn

    def linears(block: nn.Module) -> dict[str, tuple[int, int]]:
        return {
            path: (module.in_features, module.out_features)
            for path, module in block.named_modules()
            if isinstance(module, nn.Linear)
        }

    def weight(blocks: nn.ModuleList) -> int:
        return sum(inputs * outputs for inputs, outputs in linears(blocks).values())

    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    if not lists:
        raise WeightsError(
            f"No list of blocks was found in a model of type {model_type!r}.",
            hint="Use a decoder model.",
        )
    path, blocks = max(lists, key=lambda item: (weight(item[1]), -len(item[0])))
    each = [linears(block) for block in blocks]
    shared = {
        name: size
        for name, size in sorted(each[0].items())
        if all(block.get(name) == size for block in each)
    }
    return Architecture(model_type, path, len(blocks), shared)


def _read_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing narrower.
        raise WeightsError(f"{path} is damaged: {error}.", hint=FRESH_COPY) from error


def _token_names(tokenizer: Tokenizer, ids: list[Any]) -> tuple[str, ...]:
    names = (tokenizer.id_to_token(each) for each in ids if type(each) is int and each >= 0)
    return tuple(name for name in names if name)


def _token_text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    template = _optional(folder / "chat_template.json").get("chat_template") or settings.get(
        "chat_template"
    )
    if isinstance(template, list):
        named = {
            each.get("name"): each.get("template") for each in template if isinstance(each, dict)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
