"""Read and write ``adapter_config.json`` through ``peft.LoraConfig``.

Invariant: an option that changes what the adapter computes is represented here or refused by name.
So an option of a later PEFT is refused as well, and not ignored.

Importing PEFT loads torch, so it happens in the functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from personalpeft.adapters.manifest import RANK_LIMIT
from personalpeft.adapters.safe_io import format_error, parse_json, safe_repr

if TYPE_CHECKING:
    from peft import LoraConfig

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
    [
        "peft_type",
        "task_type",
        "bias",
        "init_lora_weights",
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
    ]
)
# What a trained adapter computes does not depend on these. Its tensors name the adapted modules.
_WITHOUT_EFFECT = frozenset(
    [
        "revision",
        "peft_version",
        "auto_mapping",
        "inference_mode",
        "lora_dropout",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "ensure_weight_tying",
        "fan_in_fan_out",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "megatron_core",
        "runtime_config",
    ]
)
_WRITTEN = [
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "inference_mode",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "bias",
    "fan_in_fan_out",
    "use_rslora",
    "use_dora",
    "modules_to_save",
]
# PiSSA, OLoRA, LoftQ, CorDA and LoRA-GA change the weights of the base that the adapter belongs to.
_INITS_THAT_KEEP_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")

# PEFT reads the keys of patterns as regular expressions. Names alone cannot take exponential time.
_MODULE_NAME = re.compile(r"[A-Za-z0-9_.]{1,256}")


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
    """Read the bytes of an ``adapter_config.json``.

    Raises:
        AdapterError: The file is damaged, or has an option that cannot be represented.
    """
    from peft import LoraConfig

    config = parse_json(data, source=source, what="the config")
    if not isinstance(config, dict):
        raise format_error(source, "the config is not a JSON object.")
    _check_kind(config, source)
    for key, value in config.items():
        known = key in _READ or key in _WITHOUT_EFFECT
        if not known and value not in (None, False, [], {}, ""):
            raise format_error(source, f"uses {_NAMES.get(key, safe_repr(key))}.", hint=_PLAIN_ONLY)
    use_rslora = config.get("use_rslora", False)
    if not isinstance(use_rslora, bool):
        raise format_error(
            source, f"use_rslora must be true or false, got {safe_repr(use_rslora)}."
        )
    _check_rank("r", config.get("r"), source)
    _check_alpha("lora_alpha", config.get("lora_alpha"), source)
    patterns: dict[str, Any] = {}
    for key, check in (("rank_pattern", _check_rank), ("alpha_pattern", _check_alpha)):
        patterns[key] = config.get(key) or {}
        if not isinstance(patterns[key], dict):
            raise format_error(source, f"{key} must be an object, got {safe_repr(patterns[key])}.")
        for name, value in patterns[key].items():
            if _MODULE_NAME.fullmatch(name) is None:
                raise format_error(
                    source,
                    f"{key} has the regular expression {safe_repr(name)}.",
                    hint="Name modules in full or by their last part, such as self_attn.q_proj.",
                )
            check(f"{key} of {name}", value, source)
    return AdapterConfig(
        LoraConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(config.get("base_model_name_or_path") or ""),
            r=config["r"],
            lora_alpha=config["lora_alpha"],
            use_rslora=use_rslora,
            **patterns,
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


def _check_rank(name: str, value: Any, source: str) -> None:
    if type(value) is not int or not 1 <= value <= RANK_LIMIT:
        raise format_error(
            source, f"{name} is {safe_repr(value)}.", hint=f"Ranks go from 1 to {RANK_LIMIT}."
        )


def _check_alpha(name: str, value: Any, source: str) -> None:
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise format_error(source, f"{name} is {safe_repr(value)}.", hint="Give a number above 0.")


def _check_kind(config: dict[str, Any], source: str) -> None:
    if config.get("peft_type") != "LORA":
        raise format_error(
            source,
            f"peft_type must be LORA, got {safe_repr(config.get('peft_type'))}.",
            hint=_PLAIN_ONLY,
        )
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise format_error(
            source,
            f"task_type must be CAUSAL_LM, got {safe_repr(config['task_type'])}.",
            hint="Only adapters of language models can be imported.",
        )
    if config.get("bias", "none") != "none":
        raise format_error(
            source, f"bias must be none, got {safe_repr(config['bias'])}.", hint=_PLAIN_ONLY
        )
    init = config.get("init_lora_weights")
    if not any(init is known or init == known for known in _INITS_THAT_KEEP_THE_BASE):
        raise format_error(
            source,
            f"init_lora_weights is {safe_repr(init)}, which changes the weights of the base.",
            hint="Save it with PEFT's path_initial_model_for_weight_conversion as plain LoRA.",
        )
