"""Understand a model that lies on this machine, and propose a card for it.

Invariant: there is a card only for weights that can be a base, and it names their digest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from personalpeft.base_models.chat_template import end_of_turn, find_tool_format, shows_messages
from personalpeft.base_models.digest_cache import sealed_digest
from personalpeft.base_models.files import folder_files, read_json, source_digest
from personalpeft.base_models.gguf.describe import GgufFacts, describe_gguf
from personalpeft.base_models.inspect import inspect_model
from personalpeft.base_models.mapped_weights import MAPPED_FORMATS, bytes_to_load
from personalpeft.base_models.registry import USUAL_TARGETS, all_cards, card_name, find_card
from personalpeft.base_models.types import Base, ModelCard, Source, usable_sampling
from personalpeft.errors import CardError, InvalidInput, NotFound, WeightsError
from personalpeft.sandbox import Limits, run_reader
from personalpeft.settings import WeightsMode
from personalpeft.types import Architecture, Json, Progress, Sampling, ToolFormat

# A longer context takes more memory than most machines have.
_CONTEXT = 32768
_SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512}
# Billions of parameters and the rate of styles (docs/reference/cards.md).
_RATES = ((0.135, 4e-4), (0.5, 2e-4), (1.7, 2e-4), (7.0, 1e-4))
_NO_TEMPLATE = (
    "It was not trained to chat, or the template was left out. Give one: "
    "--chat-template FILE, with the Jinja text of a model of the same family."
)
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
        CardError: The model has no template that works, or the name is taken.
    """
    path = path.expanduser().absolute()
    cards = all_cards(taken)
    file = _file_of(path)
    model = _from_folder(path, template) if file is None else _from_gguf(file, template, cards)
    if name is not None and card_name(name) != name:
        raise CardError(
            f"A name must be 1 to 64 of a-z, 0-9, '.', '_' and '-', got {name!a:.80}.",
            hint=f"Choose another, such as: --name {card_name(name) or 'my-model'}",
        )
    names = {card.name for card in cards}
    if name in names:
        raise CardError(
            f"There is a base called {name} already.", hint="Choose another: --name NAME"
        )
    chosen = name or _free_name(model, path, names)
    digest = _digest(model.card, cache, progress)
    card = replace(model.card, name=chosen, source=replace(model.card.source, digest=digest))
    if template is not None:
        card = replace(card, template=template)
    return replace(model, card=card)


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
        if models:
            raise NotFound(
                f"There are {len(models)} GGUF files in {path}.",
                hint=f"Give one of them: {models[0]}",
            )
        raise NotFound(
            f"There is no model in {path}.",
            hint="Give a GGUF file, or a folder with config.json and safetensors.",
        )
    return models[0]


def check_gguf_base(path: str, template: str | None) -> Mapping[str, str]:
    """Describe a GGUF file in a child of ``sandbox``, and return the digest of its header.

    The child also runs the chat template, which may never end.
    """
    facts = describe_gguf(Path(path))
    # A template that only fails is replaced by that of a known card, or is refused outside.
    with suppress(CardError):
        _propose_card(Path(path), facts, template, ())
    return {path: facts.header}


def _from_gguf(file: Path, template: str | None, cards: Sequence[ModelCard]) -> LocalModel:
    size = file.stat().st_size
    digests = run_reader(
        f"{__name__}:check_gguf_base",
        {"path": str(file), "template": template},
        # The file is mapped, and its header alone is read.
        Limits.for_files(size, memory_factor=1, bytes_a_second=1 << 40),
        source=str(file),
        error=WeightsError,
    )
    facts = describe_gguf(file)
    if digests.get(str(file)) != facts.header:
        raise WeightsError(f"{file}: changed while it was read.", hint="Add it again.")
    return _propose_card(file, facts, template, cards)


def _propose_card(
    file: Path, facts: GgufFacts, template: str | None, cards: Sequence[ModelCard]
) -> LocalModel:
    like = _same_model(facts, cards)
    text = template or (like.template if like else None) or facts.template
    if text is None:
        raise CardError(f"{file}: has no chat template.", hint=_NO_TEMPLATE)
    sampling: dict[str, Any] = {**_SAMPLING, **facts.sampling}
    title = facts.title or file.stem
    card = ModelCard(
        name="new",
        title=title,
        licence=facts.licence if facts.licence != "unknown" or not like else like.licence,
        source=Source("gguf", path=file),
        targets=USUAL_TARGETS,
        context=min(facts.context, _CONTEXT),
        template=text if text != facts.template else None,
        system=like.system if like else None,
        stop_tokens=facts.stop_tokens,
        sampling=like.sampling if like else Sampling(**sampling),
        learning=like.learning if like else recipe(facts.parameters),
        note=f"{facts.quantisation} weights, {facts.parameters / 1e9:.2f}B parameters.",
    )
    control = tuple(dict.fromkeys((*facts.control, *facts.stop_tokens)))
    tool_format = _check_template(card, text, control, facts.bos, facts.eos, file)
    return LocalModel(
        card=replace(card, tool_format=tool_format),
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


def _from_folder(folder: Path, template: str | None) -> LocalModel:
    card = replace(find_card(folder), name="new")
    files = folder_files(card, folder)
    facts = inspect_model(folder)
    config = read_json(folder / "config.json")
    chosen = template or facts.template
    if chosen is None:
        raise CardError(f"{folder}: has no chat template.", hint=_NO_TEMPLATE)
    layers = {path.rpartition(".")[2] for path in facts.architecture.projections}
    targets = tuple(name for name in (*USUAL_TARGETS, "qkv_proj", "gate_up_proj") if name in layers)
    if not targets:
        raise WeightsError(
            f"{folder}: none of its linear layers is known.",
            hint=f"Write a card whose target_modules name some of {', '.join(sorted(layers))}.",
        )
    size = sum(path.stat().st_size for name, path in files.items() if name.endswith("tensors"))
    width = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else _HALF
    text: Mapping[str, Any] = config.get("text_config") or config
    heads = int(text.get("num_attention_heads") or 1)
    head_dim = int(text.get("head_dim") or int(text.get("hidden_size") or heads) // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    trained = card.context
    settings = folder / "generation_config.json"
    makers = read_json(settings) if settings.is_file() else {}
    card = replace(
        card,
        targets=targets,
        context=min(trained, _CONTEXT),
        stop_tokens=tuple(facts.stops),
        sampling=Sampling(**{**_SAMPLING, **usable_sampling(makers)}),
        learning=recipe(size // width),
    )
    run_reader(
        f"{__name__}:run_template",
        {"template": chosen, "control": facts.control, "bos": facts.bos, "eos": facts.eos},
        Limits.for_files(len(chosen), memory_factor=64, bytes_a_second=1 << 20),
        source=f"{folder}: its chat template cannot be used",
        error=CardError,
    )
    tool_format = _check_template(card, chosen, facts.control, facts.bos, facts.eos, folder)
    return LocalModel(
        card=replace(card, tool_format=tool_format),
        architecture=facts.architecture.model_type,
        parameters=size // width,
        tokens=0,
        quantisation="F32" if width > _HALF else "BF16",
        size=size,
        trained_context=trained,
        has_template=facts.template is not None,
        kv_bytes=2 * 2 * facts.architecture.blocks * kv_heads * head_dim,
        is_mappable=True,
    )


def run_template(template: str, control: Sequence[str], bos: str, eos: str) -> Json:
    """Run a chat template in a child of ``sandbox``, since it may never end.

    A template that only fails is refused outside, with the name of its folder.

    Args:
        template: The chat template, in Jinja.
        control: The control tokens of the base.
        bos: The text of its beginning of a sequence.
        eos: The text of its end of a sequence.
    """
    card = ModelCard("new", "", "", Source("folder"), targets=(), context=1)
    with suppress(CardError):
        _check_template(card, template, tuple(control), bos, eos, Path())
    return {}


def recipe(parameters: int) -> dict[str, Any]:
    """Return the learning rates for a size. Rates between the measured sizes are interpolated."""
    billions = parameters / 1e9
    if billions < _RATES[0][0] * 1.2:
        return {}  # The defaults were measured there.
    rate = _RATES[-1][1]
    for (small, high), (large, low) in pairwise(_RATES):
        if billions <= large:
            share = math.log(billions / small) / math.log(large / small)
            rate = high * (low / high) ** max(0.0, share)
            break
    rounded = float(f"{rate:.2g}")
    return {"learning_rate": rounded, "memory": {"learning_rate": 2 * rounded}}


_OTHER_TEMPLATE = "Give another with --chat-template FILE."


def _check_template(
    card: ModelCard, template: str, control: tuple[str, ...], bos: str, eos: str, where: Path
) -> ToolFormat:
    """Return how a template shows tool calls. Raise ``CardError`` if it does not work."""
    architecture = Architecture("", "", 1, {})
    base = Base(card, "", Path(), Path(), template, architecture, control=control, bos=bos, eos=eos)
    try:
        end_of_turn(base)
    except InvalidInput as error:
        raise CardError(
            f"{where}: its chat template cannot be used: {error.message}", hint=_OTHER_TEMPLATE
        ) from error
    if not shows_messages(base):
        raise CardError(f"{where}: its chat template leaves messages out.", hint=_OTHER_TEMPLATE)
    return find_tool_format(base)


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
    numbered = (f"{longer}-{number}" for number in range(2, len(names) + 3))
    return next(name for name in (own, longer, *numbered) if name not in names)


def _digest(card: ModelCard, cache: Path, progress: Progress) -> str:
    def read(files: Sequence[Path]) -> str:
        stage = f"Reading {files[0].name:.40}"
        return sealed_digest(files, cache, lambda done: progress(stage, done))

    return f"sha256:{source_digest(card, read)}"
