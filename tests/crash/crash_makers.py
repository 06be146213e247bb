"""Homes to interrupt operations on, and the check of a home after an interruption."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crash_operations import ENCRYPTED, EVERY_OPERATION, SECRET, contents, open_home, users

import personalpeft
from personalpeft import Runtime
from personalpeft.store.home_keys import ENCRYPTION

# How many writes of each operation are interrupted, and how many orders of acts are drawn. ``make
# crash`` sets more.
_POINTS, _ORDERS = "PERSONALPEFT_CRASH_POINTS", "PERSONALPEFT_CRASH_ORDERS"
_USUAL_POINTS = 3


def points() -> int:
    """Return how many writes of an operation to interrupt."""
    return int(os.environ.get(_POINTS, _USUAL_POINTS))


def orders() -> int:
    """Return how many orders of acts to draw."""
    return int(os.environ.get(_ORDERS, points()))


@dataclass(frozen=True, slots=True)
class CrashFolder:
    """A folder that an operation starts from, and the ids that its home promises to keep."""

    path: Path
    contents: Mapping[str, Collection[str]]


def make_crash_folder(operation: str, path: Path) -> CrashFolder:
    """Prepare the folder of an operation."""
    path.mkdir()
    EVERY_OPERATION[operation].prepare(path)
    if "migrate" in operation:
        copy = path.with_name(f"{path.name}-migrated")
        shutil.copytree(path, copy)
        return CrashFolder(path, contents(copy))
    return CrashFolder(path, contents(path))


def check_home(
    operation: str,
    folder: Path,
    before: Mapping[str, Collection[str]],
    promises: Sequence[tuple[str, str]],
) -> None:
    """Check the home that an interrupted operation left, and that the operation can be done again."""
    erases = EVERY_OPERATION[operation].erases
    if operation in ENCRYPTED:
        assert_no_secret(folder / "home")
    kept = contents(folder)
    for key, ids in before.items():
        user = key.partition(" ")[0]
        if not (erases and user == "ada"):
            assert set(ids) <= set(kept.get(key, ())), f"lost of {key}"
    promised = dict(promises)
    for kind, what in promises:
        if kind in ("turn", "signal", "revision"):
            assert what in kept[f"ada {kind}"]
    if "forgotten" in promised:
        assert_erased(folder)
    if "file" in promised:
        check_file(folder / promised["file"], folder)
    if "backup" in promised:
        assert (folder / promised["backup"] / "personalpeft.db").is_file()
    with open_home(folder) as runtime:
        check_heads(runtime)
        assert find_problems(runtime) == []
        runtime.repair()
        # Only the next restore can know that another one was killed.
        left = [path for path in _find_unfinished(folder) if "home.restoring" not in path.parts]
        assert left == []
        if "empty" in promised:
            assert runtime.user("ada").stack().entries == ()
        if "user" in promised:
            assert promised["user"] in [user.id for user in users(runtime)]
    _do_again(operation, folder)


def _do_again(operation: str, folder: Path) -> None:
    """Perform the operation to its end, and check that nothing of the interruption is left."""
    EVERY_OPERATION[operation].act(folder, lambda kind, what: None)
    if EVERY_OPERATION[operation].erases:
        assert_erased(folder)
    with open_home(folder) as runtime:
        check_heads(runtime)
        assert find_problems(runtime) == []
    assert _find_unfinished(folder) == []


def _find_unfinished(folder: Path) -> list[Path]:
    """Return what a killed program left unfinished in a folder."""
    return [path for path in folder.rglob("*") if path.name.endswith((".part", ".tmp"))]


def check_heads(runtime: Runtime) -> None:
    """Check that each live revision is recorded and its adapter can be read."""
    for user in users(runtime):
        revisions = {revision.id: revision for revision in user.revisions()}
        for entry in user.stack().entries:
            assert revisions[entry.revision].digest == entry.digest
            assert runtime.engine().read_adapter(entry.digest).manifest.layer


def check_file(path: Path, folder: Path) -> None:
    """Check that an exported file can be imported into another home."""
    with personalpeft.open(folder / "other", backend="fake") as runtime:
        runtime.import_user(path)
    shutil.rmtree(folder / "other")


def assert_erased(folder: Path) -> None:
    """Check that no file of a folder's home has the secret in its bytes, once it is decrypted."""
    home = folder / "home"
    if (home / ENCRYPTION).exists():
        home = shutil.copytree(home, folder / "decrypted")
        personalpeft.decrypt(home)
    assert_no_secret(home)
    shutil.rmtree(folder / "decrypted", ignore_errors=True)


def assert_no_secret(home: Path) -> None:
    """Check that no file of a home has the secret in its bytes."""
    found = [
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.is_file() and SECRET.lower().encode() in path.read_bytes().lower()
    ]
    assert found == []


def find_problems(runtime: Runtime) -> list[str]:
    return [
        f"{each.where}: {each.fault}"
        for each in runtime.verify()
        if not each.remedy.startswith("Harmless")
    ]
