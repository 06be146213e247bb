"""Which backend serves, that the choice is visible, and that it does not change what is learned."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf_models import write_model
from runtime_makers import ask, greedy, open_runtime, quick_card, style

import personalpeft
from personalpeft import NotFound, Serving, User, host
from personalpeft.backends.choice import ChoiceReason, choose_backend, describe_choice
from personalpeft.base_models.local_models import inspect_local_model
from personalpeft.base_models.model_card import write_card
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.types import Base

GGUF, RANDOM = find_card("smollm2-135m-instruct"), find_card("tiny-random")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("personalpeft.host.has_gpu", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_users_decide_where_no_batch_is_set(tmp_path: Path) -> None:
    for users, expected in ((2, "llamacpp"), (3, "torch")):
        assert choose_backend("auto", GGUF, None, users=users).name == expected
        assert choose_backend("auto", GGUF, 2, users=users).name == "llamacpp"
        assert choose_backend("auto", GGUF, 3, users=users).name == "torch"
    limits = Serving(users=None, max_queue=1)
    with personalpeft.open(tmp_path, GGUF.name, serving=limits) as runtime:
        found = []
        for user in ("ada", "bo", "cy"):
            runtime.user(user)
            found.append(runtime.max_requests)
    assert found == [3, 3, 33]


@pytest.mark.usefixtures("no_gpu")
def test_the_choice_stays_while_users_come(tmp_path: Path, tiny_base: Base) -> None:
    path = tmp_path / "model.gguf"
    write_model("llama", tiny_base, path)
    card = write_card(inspect_local_model(path, cache=tmp_path).card, tmp_path)
    with personalpeft.open(tmp_path / "home", card, serving=Serving(users=None)) as runtime:
        chosen = runtime.backend_choice()
        for user in ("ada", "bo", "cy"):
            runtime.user(user)
        assert runtime.backend_choice() == chosen
        assert not chosen.trains


@pytest.mark.usefixtures("no_gpu")
def test_llamacpp_serves_one_user_of_a_gguf_base_and_torch_many() -> None:
    one = choose_backend("auto", GGUF, None)
    assert (one.name, one.reason) == ("llamacpp", ChoiceReason.FEW_ROWS)
    many = choose_backend("auto", GGUF, 16)
    assert (many.name, many.reason, many.max_batch) == ("torch", ChoiceReason.MANY_ROWS, 16)
    other = choose_backend("auto", RANDOM, None)
    assert (other.name, other.reason) == ("torch", ChoiceReason.NO_GGUF)


def test_torch_serves_where_llamacpp_is_missing_or_a_gpu_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("personalpeft.host.has_gpu", lambda: True)
    assert choose_backend("auto", GGUF, None).reason is ChoiceReason.GPU
    monkeypatch.setattr("personalpeft.backends.choice.find_spec", lambda package: None)
    missing = choose_backend("auto", GGUF, None)
    assert (missing.name, missing.reason) == ("torch", ChoiceReason.NOT_INSTALLED)


def test_torch_serves_where_the_library_of_llamacpp_cannot_be_loaded(tmp_path: Path) -> None:
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('Failed to load shared library')")
    script = """
from personalpeft import MissingPackage, host
from personalpeft.backends.choice import choose_backend
from personalpeft.backends.llamacpp.binding import load_library
from personalpeft.base_models.registry import find_card

host.has_gpu = lambda: False
chosen = choose_backend("auto", find_card("smollm2-135m-instruct"), None)
try:
    load_library()
except MissingPackage as error:
    print(chosen.name, chosen.reason, bool(error.hint))
"""
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["torch", ChoiceReason.NOT_LOADABLE, "True"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with a driver for CUDA 12."""
    monkeypatch.setattr("personalpeft.host.cuda_of_driver", lambda: 12)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("cuda", "name"), [(None, "llamacpp"), ("12.6", "torch"), ("13.0", "llamacpp")]
)
def test_a_gpu_counts_only_if_the_installed_torch_can_use_it(
    cuda: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"cuda: str | None = {cuda!r}\n", "utf-8")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("personalpeft.host.find_spec", lambda package: spec)
    host.cuda_of_torch.cache_clear()
    choice = choose_backend("auto", GGUF, None)
    host.cuda_of_torch.cache_clear()
    assert choice.name == name
    assert (choice.max_batch > 16) == (name == "torch")


@pytest.mark.usefixtures("driver")
def test_a_gpu_that_torch_does_not_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from personalpeft.backends.torch.device import choose_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    notes = []
    for cuda in (0, 13):
        monkeypatch.setattr("personalpeft.host.cuda_of_torch", lambda cuda=cuda: cuda)
        notes.append(choose_device().note)
    assert all("GPU" in note for note in notes)
    assert len(set(notes)) == 2
    monkeypatch.setattr("personalpeft.host.cuda_of_driver", lambda: 0)
    assert choose_device().note == ""


def test_requested_backend_is_never_replaced(tmp_path: Path) -> None:
    for name in ("torch", "llamacpp", "vllm"):
        choice = choose_backend(name, RANDOM, 3)
        assert (choice.name, choice.reason, choice.max_batch) == (name, ChoiceReason.REQUESTED, 3)
        assert choice.trains == (name == "torch")
    with pytest.raises(NotFound):
        personalpeft.open(tmp_path, backend="lama")


def test_turn_and_provenance_name_the_backend_and_why_it_served(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        reply = ask(ada)
        turn, why = ada.turns()[0], ada.why(reply)
        assert (turn.backend, turn.backend_reason) == ("fake", ChoiceReason.REQUESTED)
        data = why.as_json()["turn"]
        assert (data["backend"], data["backend_reason"]) == ("fake", "requested")
        assert describe_choice("fake", "requested") in str(why)
        # Where an earlier or a later version wrote the turn.
        for reason in (None, "of another version"):
            assert describe_choice("fake", reason) == "fake"


@pytest.mark.usefixtures("tiny_base")
@pytest.mark.exhaustive
def test_another_engine_learns_the_same_revision_while_chat_goes_on_and_frees_its_memory(
    tmp_path: Path,
) -> None:
    card = quick_card(tmp_path)
    expected = _learn_on_torch(tmp_path / "torch", card)
    loaded = _torch_backends()
    with personalpeft.open(tmp_path / "home", card, "llamacpp") as runtime:
        ada, bo = runtime.user("ada"), runtime.user("bo")
        _teach(ada)
        answered: list[str] = []

        def chat_once(stage: str, done: float) -> None:
            if stage == "Learning" and not answered:
                thread = threading.Thread(target=lambda: answered.extend(greedy(bo, ["hello"])))
                thread.start()
                thread.join(60)

        assert ada.learn(accept=True, progress=chat_once).live
        assert ada.revisions()[-1].digest == expected
        assert answered
        assert greedy(ada) != greedy(bo)
        assert _torch_backends() == loaded
        # For programs that train by themselves it stays.
        backend = runtime.training_backend()
        assert ada.learn(accept=True, start="scratch").revision
        assert runtime.learning_engine().backend is backend
        assert runtime.engine().backend is not backend


@pytest.mark.exhaustive
@pytest.mark.usefixtures("tiny_base")
def test_memory_is_freed_after_a_proposed_adapter_was_judged(tmp_path: Path) -> None:
    card = quick_card(tmp_path)
    with personalpeft.open(tmp_path / "home", card, "llamacpp") as runtime:
        ada, bo = runtime.user("ada"), runtime.user("bo")
        _teach(ada)
        ada.learn(accept=True)
        loaded = _torch_backends()
        folder = ada.export_peft(tmp_path / "adapter")
        assert bo.propose_peft(folder, accept=True).live
        assert _torch_backends() == loaded


def test_one_engine_serves_and_learns_where_the_backend_trains(tmp_path: Path) -> None:
    with open_runtime(tmp_path, serving=Serving(max_batch=3)) as runtime:
        assert runtime.learning_engine() is runtime.engine()
        assert greedy(runtime.user("ada"))


def _teach(user: User) -> None:
    for number in range(6):
        user.teach(f"question {number}", style(f"Answer {number}."), skill="pirate")


def _learn_on_torch(home: Path, card: Path) -> str:
    with personalpeft.open(home, card, "torch") as runtime:
        ada = runtime.user("ada")
        _teach(ada)
        assert ada.learn(accept=True).live
        return ada.revisions()[-1].digest


def _torch_backends() -> int:
    """Return how many backends of torch are in memory."""
    gc.collect()
    return sum(type(each).__name__ == "TorchBackend" for each in gc.get_objects())
