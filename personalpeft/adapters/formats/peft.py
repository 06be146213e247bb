"""Export and import PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

``personalpeft.json`` beside them holds the provenance, tied to the tensors by their SHA-256.

Invariants: an exported folder appears complete or not at all. PEFT computes from it what this
package computes from the adapter. An import reads everything that the folder holds or nothing, and
never a pickle. An option of the config that changes what the adapter computes is represented here
or refused by name, also one of a later PEFT.

Importing PEFT loads torch, so it happens in the functions.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from safetensors.numpy import save

from personalpeft.adapters.compose import compose, concatenate
from personalpeft.adapters.formats.safetensors_reader import read_tensors
from personalpeft.adapters.manifest import (
    FORMAT,
    RANK_LIMIT,
    canonical_manifest,
    check_format,
    manifest_from_json,
)
from personalpeft.adapters.safe_io import (
    format_error,
    parse_object,
    read_file,
    safe_repr,
    write_folder_atomically,
)
from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest, Matrix
from personalpeft.adapters.validate import check_adapter, projection_size, shorten
from personalpeft.errors import InvalidInput
from personalpeft.ids import check_layer_name
from personalpeft.types import Architecture, canonical_digest, canonical_json

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PROVENANCE_FILE = "personalpeft.json"
PICKLE_FILE = "adapter_model.bin"

_CONFIG_LIMIT = 2**20
_PROVENANCE_LIMIT = 2**24
_PREFIX = "base_model.model"
_HALF = re.compile(rf"{re.escape(_PREFIX)}\.(.+)\.lora_[AB]\.weight")

_PLAIN_ONLY = "Only plain LoRA and rsLoRA can be imported; train it again as such."

_NAMES = {
    "use_dora": "DoRA (use_dora)",
    "modules_to_save": "whole trained modules (modules_to_save)",
    "lora_bias": "a bias in LoRA's B (lora_bias)",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "target_parameters": "adapted bare parameters (target_parameters)",
    "layer_replication": "replicated blocks (layer_replication)",
    "alora_invocation_tokens": "an adapter for certain tokens (alora_invocation_tokens)",
}

_READ = frozenset(
    re.findall(
        r"\w+",
        """
        peft_type task_type bias init_lora_weights base_model_name_or_path r lora_alpha use_rslora
        rank_pattern alpha_pattern
        """,
    )
)
# What a trained adapter computes does not depend on these. Its tensors name the adapted modules.
_WITHOUT_EFFECT = frozenset(
    re.findall(
        r"\w+",
        """
        revision peft_version auto_mapping inference_mode lora_dropout target_modules
        exclude_modules layers_to_transform layers_pattern ensure_weight_tying fan_in_fan_out
        loftq_config eva_config corda_config lora_ga_config qalora_group_size megatron_core
        runtime_config
        """,
    )
)
_WRITTEN = re.findall(
    r"\w+",
    """
    peft_type task_type base_model_name_or_path inference_mode r lora_alpha lora_dropout
    target_modules bias fan_in_fan_out use_rslora use_dora modules_to_save
    """,
)
_RANK_HINT = f"Ranks go from 1 to {RANK_LIMIT}."
_HINTS = {
    "task_type": "Only adapters of language models can be imported.",
    "init_lora_weights": "It changes the weights of the base. Save the adapter with PEFT's "
    "path_initial_model_for_weight_conversion as plain LoRA.",
    "r": _RANK_HINT,
    "rank_pattern": _RANK_HINT,
    "lora_alpha": "Give a number above 0.",
    "alpha_pattern": "Give numbers above 0.",
    "use_rslora": "Give true or false.",
    "pattern_key": "Name modules in full or by their last part, such as self_attn.q_proj.",
}

# PEFT reads the keys of patterns as regular expressions. Names alone cannot take exponential time.
_ModuleName: TypeAlias = Annotated[str, Field(pattern="^[A-Za-z0-9_.]{1,256}$")]
_Rank: TypeAlias = Annotated[int, Field(ge=1, le=RANK_LIMIT)]
_Alpha: TypeAlias = Annotated[float, Field(gt=0, lt=1e30)]
_OrEmpty = BeforeValidator(lambda value: value or {})


class _LoraFields(BaseModel):
    """The options of a config that an import reads."""

    model_config = ConfigDict(strict=True)

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    bias: Literal["none"] = "none"
    # PiSSA, OLoRA, LoftQ, CorDA and LoRA-GA change the weights of the base.
    init_lora_weights: Literal[True, False, "gaussian", "eva", "orthogonal"] | None = None
    r: _Rank
    lora_alpha: _Alpha
    use_rslora: bool = False
    rank_pattern: Annotated[dict[_ModuleName, _Rank], _OrEmpty] = {}
    alpha_pattern: Annotated[dict[_ModuleName, _Alpha], _OrEmpty] = {}


def export_peft(
    adapter: Adapter, architecture: Architecture, folder: Path, *, base_name: str
) -> None:
    """Write one adapter as a PEFT folder; PEFT loads the base by ``base_name``."""
    source = f"layer {adapter.manifest.layer}"
    check_adapter(adapter, source=source, architecture=architecture)
    manifest = adapter.manifest
    config = build_config(
        rank=manifest.rank,
        scaling=manifest.scaling,
        targets=list(adapter.pairs),
        base_name=base_name,
    )
    about = {"manifest": canonical_manifest(manifest, source=source)}
    _write_folder(folder, config, peft_tensors(adapter.pairs, manifest.rank, architecture), about)


def export_stack_peft(
    parts: Sequence[tuple[Adapter, float]],
    architecture: Architecture,
    folder: Path,
    *,
    base_name: str,
) -> None:
    """Write a stack of (adapter, weight) as one LoRA of scaling 1; see ``export_peft``."""
    about = []
    for adapter, weight in parts:
        source = f"layer {adapter.manifest.layer}"
        check_adapter(adapter, source=source, architecture=architecture)
        if weight != 0:
            about.append(
                {
                    "manifest": canonical_manifest(adapter.manifest, source=source),
                    "weight": float(weight),
                }
            )
    whole = compose(parts)
    if whole.rank == 0:
        raise InvalidInput(
            "There is nothing to export: the stack is the bare base.",
            hint="Teach it something first.",
        )
    pairs = concatenate(whole)
    config = build_config(rank=whole.rank, scaling=1.0, targets=list(pairs), base_name=base_name)
    _write_folder(folder, config, peft_tensors(pairs, whole.rank, architecture), {"stack": about})


def import_peft(folder: Path, architecture: Architecture, *, layer: str, base: str) -> Adapter:
    """Read a PEFT folder as an adapter of ``layer`` on the base with the digest ``base``.

    LoRA and rsLoRA can be imported, also with ``rank_pattern`` and ``alpha_pattern``. A folder that
    this package exported keeps its recipe, signals and parents.
    """
    check_layer_name(layer)
    path = folder / TENSOR_FILE
    source = str(path)
    if not path.exists() and (folder / PICKLE_FILE).exists():
        raise format_error(
            str(folder / PICKLE_FILE),
            "is a pickle, which can run code.",
            hint="Load it with PEFT where you trust it, and save it as safetensors.",
        )
    config = read_config(
        read_file(folder / CONFIG_FILE, limit=_CONFIG_LIMIT), source=str(folder / CONFIG_FILE)
    )
    data = read_file(path)
    pairs = _join(read_tensors(data, source=source).arrays, config, architecture, source)
    digest = hashlib.sha256(data).hexdigest()
    manifest = _provenance(folder / PROVENANCE_FILE, digest, config, pairs, layer=layer, base=base)
    adapter = Adapter(manifest, pairs)
    check_adapter(adapter, source=source, architecture=architecture, base=base)
    return adapter


def peft_tensors(
    pairs: Mapping[str, LoRAWeights], rank: int, architecture: Architecture
) -> dict[str, Matrix]:
    """Return PEFT's tensors of each block. Smaller ranks are padded with zeros to ``rank``."""
    tensors: dict[str, Matrix] = {}
    for name, pair in pairs.items():
        padded = pair.padded(rank)
        for block in range(architecture.blocks):
            prefix = f"{_PREFIX}.{architecture.block_path}.{block}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(padded.a[block])
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(padded.b[block])
    return tensors


def _join(
    arrays: Mapping[str, Matrix], config: AdapterConfig, architecture: Architecture, source: str
) -> dict[str, LoRAWeights]:
    """Stack PEFT's tensors over the blocks, all with one rank and the scaling of the config.

    Ranks below the largest are padded with zeros. A scaling of its own is multiplied into B.
    """
    pattern = re.compile(
        re.escape(f"{_PREFIX}.{architecture.block_path}")
        + r"\.(0|[1-9][0-9]{0,5})\.(.+)\.lora_([AB])\.weight"
    )
    halves: dict[tuple[str, str], dict[int, Matrix]] = {}
    modules = {name: match[1] for name in arrays if (match := _HALF.fullmatch(name)) is not None}
    largest = max((config.rank_of(module) for module in modules.values()), default=config.lora.r)
    for name, array in arrays.items():
        match = pattern.fullmatch(name)
        if match is None:
            raise _describe_unpaired_tensor(name, architecture, source)
        block, projection, half = int(match[1]), match[2], match[3]
        inputs, outputs = projection_size(projection, architecture, source)
        if block >= architecture.blocks:
            raise format_error(
                source,
                f"adapts block {block}; the base has {architecture.blocks}.",
                hint=_ANOTHER_BASE,
            )
        rank = config.rank_of(modules[name])
        shape = (rank, inputs) if half == "A" else (outputs, rank)
        if array.shape != shape:
            raise format_error(
                source,
                f"{name} has the shape {array.shape}; it would have to be {shape}.",
                hint=_ANOTHER_BASE,
            )
        scaling = config.scaling_of(modules[name])
        if half == "B" and scaling != config.scaling:
            array = np.multiply(array, np.float32(scaling / config.scaling), dtype=np.float32)
        if rank < largest:
            padding = (0, largest - rank)
            array = np.pad(array, (padding, (0, 0)) if half == "A" else ((0, 0), padding))
        halves.setdefault((projection, half), {})[block] = array
    pairs = {}
    for projection in sorted({projection for projection, _ in halves}):
        a, b = (
            _stacked(halves.get((projection, half), {}), projection, half, architecture, source)
            for half in "AB"
        )
        pairs[projection] = LoRAWeights(a, b)
    return pairs


_ANOTHER_BASE = (
    "It was trained on another base, or its config does not belong to it. "
    "Open the base that it was trained on."
)


def _stacked(
    blocks: Mapping[int, Matrix],
    projection: str,
    half: str,
    architecture: Architecture,
    source: str,
) -> Matrix:
    missing = [block for block in range(architecture.blocks) if block not in blocks]
    if missing:
        hint = "Adapters must adapt the same projections in every block (no layers_to_transform)."
        raise format_error(
            source, f"lora_{half} of {projection} is missing in block {missing[0]}.", hint=hint
        )
    stacked = np.stack([blocks[block] for block in range(architecture.blocks)])
    stacked.flags.writeable = False
    return stacked


def _describe_unpaired_tensor(name: str, architecture: Architecture, source: str) -> Exception:
    hint = (
        "Only LoRA on the projections of the base's blocks is taken; train it again on those alone."
    )
    reasons = {
        "adapts the embeddings or the output head": "embed" in name or "lm_head" in name,
        "is DoRA": "lora_magnitude_vector" in name,
        "holds a bias": name.endswith("bias"),
    }
    for what, applies in reasons.items():
        if applies:
            return format_error(source, f"{what} ({safe_repr(name)}).", hint=hint)
    return format_error(
        source,
        f"{safe_repr(name)} is not a LoRA matrix of a projection in {architecture.block_path}.",
        hint=hint,
    )


def _provenance(
    path: Path,
    digest: str,
    config: AdapterConfig,
    pairs: Mapping[str, LoRAWeights],
    *,
    layer: str,
    base: str,
) -> Manifest:
    """Return the manifest in ``personalpeft.json``, or a new one where there is no such file."""
    origin = {"imported": "peft", "tensors": digest, "base_name": config.base_name[:200]}
    rank = next(iter(pairs.values())).a.shape[1] if pairs else config.lora.r
    new = Manifest(base, layer, rank, config.scaling, tuple(pairs), origin, canonical_digest([]))
    if not path.exists():
        return new
    source = str(path)
    about = parse_object(
        read_file(path, limit=_PROVENANCE_LIMIT), source=source, what="the provenance"
    )
    check_format(about.get("format"), source=source, what="the provenance")
    if about.get("tensors") != digest:
        hint = f"Delete {PROVENANCE_FILE} to import the folder as one of unknown origin."
        raise format_error(
            source, f"tells of other tensors than those in {TENSOR_FILE}.", hint=hint
        )
    if about.keys() == {"format", "tensors", "manifest"}:
        manifest = manifest_from_json(about["manifest"], source=source)
        if not math.isclose(manifest.scaling, config.scaling, rel_tol=1e-6):
            raise format_error(
                source, f"says scaling {manifest.scaling}, {CONFIG_FILE} says {config.scaling}."
            )
        return replace(manifest, layer=layer)
    if about.keys() == {"format", "tensors", "stack"} and isinstance(about["stack"], list):
        layers = [_stack_layer(part, base, source) for part in about["stack"]]
        signals = canonical_digest([part.signals for part in layers])
        return replace(new, recipe={**origin, "stack": about["stack"]}, signals=signals)
    raise format_error(source, f"the provenance has the keys {safe_repr(sorted(about))}.")


def _stack_layer(part: Any, base: str, source: str) -> Manifest:
    if (
        not isinstance(part, dict)
        or part.keys() != {"manifest", "weight"}
        or type(part["weight"]) not in (int, float)
    ):
        raise format_error(source, f"a layer of the stack is {safe_repr(part)}.")
    manifest = manifest_from_json(part["manifest"], source=source)
    if manifest.base != base:
        raise format_error(
            source,
            f"layer {manifest.layer} was built for base {shorten(manifest.base)}, "
            f"not for {shorten(base)}.",
            hint="Open the base it was built for.",
        )
    return manifest


def _write_folder(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, Matrix], about: Mapping[str, Any]
) -> None:
    data = save(tensors, metadata={"format": "pt"})
    provenance = {"format": FORMAT, "tensors": hashlib.sha256(data).hexdigest(), **about}
    with write_folder_atomically(folder) as new:
        (new / TENSOR_FILE).write_bytes(data)
        (new / PROVENANCE_FILE).write_text(canonical_json(provenance) + "\n", encoding="utf-8")
        (new / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The configuration of a LoRA: rank and scaling of each module."""

    lora: LoraConfig

    @property
    def base_name(self) -> str:
        return str(self.lora.base_model_name_or_path or "")

    @property
    def scaling(self) -> float:
        """The scaling of modules without a pattern."""
        return self._scale(self.lora.lora_alpha, self.lora.r)

    def rank_of(self, module: str) -> int:
        return int(self._pattern(self.lora.rank_pattern, module, self.lora.r))

    def scaling_of(self, module: str) -> float:
        """Return alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732)."""
        alpha = self._pattern(self.lora.alpha_pattern, module, self.lora.lora_alpha)
        return self._scale(alpha, self.rank_of(module))

    def _scale(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.lora.use_rslora else rank)

    @staticmethod
    def _pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
        from peft.utils.other import get_pattern_key

        patterns = patterns or {}
        return patterns.get(get_pattern_key(list(patterns), module), default)


def read_config(data: bytes, *, source: str) -> AdapterConfig:
    """Read the bytes of an ``adapter_config.json``."""
    from peft import LoraConfig

    config = parse_object(data, source=source, what="the config")
    try:
        fields = _LoraFields.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        value = None if first["type"] == "missing" else first["input"]
        path = [str(part) for part in first["loc"] if part != "[key]"]
        raise format_error(
            source,
            f"{' of '.join(path[:2])} is {safe_repr(value)}.",
            hint=_HINTS.get("pattern_key" if "[key]" in first["loc"] else path[0], _PLAIN_ONLY),
        ) from None
    for key, value in config.items():
        known = key in _READ or key in _WITHOUT_EFFECT
        if not known and value not in (None, False, [], {}, ""):
            raise format_error(source, f"uses {_NAMES.get(key, safe_repr(key))}.", hint=_PLAIN_ONLY)
    return AdapterConfig(
        LoraConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(config.get("base_model_name_or_path") or ""),
            r=fields.r,
            # Typed as int, but PEFT only divides by it.
            lora_alpha=cast(int, fields.lora_alpha),
            use_rslora=fields.use_rslora,
            rank_pattern=fields.rank_pattern,
            alpha_pattern=cast(dict[str, int], fields.alpha_pattern),
        )
    )


def build_config(
    *, rank: int, scaling: float, targets: Sequence[str], base_name: str
) -> dict[str, Any]:
    """Return the fields of ``adapter_config.json`` for a plain LoRA.

    Only fields with a meaning for a plain LoRA are written, so that the same adapter gives the same
    file with every version of PEFT.
    """
    from peft import LoraConfig

    alpha = scaling * rank
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name,
        inference_mode=True,
        r=rank,
        # Typed as int, but PEFT only divides by it.
        lora_alpha=cast(int, int(alpha) if alpha.is_integer() else alpha),
        target_modules=list(targets),
    )
    fields = config.to_dict() | {"target_modules": sorted(targets)}  # type: ignore[no-untyped-call]
    return {key: fields[key] for key in _WRITTEN}
