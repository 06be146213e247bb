"""PEFT folders: PEFT reads ours, we read PEFT's, and others are refused with a message."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import (
    BASE,
    OTHER_BASE,
    assert_equal,
    deltas,
    join_file,
    make_adapter,
    split_file,
)
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from personalpeft.adapters.formats.packed import pack, unpack
from personalpeft.adapters.formats.peft import export_peft, export_stack_peft, import_peft
from personalpeft.adapters.formats.peft_config import build_config, read_config
from personalpeft.adapters.types import Adapter
from personalpeft.errors import AdapterError, InvalidId, InvalidInput
from personalpeft.types import Architecture

LLAMA = Architecture(
    model_type="llama",
    block_path="model.layers",
    blocks=2,
    projections={
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (32, 16),
        "self_attn.v_proj": (32, 16),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (32, 48),
        "mlp.up_proj": (32, 48),
        "mlp.down_proj": (48, 32),
    },
)
PREFIX = "base_model.model.model.layers"


def llama_adapter(seed: int = 0, **changes: Any) -> Adapter:
    return make_adapter(seed, architecture=LLAMA, **{"scaling": 0.5, **changes})


@pytest.fixture(scope="module")
def llama() -> Any:
    """A tiny Llama with random weights and fewer key heads than query heads."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a valid folder of unknown origin for tests that damage it."""
    export_peft(llama_adapter(), LLAMA, tmp_path / "good", base_name="tiny")
    (tmp_path / "good" / "personalpeft.json").unlink()
    return tmp_path / "good"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12)).logits.numpy()


def with_deltas(model: Any, added: dict[str, Any]) -> Any:
    """Return a copy of the model whose own weights include what the adapter adds."""
    import torch

    changed = copy.deepcopy(model)
    for name, delta in added.items():
        for block, layer in enumerate(changed.model.layers):
            layer.get_submodule(name).weight.data += torch.from_numpy(
                delta[block].astype(np.float32)
            )
    return changed


def with_peft(model: Any, folder: Path) -> Any:
    peft = pytest.importorskip("peft")
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def save_with_peft(model: Any, folder: Path, **options: Any) -> Any:
    """Save an adapter with random matrices by PEFT, and return it."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **options})
    made = peft.get_peft_model(copy.deepcopy(model), config)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    made.save_pretrained(folder)
    return made


def peft_deltas(made: Any, projections: Any) -> dict[str, Any]:
    layers = made.base_model.model.model.layers
    return {
        name: np.stack(
            [
                layer.get_submodule(name).get_delta_weight("default").detach().numpy()
                for layer in layers
            ]
        )
        for name in projections
    }


# Export


@pytest.mark.parametrize("targets", [(), ("self_attn.q_proj", "mlp.down_proj")])
def test_peft_computes_the_same_as_our_adapter(
    llama: Any, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    adapter = llama_adapter(targets=targets)
    export_peft(adapter, LLAMA, tmp_path / "out", base_name="tiny")
    theirs = logits(with_peft(llama, tmp_path / "out"))
    ours = logits(with_deltas(llama, deltas(adapter.weights, adapter.manifest.scaling)))
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-4)
    assert np.abs(ours - logits(llama)).max() > 0.01


def test_stack_of_different_ranks_and_targets_is_one_lora(llama: Any, tmp_path: Path) -> None:
    style = llama_adapter(1)
    memory = llama_adapter(
        2, targets=("mlp.down_proj", "mlp.up_proj"), rank=5, scaling=1.5, layer="memory"
    )
    export_stack_peft([(style, 1.0), (memory, 0.5)], LLAMA, tmp_path / "out", base_name="tiny")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 8)
    summed = with_deltas(
        with_deltas(llama, deltas(style.weights, 0.5)), deltas(memory.weights, 0.75)
    )
    np.testing.assert_allclose(
        logits(with_peft(llama, tmp_path / "out")), logits(summed), rtol=1e-4, atol=1e-4
    )


def test_folder_has_exactly_three_files(tmp_path: Path) -> None:
    export_peft(llama_adapter(), LLAMA, tmp_path / "deep" / "out", base_name="tiny")
    assert names(tmp_path / "deep") == ["out"]
    assert names(tmp_path / "deep" / "out") == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "personalpeft.json",
    ]
    config = json.loads((tmp_path / "deep" / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    assert config["bias"] == "none"
    assert config["task_type"] == "CAUSAL_LM"


def test_empty_folder_is_filled_and_a_full_one_refused_unchanged(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_peft(llama_adapter(), LLAMA, tmp_path / "out", base_name="tiny")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(InvalidInput) as caught:
        export_peft(llama_adapter(5), LLAMA, tmp_path / "out", base_name="tiny")
    assert caught.value.hint
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInput):
        export_peft(llama_adapter(), LLAMA, tmp_path / "file", base_name="tiny")


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *rest: Any, **more: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InvalidInput, match="No space left on device"):
        export_peft(llama_adapter(), LLAMA, tmp_path / "out", base_name="tiny")
    assert names(tmp_path) == []


def test_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInput):
        export_peft(llama_adapter(), LLAMA, tmp_path / "file" / "out", base_name="tiny")


def test_adapter_of_another_architecture_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(AdapterError):
        export_peft(make_adapter(), LLAMA, tmp_path / "out", base_name="tiny")
    assert names(tmp_path) == []


def test_bare_base_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        export_stack_peft([(llama_adapter(), 0.0)], LLAMA, tmp_path / "out", base_name="tiny")


# Import


@pytest.mark.parametrize("rooted", [False, True])
def test_adapter_saved_by_peft_is_imported_equal(llama: Any, tmp_path: Path, rooted: bool) -> None:
    made = save_with_peft(
        llama, tmp_path / "theirs", target_modules="all-linear", use_rslora=rooted
    )
    adapter = import_peft(tmp_path / "theirs", LLAMA, layer="skill.email", base=BASE)
    assert adapter.manifest.scaling == pytest.approx(3.0 if rooted else 1.5)
    assert adapter.manifest.layer == "skill.email"
    assert adapter.manifest.base == BASE
    assert set(adapter.weights) == set(LLAMA.projections)
    expected = peft_deltas(made, LLAMA.projections)
    for name, delta in deltas(adapter.weights, adapter.manifest.scaling).items():
        np.testing.assert_allclose(delta, expected[name], rtol=1e-4, atol=1e-5)
    assert_equal(unpack(pack(adapter), source="test", architecture=LLAMA, base=BASE), adapter)


@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize(
    "patterns",
    [
        {"rank_pattern": {"q_proj": 2, "mlp.down_proj": 7}},
        {"alpha_pattern": {"self_attn.v_proj": 12}},
        {"rank_pattern": {"o_proj": 1}, "alpha_pattern": {"o_proj": 5, "layers.1.mlp.up_proj": 3}},
    ],
)
def test_rank_and_scaling_patterns_are_imported_equal(
    llama: Any, tmp_path: Path, patterns: dict[str, Any], rooted: bool
) -> None:
    made = save_with_peft(
        llama, tmp_path / "theirs", target_modules="all-linear", use_rslora=rooted, **patterns
    )
    adapter = import_peft(tmp_path / "theirs", LLAMA, layer="style", base=BASE)
    expected = peft_deltas(made, LLAMA.projections)
    for name, delta in deltas(adapter.weights, adapter.manifest.scaling).items():
        np.testing.assert_allclose(delta, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("key", ["(a+)+b", "[unclosed", "", "q_proj$"])
def test_regular_expression_in_a_pattern_is_refused_with_what_may_stand_there(
    llama: Any, tmp_path: Path, option: str, key: str
) -> None:
    save_with_peft(llama, tmp_path / "theirs", target_modules=["q_proj"])
    folder = configured(tmp_path / "theirs", **{option: {key: 4}})
    with pytest.raises(AdapterError) as caught:
        import_peft(folder, LLAMA, layer="style", base=BASE)
    assert str(caught.value).startswith(f"{folder / 'adapter_config.json'}: {option}")
    assert str(caught.value).count(repr(key)) == 1
    assert "self_attn.q_proj" in caught.value.hint


def test_our_export_is_imported_with_its_provenance(tmp_path: Path) -> None:
    adapter = llama_adapter(scaling=0.1)
    export_peft(adapter, LLAMA, tmp_path / "out", base_name="tiny")
    assert_equal(import_peft(tmp_path / "out", LLAMA, layer="style", base=BASE), adapter)
    assert (
        import_peft(tmp_path / "out", LLAMA, layer="skill.x", base=BASE).manifest.layer == "skill.x"
    )


def test_stack_is_imported_as_one_layer_that_names_its_layers(tmp_path: Path) -> None:
    style, memory = llama_adapter(1), llama_adapter(2, layer="memory", rank=2)
    export_stack_peft([(style, 1.0), (memory, 0.5)], LLAMA, tmp_path / "out", base_name="tiny")
    adapter = import_peft(tmp_path / "out", LLAMA, layer="style", base=BASE)
    assert adapter.manifest.rank == 5
    assert [part["manifest"]["layer"] for part in adapter.manifest.recipe["stack"]] == [
        "style",
        "memory",
    ]
    assert_equal(unpack(pack(adapter), source="test"), adapter)
    with pytest.raises(AdapterError, match="abababababab"):
        import_peft(tmp_path / "out", LLAMA, layer="style", base=OTHER_BASE)


def test_provenance_of_another_base_is_refused(tmp_path: Path) -> None:
    export_peft(llama_adapter(), LLAMA, tmp_path / "out", base_name="tiny")
    with pytest.raises(AdapterError, match=r"abababababab.*cdcdcdcdcdcd"):
        import_peft(tmp_path / "out", LLAMA, layer="style", base=OTHER_BASE)


def test_provenance_of_other_tensors_is_refused(tmp_path: Path) -> None:
    export_peft(llama_adapter(1), LLAMA, tmp_path / "one", base_name="tiny")
    export_peft(llama_adapter(2), LLAMA, tmp_path / "two", base_name="tiny")
    shutil.copy(tmp_path / "one" / "personalpeft.json", tmp_path / "two" / "personalpeft.json")
    with pytest.raises(AdapterError):
        import_peft(tmp_path / "two", LLAMA, layer="style", base=BASE)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": None},
        {"more": 1},
        {"manifest": []},
        {"manifest": {}},
        {"stack": []},
    ],
)
def test_malformed_provenance_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    export_peft(llama_adapter(), LLAMA, tmp_path / "out", base_name="tiny")
    path = tmp_path / "out" / "personalpeft.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(AdapterError, match=r"personalpeft\.json"):
        import_peft(tmp_path / "out", LLAMA, layer="style", base=BASE)


# Refusals


def refused(folder: Path, match: str, *, layer: str = "style") -> None:
    with pytest.raises(AdapterError, match=match) as caught:
        import_peft(folder, LLAMA, layer=layer, base=BASE)
    assert str(folder) in str(caught.value)
    assert caught.value.hint


def configured(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def with_tensors(folder: Path, change: Any) -> Path:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias"),
        ({"layers_to_transform": [1]}, "block 0"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "head"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_peft_methods_beyond_lora_are_refused(
    llama: Any, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    save_with_peft(
        llama, tmp_path / "theirs", **{"target_modules": ["q_proj", "v_proj"], **options}
    )
    refused(tmp_path / "theirs", match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": None}, "type"),
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({"some_future_option": {"a": 1}}, "some_future_option"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"r": 0}, "r .*0"),
        ({"r": "8"}, "r .*'8'"),
        ({"r": True}, "r .*True"),
        ({"r": 4}, "shape"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "olora"}, "olora"),
    ],
)
def test_configuration_beyond_lora_is_refused(
    folder: Path, changes: dict[str, Any], match: str
) -> None:
    refused(configured(folder, **changes), match)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": 8, "r": 9}', '{"r": NaN}', "\udcff"])
def test_invalid_configuration_is_refused(folder: Path, text: str) -> None:
    (folder / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(folder, "config")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refused(folder, name)


def test_pickle_is_never_read(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused(folder, "pickle")


def test_invalid_layer_name_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidId):
        import_peft(folder, LLAMA, layer="../style", base=BASE)


def test_tensors_are_read_by_the_strict_reader(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    header, body = split_file(path.read_bytes())
    path.write_bytes(
        join_file(
            {**header, "../../x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, body
        )
    )
    refused(folder, "x")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("1.mlp.up_proj.lora_A.weight", "1.mlp.wide_proj.lora_A.weight", "wide_proj"),
        ("1.mlp.up_proj.lora_A.weight", "2.mlp.up_proj.lora_A.weight", "layers.2"),
        ("1.mlp.up_proj.lora_A.weight", "01.mlp.up_proj.lora_A.weight", "LoRA"),
        ("1.mlp.up_proj.lora_A.weight", "1.mlp.up_proj.lora_magnitude_vector", "magnitude"),
        ("1.mlp.up_proj.lora_A.weight", "1.mlp.up_proj.bias", "bias"),
        ("1.mlp.up_proj.lora_A.weight", "1.mlp.up_proj.lora_A.default.weight", "LoRA"),
    ],
)
def test_tensors_that_the_base_lacks_are_refused(
    folder: Path, old: str, new: str, match: str
) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        tensors[f"{PREFIX}.{new}"] = tensors.pop(f"{PREFIX}.{old}")

    refused(with_tensors(folder, rename), match)


def test_missing_matrix_is_refused(folder: Path) -> None:
    refused(
        with_tensors(folder, lambda t: t.pop(f"{PREFIX}.1.mlp.up_proj.lora_B.weight")),
        "lora_B.*block 1",
    )


def test_tensor_of_the_wrong_shape_is_refused(folder: Path) -> None:
    def turn(tensors: dict[str, Any]) -> None:
        name = f"{PREFIX}.1.mlp.up_proj.lora_A.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].T)

    refused(with_tensors(folder, turn), "lora_A")


def test_non_finite_values_are_refused(folder: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors[f"{PREFIX}.1.mlp.up_proj.lora_A.weight"][0, 0] = np.nan

    refused(with_tensors(folder, spoil), "NaN")


PLAIN = build_config(rank=3, scaling=0.5, targets=["mlp.up_proj"], base_name="tiny")
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["LORA", "none"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


@examples(60)
@given(st.dictionaries(st.sampled_from(sorted(PLAIN)) | st.text(max_size=5), ANYTHING, max_size=3))
def test_any_configuration_is_read_or_refused(changes: dict[str, Any]) -> None:
    try:
        config = read_config(json.dumps({**PLAIN, **changes}).encode())
    except AdapterError:
        return
    assert config.r >= 1
    assert 0 < config.scaling < np.inf


@examples(60)
@given(st.integers(0, 10_000), st.sampled_from(b'0129-.eE"{}[],: \\\0\xff'))
def test_changed_characters_of_a_configuration_are_read_or_refused(
    position: int, character: int
) -> None:
    text = bytearray(json.dumps(PLAIN).encode())
    text[position % len(text)] = character
    with contextlib.suppress(AdapterError):
        assert read_config(bytes(text)).r >= 1
