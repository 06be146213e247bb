"""The public surface: its names, the cost of its import, its errors, and the docstring's example."""

from __future__ import annotations

import ast
import builtins
import inspect
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import python_environment

import personalpeft
from personalpeft import errors
from personalpeft.backends.vllm.transport import Unreachable
from personalpeft.erasure import ForgetReport
from personalpeft.errors import (
    ERROR_CODES,
    PersonalPeftError,
    ServingFailed,
    get_error_codes,
    get_error_type,
    suggest_nearest,
)

NAMES = [
    "DEFAULT_BASE",
    "ActivitySummary",
    "AdapterError",
    "BaseMismatch",
    "BuildMismatch",
    "Busy",
    "Cancelled",
    "CardError",
    "Certificate",
    "Comparison",
    "Conversation",
    "ConversationSummary",
    "Damaged",
    "DeadlineExceeded",
    "EncryptionReport",
    "Forgotten",
    "HomeError",
    "InvalidId",
    "InvalidInput",
    "LearnReport",
    "LedgerMoved",
    "MissingPackage",
    "NotFound",
    "NothingToLearn",
    "PersonalFileError",
    "PersonalPeftError",
    "PluginError",
    "PromptTooLong",
    "Provenance",
    "QueueFull",
    "RebaseReport",
    "RepairReport",
    "Reply",
    "ReproductionReport",
    "RestoreReport",
    "Runtime",
    "Serving",
    "ServingFailed",
    "Stream",
    "TrainingStatus",
    "TurnFeedback",
    "User",
    "Verdict",
    "VllmServer",
    "WeightsError",
    "decrypt",
    "encrypt",
    "open",
    "restore",
    "verify_certificate",
]
METHODS = [
    "activity_summary",
    "apply_learn",
    "bundle_learn",
    "chat",
    "compare",
    "conversation",
    "conversations",
    "copy_layer",
    "edit_item",
    "export",
    "export_gguf",
    "export_merged",
    "export_peft",
    "feedback",
    "forget",
    "history",
    "import_gguf",
    "import_peft",
    "items",
    "layers",
    "learn",
    "pending",
    "practice",
    "propose_peft",
    "record_implicit_feedback",
    "remember",
    "reports",
    "reproduce",
    "retract",
    "retract_item",
    "review_probation",
    "revisions",
    "rollback",
    "scope",
    "set_training",
    "set_weight",
    "signal_statuses",
    "signals",
    "stack",
    "stream",
    "summary",
    "teach",
    "teach_many",
    "training_status",
    "turn",
    "turns",
    "why",
]
HEAVY = [
    "torch",
    "transformers",
    "sentence_transformers",
    "safetensors",
    "tokenizers",
    "textual",
    "flask",
    "sqlite_utils",
    "sqlite3",
    "numpy",
    "rich",
]


def run(code: str, cache: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=python_environment(cache),
    )
    return done.stdout


def test_public_names_are_these_and_each_has_a_docstring() -> None:
    assert sorted(personalpeft.__all__) == sorted(NAMES)
    for name in set(NAMES) - {"DEFAULT_BASE"}:
        assert inspect.getdoc(getattr(personalpeft, name)), name
    with pytest.raises(AttributeError, match="nonsense"):
        personalpeft.nonsense  # noqa: B018


def test_misspelled_name_is_an_error_for_type_checkers() -> None:
    module = ast.parse(inspect.getsource(personalpeft))
    functions = {each.name for each in module.body if isinstance(each, ast.FunctionDef)}
    assert functions == {"open"}


def test_user_methods_are_these_and_each_has_a_docstring() -> None:
    public = {name for name in dir(personalpeft.User) if not name.startswith("_")}
    assert public == set(METHODS)
    for name in METHODS:
        assert len(inspect.getdoc(getattr(personalpeft.User, name)) or "") > 20, name


def test_deprecated_name_works_for_one_release_and_warns(tmp_path: Path) -> None:
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        ada = runtime.user("ada")
        for owner, old, new in (
            (ada, "check_rebuild", "reproduce"),
            (ada, "digest", "activity_summary"),
            (ada, "lessons", "signal_statuses"),
            (ada, "remove_item", "retract_item"),
            (ada, "weigh", "set_weight"),
            (runtime, "tokens", "api_keys"),
            (personalpeft, "RebuildReport", "ReproductionReport"),
            (personalpeft, "Why", "Provenance"),
            (ada.pending(), "news", "triggers"),
            (ForgetReport("ada", "s_1", datetime.now(UTC), 0.0), "stands", "remaining_mentions"),
        ):
            with pytest.warns(DeprecationWarning, match=new):
                assert getattr(owner, old) == getattr(owner, new)
        assert not hasattr(ada, "nonsense")
        reply = ada.chat("Hello", temperature=0)
        with pytest.warns(DeprecationWarning, match="record_implicit_feedback"):
            assert ada.observe(reply, seen="copied") is None  # type: ignore[attr-defined]
        for learn in (ada.learn, partial(runtime.learn_many, ["ada"])):
            with (
                pytest.warns(DeprecationWarning, match="max_memory_mb"),
                pytest.raises(personalpeft.InvalidInput),
            ):
                learn(memory=-1)
        with (
            pytest.warns(DeprecationWarning, match="scratch") as warned,
            pytest.raises(personalpeft.NothingToLearn),
        ):
            ada.learn(start="nothing")
        assert [each.filename for each in warned] == [__file__]


def test_deprecated_option_of_open_works_for_one_release_and_warns(tmp_path: Path) -> None:
    old: dict[str, Any] = {"observing": "kept"}
    with pytest.warns(DeprecationWarning, match="implicit_feedback"):
        opened = personalpeft.open(tmp_path / "home", backend="fake", **old)
    with opened as runtime:
        ada = runtime.user("ada")
        assert ada.record_implicit_feedback(ada.chat("Hello", temperature=0), "copied")


def test_help_of_chat_names_each_option() -> None:
    chat, stream = (
        inspect.signature(getattr(personalpeft.User, name)) for name in ("chat", "stream")
    )
    assert chat.parameters == stream.parameters
    assert {"prompt", "temperature", "layers", "timeout"} <= set(chat.parameters)
    assert (chat.return_annotation, stream.return_annotation) == ("Reply", "Stream")


def test_import_loads_no_heavy_module(shared_cache: Path) -> None:
    code = "import personalpeft, sys; print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in run(code, shared_cache).split()}
    assert not loaded & set(HEAVY)


def test_recording_and_reading_load_no_model_code(shared_cache: Path, tmp_path: Path) -> None:
    code = """
import sys, personalpeft
with personalpeft.open(sys.argv[1], base="tiny-random") as runtime:
    ada = runtime.user("ada")
    ada.teach("Write to Bo.", "Dear Bo")
    ada.remember("My dog is called Biscuit.")
    ada.signals(), ada.layers(), ada.revisions(), ada.history(), ada.turns(), runtime.users(), runtime.models()
    runtime.verify()
print(*sys.modules)
"""
    loaded = {
        name.partition(".")[0] for name in run(code, shared_cache, str(tmp_path / "home")).split()
    }
    assert not loaded & {"torch", "transformers", "sentence_transformers", "tokenizers"}


def test_example_of_the_docstring_runs(shared_cache: Path, tmp_path: Path) -> None:
    shown = (
        inspect.cleandoc(personalpeft.__doc__ or "")
        .partition("\n\n")[2]
        .partition("\nImporting this")[0]
    )
    lines = inspect.cleandoc(shown).replace("open()", "open(sys.argv[1], backend='fake')")
    assert len(lines.splitlines()) == 7
    printed = run(f"import sys\n{lines}", shared_cache, str(tmp_path / "home"))
    assert "style" in printed


LEAVES = [
    each
    for each in vars(errors).values()
    if isinstance(each, type)
    and issubclass(each, PersonalPeftError)
    and each is not PersonalPeftError
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: str(leaf.__name__))
def test_each_error_has_an_outcome_and_is_a_builtin_too(leaf: type[PersonalPeftError]) -> None:
    error = leaf("It broke.", hint="Mend it.")
    assert (str(error), error.message, error.hint) == ("It broke.", "It broke.", "Mend it.")
    assert get_error_codes(error) == ERROR_CODES[leaf]
    own = [
        each
        for each in leaf.__mro__
        if each.__module__ == "builtins" and each not in (Exception, BaseException, object)
    ]
    assert own
    assert all(getattr(builtins, each.__name__) is each for each in own)
    assert leaf.__name__ in personalpeft.__all__
    assert getattr(personalpeft, leaf.__name__) is leaf
    assert 0 < get_error_codes(error).exit_code < 256
    assert 400 <= get_error_codes(error).http_status < 600


def test_error_class_of_a_backend_maps_to_its_public_class() -> None:
    error = Unreachable("Nobody is there.", hint="Start it.")
    assert get_error_type(error) is ServingFailed
    assert get_error_codes(error) == ERROR_CODES[ServingFailed]


def test_errors_with_different_meanings_have_different_exit_codes() -> None:
    kinds = {leaf for leaf in LEAVES if PersonalPeftError in leaf.__bases__}
    assert set(ERROR_CODES) == {PersonalPeftError, *LEAVES}
    assert len({ERROR_CODES[kind].exit_code for kind in kinds}) == len(kinds)


def test_hint_names_the_nearest_or_the_existing_names() -> None:
    for wanted, known, named in (
        ("styl", ["style", "memory"], ["style"]),
        ("smol", ["small", "smollm2-135m-instruct"], ["smollm2-135m-instruct"]),
        ("say-nothing", ["serve", "path"], ["path", "serve"]),
        ("zzz", ["b-side", "a-side"], ["a-side", "b-side"]),
    ):
        hint = suggest_nearest(wanted, known, what="name")
        assert [name for name in sorted(known) if name in hint] == named
    assert "layer" in suggest_nearest("zzz", [], what="layer")


def test_each_package_with_code_is_in_the_wheel() -> None:
    import tomllib

    root = Path(__file__).parents[3]
    listed = set(
        tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    folders = {"personalpeft": root / "personalpeft", "personalpeft_app": root / "app"}
    found = {
        ".".join((name, *file.parent.relative_to(folder).parts))
        for name, folder in folders.items()
        for file in folder.rglob("*.py")
    }
    assert found - listed == set()
