"""The Llama decoder in plain torch, for bases of that kind with default rotary embeddings.

Transformers has the code of every other kind. Importing it takes longer than the rest of a start.

Invariant: a pass gives the bits that transformers' Llama gives with the same attention, and the
modules have its names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from personalpeft.backends.torch.kv_cache import paged_attention_forward
from personalpeft.backends.torch.ops.base import apply_rotary_embedding
from personalpeft.base_models.files import head_sizes, weights_of

_HEAD = "lm_head.weight"
# transformers has defaults for these.
_NEEDED = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "rms_norm_eps"),
}


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """What a ``config.json`` says of the decoder, under its names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool = False

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> LlamaConfig | None:
        """Return None for a decoder that this module does not compute."""
        rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
        supported = (
            config.get("model_type") == "llama"
            and config.get("hidden_act") == "silu"
            and not config.get("attention_bias")
            and not config.get("mlp_bias")
            and not config.get("rope_scaling")
            and not set(rope) - {"rope_theta", "rope_type"}
            and rope.get("rope_type", "default") == "default"
            and config.keys() >= _NEEDED
        )
        if not supported:
            return None
        heads, kv_heads, head_dim = head_sizes(config)
        return _CONFIG.validate_python(
            {
                **config,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": head_dim,
                "rope_theta": rope["rope_theta"],
            }
        )

    def get_text_config(self) -> Self:
        """Return the decoder's part of the configuration, which is all of it."""
        return self


_CONFIG = TypeAdapter(LlamaConfig)


def empty_llama(folder: Path) -> LlamaForCausalLM | None:
    """Return a folder's model without weights; None if it is of another kind."""
    config = LlamaConfig.from_json(json.loads((folder / "config.json").read_text("utf-8")))
    if config is None:
        return None
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb.compute_frequencies(config)
    return model


def load_llama(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM | None:
    """Load a folder's model; None if it is of another kind, or its weights have other names."""
    model = empty_llama(folder)
    if model is None:
        return None
    config = model.config
    weights = dict(weights_of(folder))
    tied = config.tie_word_embeddings and _HEAD not in weights
    expected = {
        name: parameter.shape
        for name, parameter in model.named_parameters()
        if not (tied and name == _HEAD)
    }
    if any(name not in weights or weights[name].shape != expected[name] for name in expected):
        return None
    converted = {name: weights[name].to(dtype) for name in expected}
    model.load_state_dict(converted, assign=True, strict=not tied)
    if tied:
        # One parameter, so a move to a device copies it once.
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing: weights are loaded, and torch's own imports its compiler for a meta tensor."""


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing, as ``_Linear``."""


class LlamaForCausalLM(nn.Module):
    """The decoder and its output layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head: nn.Module = _Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def base_model(self) -> LlamaModel:
        return self.model

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head

    def forward(self, logits_to_keep: Tensor, **inputs: Any) -> SimpleNamespace:
        """Return ``logits`` of the tokens at ``logits_to_keep``, ``[1, tokens, vocabulary]``.

        See ``LlamaModel.forward``.
        """
        hidden = self.model(**inputs).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden[:, logits_to_keep, :]))


class LlamaModel(nn.Module):
    """The decoder (Touvron et al. 2023)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = _Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [LlamaDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
        )
        self.norm = LlamaRMSNorm(config)
        self.rotary_emb = LlamaRotaryEmbedding()

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, **attention: Any
    ) -> SimpleNamespace:
        """Return ``last_hidden_state`` of tokens, after the last norm, ``[1, tokens, size]``.

        Args:
            input_ids: ``[1, tokens]``.
            position_ids: ``[1, tokens]``.
            use_cache: As of transformers' Llama, without an effect.
            **attention: Passed to each attention.
        """
        hidden = self.embed_tokens(input_ids)
        embeddings = self.rotary_emb(hidden, position_ids=position_ids)
        for layer in self.layers:
            hidden = layer(hidden, embeddings, attention)
        return SimpleNamespace(last_hidden_state=self.norm(hidden))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and beside a residual."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config)
        self.post_attention_layernorm = LlamaRMSNorm(config)

    def forward(
        self, hidden: Tensor, embeddings: tuple[Tensor, Tensor], attention: Mapping[str, Any]
    ) -> Tensor:
        """Return the states ``[1, tokens, size]`` after this layer from those before it."""
        attended, _ = self.self_attn(
            self.input_layernorm(hidden), position_embeddings=embeddings, **attention
        )
        hidden = hidden + attended
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class LlamaRMSNorm(nn.Module):
    """A norm without a mean (Zhang & Sennrich 2019)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.variance_epsilon = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the states divided by their root mean square, times the weights."""
        x32 = x.to(torch.float32)
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x32.to(x.dtype)


class LlamaMLP(nn.Module):
    """A gated MLP (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = _Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = _Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = _Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's outputs."""
        return cast(Tensor, self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class LlamaAttention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023)."""

    is_causal = True

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = _Linear(config.hidden_size, queries, bias=False)
        self.k_proj = _Linear(config.hidden_size, keys, bias=False)
        self.v_proj = _Linear(config.hidden_size, keys, bias=False)
        self.o_proj = _Linear(queries, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **attention: Any,
    ) -> tuple[Tensor, None]:
        """Return the outputs, ``[1, tokens, size]``.

        Args:
            hidden_states: ``[1, tokens, size]``.
            position_embeddings: Cosines and sines of the positions.
            attention_mask: As of ``paged_attention_forward``, which also takes the rest.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        query, key = apply_rotary_embedding(query, cos, sin), apply_rotary_embedding(key, cos, sin)
        mixed, _ = paged_attention_forward(
            self, query, key, value, attention_mask, scaling=self.scaling, **attention
        )
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1).contiguous()), None


class LlamaRotaryEmbedding(nn.Module):
    """Cosines and sines of positions (RoFormer, Su et al. 2021)."""

    rope_type = "default"
    inv_freq: Tensor

    def compute_frequencies(self, config: LlamaConfig) -> None:
        """Compute the frequencies. No file has them."""
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        self.register_buffer("inv_freq", 1.0 / (config.rope_theta**steps), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[1, tokens, head size]`` in the dtype of ``x``."""
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)
