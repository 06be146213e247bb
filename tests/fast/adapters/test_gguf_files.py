"""GGUF: what llama.cpp makes of ours, what we make of a file, and what is refused by name."""

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
    adapter,
    attach,
    base_with_merges,
    llamacpp_backend,
    row,
    torch_backend,
    written,
)
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from personalpeft.adapters.compose import compose
from personalpeft.adapters.formats.gguf import import_gguf_lora, read_gguf, write_gguf_lora
from personalpeft.adapters.formats.ollama import build_modelfile
from personalpeft.adapters.merge import write_merged_folder, write_merged_gguf
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
def own(torch_tiny: Backend) -> Adapter:
    return adapter(torch_tiny, 3, rank=4)


@pytest.fixture
def good(own: Adapter, names: GgufNames, tmp_path: Path) -> Path:
    path = tmp_path / "good.gguf"
    write_gguf_lora(names, compose([(own, 1.0)]), path)
    return path


def taken(path: Path, base: Base, names: GgufNames) -> Adapter:
    return import_gguf_lora(path, base.architecture, names, layer="style", base=base.digest)


def test_what_was_written_comes_back_as_what_it_adds(
    own: Adapter, good: Path, tiny_base: Base, names: GgufNames
) -> None:
    back = taken(good, tiny_base, names)
    assert set(back.pairs) == set(own.pairs)
    for name, change in deltas(own.pairs, own.manifest.scaling).items():
        assert np.allclose(
            deltas(back.pairs, back.manifest.scaling)[name], change, rtol=1e-3, atol=1e-3
        )


def test_a_stack_whose_layers_adapt_different_projections_comes_back(
    torch_tiny: Backend, tiny_base: Base, names: GgufNames, tmp_path: Path
) -> None:
    style, memory = adapter(torch_tiny, 1, rank=2), adapter(torch_tiny, 2, rank=3, layer="memory")
    pairs = {name: pair for name, pair in memory.pairs.items() if name.startswith("mlp")}
    from dataclasses import replace

    memory = replace(
        memory, pairs=pairs, manifest=replace(memory.manifest, targets=tuple(sorted(pairs)))
    )
    write_gguf_lora(names, compose([(style, 1.0), (memory, 0.5)]), tmp_path / "both.gguf")
    back = taken(tmp_path / "both.gguf", tiny_base, names)
    both = deltas(style.pairs, style.manifest.scaling)
    for name, change in deltas(memory.pairs, memory.manifest.scaling).items():
        both[name] = both[name] + 0.5 * change
    for name, change in deltas(back.pairs, back.manifest.scaling).items():
        assert np.allclose(change, both[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weight", [1e-30, 1e-5, 3.0])
def test_a_weight_goes_out_as_it_is_however_small(
    weight: float, own: Adapter, tiny_base: Base, names: GgufNames, tmp_path: Path
) -> None:
    write_gguf_lora(names, compose([(own, weight)]), tmp_path / "weighed.gguf")
    back = taken(tmp_path / "weighed.gguf", tiny_base, names)
    wanted = deltas(own.pairs, own.manifest.scaling * weight)
    for name, change in deltas(back.pairs, back.manifest.scaling).items():
        assert np.allclose(change, wanted[name], rtol=1e-3, atol=1e-3 * weight)


def test_a_weight_beyond_all_numbers_is_an_error_of_ours(
    own: Adapter, names: GgufNames, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError):
        write_gguf_lora(names, compose([(own, 1e39)]), tmp_path / "weighed.gguf")


def test_ranks_that_would_make_much_of_little_are_refused(
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(AdapterError):
        taken(tmp_path / "wide.gguf", tiny_base, names)


def test_an_adapter_for_another_architecture_is_refused_by_name(
    good: Path, tiny_base: Base, names: GgufNames
) -> None:
    from dataclasses import replace

    with pytest.raises(AdapterError, match=r"llama.*qwen2"):
        taken(good, tiny_base, replace(names, architecture="qwen2"))


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", ""),
        (b"GGML" + bytes(20), ""),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62), "1048576"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**62), ""),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 2**62), "9"),
    ],
)
def test_a_file_that_says_too_much_of_itself_is_refused(data: bytes, value: str) -> None:
    with pytest.raises(AdapterError, match=f"hostile.gguf.*{value}"):
        read_gguf(data, source="hostile.gguf")


@examples(25)
@given(data=st.data())
def test_whatever_the_bytes_are_they_give_an_adapter_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_base: Base,
    torch_tiny: Backend,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    names = gguf_names(tiny_base)
    write_gguf_lora(names, compose([(adapter(torch_tiny, 3, rank=1), 1.0)]), folder / "good.gguf")
    raw = bytearray((folder / "good.gguf").read_bytes())
    header = len(raw) - 40_000
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(1, min(header, 6000))))
        raw[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    bad = folder / "bad.gguf"
    bad.write_bytes(raw[:cut] if data.draw(st.booleans()) else raw)
    try:
        back = taken(bad, tiny_base, names)
    except AdapterError as error:
        assert str(error).startswith(str(bad))  # noqa: PT017 - either is right
    else:
        assert all(np.isfinite(pair.a).all() for pair in back.pairs.values())


def test_a_merged_model_says_without_a_stack_what_the_base_says_with_it(
    tiny_base: Base, torch_tiny: Backend, own: Adapter, tmp_path: Path, shared_cache: Path
) -> None:
    stack = compose([(own, 1.0)])
    write_merged_folder(tiny_base, stack, tmp_path / "merged")
    attach(torch_tiny, "own", stack)
    asked = [row(torch_tiny, prompt, "own", max_tokens=10) for prompt in ("hello", "why?")]
    wanted = [reply.tokens for reply in written(torch_tiny, asked)]
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
        assert [reply.tokens for reply in written(backend, plain)] == wanted
        backend.close()


def test_llamacpp_loads_a_merged_gguf_and_says_the_same(tmp_path: Path, shared_cache: Path) -> None:
    from personalpeft.backends.llamacpp.binding import BatchToken, ContextParams, Model

    base = base_with_merges(tmp_path)
    backend = llamacpp_backend(base, shared_cache, slots=1, rows=1)
    stack = compose([(adapter(backend, 3, rank=4), 1.0)])
    write_merged_gguf(base, stack, tmp_path / "merged", partial(check_tokenizer, base))
    attach(backend, "own", stack)
    asked = row(backend, "the cat", "own", max_tokens=1)
    (reply,) = written(backend, [asked])
    backend.close()
    model = Model(tmp_path / "merged" / "model.gguf", repack=False)
    context = model.new_context(ContextParams(512, 256, 1, 1, float32=True), None)
    last = len(asked.prompt_tokens) - 1
    logits = context.decode(
        [
            BatchToken(token, n, needs_logits=n == last)
            for n, token in enumerate(asked.prompt_tokens)
        ]
    )
    assert int(logits[0].argmax()) == reply.tokens[0]
    context.close()
    model.close()
    assert (
        (tmp_path / "merged" / "Modelfile")
        .read_text("utf-8")
        .startswith("FROM ./model.gguf\nTEMPLATE ")
    )


def test_a_model_whose_tokenizer_has_no_form_in_gguf_is_not_given_to_others(
    tiny_base: Base, own: Adapter, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match="tiny-random"):
        write_merged_gguf(
            tiny_base,
            compose([(own, 1.0)]),
            tmp_path / "merged",
            partial(check_tokenizer, tiny_base),
        )
    assert not (tmp_path / "merged").exists()


def lowered(tokenizer: Any) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def begun_with_a_space(tokenizer: Any) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def with_a_token_that_takes_the_space_before_it(tokenizer: Any) -> None:
    tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True, lstrip=True)])


def with_a_token_of_whole_words(tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken("tea", single_word=True)])


@pytest.mark.parametrize(
    "change",
    [
        lowered,
        begun_with_a_space,
        with_a_token_that_takes_the_space_before_it,
        with_a_token_of_whole_words,
    ],
)
def test_a_model_whose_texts_llamacpp_would_split_otherwise_is_not_given_to_others(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    base = base_with_merges(tmp_path, change)
    stack = compose([(make_adapter(architecture=base.architecture), 1.0)])
    with pytest.raises(WeightsError, match="with-merges") as caught:
        write_merged_gguf(base, stack, tmp_path / "merged", partial(check_tokenizer, base))
    assert "safetensors" in caught.value.hint
    assert not (tmp_path / "merged").exists()


def composed_first(tokenizer: Any) -> None:
    tokenizer.normalizer = normalizers.NFC()


def with_tokens_of_its_own(tokenizer: Any) -> None:
    tokenizer.add_tokens(["hello", AddedToken("<tool>", normalized=False)])


def with_digits_apart(tokenizer: Any) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def split_by_a_pattern(name: str, tokenizer: Any) -> None:
    (pattern,) = (pattern for pattern, known in gguf_writer._PATTERNS.items() if known == name)
    parts = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [parts, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(composed_first, id="composed"),
        pytest.param(with_tokens_of_its_own, id="tokens"),
        pytest.param(with_digits_apart, id="digits"),
        pytest.param(partial(split_by_a_pattern, "qwen2"), id="qwen"),
        pytest.param(partial(split_by_a_pattern, "llama-bpe"), id="llama"),
    ],
)
def test_a_model_whose_texts_llamacpp_splits_alike_is_given_to_others(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    base = base_with_merges(tmp_path, change)
    stack = compose([(make_adapter(architecture=base.architecture), 1.0)])
    write_merged_gguf(base, stack, tmp_path / "merged", partial(check_tokenizer, base))
    assert (tmp_path / "merged" / "model.gguf").is_file()


def test_what_fails_leaves_no_folder_behind(tiny_base: Base, own: Adapter, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("kept", "utf-8")
    with pytest.raises(InvalidInput):
        write_merged_folder(tiny_base, compose([(own, 1.0)]), tmp_path / "there")
    from dataclasses import replace

    stretched = replace(tiny_base, folder=tmp_path / "other")
    (tmp_path / "other").mkdir()
    config = (tiny_base.folder / "config.json").read_text("utf-8").replace('"default"', '"yarn"')
    (tmp_path / "other" / "config.json").write_text(config, "utf-8")
    with pytest.raises(WeightsError):
        write_merged_gguf(
            stretched, compose([(own, 1.0)]), tmp_path / "new", partial(check_tokenizer, stretched)
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "there"]


def go(template: str, messages: list[tuple[str, str]]) -> str:
    """What Ollama makes of a Modelfile's template, as far as ours go: a range with cases by role."""
    import re

    inside, rest = template.removeprefix("{{ range .Messages }}").split("{{ end }}{{ end }}")
    cases = dict(
        re.findall(
            r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}(.*?)(?=\{\{ else if|\Z)', inside, re.DOTALL
        )
    )
    return "".join(cases[role].replace("{{ .Content }}", text) for role, text in messages) + rest


def test_the_template_for_ollama_gives_what_the_bases_own_gives(tiny_base: Base) -> None:
    from personalpeft.base_models.chat_template import render_chat
    from personalpeft.types import Message

    template = build_modelfile(tiny_base, "model.gguf").split('"""')[1]
    said: list[tuple[Any, str]] = [
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Hello."),
        ("user", "Bye"),
    ]
    assert go(template, said) == render_chat(
        tiny_base, [Message(role, text) for role, text in said]
    )


def test_a_template_that_depends_on_more_than_roles_is_left_to_ollama(tiny_base: Base) -> None:
    from dataclasses import replace

    odd = "{% for m in messages %}{{ loop.index }}{{ m.content }}<|im_end|>{% endfor %}"
    assert "TEMPLATE" not in build_modelfile(replace(tiny_base, template=odd), "model.gguf")


def test_make_adapter_is_for_another_base_than_the_tiny_one(
    tiny_base: Base, names: GgufNames, tmp_path: Path
) -> None:
    write_gguf_lora(names, compose([(make_adapter(1), 1.0)]), tmp_path / "foreign.gguf")
    with pytest.raises(AdapterError):
        taken(tmp_path / "foreign.gguf", tiny_base, names)
