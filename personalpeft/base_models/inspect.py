"""What a folder with a model says of itself: its shape, its control tokens, its chat template.

Invariant: the same files give the same facts, so they are looked up once and kept in the cache; reading kept facts imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from personalpeft.base_models.files import read_json, read_text
from personalpeft.base_models.types import ModelCard
from personalpeft.errors import CardError, WeightsError, suggest_nearest
from personalpeft.types import Architecture

if TYPE_CHECKING:
    from torch import nn


# Names how facts are found; raise it when other facts are wanted or they are found in another way.
FACTS = 1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``architecture`` has every linear layer that all blocks share, whatever a card's targets are. ``eos`` and ``bos`` are what the
    template calls so; ``stops`` are the tokens that the configuration lets end a reply; ``template`` is None if the files bring none;
    ``longest`` is how many tokens the configuration has positions for, None if it does not say."""

    architecture: Architecture
    control: tuple[str, ...]
    bos: str
    eos: str
    stops: tuple[str, ...]
    template: str | None
    longest: int | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelFacts:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything that ``to_json`` did not write."""
        shape = value["architecture"]
        return cls(
            architecture=Architecture(
                model_type=str(shape["model_type"]),
                block_path=str(shape["block_path"]),
                blocks=int(shape["blocks"]),
                projections={
                    str(k): (int(i), int(o)) for k, (i, o) in shape["projections"].items()
                },
            ),
            control=tuple(map(str, value["control"])),
            bos=str(value["bos"]),
            eos=str(value["eos"]),
            stops=tuple(map(str, value["stops"])),
            template=None if value["template"] is None else str(value["template"]),
            longest=None if value["longest"] is None else int(value["longest"]),
        )


def inspect_model(folder: Path) -> ModelFacts:
    """Looks into config, tokenizer and template of a folder; builds the model without weights. Raises ``WeightsError`` if it cannot."""
    tokenizer = read_json(folder / "tokenizer.json")
    settings = _optional(folder / "tokenizer_config.json")
    config = read_json(folder / "config.json")
    tokens = _Tokens(tokenizer)
    ends = _optional(folder / "generation_config.json").get(
        "eos_token_id", config.get("eos_token_id")
    )
    stops = tokens.names(ends if isinstance(ends, list) else [ends])
    eos = _token_text(settings.get("eos_token")) or next(iter(stops), "")
    bos = _token_text(settings.get("bos_token")) or next(
        iter(tokens.names([config.get("bos_token_id")])), ""
    )
    return ModelFacts(
        architecture=_architecture(folder, config),
        control=tokens.control,
        bos=bos,
        eos=eos,
        stops=tuple(dict.fromkeys((*stops, *([eos] if eos else ())))),
        template=_template(folder, settings),
        longest=longest
        if isinstance(longest := config.get("max_position_embeddings"), int)
        else None,
    )


def restrict_to_targets(architecture: Architecture, card: ModelCard) -> Architecture:
    """The architecture with only the projections that the card's targets name (``q_proj``, or in full ``self_attn.q_proj``).

    Raises ``CardError`` for a target that names none.
    """
    chosen: dict[str, tuple[int, int]] = {}
    for target in card.targets:
        named = {
            path: size
            for path, size in architecture.projections.items()
            if path == target or path.endswith(f".{target}")
        }
        if not named:
            raise CardError(
                f"targets of {card.name} name {target!r}, and no block of {architecture.model_type} has such a linear layer.",
                hint=suggest_nearest(
                    target,
                    {path.rpartition(".")[2] for path in architecture.projections},
                    what="linear layer",
                ),
            )
        chosen |= named
    projections = {path: size for path, size in architecture.projections.items() if path in chosen}
    return Architecture(
        architecture.model_type, architecture.block_path, architecture.blocks, projections
    )


def _architecture(folder: Path, config: Mapping[str, Any]) -> Architecture:
    if "quantization_config" in config:
        raise WeightsError(
            f"The weights in {folder} are quantised.",
            hint="Get the model with plain weights (bf16 or fp32).",
        )

    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    # What a configuration that somebody wrote can make transformers raise; code that a folder brings along is never run.
    mistakes = (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        StrictDataclassError,
    )
    try:
        known = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(known, trust_remote_code=False)
    except mistakes as error:
        raise WeightsError(
            f"{folder / 'config.json'} does not describe a model that transformers can build: {str(error).splitlines()[0]}",
            hint="Only models whose code is part of transformers can be used; a newer transformers may know this one.",
        ) from error
    return architecture_of(model, str(config.get("model_type", "")))


def architecture_of(model: nn.Module, model_type: str) -> Architecture:
    """Finds the list of blocks (the one that holds most of the model's linear layers) and what all its blocks have in common."""
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


class _Tokens:
    """The tokens of a tokenizer.json, by id."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        added = [token for token in tokenizer.get("added_tokens") or [] if isinstance(token, dict)]
        self.control = tuple(
            str(token["content"])
            for token in added
            if token.get("special") and token.get("content")
        )
        self._added = {token.get("id"): str(token.get("content", "")) for token in added}
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
        # Unigram lists [token, score] by id, all others map token to id.
        self._vocabulary = (
            {token: number for number, (token, *_) in enumerate(vocabulary)}
            if isinstance(vocabulary, list)
            else vocabulary
        )

    def names(self, ids: list[Any]) -> tuple[str, ...]:
        wanted = [number for number in ids if isinstance(number, int)]
        missing = {number for number in wanted if number not in self._added}
        plain = (
            {number: token for token, number in self._vocabulary.items() if number in missing}
            if missing
            else {}
        )
        return tuple(
            name for number in wanted if (name := self._added.get(number) or plain.get(number))
        )


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
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
