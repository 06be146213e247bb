"""What a base is: a frozen shared model, known by the digest of its weights, its tokenizer and its chat template.

Invariants: a ``Base`` exists only after its files were found and hashed; equal ``digest`` means that the same tokens go
in and the same numbers come out. A base is never written to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from personalpeft.types import Architecture, Json, Sampling

SourceKind: TypeAlias = Literal["package", "folder", "hub", "random"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where weights come from.

    package: ``files`` are resources ``<package>:<path>``; several are the parts of one GGUF file, in order. folder:
    ``path`` holds safetensors, config and tokenizer. hub: ``repo`` at ``revision``. random: a tiny model made from
    ``seed`` with ``shape``. ``digest`` (``sha256:<hex>``), where given, is what the weights must hash to.
    """

    kind: SourceKind
    files: tuple[str, ...] = ()
    path: Path | None = None
    repo: str | None = None
    revision: str | None = None
    seed: int = 0
    shape: Json = field(default_factory=dict)
    digest: str | None = None
    install: str | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A base as its ``models/*.toml`` describes it.

    ``template`` None means: the one that the tokenizer carries. ``system`` is said first where a chat brings no system
    message of its own. ``stop_tokens`` end a reply besides those that the base's own configuration names. ``learning``
    overrides fields of the learning recipe for this base, ``gate`` the gate's margins,
    ``practice`` the drill of skills.
    """

    name: str
    title: str
    licence: str
    source: Source
    targets: tuple[str, ...]
    context: int
    template: str | None = None
    system: str | None = None
    stop_tokens: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    learning: Json = field(default_factory=dict)
    gate: Json = field(default_factory=dict)
    practice: Json = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Base:
    """A base that is ready to be loaded: ``folder`` holds config.json, tokenizer.json and safetensors weights.

    The weights are one model.safetensors or shards with their index. ``architecture`` has the projections that the
    card's targets name. The first of ``stop_tokens`` ends a turn in the template; all of them end a reply. ``control``
    are the tokens that no text may spell, ``bos`` and ``eos`` what the template calls ``bos_token`` and ``eos_token``:
    see ``template.chat_text``.
    """

    card: ModelCard
    digest: str
    folder: Path
    template: str
    architecture: Architecture
    stop_tokens: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    bos: str = ""
    eos: str = ""
