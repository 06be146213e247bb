"""``publish`` writes whole stacks under their names for other servers, and nothing of users without
a live stack.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from runtime_makers import correct, open_runtime, python_environment, quick_card

import personalpeft
from personalpeft import Busy, InvalidId, InvalidInput, NotFound, Runtime, User
from personalpeft.adapters.formats.published import FILES, PublishedAdapterFolder

USERS = ("ada", "bo", "cy")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def runtime(cache: Path, home: Path) -> Iterator[Runtime]:
    with open_runtime(home) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def learned_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("learned") / "home"
    with open_runtime(home) as runtime:
        for name in USERS:
            learn_style(runtime.user(name))
        correct(runtime.user("dee"), 1)
    return home


@pytest.fixture
def learned_users(learned_home: Path, runtime: Runtime) -> Runtime:
    """Return a runtime with three users who learned and one who has feedback alone."""
    return runtime


def learn_style(user: User) -> None:
    # Each user has their own answers.
    for number in range(5):
        user.feedback(
            user.chat(f"question {number}", temperature=0),
            edit=f"Ahoy! {user.id} says {number}. Arrr!",
        )
    assert user.learn().verdict == "promoted"


def names(
    runtime: Runtime, users: list[str] | None = None, to: Path | None = None
) -> dict[str, str | None]:
    return {each.user: each.name for each in runtime.publish(users, to=to).stacks}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("loss", ["whole home", "nothing"])
def test_published_stacks_are_known_after_a_restore_of_the_home(
    learned_home: Path, tmp_path: Path, loss: str
) -> None:
    home, published = tmp_path / "home", tmp_path / "published"
    shutil.copytree(learned_home, home)
    with open_runtime(home) as runtime:
        runtime.maintenance.back_up(tmp_path / "copies")
        learn_style(runtime.user("eve"))
        before = names(runtime, to=published)
    if loss == "whole home":
        shutil.rmtree(home)
    personalpeft.restore(tmp_path / "copies", home, replace=True)
    with open_runtime(home) as runtime:
        certificate = runtime.forget_user("ada", certificate=True).certificate
        assert certificate is not None
        remains = certificate.statement["remains"]
        assert remains["restored"][:10] in certificate.to_markdown()
        if loss == "whole home":
            return
        # Of eve, whom the backup does not have, nothing can be forgotten later.
        left = {f"personalpeft:{each.name}" for each in published.glob("*/*")}
        assert left == {before["bo"], before["cy"]}
        runtime.publish(to=published)
        assert len(list(published.iterdir())) == 1


def file_contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def digests(folder: Path) -> set[str]:
    """Return the stacks of a folder, after a check that each is whole and named by its digest."""
    for path in folder.iterdir():
        listed = "".join(
            f"{hashlib.sha256((path / file).read_bytes()).hexdigest()}  {file}\n" for file in FILES
        )
        assert hashlib.sha256(listed.encode()).hexdigest() == path.name
        assert {file.name for file in path.iterdir()} == set(FILES)
    return {path.name for path in folder.iterdir()}


def digests_of(named: dict[str, str | None]) -> set[str]:
    return {name.removeprefix("personalpeft:") for name in named.values() if name}


def test_publish_writes_each_live_stack_under_its_name_without_a_model(
    learned_users: Runtime, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned_users.close()

    def never(*args: object, **more: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("personalpeft.runtime.load_backend", never)
    shares: list[float] = []
    with open_runtime(home) as runtime:
        done = runtime.publish(progress=lambda stage, share: shares.append(share))
        assert [each.user for each in done.stacks] == list(USERS)
        assert (done.written, done.taken) == (3, 0)
        assert shares == sorted(shares)
        assert shares[-1] == 1
        for each in done.stacks:
            assert each.name
            digest = each.name.removeprefix("personalpeft:")
            assert {name: runtime.read_published_file(digest, name) for name in FILES} == {
                name: (done.folder / digest / name).read_bytes() for name in FILES
            }
        assert len(digests(done.folder)) == 3
        # The published files name no user.
        shown = list(done.folder.rglob("*.json"))
        assert not any(name in path.read_text() for name in USERS for path in shown)
        assert runtime.verify() == ()
    # The stacks outlive the process.
    assert len(digests(done.folder)) == 3


def test_disabled_layer_is_not_published(learned_users: Runtime, tmp_path: Path) -> None:
    user = learned_users.user(USERS[0])
    (layer,) = (entry.layer for entry in user.stack().entries)
    user.scope(layer, "never")
    (published,) = learned_users.publish([user.id]).stacks
    assert (published.name, published.reason) == (None, "nothing is live")
    with pytest.raises(NotFound):
        user.export_peft(tmp_path / "peft")
    # It is exported where it is named.
    assert user.export_peft(tmp_path / "peft", layer=layer).is_dir()


def test_publishing_again_writes_nothing(learned_users: Runtime, home: Path) -> None:
    first = learned_users.publish()
    before = {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in first.folder.parent.rglob("*")
    }
    notes = {path: path.stat().st_ino for path in (home / "notes").iterdir()}
    again = learned_users.publish()
    assert again.stacks == first.stacks
    assert (again.written, again.taken) == (0, 0)
    assert {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in first.folder.parent.rglob("*")
    } == before
    assert {path: path.stat().st_ino for path in (home / "notes").iterdir()} == notes


ACTS = st.lists(
    st.tuples(st.just("weigh"), st.sampled_from(USERS), st.sampled_from([0.0, 0.5, 1.0]))
    | st.tuples(
        st.just("publish"),
        st.none() | st.lists(st.sampled_from([*USERS, "dee"]), max_size=3),
        st.just(0.0),
    ),
    max_size=10,
)


@given(acts=ACTS)
@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_folder_holds_each_users_live_stack_as_of_the_last_publish(
    learned_users: Runtime, tmp_path: Path, acts: list[tuple[str, str | list[str] | None, float]]
) -> None:
    place = Path(tempfile.mkdtemp(dir=tmp_path))
    for name in USERS:
        learned_users.user(name).set_weight("style", 1.0)
    expected: dict[str, str | None] = {}
    for act, target, weight in acts:
        if act == "weigh":
            assert isinstance(target, str)
            learned_users.user(target).set_weight("style", weight)
            continue
        assert not isinstance(target, str)
        done = learned_users.publish(target, to=place)
        live = {name: learned_users.user(name).stack() for name in USERS}
        published_names = {each.user: each.name for each in done.stacks}
        assert {user for user, name in published_names.items() if name} == {
            user
            for user in (USERS if target is None else target)
            if user in live and not live[user].is_bare
        }
        expected |= dict.fromkeys(USERS, None) if target is None else {}
        expected |= published_names
        assert digests(done.folder) == digests_of(expected)
        assert learned_users.publish(target, to=place).written == 0


def test_user_without_a_live_stack_is_removed_with_a_reason(learned_users: Runtime) -> None:
    before = learned_users.publish(["ada", "dee"])
    assert [(each.user, each.reason) for each in before.stacks if not each.name] == [
        ("dee", "nothing is live")
    ]
    learned_users.user("ada").rollback("style", None)
    after = learned_users.publish(["ada"])
    assert (after.stacks[0].name, after.stacks[0].reason, after.taken) == (
        None,
        "nothing is live",
        1,
    )
    assert digests(after.folder) == set()


def test_unservable_stack_of_one_user_blocks_no_other(learned_users: Runtime, home: Path) -> None:
    (entry,) = learned_users.user("bo").stack().entries
    (home / "blobs" / entry.digest[:2] / entry.digest).write_bytes(b"other bytes")
    done = learned_users.publish()
    assert [each.user for each in done.stacks if each.name] == ["ada", "cy"]
    assert [each.user for each in done.stacks if each.reason] == ["bo"]
    done = learned_users.publish(["bo"])
    assert done.stacks[0].name is None
    assert done.stacks[0].reason


def test_published_stack_stays_while_its_adapter_here_is_lost(
    learned_users: Runtime, home: Path
) -> None:
    before = digests(learned_users.publish().folder)
    (entry,) = learned_users.user("bo").stack().entries
    (home / "blobs" / entry.digest[:2] / entry.digest).unlink()
    done = learned_users.publish()
    assert done.taken == 0
    assert digests(done.folder) == before


def test_stack_shared_by_two_users_stays_until_neither_has_it(
    learned_users: Runtime, tmp_path: Path
) -> None:
    learned_users.user("ada").export(tmp_path / "ada.personal")
    learned_users.import_user(tmp_path / "ada.personal", as_user="eve")
    named = names(learned_users)
    assert named["ada"] == named["eve"]
    folder = learned_users.publish().folder
    learned_users.user("ada").rollback("style", None)
    assert learned_users.publish().taken == 0
    assert digests_of(named) == digests(folder)
    learned_users.user("eve").forget(learned_users.user("eve").signals()[0].id, rebuild=False)
    assert digests(folder) == digests_of({"bo": named["bo"], "cy": named["cy"]})


def test_forgetting_removes_each_published_stack_of_the_user_alone(
    learned_users: Runtime, tmp_path: Path
) -> None:
    named, elsewhere = names(learned_users), learned_users.publish(to=tmp_path / "elsewhere")
    digest = digests_of({"ada": named["ada"]}).pop()
    learned_users.user("ada").forget(learned_users.user("ada").signals()[0].id, dry_run=True)
    assert learned_users.read_published_file(digest, FILES[0])
    report = learned_users.user("ada").forget(learned_users.user("ada").signals()[0].id)
    assert report.revisions
    with pytest.raises(NotFound):
        learned_users.read_published_file(digest, FILES[0])
    assert digests(elsewhere.folder) == digests_of({"bo": named["bo"], "cy": named["cy"]})
    # The rebuilt stack is published by the next call alone.
    assert names(learned_users)["ada"] not in (named["ada"], None)


def test_folder_out_of_reach_during_a_forget_is_cleaned_by_the_next_publish(
    learned_users: Runtime, tmp_path: Path
) -> None:
    named = names(learned_users, to=tmp_path / "drive")
    (tmp_path / "drive").rename(tmp_path / "unplugged")
    learned_users.user("ada").forget(learned_users.user("ada").signals()[0].id, rebuild=False)
    assert not (tmp_path / "drive").exists()
    (tmp_path / "unplugged").rename(tmp_path / "drive")
    done = learned_users.publish(to=tmp_path / "drive")
    assert digests(done.folder) == digests_of({"bo": named["bo"], "cy": named["cy"]})


def test_forgetting_an_unlearned_item_leaves_published_stacks(learned_users: Runtime) -> None:
    named = names(learned_users)
    late = correct(learned_users.user("ada"), 1, first=7)[0]
    learned_users.user("ada").forget(late)
    assert names(learned_users) == named
    assert learned_users.publish().written == 0


def test_tampered_published_files_are_repaired(learned_users: Runtime) -> None:
    done = learned_users.publish()
    one, other, third = sorted(done.folder.iterdir())
    (one / FILES[1]).write_bytes(b"other numbers")
    (other / FILES[0]).unlink()
    shutil.rmtree(third)
    assert learned_users.publish().written == 3
    assert len(digests(done.folder)) == 3


def test_another_process_or_home_removes_no_published_stack(
    learned_users: Runtime, tmp_path: Path
) -> None:
    done = learned_users.publish()
    # One process was killed on this machine, and another one cleans up.
    dead = PublishedAdapterFolder(done.folder.parent, "here.dead")
    dead._lock.release()
    with closing(PublishedAdapterFolder(done.folder.parent, "here.living")) as folders:
        assert folders.dead_processes() == ("here.dead",)
        folders.sweep("here.dead")
    with open_runtime(tmp_path / "other-home") as other:
        learn_style(other.user("ada"))
        its = other.publish()
        assert its.folder.parent == done.folder.parent
        other.user("ada").rollback("style", None)
        assert other.publish().taken == 1
    assert len(digests(done.folder)) == 3


def test_opening_a_backup_removes_no_published_stack(
    learned_users: Runtime, tmp_path: Path
) -> None:
    done = learned_users.publish()
    backup = learned_users.maintenance.back_up(tmp_path / "copies")
    with open_runtime(backup.path) as copy:
        ada = copy.user("ada")
        assert ada.forget(ada.signals()[0].id, rebuild=False).revisions
    assert len(digests(done.folder)) == 3
    assert learned_users.publish().written == 0


def test_stacks_of_another_base_are_published_apart(
    learned_users: Runtime, home: Path, tmp_path: Path
) -> None:
    done = learned_users.publish(to=tmp_path / "place")
    learned_users.close()
    with open_runtime(home, quick_card(tmp_path)) as other:
        its = other.publish(["ada"], to=tmp_path / "place")
        assert its.stacks[0].name is None
        assert its.stacks[0].reason
        assert (its.written, its.taken) == (0, 0)
        other.publish(to=tmp_path / "place")
    assert len(digests(done.folder)) == 3
    assert digests(its.folder) == set()


def test_one_process_at_a_time_publishes_from_a_home(learned_users: Runtime, home: Path) -> None:
    with open_runtime(home) as other, other.maintenance.exclusive("publish"), pytest.raises(Busy):
        learned_users.publish()
    assert learned_users.publish().written == 3


def test_forget_waits_for_a_publish_of_the_user_and_leaves_nothing(
    learned_users: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forget begins while the publish writes the user's files."""
    begun, may_go = threading.Event(), threading.Event()
    rename = Path.rename

    def slow_write(path: Path, target: Path) -> Path:
        if "published_" in str(path):
            begun.set()
            assert may_go.wait(20)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", slow_write)
    publishing = threading.Thread(target=learned_users.publish, args=(["ada"],))
    publishing.start()
    assert begun.wait(20)
    ada = learned_users.user("ada")
    forgetting = threading.Thread(
        target=ada.forget, args=(ada.signals()[0].id,), kwargs={"rebuild": False}
    )
    forgetting.start()
    may_go.set()
    for thread in (publishing, forgetting):
        thread.join(30)
    assert digests(learned_users.publish([]).folder) == set()


KILLED = """
import os, sys
from pathlib import Path
import personalpeft
count, rename = 0, Path.rename
def killed(path, target):
    global count
    count += "published_" in str(path)
    if count == 2:
        os._exit(9)
    return rename(path, target)
Path.rename = killed
with personalpeft.open(sys.argv[1], backend="fake") as runtime:
    runtime.publish()
"""


@pytest.mark.exhaustive
def test_kill_leaves_whole_stacks_and_a_later_forget_finds_them(
    learned_users: Runtime, home: Path, cache: Path
) -> None:
    assert run(KILLED, home, cache).returncode == 9
    # Ada's stack is complete and bo's was being written.
    (part,) = cache.glob("served/published_*_*")
    assert len(digests(part)) == 1
    for name in ("ada", "bo"):
        learned_users.user(name).forget(learned_users.user(name).signals()[0].id, rebuild=False)
    assert file_contents(cache / "served") == {}
    assert learned_users.publish().written == 1


FULL = """
import resource, sys
import personalpeft
from personalpeft import HomeError, InvalidInput
from personalpeft.adapters.formats.published import PublishedSubfolder
largest = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
put = PublishedSubfolder.put
def full(call, *args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1100, largest))
    try:
        return call(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
with personalpeft.open(sys.argv[1], backend="fake") as runtime:
    runtime.publish(["ada"])
    runtime.user("ada").set_weight("style", 0.5)
    try:
        full(runtime.publish)
    except HomeError as error:
        print(error.message)
    PublishedSubfolder.put = lambda *args: full(put, *args)
    try:
        runtime.publish()
    except InvalidInput as error:
        print(error.message, error.hint)
"""


@pytest.mark.exhaustive
def test_full_disk_keeps_published_stacks_and_leaves_none_half(
    learned_users: Runtime, home: Path, cache: Path
) -> None:
    process = run(FULL, home, cache)
    assert "nothing was changed" in process.stdout, process.stderr
    assert "File too large" in process.stdout, process.stderr
    (part,) = cache.glob("served/published_*_*")
    assert len(digests(part)) == 1
    assert [path.name for path in part.parent.iterdir()] == [part.name]
    assert (learned_users.publish().written, len(digests(part))) == (3, 3)


def run(code: str, home: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = python_environment(cache)
    return subprocess.run(
        [sys.executable, "-c", code, str(home)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_invalid_publish_is_refused_before_anything_is_written(
    learned_users: Runtime, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    for users, error, words in (
        (["ada", "nobody"], NotFound, "nobody"),
        (["../ada"], InvalidId, "ada"),
        ("ada", InvalidInput, "list"),
    ):
        with pytest.raises(error, match=words) as caught:
            learned_users.publish(users, to=place)
        assert caught.value.hint
    assert not place.exists()
    place.write_text("a file")
    with pytest.raises(InvalidInput):
        learned_users.publish(to=place)


def test_published_files_are_readable_by_others_where_the_folder_is(
    learned_users: Runtime, tmp_path: Path
) -> None:
    for mode in (0o700, 0o755):
        place = tmp_path / f"{mode:o}"
        place.mkdir(mode=mode)
        place.chmod(mode)
        folder = learned_users.publish(["ada"], to=place).folder
        assert {path.stat().st_mode & 0o777 for path in folder.rglob("*")} == {mode, mode & 0o644}
        assert folder.stat().st_mode & 0o777 == mode


def test_read_only_home_publishes_nothing(learned_users: Runtime, home: Path, cache: Path) -> None:
    learned_users.close()
    with (
        personalpeft.open(home, backend="fake", read_only=True) as runtime,
        pytest.raises(personalpeft.HomeError, match="read-only"),
    ):
        runtime.publish()
    assert not (cache / "served").exists()
