"""``forget_user`` leaves no byte of a user's id or texts in the home, and changes no other user."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import pytest
from runtime_makers import ask, correct, home_unchanged, open_runtime

from personalpeft import Busy, Forgotten, HomeError, InvalidId, NotFound, Runtime, User
from personalpeft.types import PromptResponse

ADA, SECRET = "zorblax-ada", "Quuxwell"


def files_that_hold(home: Path, *texts: str) -> list[str]:
    """Return the files of the home whose name or content has one of the texts."""
    return [
        str(path.relative_to(home))
        for path in home.rglob("*")
        for text in texts
        if text in path.name or (path.is_file() and text.encode() in path.read_bytes())
    ]


def use_app(user: User) -> None:
    """Record turns, edits, a fact, a rule and retractions, learn all layers, and forget an item."""
    correct(user)
    rule = user.feedback(ask(user, "And now?"), comment=f"Sign as {SECRET}.")
    user.remember(f"My dog is {SECRET}.", questions=["My dog?", "Which dog?"], answer=SECRET)
    user.learn()
    user.retract(rule)
    user.forget(user.turns()[0])


def everything_of(user: User) -> tuple[object, ...]:
    return user.turns(), user.signals(), user.revisions(), user.stack(), user.reports()


@pytest.fixture(scope="module")
def learned_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("learned") / "home"
    with open_runtime(home) as runtime:
        use_app(runtime.user(ADA))
    return home


@pytest.fixture
def ada(learned_home: Path, runtime: Runtime) -> User:
    return runtime.user(ADA)


def test_no_byte_of_a_forgotten_user_stays_and_other_users_are_unchanged(
    home: Path, runtime: Runtime, ada: User
) -> None:
    bob = runtime.user("bob")
    use_app(bob)
    runtime._services.store.save_checkpoint(ADA, "style", SECRET.encode())
    before = everything_of(bob)
    summary = ada.summary()
    report = runtime.forget_user(ADA)
    assert (report.turns, report.signals, report.revisions, report.complete) == (
        summary.turns,
        summary.signals,
        summary.revisions,
        True,
    )
    assert everything_of(bob) == before
    assert runtime.verify() == ()
    assert [each.id for each in runtime.users()] == ["bob"]
    runtime.forget_user("bob")
    runtime.close()
    assert files_that_hold(home, ADA, SECRET, "bob") == []
    assert not any((home / "blobs").rglob("*.*"))


def test_forgotten_user_is_unknown_and_the_id_can_be_used_anew(runtime: Runtime, ada: User) -> None:
    runtime.forget_user(ADA)
    for act in (
        lambda: runtime.forget_user(ADA),
        lambda: runtime.user(ADA, create=False),
        lambda: ada.chat("Hello"),
        lambda: ada.learn(),
        ada.turns,
    ):
        with pytest.raises(NotFound):
            act()
    assert runtime.users() == ()
    again = runtime.user(ADA)
    assert (again.turns(), again.signals(), again.layers(), again.revisions()) == ((), (), (), ())
    use_app(again)
    assert runtime.verify() == ()


def test_dry_run_reports_the_same_and_changes_nothing(
    home: Path, runtime: Runtime, ada: User
) -> None:
    runtime.api_keys.create(ADA)
    with home_unchanged(home):
        dry = runtime.forget_user(ADA, dry_run=True)
    done = runtime.forget_user(ADA)
    assert (dry.turns, dry.signals, dry.revisions, dry.api_keys) == (
        done.turns,
        done.signals,
        done.revisions,
        done.api_keys,
    )
    assert (dry.dry_run, done.dry_run, done.api_keys) == (True, False, 1)


@pytest.mark.parametrize("again", [False, True])
def test_reply_in_flight_of_a_forgotten_user_is_not_kept(
    home: Path, runtime: Runtime, ada: User, again: bool
) -> None:
    with open_runtime(home) as elsewhere:
        streams = [each.user(ADA).stream(f"I am {SECRET}.") for each in (runtime, elsewhere)]
        comparison = ada.compare("question 2", "live", "base")
        for stream in streams:
            next(stream)
        runtime.forget_user(ADA)
        if again:
            runtime.user(ADA)
        for stream in streams:
            with pytest.raises(Forgotten):
                list(stream)
        for answer in comparison.answers:
            if answer.text.strip():
                with pytest.raises(Forgotten):
                    comparison.choose(answer.name)
        assert [each.turns for each in runtime.users()] == [0] * again
    runtime.close()
    assert files_that_hold(home, SECRET) == []


def test_api_keys_of_a_forgotten_user_alone_are_revoked(
    home: Path, runtime: Runtime, ada: User
) -> None:
    keys = runtime.api_keys
    secrets = [keys.create(ADA)[1], keys.create(ADA)[1], keys.create_session_key(ADA)]
    kept = [keys.create("bob")[1], keys.create(None)[1]]
    assert all(map(keys.authenticate, secrets))
    assert runtime.forget_user(ADA).api_keys == 2
    assert list(map(keys.authenticate, secrets)) == [None] * 3
    assert all(map(keys.authenticate, kept))


def test_published_stacks_of_a_forgotten_user_alone_are_removed(
    tmp_path: Path, runtime: Runtime, ada: User
) -> None:
    bob = runtime.user("bob")
    for number in range(5):
        bob.feedback(ask(bob, f"other {number}"), edit=f"Ahoy {number}! Arrr!")
    bob.learn()
    folder = runtime.publish(to=tmp_path / "copies").folder
    stacks = {each.user: each.name for each in runtime.publish(to=tmp_path / "copies").stacks}
    runtime.forget_user(ADA)
    assert {path.name for path in folder.iterdir()} == {
        str(stacks["bob"]).removeprefix("personalpeft:")
    }
    assert [each.user for each in runtime.publish(to=tmp_path / "copies").stacks] == ["bob"]


def test_user_forgotten_during_publishing_stops_no_other(
    tmp_path: Path, runtime: Runtime, ada: User
) -> None:
    use_app(runtime.user("bob"))
    forgotten: list[str] = []

    def forget_ada(stage: str, done: float) -> None:
        if not forgotten:
            forgotten.append(runtime.forget_user(ADA).user)

    report = runtime.publish(to=tmp_path / "copies", progress=forget_ada)
    assert [each.user for each in report.stacks] == ["bob"]
    (copy,) = report.folder.iterdir()
    assert f"personalpeft:{copy.name}" == report.stacks[0].name


def test_forgetting_is_refused_while_published_stacks_cannot_be_reached(
    tmp_path: Path, runtime: Runtime, ada: User
) -> None:
    folder = runtime.publish(to=tmp_path / "drive").folder
    (tmp_path / "drive").rename(tmp_path / "unplugged")
    runtime.api_keys.create(ADA)
    before = everything_of(ada), runtime.api_keys.list_keys()
    with pytest.raises(HomeError):
        runtime.forget_user(ADA)
    assert (everything_of(ada), runtime.api_keys.list_keys()) == before
    (tmp_path / "unplugged").rename(tmp_path / "drive")
    assert runtime.forget_user(ADA).complete
    assert list(folder.iterdir()) == []


def test_deleted_folder_of_published_stacks_does_not_block_forgetting(
    tmp_path: Path, runtime: Runtime, ada: User
) -> None:
    folder = runtime.publish(to=tmp_path / "drive").folder
    shutil.rmtree(tmp_path / "drive")
    with pytest.raises(HomeError):
        runtime.forget_user(ADA)
    folder.mkdir(parents=True)
    assert runtime.forget_user(ADA).complete


def test_forgetting_a_user_during_their_learn_raises_busy(
    home: Path, runtime: Runtime, ada: User
) -> None:
    with (
        home_unchanged(home),
        runtime._services.store.leases.acquire(f"learn-{ADA}"),
        pytest.raises(Busy),
    ):
        runtime.forget_user(ADA)
    assert runtime.forget_user(ADA).complete


@pytest.mark.parametrize(
    ("name", "error"), [("nobody", NotFound), ("", InvalidId), ("Ä", InvalidId)]
)
def test_only_an_existing_user_can_be_forgotten(
    home: Path, runtime: Runtime, ada: User, name: str, error: type[Exception]
) -> None:
    with home_unchanged(home):
        for dry_run in (True, False):
            with pytest.raises(error):
                runtime.forget_user(name, dry_run=dry_run)


def test_read_only_home_forgets_no_user(home: Path, runtime: Runtime, ada: User) -> None:
    runtime.close()
    with open_runtime(home, read_only=True) as reader:
        with pytest.raises(HomeError):
            reader.forget_user(ADA)
        assert reader.forget_user(ADA, dry_run=True).turns


def test_engine_keeps_nothing_of_a_forgotten_user(runtime: Runtime, ada: User) -> None:
    ask(ada, "Hello")
    assert runtime.engine()._scheduler.adapters.keys
    runtime.forget_user(ADA)
    assert runtime.engine()._scheduler.adapters.keys == ()


def test_no_lesson_of_a_forgotten_user_stays_in_memory(runtime: Runtime) -> None:
    user = runtime.user("zoe")
    for number in range(8):
        user.feedback(ask(user, f"prompt {number}"), edit=f"zanzibar-{number} is the answer.")
    user.learn()
    runtime.forget_user("zoe")
    gc.collect()
    found = [
        each
        for each in gc.get_objects()
        if type(each) is PromptResponse and "zanzibar" in each.answer
    ]
    assert found == []
