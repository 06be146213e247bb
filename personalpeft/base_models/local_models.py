"""Understand a model that lies on this machine, and propose a card for it.

Invariant: there is a card only for weights that can be a base, and it names their digest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from personalpeft.arguments import check_path
from personalpeft.base_models.chat_template import (
    end_of_turn,
    find_tool_format,
    render_chat,
    shows_messages,
)
from personalpeft.base_models.digest_cache import sealed_digest
from personalpeft.base_models.files import (
    FRESH_COPY,
    folder_files,
    head_sizes,
    read_json,
    source_digest,
    weights_of,
)
from personalpeft.base_models.gguf.describe import GgufFacts, describe_gguf
from personalpeft.base_models.inspect import ModelFacts, inspect_model
from personalpeft.base_models.mapped_weights import MAPPED_FORMATS, bytes_to_load
from personalpeft.base_models.registry import USUAL_TARGETS, all_cards, card_name, find_card
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base, ModelCard, Source, usable_sampling
from personalpeft.errors import CardError, InvalidInput, NotFound, PersonalPeftError, WeightsError
from personalpeft.sandbox import Limits, run_reader
from personalpeft.settings import WeightsMode
from personalpeft.types import Architecture, Message, Progress, Sampling, ToolFormat

# A longer context takes more memory than most machines have.
_CONTEXT = 32768
_SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512}
# Billions of parameters, and the rate of styles for each (docs/how-to/own-base.md).
_SIZES = (0.135, 0.5, 1.7, 7.0)
_RATES = (4e-4, 2e-4, 2e-4, 1e-4)
_SHORTEST = (Message("user", "?"),)
_NO_TEMPLATE = (
    "It was not trained to chat, or the template was left out. Give one: "
    "--chat-template FILE, with the Jinja text of a model of the same family."
)
# Of processor time. The templates of all shipped cards take 15 ms at most.
_TEMPLATE_SECONDS = 5
_OTHER_TEMPLATE = "Give another with --chat-template FILE."
_HALF = 2  # Bytes of a number in bfloat16.
_USUAL_LENGTH = 8192
_TOKEN = 5500  # Bytes that making a tokenizer takes for each token, as measured.
_OVERHEAD = 1 << 29  # Of the program and its libraries.


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What was understood of a model, and a card for it."""

    card: ModelCard
    architecture: str
    parameters: int
    tokens: int  # of the vocabulary, where it has to be unpacked
    quantisation: str
    size: int  # of the files, in bytes
    trained_context: int
    has_template: bool  # of its own
    kv_bytes: int  # of a token's keys and values
    is_mappable: bool  # whether torch reads the weights as the file stores them

    def memory(self, backend: str, weights: WeightsMode, free: int) -> int:
        """Return about how many bytes of memory the first opening takes on a processor.

        Args:
            backend: The backend that serves.
            weights: Where torch keeps the weights.
            free: The bytes that are free. Torch leaves weights in their file where these are few.
        """
        unpacking = _TOKEN * self.tokens
        cache = self.kv_bytes * min(self.card.context, _USUAL_LENGTH)
        loads = weights == "loaded" or not self.is_mappable
        if weights == "auto":
            loads |= free >= bytes_to_load(self.parameters, _HALF)
        # Torch reads loaded weights from a file into the order of its kernels.
        loaded = 2 * _HALF * self.parameters if loads else self.size
        needed = {"torch": loaded, "llamacpp": self.size}.get(backend, 0)
        return _OVERHEAD + max(unpacking, needed + cache if needed else 0)

    def disk(self, backend: str) -> int:
        """Return about how many bytes of the cache the first opening with a backend takes."""
        unpacks = backend == "torch" and self.card.source.kind == "gguf"
        return _HALF * self.parameters if unpacks else 0


def inspect_local_model(
    path: Path,
    *,
    cache: Path,
    name: str | None = None,
    template: str | None = None,
    taken: Sequence[Path] = (),
    progress: Progress = lambda stage, done: None,
) -> LocalModel:
    """Return what a GGUF file or a folder holds, with a card that is not written yet.

    Args:
        path: A GGUF file, or a folder with one or with a model in Hugging Face format.
        cache: The folder of seals, so that the weights are hashed once.
        name: The card's name. By default it comes from the model's own.
        template: A chat template to use in place of the model's own.
        taken: Folders with the user's cards, whose names are taken.
        progress: Called with a stage and the share of it that is done, 0 to 1.

    Raises:
        NotFound: There is no model.
        WeightsError: The model cannot be a base.
        CardError: The model has no template that works, its context holds no prompt, or the name
            is taken.
    """
    path = check_path("path", path)
    cards = all_cards(taken)
    try:
        file = _file_of(path)
        model, facts = _from_folder(path) if file is None else _from_gguf(file, cards)
    except PersonalPeftError:
        raise
    except OSError as error:
        raise WeightsError(
            f"{path}: cannot be read: {error.strerror or error}.",
            hint="Check the path and the permissions of its folders.",
        ) from error
    card = model.card
    chosen = template or card.template or facts.template
    if chosen is None:
        raise CardError(f"{path}: has no chat template.", hint=_NO_TEMPLATE)
    progress("Trying the chat template", 0.0)
    limits = Limits.for_files(len(chosen), memory_factor=64, bytes_a_second=1 << 20)
    found = run_reader(
        f"{__name__}:check_template",
        {
            "template": chosen,
            "control": (*facts.control, *card.stop_tokens),
            "bos": facts.bos,
            "eos": facts.eos,
            "system": card.system,
        },
        replace(limits, seconds=_TEMPLATE_SECONDS),
        source=f"{path}: its chat template cannot be used",
        error=CardError,
        hint=_OTHER_TEMPLATE,
    )
    names = {card.name for card in cards}
    if name is not None and card_name(name) != name:
        raise CardError(
            f"A name must be 1 to 64 of a-z, 0-9, '.', '_' and '-', got {name!a:.80}.",
            hint=f"Choose another, such as: --name {card_name(name) or 'my-model'}",
        )
    if name in names:
        raise CardError(
            f"There is a base called {name} already.", hint="Choose another: --name NAME"
        )

    def hash_weights(files: Sequence[Path]) -> str:
        return sealed_digest(files, cache, partial(progress, f"Reading {files[0].name:.40}"))

    card = replace(
        card,
        name=name or _free_name(model, path, names),
        source=replace(card.source, digest=f"sha256:{source_digest(card, hash_weights)}"),
        template=chosen if chosen != facts.template else None,
        tool_format=ToolFormat(found["tool_format"]),
        sampling=replace(
            card.sampling, max_tokens=min(card.sampling.max_tokens, max(1, card.context // 2))
        ),
    )
    # A token has one byte or more, so most models need no tokenizer for this.
    if card.context <= int(found["prompt_bytes"]) + 1:
        _check_context(path, card, cache)
    return replace(model, card=card)


def _check_context(path: Path, card: ModelCard, cache: Path) -> None:
    """Raise ``CardError`` unless the context holds the shortest prompt, and a token of a reply."""
    from tokenizers import Tokenizer

    base = resolve_base(card, cache=cache)
    tokenizer = Tokenizer.from_file(str(base.folder / "tokenizer.json"))
    prompt = render_chat(base, _SHORTEST)
    needed = len(tokenizer.encode(prompt, add_special_tokens=False).ids) + 1
    if card.context < needed:
        raise CardError(
            f"{path}: its context must be at least {needed} tokens, those of the shortest prompt "
            f"of its chat template and one of a reply, got {card.context}.",
            hint="Give a shorter template with --chat-template FILE, or another model.",
        )


def _file_of(path: Path) -> Path | None:
    """Return the GGUF file that a path names, or None for a folder in Hugging Face format."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise NotFound(
            f"There is nothing at {path}.",
            hint="Give a GGUF file or a folder. Without a path, `personalpeft models add` lists "
            "those it finds.",
        )
    if (path / "config.json").is_file():
        return None
    files = sorted(each for each in path.iterdir() if each.suffix.lower() == ".gguf")
    models = [each for each in files if "mmproj" not in each.name.lower()]
    if len(models) != 1:
        raise NotFound(
            f"{path} has no config.json, and {len(models)} GGUF files of models.",
            hint="Give a GGUF file, or a folder with config.json and safetensors.",
        )
    return models[0]


def check_gguf_base(path: str) -> Mapping[str, str]:
    """Describe a GGUF file in a child of ``sandbox``, and return the digest of its header."""
    return {path: describe_gguf(Path(path)).header}


def _from_gguf(file: Path, cards: Sequence[ModelCard]) -> tuple[LocalModel, GgufFacts]:
    digests = run_reader(
        f"{__name__}:check_gguf_base",
        {"path": str(file)},
        # The file is mapped, and its header alone is read.
        Limits.for_files(file.stat().st_size, memory_factor=1, bytes_a_second=1 << 40),
        source=str(file),
        error=WeightsError,
    )
    facts = describe_gguf(file)
    if digests.get(str(file)) != facts.header:
        raise WeightsError(f"{file}: changed while it was read.", hint="Add it again.")
    like = _same_model(facts, cards)
    card = ModelCard(
        name="new",
        title=facts.title or file.stem,
        licence=facts.licence if facts.licence != "unknown" or not like else like.licence,
        source=Source("gguf", path=file),
        targets=USUAL_TARGETS,
        context=min(facts.context, _CONTEXT),
        template=like.template if like else None,
        system=like.system if like else None,
        stop_tokens=facts.stop_tokens,
        sampling=like.sampling if like else Sampling(**{**_SAMPLING, **facts.sampling}),
        learning=like.learning if like else recipe(facts.parameters),
        note=f"{facts.quantisation} weights, {facts.parameters / 1e9:.2f}B parameters.",
    )
    model = LocalModel(
        card=card,
        architecture=facts.architecture,
        parameters=facts.parameters,
        tokens=facts.tokens,
        quantisation=facts.quantisation,
        size=facts.size,
        trained_context=facts.context,
        has_template=facts.template is not None,
        kv_bytes=facts.kv_bytes,
        is_mappable=facts.formats <= set(MAPPED_FORMATS),
    )
    return model, facts


def _from_folder(folder: Path) -> tuple[LocalModel, ModelFacts]:
    card = find_card(folder)
    files = folder_files(card, folder)
    facts = inspect_model(folder)
    _check_shapes(folder, facts.architecture)
    layers = {path.rpartition(".")[2] for path in facts.architecture.projections}
    targets = tuple(name for name in (*USUAL_TARGETS, "qkv_proj", "gate_up_proj") if name in layers)
    if not targets:
        raise WeightsError(
            f"{folder}: none of its linear layers is known.",
            hint=f"Write a card whose target_modules name some of {', '.join(sorted(layers))}.",
        )
    config = read_json(folder / "config.json")
    size = sum(path.stat().st_size for name, path in files.items() if name.endswith("tensors"))
    width = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else _HALF
    text: Mapping[str, Any] = config.get("text_config") or config
    _, kv_heads, head_dim = head_sizes({"num_attention_heads": 1, "hidden_size": 0, **text})
    settings = folder / "generation_config.json"
    makers = read_json(settings) if settings.is_file() else {}
    model = LocalModel(
        card=replace(
            card,
            targets=targets,
            context=min(card.context, _CONTEXT),
            stop_tokens=facts.stops,
            sampling=Sampling(**{**_SAMPLING, **usable_sampling(makers)}),
            learning=recipe(size // width),
        ),
        architecture=facts.architecture.model_type,
        parameters=size // width,
        tokens=0,
        quantisation="F32" if width > _HALF else "BF16",
        size=size,
        trained_context=card.context,
        has_template=facts.template is not None,
        kv_bytes=2 * 2 * facts.architecture.blocks * kv_heads * head_dim,
        is_mappable=True,
    )
    return model, facts


def _check_shapes(folder: Path, architecture: Architecture) -> None:
    """Check that the files of weights are whole, and that their linear layers fit the config.

    Layers are not judged that transformers renames when it loads them.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(folder)}
    for projection, (inputs, outputs) in architecture.projections.items():
        for block in range(architecture.blocks):
            name = f"{architecture.block_path}.{block}.{projection}.weight"
            if shapes.get(name, (outputs, inputs)) != (outputs, inputs):
                raise WeightsError(
                    f"{name} in {folder} must be {(outputs, inputs)} by its config.json, "
                    f"got {shapes[name]}.",
                    hint=FRESH_COPY,
                )


def recipe(parameters: int) -> dict[str, Any]:
    """Return the learning rates for a size. Rates between the measured sizes are interpolated."""
    billions = parameters / 1e9
    if billions < _SIZES[0] * 1.2:
        return {}  # The defaults were measured there.
    rate = math.exp(np.interp(math.log(billions), np.log(_SIZES), np.log(_RATES)))
    rounded = float(f"{rate:.2g}")
    return {"learning_rate": rounded, "memory": {"learning_rate": 2 * rounded}}


def check_template(
    template: str, control: Sequence[str], bos: str, eos: str, system: str | None = None
) -> Mapping[str, str]:
    """Try a chat template in a child of ``sandbox``, since it may never end.

    Args:
        template: The chat template, in Jinja.
        control: The control tokens of the base.
        bos: The text of its beginning of a sequence.
        eos: The text of its end of a sequence.
        system: The card's system message.

    Returns:
        ``tool_format``: How it shows tool calls.
        ``prompt_bytes``: The size of the shortest prompt.

    Raises:
        CardError: It does not work, or leaves messages out.
    """
    card = ModelCard("new", "", "", Source("folder"), targets=(), context=1, system=system)
    base = Base(
        card,
        digest="",
        folder=Path(),
        cache=Path(),
        template=template,
        architecture=Architecture("", "", 1),
        control=tuple(dict.fromkeys(control)),
        bos=bos,
        eos=eos,
    )
    try:
        end_of_turn(base)
    except InvalidInput as error:
        raise CardError(
            f"The chat template cannot be used: {error.message}", hint=_OTHER_TEMPLATE
        ) from error
    if not shows_messages(base):
        raise CardError("The chat template leaves messages out.", hint=_OTHER_TEMPLATE)
    prompt = render_chat(base, _SHORTEST)
    return {"tool_format": find_tool_format(base), "prompt_bytes": str(len(prompt.encode()))}


def _same_model(facts: GgufFacts, cards: Sequence[ModelCard]) -> ModelCard | None:
    """Return the card of the same model from elsewhere, by its title."""
    name = re.sub("[^a-z0-9]", "", facts.title.lower())
    titles = {
        re.sub("[^a-z0-9]", "", card.title.lower()): card
        for card in cards
        if card.source.kind == "hub"
    }
    return titles.get(name) or titles.get(name.removesuffix("instruct"))


def _free_name(model: LocalModel, path: Path, names: set[str]) -> str:
    """Return a name from the model's own that no card has."""
    own = card_name(model.card.title) or card_name(path.stem) or "model"
    longer = f"{own[:48]}-{card_name(model.quantisation)}"
    numbered = (f"{longer}-{number}" for number in count(2))
    return next(name for name in chain((own, longer), numbered) if name not in names)
