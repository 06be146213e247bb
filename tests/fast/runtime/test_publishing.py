"""What ``publish`` promises: servers elsewhere find what is live by name, whole, and nothing of who has nothing live or forgot it."""

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
from runtime_makers import correct, opened, python_environment, quick_card

import personalpeft
from personalpeft import Busy, InvalidId, InvalidInput, NotFound, Runtime, User
from personalpeft.adapters.formats.published import FILES, PublishedAdapterFolder

PEOPLE = ("ada", "bo", "cy")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def runtime(cache: Path, home: Path) -> Iterator[Runtime]:
    with opened(home) as runtime:
        yield runtime


@pytest.fixture
def crowd(runtime: Runtime) -> Runtime:
    """Three who have learned, and one who said something and learned nothing."""
    for name in PEOPLE:
        learned(runtime.user(name))
    correct(runtime.user("dee"), 1)
    return runtime


def learned(user: User) -> None:
    # Nobody's answers are another's.
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


def lying(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def digests(folder: Path) -> set[str]:
    """The stacks in a part; each whole and what its name says."""
    for path in folder.iterdir():
        listed = "".join(
            f"{hashlib.sha256((path / file).read_bytes()).hexdigest()}  {file}\n" for file in FILES
        )
        assert hashlib.sha256(listed.encode()).hexdigest() == path.name
        assert {file.name for file in path.iterdir()} == set(FILES)
    return {path.name for path in folder.iterdir()}


def of(named: dict[str, str | None]) -> set[str]:
    return {name.removeprefix("personalpeft:") for name in named.values() if name}


def test_what_is_live_of_everybody_is_given_by_its_name_although_nobody_is_served(
    crowd: Runtime, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd.close()

    def never(*args: object, **more: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("personalpeft.runtime.load_backend", never)
    heard: list[float] = []
    with opened(home) as runtime:
        done = runtime.publish(progress=lambda stage, share: heard.append(share))
        assert [each.user for each in done.stacks] == list(PEOPLE)
        assert (done.written, done.taken) == (3, 0)
        assert heard == sorted(heard)
        assert heard[-1] == 1
        for each in done.stacks:
            assert each.name
            digest = each.name.removeprefix("personalpeft:")
            assert {name: runtime.read_published_file(digest, name) for name in FILES} == {
                name: (done.folder / digest / name).read_bytes() for name in FILES
            }
        assert len(digests(done.folder)) == 3
        # What others may look at says nothing of who somebody is.
        shown = list(done.folder.rglob("*.json"))
        assert not any(name in path.read_text() for name in PEOPLE for path in shown)
        assert runtime.verify() == ()
    # It outlives the program.
    assert len(digests(done.folder)) == 3


def test_a_layer_that_is_switched_off_is_not_given_to_others(
    crowd: Runtime, tmp_path: Path
) -> None:
    user = crowd.user(PEOPLE[0])
    (layer,) = (entry.layer for entry in user.stack().entries)
    user.scope(layer, "never")
    (told,) = crowd.publish([user.id]).stacks
    assert (told.name, told.reason) == (None, "nothing is live")
    with pytest.raises(NotFound):
        user.export_peft(tmp_path / "peft")
    # By its name it is.
    assert user.export_peft(tmp_path / "peft", layer=layer).is_dir()


def test_publishing_again_writes_nothing(crowd: Runtime, home: Path) -> None:
    first = crowd.publish()
    before = {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in first.folder.parent.rglob("*")
    }
    notes = {path: path.stat().st_ino for path in (home / "notes").iterdir()}
    again = crowd.publish()
    assert again.stacks == first.stacks
    assert (again.written, again.taken) == (0, 0)
    assert {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in first.folder.parent.rglob("*")
    } == before
    assert {path: path.stat().st_ino for path in (home / "notes").iterdir()} == notes


ACTS = st.lists(
    st.tuples(st.just("weigh"), st.sampled_from(PEOPLE), st.sampled_from([0.0, 0.5, 1.0]))
    | st.tuples(
        st.just("publish"),
        st.none() | st.lists(st.sampled_from([*PEOPLE, "dee"]), max_size=3),
        st.just(0.0),
    ),
    max_size=10,
)


@given(acts=ACTS)
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_place_has_for_each_user_what_was_live_when_they_were_published_last(
    crowd: Runtime, tmp_path: Path, acts: list[tuple[str, str | list[str] | None, float]]
) -> None:
    place = Path(tempfile.mkdtemp(dir=tmp_path))
    for name in PEOPLE:
        crowd.user(name).set_weight("style", 1.0)
    expected: dict[str, str | None] = {}
    for act, whom, weight in acts:
        if act == "weigh":
            assert isinstance(whom, str)
            crowd.user(whom).set_weight("style", weight)
            continue
        assert not isinstance(whom, str)
        done = crowd.publish(whom, to=place)
        live = {name: crowd.user(name).stack() for name in PEOPLE}
        said = {each.user: each.name for each in done.stacks}
        assert {user for user, name in said.items() if name} == {
            user
            for user in (PEOPLE if whom is None else whom)
            if user in live and not live[user].is_bare
        }
        expected |= dict.fromkeys(PEOPLE, None) if whom is None else {}
        expected |= said
        assert digests(done.folder) == of(expected)
        assert crowd.publish(whom, to=place).written == 0


def test_of_who_has_nothing_live_nothing_stays_and_the_answer_says_why(crowd: Runtime) -> None:
    before = crowd.publish(["ada", "dee"])
    assert [(each.user, each.reason) for each in before.stacks if not each.name] == [
        ("dee", "nothing is live")
    ]
    crowd.user("ada").rollback("style", None)
    after = crowd.publish(["ada"])
    assert (after.stacks[0].name, after.stacks[0].reason, after.taken) == (
        None,
        "nothing is live",
        1,
    )
    assert digests(after.folder) == set()


def test_one_whose_stack_cannot_be_served_keeps_nobody_from_being_published(
    crowd: Runtime, home: Path
) -> None:
    (entry,) = crowd.user("bo").stack().entries
    (home / "blobs" / entry.digest[:2] / entry.digest).write_bytes(b"other bytes")
    done = crowd.publish()
    assert [each.user for each in done.stacks if each.name] == ["ada", "cy"]
    done = crowd.publish(["bo"])
    assert done.stacks[0].name is None
    assert done.stacks[0].reason


def test_two_who_have_the_same_stack_keep_it_until_neither_has_it(
    crowd: Runtime, tmp_path: Path
) -> None:
    crowd.user("ada").export(tmp_path / "ada.personal")
    crowd.import_user(tmp_path / "ada.personal", as_user="eve")
    named = names(crowd)
    assert named["ada"] == named["eve"]
    folder = crowd.publish().folder
    crowd.user("ada").rollback("style", None)
    assert crowd.publish().taken == 0
    assert of(named) == digests(folder)
    crowd.user("eve").forget(crowd.user("eve").signals()[0].id, rebuild=False)
    assert digests(folder) == of({"bo": named["bo"], "cy": named["cy"]})


def test_a_forgetting_takes_away_all_that_is_published_of_the_user_and_of_nobody_else(
    crowd: Runtime, tmp_path: Path
) -> None:
    named, elsewhere = names(crowd), crowd.publish(to=tmp_path / "elsewhere")
    digest = of({"ada": named["ada"]}).pop()
    crowd.user("ada").forget(crowd.user("ada").signals()[0].id, dry_run=True)
    assert crowd.read_published_file(digest, FILES[0])
    report = crowd.user("ada").forget(crowd.user("ada").signals()[0].id)
    assert report.revisions
    with pytest.raises(NotFound):
        crowd.read_published_file(digest, FILES[0])
    assert digests(elsewhere.folder) == of({"bo": named["bo"], "cy": named["cy"]})
    # What was built anew is published when somebody says so.
    assert names(crowd)["ada"] not in (named["ada"], None)


def test_what_a_forgetting_could_not_reach_goes_with_the_next_publishing_there(
    crowd: Runtime, tmp_path: Path
) -> None:
    named = names(crowd, to=tmp_path / "drive")
    (tmp_path / "drive").rename(tmp_path / "unplugged")
    crowd.user("ada").forget(crowd.user("ada").signals()[0].id, rebuild=False)
    assert not (tmp_path / "drive").exists()
    (tmp_path / "unplugged").rename(tmp_path / "drive")
    done = crowd.publish(to=tmp_path / "drive")
    assert digests(done.folder) == of({"bo": named["bo"], "cy": named["cy"]})


def test_forgetting_what_nothing_was_learned_from_leaves_what_is_published(crowd: Runtime) -> None:
    named = names(crowd)
    late = correct(crowd.user("ada"), 1, first=7)[0]
    crowd.user("ada").forget(late)
    assert names(crowd) == named
    assert crowd.publish().written == 0


def test_what_was_changed_where_it_is_published_is_put_right(crowd: Runtime) -> None:
    done = crowd.publish()
    one, other, third = sorted(done.folder.iterdir())
    (one / FILES[1]).write_bytes(b"other numbers")
    (other / FILES[0]).unlink()
    shutil.rmtree(third)
    assert crowd.publish().written == 3
    assert len(digests(done.folder)) == 3


def test_neither_another_program_nor_another_home_takes_away_what_is_published(
    crowd: Runtime, tmp_path: Path
) -> None:
    done = crowd.publish()
    # One that was killed on this machine, and one that clears up after it.
    dead = PublishedAdapterFolder(done.folder.parent, "here.dead")
    dead._lock.release()
    with closing(PublishedAdapterFolder(done.folder.parent, "here.living")) as folders:
        assert folders.incomplete() == ("here.dead",)
        folders.sweep("here.dead")
    with opened(tmp_path / "other-home") as other:
        learned(other.user("ada"))
        its = other.publish()
        assert its.folder.parent == done.folder.parent
        other.user("ada").rollback("style", None)
        assert other.publish().taken == 1
    assert len(digests(done.folder)) == 3


def test_what_was_built_on_another_base_is_published_apart(
    crowd: Runtime, home: Path, tmp_path: Path
) -> None:
    done = crowd.publish(to=tmp_path / "place")
    crowd.close()
    with opened(home, quick_card(tmp_path)) as other:
        its = other.publish(["ada"], to=tmp_path / "place")
        assert its.stacks[0].name is None
        assert its.stacks[0].reason
        assert (its.written, its.taken) == (0, 0)
        other.publish(to=tmp_path / "place")
    assert len(digests(done.folder)) == 3
    assert digests(its.folder) == set()


def test_one_program_at_a_time_publishes_from_a_home(crowd: Runtime, home: Path) -> None:
    with opened(home) as other, other.maintenance.exclusive("publish"), pytest.raises(Busy):
        crowd.publish()
    assert crowd.publish().written == 3


def test_a_forgetting_waits_for_a_publishing_of_that_user_and_leaves_nothing(
    crowd: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one is at the user's files while the other begins."""
    begun, may_go = threading.Event(), threading.Event()
    rename = Path.rename

    def slowly(path: Path, target: Path) -> Path:
        if "published_" in str(path):
            begun.set()
            assert may_go.wait(20)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", slowly)
    publishing = threading.Thread(target=crowd.publish, args=(["ada"],))
    publishing.start()
    assert begun.wait(20)
    ada = crowd.user("ada")
    forgetting = threading.Thread(
        target=ada.forget, args=(ada.signals()[0].id,), kwargs={"rebuild": False}
    )
    forgetting.start()
    may_go.set()
    for thread in (publishing, forgetting):
        thread.join(30)
    assert digests(crowd.publish([]).folder) == set()


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


def test_a_kill_leaves_whole_stacks_alone_and_a_forgetting_still_knows_of_them(
    crowd: Runtime, home: Path, cache: Path
) -> None:
    assert run(KILLED, home, cache).returncode == 9
    # Ada's is there and bo's was being written.
    (part,) = cache.glob("served/published_*_*")
    assert len(digests(part)) == 1
    for name in ("ada", "bo"):
        crowd.user(name).forget(crowd.user(name).signals()[0].id, rebuild=False)
    assert lying(cache / "served") == {}
    assert crowd.publish().written == 1


FULL = """
import resource, sys
import personalpeft
from personalpeft import InvalidInput
largest = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
with personalpeft.open(sys.argv[1], backend="fake") as runtime:
    runtime.publish(["ada"])
    runtime.user("ada").set_weight("style", 0.5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1100, largest))
    try:
        runtime.publish()
    except InvalidInput as error:
        print(error.message, error.hint)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
"""


def test_on_a_full_disk_what_was_published_stays_and_nothing_is_half(
    crowd: Runtime, home: Path, cache: Path
) -> None:
    told = run(FULL, home, cache)
    assert "File too large" in told.stdout, told.stderr
    (part,) = cache.glob("served/published_*_*")
    assert len(digests(part)) == 1
    assert [path.name for path in part.parent.iterdir()] == [part.name]
    assert (crowd.publish().written, len(digests(part))) == (3, 3)


def run(code: str, home: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = python_environment(cache)
    return subprocess.run(
        [sys.executable, "-c", code, str(home)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_cannot_be_published_is_said_before_anything_is_written(
    crowd: Runtime, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    for users, error, words in (
        (["ada", "nobody"], NotFound, "nobody"),
        (["../ada"], InvalidId, "ada"),
        ("ada", InvalidInput, "list"),
    ):
        with pytest.raises(error, match=words) as caught:
            crowd.publish(users, to=place)
        assert caught.value.hint
    assert not place.exists()
    place.write_text("a file")
    with pytest.raises(InvalidInput):
        crowd.publish(to=place)


def test_others_may_read_what_is_published_where_they_may_look_into_the_place(
    crowd: Runtime, tmp_path: Path
) -> None:
    for mode in (0o700, 0o755):
        place = tmp_path / f"{mode:o}"
        place.mkdir(mode=mode)
        place.chmod(mode)
        folder = crowd.publish(["ada"], to=place).folder
        assert {path.stat().st_mode & 0o777 for path in folder.rglob("*")} == {mode, mode & 0o644}
        assert folder.stat().st_mode & 0o777 == mode


def test_a_home_that_is_read_only_publishes_nothing(
    crowd: Runtime, home: Path, cache: Path
) -> None:
    crowd.close()
    with (
        personalpeft.open(home, backend="fake", read_only=True) as runtime,
        pytest.raises(personalpeft.HomeError, match="read-only"),
    ):
        runtime.publish()
    assert not (cache / "served").exists()
