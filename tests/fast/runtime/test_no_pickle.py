"""Nothing is unpickled: a pickle can run code.

Ray is left out. Its workers exchange their own objects as pickles, within one cluster, and a learn
crosses in bytes that ``learn_bundles`` checks.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import ask, correct, open_runtime, quick_card

import personalpeft

SOURCES = Path(personalpeft.__file__).resolve().parents[1]
MODULES = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")

_seen: list[str] | None = None
_hooked = False


@contextmanager
def unpickled() -> Iterator[list[str]]:
    """Collect the classes that any pickle looks up. A hook cannot be removed, only turned off."""
    global _seen, _hooked

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class" and _seen is not None:
            _seen.append(".".join(map(str, arguments)))

    if not _hooked:
        sys.addaudithook(hook)
        _hooked = True
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


def do_the_main_jobs(folder: Path, base: str | Path) -> None:
    """Chat, learn, publish, export and import."""
    with open_runtime(folder / "home", base) as runtime:
        ada = runtime.user("ada")
        correct(ada)
        ada.remember("My dog is called Biscuit.")
        ada.learn()
        assert ask(ada).text
        runtime.publish(to=folder / "published")
        file = ada.export(folder / "ada.personal").path
        runtime.import_user(file, as_user="bo")
        runtime.user("bo").import_peft(ada.export_peft(folder / "peft"))
        assert ask(runtime.user("bo")).text
        cy = runtime.user("cy")
        correct(cy)
        bundle = cy.bundle_learn()
        with open_runtime(folder / "elsewhere", base) as elsewhere:
            cy.apply_learn(*elsewhere.learn_bundles([bundle]))


def test_the_hook_sees_a_pickle() -> None:
    with unpickled() as seen:
        pickle.loads(pickle.dumps(Path("x")))  # noqa: S301
    assert seen


def test_main_jobs_unpickle_nothing(tmp_path: Path) -> None:
    with unpickled() as seen:
        do_the_main_jobs(tmp_path, "fake")
    assert seen == []


@pytest.mark.exhaustive
def test_main_jobs_on_a_model_unpickle_nothing(tmp_path: Path) -> None:
    with unpickled() as seen:
        do_the_main_jobs(tmp_path, quick_card(tmp_path))
    assert seen == []


def test_no_module_of_ours_imports_a_pickling_library() -> None:
    pattern = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(MODULES)})\b", re.MULTILINE)
    found = [
        str(path.relative_to(SOURCES))
        for package in ("personalpeft", "app", "models", "plugins")
        for path in sorted((SOURCES / package).rglob("*.py"))
        if "tests" not in path.parts and pattern.search(path.read_text("utf-8"))
    ]
    assert found == []
