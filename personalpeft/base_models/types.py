"""A base: a frozen shared model, named by the digest of weights, tokenizer and chat template.

Invariants: a ``Base`` exists only after its files were found and hashed. Bases with one ``digest``
read the same tokens and compute the same numbers. Nothing writes to a base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    with_config,
)

from personalpeft.types import Architecture, Json, Sampling, ToolFormat, is_number

SourceKind: TypeAlias = Literal["package", "folder", "gguf", "hub", "random"]

DEPRECATED_KEYS = {
    "targets": "target_modules",
    "context": "context_length",
    "template": "chat_template",
    "system": "system_prompt",
    "practice": "rl",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "blocks": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
"""Deprecated keys of cards, which are names of fields, and the keys of today."""


def _key_of(name: str) -> Any:
    return Field(validation_alias=AliasChoices(DEPRECATED_KEYS[name], name))


def _without_repeats(items: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(items)) < len(items):
        raise ValueError("has an item twice")
    return items


def _inside_package(resource: str) -> str:
    if ".." in resource:
        raise ValueError("must not lead out of its package")
    return resource


def _below_card(path: object, info: ValidationInfo) -> object:
    """Take a relative path from the card's folder (the validation context)."""
    if not isinstance(path, str):
        return path
    if not path.strip():
        raise ValueError("must not be empty")
    return str(cast(Path, info.context) / Path(path).expanduser())


def _splits_into_heads(hidden: int, info: ValidationInfo) -> int:
    heads = info.data.get("heads")
    if heads and hidden % (2 * heads):
        raise ValueError(f"must be an even multiple of the attention heads ({heads})")
    return hidden


def _divides_heads(kv_heads: int, info: ValidationInfo) -> int:
    heads = info.data.get("heads")
    if heads and heads % kv_heads:
        raise ValueError(f"must divide the attention heads ({heads})")
    return kv_heads


def usable_sampling(values: Mapping[str, Any]) -> dict[str, float | int]:
    """Return those of a model's own sampling settings that a card may have."""
    found: dict[str, float | int] = {}
    for key, low, high in (("temperature", 0, 10), ("top_p", 1e-4, 1)):
        if is_number(value := values.get(key)) and low <= value <= high:
            found[key] = round(float(value), 4)
    top_k = values.get("top_k")
    return {**found, "top_k": top_k} if type(top_k) is int and 0 <= top_k < 2**31 else found


# ``model_card`` checks these bounds through pydantic.
_Text: TypeAlias = Annotated[str, Field(pattern=r"\S")]
_Integer: TypeAlias = Annotated[int, Field(ge=0, lt=2**53)]
_Size: TypeAlias = Annotated[int, Field(ge=1, lt=2**53)]
_Texts: TypeAlias = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], AfterValidator(_without_repeats)
]
_Resource: TypeAlias = Annotated[
    str, Field(pattern=r"^[A-Za-z_]\w*:[\w.-]+(/[\w.-]+)*$"), AfterValidator(_inside_package)
]


@dataclass(frozen=True, slots=True)
class RandomShape:
    """The sizes of a tiny Llama. The heads come first: other sizes depend on them."""

    heads: Annotated[_Size, _key_of("heads")]  # attention heads of a block
    kv_heads: Annotated[_Size, _key_of("kv_heads"), AfterValidator(_divides_heads)]  # of those
    hidden: Annotated[_Size, _key_of("hidden"), AfterValidator(_splits_into_heads)]  # of a token
    intermediate: Annotated[_Size, _key_of("intermediate")]  # of a token within an MLP
    blocks: Annotated[_Size, _key_of("blocks")]  # hidden layers


@dataclass(frozen=True, slots=True)
class Source:
    """Where weights come from; each kind has its own fields."""

    kind: SourceKind
    # package: resources ``<package>:<path>``; several are the parts of one GGUF file, in order
    files: Annotated[
        tuple[_Resource, ...], Field(min_length=1), AfterValidator(_without_repeats)
    ] = ()
    # folder: holds safetensors, config and tokenizer; gguf: a file
    path: Annotated[Path, BeforeValidator(_below_card)] | None = None
    repo: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None  # hub: owner/name
    revision: _Text | None = None  # hub: branch, tag or commit
    seed: _Integer = 0  # random: of the weights
    shape: RandomShape | None = None  # random: of the model
    digest: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")] | None = None  # of the weights
    install: _Text | None = None  # command that installs the weights, for errors


@with_config(ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
@dataclass(frozen=True, slots=True)
class ModelCard:
    """A base as its ``models/*.toml`` describes it."""

    # 1 to 64 of a-z, 0-9, '.', '_' and '-'
    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9._-]{0,63}$")]
    title: _Text  # the model's name for people
    licence: _Text  # of the weights
    source: Source
    # linear layers that adapters may change
    targets: Annotated[_Texts, Field(min_length=1), _key_of("targets")]
    context: Annotated[_Size, _key_of("context")]  # most tokens of a prompt and its reply
    # chat template in Jinja; None: the tokenizer's own
    template: Annotated[_Text | None, _key_of("template")] = None
    # system message of chats without one
    system: Annotated[_Text | None, _key_of("system")] = None
    # end a reply, besides those that the model's configuration names: control tokens, or texts that
    # are one token each
    stop_tokens: _Texts = ()
    sampling: Sampling = Sampling()  # defaults of requests
    learning: Json = field(default_factory=dict)  # overrides of ``TrainingConfig``
    gate: Json = field(default_factory=dict)  # overrides of the gate's margins
    # overrides of ``RLConfig``
    practice: Annotated[Json, _key_of("practice")] = field(default_factory=dict)
    # how the model writes tool calls; None: as its template shows
    tool_format: ToolFormat | None = None
    note: str = ""  # one sentence for lists of bases


@dataclass(frozen=True, slots=True)
class Base:
    """A base that can be loaded."""

    card: ModelCard
    digest: str
    folder: Path  # config.json and tokenizer.json; ``resolve.unpacked_folder`` has the weights too
    cache: Path  # where files that are made of the base lie
    template: str
    architecture: Architecture  # with the projections that the card's targets name
    stop_tokens: tuple[str, ...] = ()  # end a reply; the first ends a turn in the template
    control: tuple[str, ...] = ()  # tokens that no text of a message may spell
    bos: str = ""  # the template's ``bos_token``
    eos: str = ""  # the template's ``eos_token``
    tool_format: ToolFormat = ToolFormat.NONE  # how it writes tool calls
