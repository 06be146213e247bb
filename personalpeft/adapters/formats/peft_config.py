"""What an ``adapter_config.json`` says, where it describes a LoRA that adds ``scaling * B @ A`` and nothing else.

Invariant: an option that could change what the adapter computes is either understood here or, if set, refused by name; so an
option that a later PEFT invents is refused too, and not ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.adapters.manifest import RANK_LIMIT
from personalpeft.adapters.safe_io import format_error, parse_json, safe_repr

_PLAIN_ONLY = "Only plain LoRA and rsLoRA of one rank on the projections of every block are taken; train it again as such."

# How a refused option is called, for those that people really use.
_CALLED = {
    "use_dora": "DoRA (use_dora)",
    "modules_to_save": "whole trained modules (modules_to_save)",
    "rank_pattern": "ranks that differ between modules (rank_pattern)",
    "alpha_pattern": "scalings that differ between modules (alpha_pattern)",
    "lora_bias": "a bias in LoRA's B (lora_bias)",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "target_parameters": "adapted bare parameters (target_parameters)",
    "layer_replication": "replicated blocks (layer_replication)",
    "alora_invocation_tokens": "an adapter that waits for certain tokens (alora_invocation_tokens)",
}

# Read below, or without effect on what a trained adapter computes. Which modules it touches is seen from its tensors.
_HARMLESS = frozenset(
    {
        *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"),
        *(
            "base_model_name_or_path",
            "revision",
            "peft_version",
            "auto_mapping",
            "inference_mode",
            "lora_dropout",
        ),
        *(
            "target_modules",
            "exclude_modules",
            "layers_to_transform",
            "layers_pattern",
            "ensure_weight_tying",
        ),
        *(
            "fan_in_fan_out",
            "loftq_config",
            "eva_config",
            "corda_config",
            "lora_ga_config",
            "qalora_group_size",
        ),
        *("megatron_core", "runtime_config"),
    }
)

# The other ways to begin (PiSSA, OLoRA, LoftQ, CorDA, LoRA-GA) change the base's weights, which the adapter then needs changed.
_INITS_THAT_KEEP_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The two numbers that count, and the name of the base as the file gives it."""

    rank: int
    scaling: float
    base_name: str


def read_config(data: bytes, *, source: str) -> PeftConfig:
    """The config in a file's bytes. Raises ``AdapterError`` naming ``source`` and the option that cannot be taken."""
    config = parse_json(data, source=source, what="the config")
    if not isinstance(config, dict):
        raise format_error(source, "the config is not a JSON object.")
    _check_kind(config, source)
    for key, value in config.items():
        if key not in _HARMLESS and value not in (None, False, [], {}, ""):
            raise format_error(
                source, f"uses {_CALLED.get(key, safe_repr(key))}.", hint=_PLAIN_ONLY
            )
    rank, alpha, rooted = config.get("r"), config.get("lora_alpha"), config.get("use_rslora", False)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= RANK_LIMIT:
        raise format_error(
            source, f"r is {safe_repr(rank)}.", hint=f"Ranks go from 1 to {RANK_LIMIT}."
        )
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < 1e30:
        raise format_error(
            source, f"lora_alpha is {safe_repr(alpha)}.", hint="lora_alpha is a number above 0."
        )
    if not isinstance(rooted, bool):
        raise format_error(source, f"use_rslora is {safe_repr(rooted)}, neither true nor false.")
    return PeftConfig(
        rank,
        alpha / (math.sqrt(rank) if rooted else rank),
        str(config.get("base_model_name_or_path") or ""),
    )


def build_config(
    *, rank: int, scaling: float, targets: Sequence[str], base_name: str
) -> dict[str, Any]:
    """The config of a LoRA, as PEFT reads it."""
    alpha = scaling * rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _check_kind(config: dict[str, Any], source: str) -> None:
    if config.get("peft_type") != "LORA":
        raise format_error(
            source,
            f"is of the type {safe_repr(config.get('peft_type'))}, not LORA.",
            hint=_PLAIN_ONLY,
        )
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        hint = "Only adapters of models that write text (CAUSAL_LM) are taken."
        raise format_error(
            source, f"is made for the task {safe_repr(config['task_type'])}.", hint=hint
        )
    if config.get("bias", "none") != "none":
        raise format_error(
            source,
            f"trained biases as well (bias is {safe_repr(config['bias'])}).",
            hint=_PLAIN_ONLY,
        )
    init = config.get("init_lora_weights")
    if not any(init is known or init == known for known in _INITS_THAT_KEEP_THE_BASE):
        hint = "Save it with PEFT's path_initial_model_for_weight_conversion, which turns it into plain LoRA."
        raise format_error(
            source, f"began as {safe_repr(init)}, which changes the base's own weights.", hint=hint
        )
