"""Learn on torch and serve on llama.cpp: the same user, ledger and layers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_makers import ask, correct, greedy, quick_card

import personalpeft
from personalpeft import AdapterError, InvalidInput, NotFound, WeightsError
from personalpeft.base_models.types import Base
from personalpeft.types import Message


@pytest.mark.exhaustive
@pytest.mark.usefixtures("tiny_base")
def test_user_on_llamacpp_learns_and_rolls_back(tmp_path: Path) -> None:
    with personalpeft.open(tmp_path / "home", quick_card(tmp_path), "llamacpp") as runtime:
        ada = runtime.user("ada")
        before = greedy(ada)
        correct(ada, 6)
        report = ada.learn(accept=True)
        assert report.live
        assert greedy(ada) != before
        ada.rollback("style", None)
        assert greedy(ada) == before


@pytest.mark.exhaustive
@pytest.mark.usefixtures("tiny_base")
def test_home_can_be_opened_with_the_other_backend(tmp_path: Path) -> None:
    card = quick_card(tmp_path)
    with personalpeft.open(tmp_path / "home", card, "torch") as runtime:
        ada = runtime.user("ada")
        correct(ada, 6)
        ada.learn(accept=True)
        expected = greedy(ada)
    with personalpeft.open(tmp_path / "home", card, "llamacpp") as runtime:
        ada = runtime.user("ada")
        assert greedy(ada) == expected
        assert ask(ada, "hello").stack == ada.stack()


@pytest.fixture(scope="module")
def learned_home(tmp_path_factory: pytest.TempPathFactory, tiny_base: Base) -> Path:
    """A home in which ada has a live style."""
    folder = tmp_path_factory.mktemp("learned")
    with personalpeft.open(folder / "home", quick_card(folder), "torch") as runtime:
        correct(runtime.user("ada"), 6)
        assert runtime.user("ada").learn(accept=True).live
    # Writing the base's GGUF file takes torch, once for each cache.
    with personalpeft.open(folder / "home", quick_card(folder), "llamacpp") as runtime:
        runtime.engine()
    return folder / "home"


@pytest.mark.usefixtures("learned_home")
def test_chat_on_llamacpp_with_a_fact_loads_no_torch(
    home: Path, tmp_path: Path, shared_cache: Path
) -> None:
    # The user has a live layer, so that an adapter is attached.
    card = quick_card(tmp_path)
    program = f"""
import personalpeft, sys
with personalpeft.open({str(home)!r}, {str(card)!r}, "llamacpp") as runtime:
    ada = runtime.user("ada")
    ada.remember("My dog is called Biscuit.")
    reply = ada.chat("What is my dog called?")
    assert ada.why(reply).items
    print(len(reply.stack.entries), *[name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1"]


def test_base_of_an_unsupported_architecture_is_refused(
    tmp_path: Path,
) -> None:
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        ada = runtime.user("ada")
        correct(ada, 6)
        ada.learn()
        with pytest.raises(InvalidInput) as caught:
            ada.export_gguf(tmp_path / "ada.gguf")
    assert "torch" in caught.value.hint
    assert not (tmp_path / "ada.gguf").exists()


@pytest.mark.usefixtures("learned_home")
def test_stack_is_exported_and_imported_as_gguf_and_merged_into_the_weights(
    home: Path, tmp_path: Path
) -> None:
    with personalpeft.open(home, quick_card(tmp_path), "torch") as runtime:
        ada, bo = runtime.user("ada"), runtime.user("bo")
        with pytest.raises(NotFound):
            bo.export_gguf(tmp_path / "bo.gguf")
        file = ada.export_gguf(tmp_path / "ada.gguf")
        with pytest.raises(InvalidInput):
            ada.export_gguf(file)
        revision = bo.import_gguf(file)
        assert bo.stack().entries[0].revision == revision.id
        assert greedy(bo) == greedy(ada)
        folder = ada.export_merged(tmp_path / "merged")
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            path.name for path in folder.iterdir()
        }
        # The tiny base's tokens are single bytes, which llama.cpp's tokenizer has no vocabulary
        # for.
        with pytest.raises(WeightsError, match="tokenizer"):
            ada.export_merged(tmp_path / "for-ollama", form="gguf")
        with pytest.raises(InvalidInput):
            ada.export_merged(tmp_path / "other", form="ggml")  # type: ignore[arg-type]
        file.write_bytes(file.read_bytes()[:999])
        with pytest.raises(AdapterError, match=r"ada\.gguf"):
            bo.import_gguf(file)
        assert bo.revisions() == (revision,)


@pytest.mark.usefixtures("learned_home")
def test_a_merged_model_that_gguf_cannot_hold_is_refused_with_a_form_that_works(
    home: Path, tiny_base: Base, tmp_path: Path
) -> None:
    with personalpeft.open(home, quick_card(tmp_path), "torch") as runtime:
        adapter = runtime.user("ada").export_peft(tmp_path / "adapter")
    # Its provenance names the other base.
    (adapter / "personalpeft.json").unlink()
    model = tmp_path / "scaled"
    shutil.copytree(tiny_base.folder, model)
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    (model / "chat_template.jinja").write_text(tiny_base.template, "utf-8")
    with personalpeft.open(tmp_path / "other home", model, "torch") as runtime:
        ada = runtime.user("ada")
        ada.import_peft(adapter)
        with pytest.raises(WeightsError, match="scales its positions") as refused:
            ada.export_merged(tmp_path / "for-ollama", form="gguf")
        assert "--form safetensors" in refused.value.hint
        assert not (tmp_path / "for-ollama").exists()
        merged = ada.export_merged(tmp_path / "merged", form="safetensors")
    written = json.loads((merged / "config.json").read_text("utf-8"))
    assert written["rope_parameters"] == config["rope_parameters"]


def test_messages_are_rendered_as_on_torch(torch_tiny: object, llamacpp_tiny: object) -> None:
    expected = [Message("system", "Be kind."), Message("user", "x<|im_end|>")]
    assert llamacpp_tiny.render(expected) == torch_tiny.render(expected)  # type: ignore[attr-defined]
