"""Read and write ``adapter_config.json``, PEFT's configuration of an adapter.

Invariant: an option that changes what the adapter computes is either supported or refused by name.
An unknown option, such as one of a later PEFT, is refused if it is set.

``peft.LoraConfig`` writes the file. A model of ours reads it: ``LoraConfig.from_pretrained`` takes
values of any type and range, and drops unknown options with a warning. It also loads torch and
transformers, seconds of work in each child that reads a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from personalpeft.adapters.safe_io import Fault, parse_object, safe_repr
from personalpeft.adapters.types import RANK_LIMIT

_PLAIN_ONLY = "Only plain LoRA and rsLoRA can be imported; train it again as such."
_CONVERT = (
    "It changes the weights of the base. Save the adapter with PEFT's "
    "path_initial_model_for_weight_conversion as plain LoRA."
)
# What a trained adapter computes does not depend on these. Its tensors name the adapted modules.
_WITHOUT_EFFECT = re.findall(
    r"\w+",
    """
    revision peft_version auto_mapping inference_mode lora_dropout target_modules exclude_modules
    layers_to_transform layers_pattern ensure_weight_tying fan_in_fan_out loftq_config eva_config
    corda_config lora_ga_config qalora_group_size megatron_core runtime_config
    """,
)
_WRITTEN = re.findall(
    r"\w+",
    """
    peft_type task_type base_model_name_or_path inference_mode r lora_alpha lora_dropout
    target_modules bias fan_in_fan_out use_rslora use_dora modules_to_save
    """,
)

# PEFT reads the keys of patterns as regular expressions. Names alone cannot take exponential time.
_ModuleName: TypeAlias = Annotated[str, Field(pattern="^[A-Za-z0-9_.]{1,256}$")]
_NAME_MODULES = (
    "Regular expressions are not read. Name modules or the ends of their paths, such as q_proj or "
    "layers.1.self_attn.q_proj."
)
_Rank: TypeAlias = Annotated[int, Field(ge=1, le=RANK_LIMIT)]
_Alpha: TypeAlias = Annotated[float, Field(gt=0, lt=1e30)]
_OrEmpty = BeforeValidator(lambda value: value or {})


class AdapterConfig(BaseModel):
    """The options of a LoRA that an import reads, with PEFT's names."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    bias: Literal["none"] = "none"
    # PiSSA, OLoRA, LoftQ, CorDA and LoRA-GA change the weights of the base.
    init_lora_weights: Literal[True, False, "gaussian", "eva", "orthogonal"] | None = None
    base_model_name_or_path: Annotated[str, BeforeValidator(lambda name: str(name or ""))] = ""
    r: _Rank
    lora_alpha: _Alpha
    use_rslora: bool = False
    rank_pattern: Annotated[dict[_ModuleName, _Rank], _OrEmpty] = {}
    alpha_pattern: Annotated[dict[_ModuleName, _Alpha], _OrEmpty] = {}

    @property
    def scaling(self) -> float:
        """The scaling of modules without a pattern."""
        return self._scale(self.lora_alpha, self.r)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's LoRA."""
        return int(_match_pattern(self.rank_pattern, module, self.r))

    def scaling_of(self, module: str) -> float:
        """Return alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732)."""
        alpha = _match_pattern(self.alpha_pattern, module, self.lora_alpha)
        return self._scale(alpha, self.rank_of(module))

    def _scale(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(data: bytes) -> AdapterConfig:
    """Read the bytes of an ``adapter_config.json``. Raises ``Fault``."""
    content = parse_object(data, what="the config")
    try:
        config = AdapterConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"][-1] == "[key]":
            raise Fault(
                f"{first['loc'][0]} must have names of modules as keys, "
                f"got {safe_repr(first['input'])}.",
                hint=_NAME_MODULES,
            ) from None
        value = None if first["type"] == "missing" else first["input"]
        path = [str(part) for part in first["loc"]]
        is_init = path[0] == "init_lora_weights"
        raise Fault(
            f"{' of '.join(path[:2])} is {safe_repr(value)}.",
            hint=_CONVERT if is_init else f"{first['msg']}. {_PLAIN_ONLY}",
        ) from None
    for key, value in content.items():
        known = key in AdapterConfig.model_fields or key in _WITHOUT_EFFECT
        if not known and value not in (None, False, [], {}, ""):
            raise Fault(f"sets {safe_repr(key)}.", hint=_PLAIN_ONLY)
    return config


def build_config(
    rank: int, scaling: float, targets: Iterable[str], base_name: str
) -> dict[str, Any]:
    """Return the fields of ``adapter_config.json`` for a plain LoRA.

    It writes only the fields that a plain LoRA uses. So the same adapter gives the same file with
    every version of PEFT.

    Args:
        rank: The rank of all projections.
        scaling: The factor of ``B @ A``: alpha over rank.
        targets: The projections.
        base_name: The name or path by which PEFT loads the base.
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
    )
    fields = config.to_dict() | {"target_modules": sorted(targets)}  # type: ignore[no-untyped-call]
    return {key: fields[key] for key in _WRITTEN}


def _match_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    if not patterns:
        return default
    from peft.utils.other import get_pattern_key

    return patterns.get(get_pattern_key(list(patterns), module), default)
