"""Fixtures: a tiny base and a backend of each kind on it, and a stand-in for a vLLM server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from backend_makers import attach, random_stack
from tiny_models import save_random_model
from vllm_double import Open, VllmDouble, cache_expected_tokens, run_double

from personalpeft.backends.base import Backend, TrainingBackend
from personalpeft.backends.vllm.backend import VllmBackend
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base, ModelCard, Source
from personalpeft.settings import VllmServer
from personalpeft.types import Sampling

B = TypeVar("B", bound=Backend)

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": None,
    # With tied embeddings a random model repeats its last token forever.
    "tie_word_embeddings": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 40,
        # As llama.cpp expects it of a Gemma 3.
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    },
}


@pytest.fixture(
    params=[
        "fake",
        "torch_tiny",
        "llamacpp_tiny",
        pytest.param("vllm_tiny", marks=pytest.mark.vllm),
    ],
    ids=["fake", "torch", "llamacpp", "vllm"],
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each backend in turn, with the stacks "one", "two" and "three" attached and one slot free."""
    yield from _with_stacks(request.getfixturevalue(request.param))


@pytest.fixture(params=["fake", "torch_tiny"], ids=["fake", "torch"])
def training_backend(request: pytest.FixtureRequest) -> Iterator[TrainingBackend]:
    """Each backend that trains in turn, with the same stacks."""
    yield from _with_stacks(request.getfixturevalue(request.param))


def _with_stacks(backend: B) -> Iterator[B]:
    names = ("one", "two", "three")
    for seed, name in enumerate(names):
        attach(backend, name, random_stack(backend, seed, rank=2 + seed))
    yield backend
    for name in (*names, "four"):
        backend.detach(name)
    # Prompts are cached under the keys, and the next test gives "four" to another stack.
    backend.clear_cache()


@pytest.fixture
def double(tiny_base: Base) -> Iterator[VllmDouble]:
    """A stand-in for a vLLM server that fails on demand."""
    with run_double(VllmDouble(tiny_base)) as double:
        yield double


@pytest.fixture
def open_on(tiny_base: Base, tmp_path: Path) -> Iterator[Open]:
    """Open the vLLM backend on a stand-in, with the expected tokens of the model check cached."""
    with ExitStack() as ends:

        def opened(double: VllmDouble, **more: Any) -> VllmBackend:
            cache = more.pop("cache", tmp_path / "cache")
            cache_expected_tokens(double, cache)
            sizes = {name: more.pop(name) for name in ("slots", "rows") if name in more}
            server = VllmServer(
                **{"url": double.url, "retry_seconds": 1.0, "timeout": 10.0, **more}
            )
            backend = VllmBackend(
                tiny_base, cache=cache, server=server, entropy=os.urandom, **sizes
            )
            ends.callback(backend.close)
            return backend

        yield opened


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        pytest.param("qwen2", marks=pytest.mark.exhaustive),
        pytest.param("qwen3", marks=pytest.mark.exhaustive),
        "gemma3_text",
    ],
)
def base(
    request: pytest.FixtureRequest, tiny_base: Base, tmp_path_factory: pytest.TempPathFactory
) -> Base:
    """A model of this kind with random weights, and the tiny base's tokenizer."""
    from transformers import AutoConfig

    own = tmp_path_factory.mktemp(request.param)
    folder = own / "weights"
    config = AutoConfig.for_model(
        request.param, **{**SHAPE, "vocab_size": _vocabulary(tiny_base), **KINDS[request.param]}
    )
    save_random_model(config, tiny_base, folder)
    card = ModelCard(
        name=request.param,
        title="A tiny one",
        licence="Apache-2.0",
        source=Source("folder", path=folder),
        targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        context=512,
        template=tiny_base.template,
        stop_tokens=tiny_base.stop_tokens,
        sampling=Sampling(),
    )
    return resolve_base(card, cache=own / "cache")


def _vocabulary(base: Base) -> int:
    from tokenizers import Tokenizer

    return int(Tokenizer.from_file(str(base.folder / "tokenizer.json")).get_vocab_size())
