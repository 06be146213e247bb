"""Nothing is unpickled: a pickle can run code.

``pickle_watch`` sees what every other test does. Here are the main jobs in one process, and the
proof that it sees a pickle.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pickle_watch import take_found
from runtime_makers import ask, correct, open_runtime, quick_card

import personalpeft

SOURCES = Path(personalpeft.__file__).resolve().parents[1]
MODULES = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")


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


def test_each_test_would_fail_that_unpickles_anything() -> None:
    pickle.loads(pickle.dumps(Path("x")))  # noqa: S301
    (found,) = take_found()
    assert found.endswith(f"Path, by {__name__}")


def test_each_test_would_fail_whose_program_unpickles_anything() -> None:
    program = "import pickle, personalpeft; pickle.loads(pickle.dumps(personalpeft.User))"
    subprocess.run([sys.executable, "-c", program], check=True)
    (found,) = take_found()
    assert found.endswith("User, by __main__")


def test_main_jobs_unpickle_nothing(tmp_path: Path) -> None:
    do_the_main_jobs(tmp_path, "fake")
    assert take_found() == []


@pytest.mark.exhaustive
def test_main_jobs_on_a_model_unpickle_nothing(tmp_path: Path) -> None:
    do_the_main_jobs(tmp_path, quick_card(tmp_path))
    assert take_found() == []


def test_no_module_of_ours_imports_a_pickling_library() -> None:
    pattern = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(MODULES)})\b", re.MULTILINE)
    found = [
        str(path.relative_to(SOURCES))
        for package in ("personalpeft", "app", "models", "plugins")
        for path in sorted((SOURCES / package).rglob("*.py"))
        if "tests" not in path.parts and pattern.search(path.read_text("utf-8"))
    ]
    assert found == []
