"""A process on a node learns with what the node has, and answers in builtin values. Needs no Ray."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_makers import USERS, World

from personalpeft_ray_updates import node


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder of a node of its own."""
    monkeypatch.setenv(node.FOLDER_VARIABLE, str(tmp_path / "node"))
    monkeypatch.setattr(node, "runtimes", {})
    yield tmp_path / "node"
    for runtime in node.runtimes.values():
        runtime.close()


def learn(bundles: list[bytes], base: str = "fake") -> dict[str, Any]:
    return node.learn(bundles, base, "fake", lambda stage, done: False)


def test_a_bundle_is_learned_in_a_folder_of_the_node_and_recorded_at_home(
    world: World, folder: Path
) -> None:
    world.correct(USERS[:2])
    alone = world.learn_alone(USERS[:2])
    with world.open_runtime() as runtime:
        users = [runtime.user(user) for user in USERS[:2]]
        answer = learn([user.bundle_learn() for user in users])
        assert answer.keys() == {"results"}
        for user, result in zip(users, answer["results"], strict=True):
            assert user.apply_learn(result).live
    assert world.live_revisions(USERS[:2]) == alone
    world.recorded_once(USERS[:2])
    assert len(list(folder.glob("worker-*/home"))) == 1
    left = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"Arrr" not in left


def test_a_node_refuses_for_itself_and_a_bundle_for_its_user(world: World, folder: Path) -> None:
    world.correct(USERS[:1])
    with world.open_runtime() as runtime:
        bundle = runtime.user(USERS[0]).bundle_learn()
    refused = node.learn([bundle], "tiny-random", "torch", lambda stage, done: False)["error"]
    assert (refused["kind"], refused["of_bundle"]) == ("BaseMismatch", False)
    # It may hold a copy of somebody, so it is not used again.
    assert list(folder.glob("worker-*/home")) == []
    damaged = learn([bundle[:-100]])["error"]
    assert (damaged["kind"], damaged["of_bundle"]) == ("PersonalFileError", True)
    assert json.loads(json.dumps([refused, damaged])) == [refused, damaged]


def test_a_folder_that_cannot_be_used_is_an_error_of_the_node(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(node.FOLDER_VARIABLE, str(tmp_path / "file" / "below"))
    error = learn([b""])["error"]
    assert (error["kind"], error["of_bundle"]) == ("HomeError", False)
    assert node.FOLDER_VARIABLE in error["hint"]


@pytest.mark.exhaustive
def test_folders_of_processes_that_ended_are_deleted_and_others_stay(folder: Path) -> None:
    code = "from personalpeft_ray_updates import node; print(node._make_folder())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    abandoned = Path(ended.stdout.strip())
    (abandoned / "of a user").write_text("Arrr!")
    mine = node._make_folder()
    assert not abandoned.exists()
    other = node._make_folder()
    assert mine.is_dir()
    assert mine != other
    assert mine.stat().st_mode & 0o077 == 0


def test_a_node_whose_account_has_no_name_has_a_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwd = pytest.importorskip("pwd")

    def no_entry(uid: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert learn([b""])["error"]["of_bundle"]
    assert len(list(folder.glob("worker-*/home"))) == 1
    monkeypatch.delenv(node.FOLDER_VARIABLE)
    assert node._make_folder().parent.parent == tmp_path
