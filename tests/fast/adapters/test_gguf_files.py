"""GGUF adapters and merged models: llama.cpp reads ours, we read valid files, and others are
refused with a message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import deltas, make_adapter
from backend_makers import (
    attach,
    base_with_merges,
    generate,
    llamacpp_backend,
    random_adapter,
    row,
    torch_backend,
)
from example_counts import examples
from gguf_models import write_out
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from personalpeft.adapters.compose import compose
from personalpeft.adapters.formats.gguf import import_gguf_lora, read_gguf, write_gguf_lora
from personalpeft.adapters.formats.ollama import build_modelfile
from personalpeft.adapters.merge import write_merged_folder, write_merged_gguf
from personalpeft.adapters.safe_io import naming
from personalpeft.adapters.types import Adapter
from personalpeft.backends.base import Backend
from personalpeft.backends.llamacpp.tokenizer_check import check_tokenizer
from personalpeft.base_models.gguf import writer as gguf_writer
from personalpeft.base_models.gguf.tensor_names import GgufNames, gguf_names
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base, ModelCard, Source
from personalpeft.errors import AdapterError, InvalidInput, WeightsError


@pytest.fixture
def names(tiny_base: Base) -> GgufNames:
    return gguf_names(tiny_base)


@pytest.fixture
def adapter(torch_tiny: Backend) -> Adapter:
    return random_adapter(torch_tiny, 3, rank=4)


@pytest.fixture
def good(adapter: Adapter, names: GgufNames, tmp_path: Path) -> Path:
    path = tmp_path / "good.gguf"
    write_gguf_lora(names, compose([(adapter, 1.0)]), path)
    return path


def read_back(path: Path, base: Base, names: GgufNames) -> Adapter:
    return import_gguf_lora(path, base.architecture, names, layer="style", base=base.digest)


def test_written_adapter_is_read_back_equal(
    adapter: Adapter, good: Path, tiny_base: Base, names: GgufNames
) -> None:
    back = read_back(good, tiny_base, names)
    assert set(back.weights) == set(adapter.weights)
    for name, change in deltas(adapter.weights, adapter.manifest.scaling).items():
        assert np.allclose(
            deltas(back.weights, back.manifest.scaling)[name], change, rtol=1e-3, atol=1e-3
        )


def test_stack_whose_layers_adapt_different_projections_is_read_back(
    torch_tiny: Backend, tiny_base: Base, names: GgufNames, tmp_path: Path
) -> None:
    style, memory = (
        random_adapter(torch_tiny, 1, rank=2),
        random_adapter(torch_tiny, 2, rank=3, layer="memory"),
    )
    pairs = {name: pair for name, pair in memory.weights.items() if name.startswith("mlp")}
    from dataclasses import replace

    memory = replace(
        memory, weights=pairs, manifest=replace(memory.manifest, targets=tuple(sorted(pairs)))
    )
    write_gguf_lora(names, compose([(style, 1.0), (memory, 0.5)]), tmp_path / "both.gguf")
    back = read_back(tmp_path / "both.gguf", tiny_base, names)
    both = deltas(style.weights, style.manifest.scaling)
    for name, change in deltas(memory.weights, memory.manifest.scaling).items():
        both[name] = both[name] + 0.5 * change
    for name, change in deltas(back.weights, back.manifest.scaling).items():
        assert np.allclose(change, both[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weight", [1e-30, 1e-5, 3.0])
def test_weight_is_exported_exactly_however_small(
    weight: float, adapter: Adapter, tiny_base: Base, names: GgufNames, tmp_path: Path
) -> None:
    write_gguf_lora(names, compose([(adapter, weight)]), tmp_path / "weighed.gguf")
    back = read_back(tmp_path / "weighed.gguf", tiny_base, names)
    wanted = deltas(adapter.weights, adapter.manifest.scaling * weight)
    for name, change in deltas(back.weights, back.manifest.scaling).items():
        assert np.allclose(change, wanted[name], rtol=1e-3, atol=1e-3 * weight)


def test_non_finite_weight_is_refused(adapter: Adapter, names: GgufNames, tmp_path: Path) -> None:
    with pytest.raises(AdapterError):
        write_gguf_lora(names, compose([(adapter, 1e39)]), tmp_path / "weighed.gguf")


def test_ranks_beyond_the_size_of_the_file_are_refused(
    tiny_base: Base, names: GgufNames, tmp_path: Path
) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "wide.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    for block in range(tiny_base.architecture.blocks):
        for projection, rank in (("self_attn.q_proj", 1), ("self_attn.v_proj", 100_000)):
            inputs, outputs = tiny_base.architecture.projections[projection]
            name = names.projection(projection, block)
            writer.add_tensor(
                f"{name}.lora_a", np.zeros((rank, inputs if rank == 1 else 1), np.float16)
            )
            writer.add_tensor(
                f"{name}.lora_b", np.zeros((outputs if rank == 1 else 1, rank), np.float16)
            )
    write_out(writer)
    with pytest.raises(AdapterError):
        read_back(tmp_path / "wide.gguf", tiny_base, names)


def test_adapter_for_another_architecture_is_refused(
    good: Path, tiny_base: Base, names: GgufNames
) -> None:
    from dataclasses import replace

    with pytest.raises(AdapterError, match=r"llama.*qwen2"):
        read_back(good, tiny_base, replace(names, architecture="qwen2"))


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", ""),
        (b"GGML" + bytes(20), ""),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), ""),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62), ""),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**62), ""),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 2**62), "9"),
    ],
)
def test_file_with_oversized_metadata_is_refused(data: bytes, value: str) -> None:
    with pytest.raises(AdapterError, match=f"hostile.gguf.*{value}"), naming("hostile.gguf"):
        read_gguf(data)


def two_tensors(offset: int) -> bytes:
    """A file with two tensors of one number each, the second at this offset."""
    infos = b"".join(
        struct.pack("<Q", 1) + name + struct.pack("<IQIQ", 1, 1, 0, at)
        for name, at in ((b"a", 0), (b"b", offset))
    )
    header = b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + infos
    return header + bytes(-len(header) % 32) + bytes(64)


@pytest.mark.parametrize("offset", [0, 16, 64, 2**64 - 32])
def test_tensors_lie_one_after_the_other(offset: int) -> None:
    _, arrays = read_gguf(two_tensors(32))
    assert list(arrays) == ["a", "b"]
    with pytest.raises(AdapterError, match=r"hostile\.gguf"), naming("hostile.gguf"):
        read_gguf(two_tensors(offset))


@examples(25)
@given(data=st.data())
def test_any_bytes_give_an_adapter_or_a_library_error(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_base: Base,
    torch_tiny: Backend,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    names = gguf_names(tiny_base)
    write_gguf_lora(
        names, compose([(random_adapter(torch_tiny, 3, rank=1), 1.0)]), folder / "good.gguf"
    )
    raw = bytearray((folder / "good.gguf").read_bytes())
    header = len(raw) - 40_000
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(1, min(header, 6000))))
        raw[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    bad = folder / "bad.gguf"
    bad.write_bytes(raw[:cut] if data.draw(st.booleans()) else raw)
    try:
        back = read_back(bad, tiny_base, names)
    except AdapterError as error:
        assert str(error).startswith(str(bad))  # noqa: PT017 - either is right
    else:
        assert all(np.isfinite(pair.a).all() for pair in back.weights.values())


def test_merged_model_replies_like_the_base_with_the_stack(
    tiny_base: Base, torch_tiny: Backend, adapter: Adapter, tmp_path: Path, shared_cache: Path
) -> None:
    stack = compose([(adapter, 1.0)])
    write_merged_folder(tiny_base, stack, tmp_path / "merged")
    attach(torch_tiny, "own", stack)
    asked = [row(torch_tiny, prompt, "own", max_tokens=10) for prompt in ("hello", "why?")]
    wanted = [reply.tokens for reply in generate(torch_tiny, asked)]
    torch_tiny.detach("own")
    card = ModelCard(
        name="merged",
        title="A merged one",
        licence="Apache-2.0",
        source=Source("folder", path=tmp_path / "merged"),
        targets=tiny_base.card.targets,
        context=512,
        template=tiny_base.template,
        stop_tokens=tiny_base.card.stop_tokens,
    )
    merged = resolve_base(card, cache=tmp_path / "cache")
    for backend in (
        torch_backend(merged, slots=1, rows=2),
        llamacpp_backend(merged, shared_cache, slots=1, rows=2),
    ):
        plain = [row(backend, prompt, max_tokens=10) for prompt in ("hello", "why?")]
        assert [reply.tokens for reply in generate(backend, plain)] == wanted
        backend.close()


def test_llamacpp_loads_a_merged_gguf_with_equal_replies(
    tmp_path: Path, shared_cache: Path
) -> None:
    from personalpeft.backends.llamacpp.binding import ContextParams, Model

    base = base_with_merges(tmp_path)
    backend = llamacpp_backend(base, shared_cache, slots=1, rows=1)
    stack = compose([(random_adapter(backend, 3, rank=4), 1.0)])
    write_merged_gguf(base, stack, tmp_path / "merged", partial(check_tokenizer, base))
    attach(backend, "own", stack)
    asked = row(backend, "the cat", "own", max_tokens=1)
    (reply,) = generate(backend, [asked])
    ending = backend.end_of_turn
    backend.close()
    model = Model(tmp_path / "merged" / "model.gguf", repack=False, threads=lambda: 1)
    context = model.new_context(ContextParams(512, 256, 1, float32=True), None)
    logits = context.decode(asked.prompt_tokens, 0, 1)
    # Which tokens are nearly equally likely depends on the processor's kernels, and the likeliest
    # may end the reply.
    likeliest = int(logits[0].argmax())
    assert reply.tokens == (likeliest,) or (not reply.tokens and likeliest in ending)
    context.close()
    model.close()
    assert (
        (tmp_path / "merged" / "Modelfile")
        .read_text("utf-8")
        .startswith("FROM ./model.gguf\nTEMPLATE ")
    )


def test_model_with_an_unsupported_tokenizer_is_not_exported(
    tiny_base: Base, adapter: Adapter, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match="tiny-random"):
        write_merged_gguf(
            tiny_base,
            compose([(adapter, 1.0)]),
            tmp_path / "merged",
            partial(check_tokenizer, tiny_base),
        )
    assert not (tmp_path / "merged").exists()


def lowercasing(tokenizer: Any) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def with_prefix_space(tokenizer: Any) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def with_left_stripping_token(tokenizer: Any) -> None:
    tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True, lstrip=True)])


def with_single_word_token(tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken("tea", single_word=True)])


@pytest.mark.parametrize(
    "change",
    [
        lowercasing,
        with_prefix_space,
        with_left_stripping_token,
        with_single_word_token,
    ],
)
def test_model_that_llamacpp_would_tokenize_differently_is_not_exported(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    base = base_with_merges(tmp_path, change)
    stack = compose([(make_adapter(architecture=base.architecture), 1.0)])
    with pytest.raises(WeightsError, match="with-merges") as caught:
        write_merged_gguf(base, stack, tmp_path / "merged", partial(check_tokenizer, base))
    assert "safetensors" in caught.value.hint
    assert not (tmp_path / "merged").exists()


def with_nfc(tokenizer: Any) -> None:
    tokenizer.normalizer = normalizers.NFC()


def with_added_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens(["hello", AddedToken("<tool>", normalized=False)])


def with_single_digits(tokenizer: Any) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def with_split_pattern(name: str, tokenizer: Any) -> None:
    pattern = gguf_writer.SPLITTING_PATTERNS[name]
    parts = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [parts, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(with_nfc, id="composed"),
        pytest.param(with_added_tokens, id="tokens"),
        pytest.param(with_single_digits, id="digits"),
        pytest.param(partial(with_split_pattern, "qwen2"), id="qwen"),
        pytest.param(partial(with_split_pattern, "llama-bpe"), id="llama"),
    ],
)
def test_model_that_llamacpp_tokenizes_alike_is_exported(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    base = base_with_merges(tmp_path, change)
    stack = compose([(make_adapter(architecture=base.architecture), 1.0)])
    write_merged_gguf(base, stack, tmp_path / "merged", partial(check_tokenizer, base))
    assert (tmp_path / "merged" / "model.gguf").is_file()


def test_failed_export_leaves_no_folder(tiny_base: Base, adapter: Adapter, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("kept", "utf-8")
    with pytest.raises(InvalidInput):
        write_merged_folder(tiny_base, compose([(adapter, 1.0)]), tmp_path / "there")
    from dataclasses import replace

    stretched = replace(tiny_base, folder=tmp_path / "other")
    (tmp_path / "other").mkdir()
    config = (tiny_base.folder / "config.json").read_text("utf-8").replace('"default"', '"yarn"')
    (tmp_path / "other" / "config.json").write_text(config, "utf-8")
    with pytest.raises(WeightsError):
        write_merged_gguf(
            stretched,
            compose([(adapter, 1.0)]),
            tmp_path / "new",
            partial(check_tokenizer, stretched),
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "there"]


def render_ollama_template(template: str, messages: list[tuple[str, str]]) -> str:
    """Render an Ollama template as far as ours need it: a range with cases by role."""
    import re

    inside, rest = template.removeprefix("{{ range .Messages }}").split("{{ end }}{{ end }}")
    cases = dict(
        re.findall(
            r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}(.*?)(?=\{\{ else if|\Z)', inside, re.DOTALL
        )
    )
    return "".join(cases[role].replace("{{ .Content }}", text) for role, text in messages) + rest


def test_ollama_template_renders_like_the_bases_own(tiny_base: Base) -> None:
    from personalpeft.base_models.chat_template import render_chat
    from personalpeft.types import Message

    template = build_modelfile(tiny_base, "model.gguf").split('"""')[1]
    turns: list[tuple[Any, str]] = [
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Hello."),
        ("user", "Bye"),
    ]
    assert render_ollama_template(template, turns) == render_chat(
        tiny_base, [Message(role, text) for role, text in turns]
    )


def test_template_that_depends_on_more_than_roles_is_left_to_ollama(tiny_base: Base) -> None:
    from dataclasses import replace

    odd = "{% for m in messages %}{{ loop.index }}{{ m.content }}<|im_end|>{% endfor %}"
    assert "TEMPLATE" not in build_modelfile(replace(tiny_base, template=odd), "model.gguf")


def test_make_adapter_is_not_for_the_tiny_base(
    tiny_base: Base, names: GgufNames, tmp_path: Path
) -> None:
    write_gguf_lora(names, compose([(make_adapter(1), 1.0)]), tmp_path / "foreign.gguf")
    with pytest.raises(AdapterError):
        read_back(tmp_path / "foreign.gguf", tiny_base, names)
