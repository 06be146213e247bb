"""No log line contains a user's text.

A log names the kind of an error, where it was raised, and an id.
"""

from __future__ import annotations

import ast
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import personalpeft
from personalpeft import Runtime, Serving, ServingFailed
from personalpeft.backends.error_mapping import map_model_errors
from personalpeft.backends.fake import FakeBackend
from personalpeft.errors import format_origin

SECRET = "my dog is called Biscuit"
SOURCES = Path(personalpeft.__file__).parents[1]


@pytest.fixture(autouse=True)
def all_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def test_failing_step_logs_no_text(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(backend: FakeBackend) -> object:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise RuntimeError(f"no token for {SECRET}") from error

    monkeypatch.setattr(FakeBackend, "step", broken)
    with pytest.raises(ServingFailed) as caught:
        runtime.user("ada").chat(SECRET)
    assert SECRET not in caplog.text + caught.value.message + caught.value.hint
    assert "RuntimeError" in caplog.text
    assert "KeyError" in caplog.text
    assert ".broken" in caplog.text


def test_failing_check_of_a_reply_logs_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*asked: object) -> object:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(FakeBackend, "score", broken)
    with personalpeft.open(
        tmp_path / "home", backend="fake", serving=Serving(self_check=1.0)
    ) as runtime:
        runtime.user("ada").chat(SECRET)
        end = time.monotonic() + 20
        while not runtime.engine().metrics()["self_checks_skipped_total"]:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert SECRET not in caplog.text
    assert "RuntimeError" in caplog.text


def test_error_of_a_model_logs_no_text(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ServingFailed), map_model_errors("The model failed."):
        raise OSError(SECRET)
    assert SECRET not in caplog.text
    assert "OSError" in caplog.text


def test_same_failure_has_the_same_id_for_any_text() -> None:
    def log_error(text: str) -> str:
        try:
            raise ValueError(text)
        except ValueError as error:
            return format_origin(error)

    assert log_error("one") == log_error("two")
    assert ".log_error" in log_error("one")


def test_no_logging_call_receives_an_exception() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{line}"
        for package in ("personalpeft", "app")
        for path in sorted((SOURCES / package).rglob("*.py"))
        for line in _texts_in_logs(ast.parse(path.read_text("utf-8")))
    ]
    assert found == []


_LEVELS = {"debug", "info", "warning", "error", "critical", "log"}


def _texts_in_logs(tree: ast.AST) -> Iterator[int]:
    """Return the lines of calls that log a traceback or an exception itself."""
    caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)} - {None}
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if not (
            isinstance(call.func.value, ast.Name)
            and call.func.value.id.strip("_") in ("log", "logger", "access")
        ):
            continue
        if call.func.attr == "exception" or any(word.arg == "exc_info" for word in call.keywords):
            yield call.lineno
        if call.func.attr in _LEVELS and any(_holds(each, caught) for each in call.args):
            yield call.lineno


def _holds(value: ast.expr, caught: set[str | None]) -> bool:
    """Return whether an expression contains an exception's text, and not only its kind or its
    place.
    """
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ("format_origin", "type")
    ):
        return False
    if isinstance(value, ast.Name):
        return value.id in caught
    return any(
        _holds(each, caught) for each in ast.iter_child_nodes(value) if isinstance(each, ast.expr)
    )
