"""``forget`` leaves no byte of an item in the home. Live layers are rebuilt as if without it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import FakeTime, ask, correct, home_unchanged, open_runtime, quick_card, style

from personalpeft import (
    Busy,
    Cancelled,
    Forgotten,
    InvalidInput,
    NotFound,
    Reply,
    Runtime,
    User,
    erasure,
)
from personalpeft.formatting import to_json
from personalpeft.learning.erasure_plan import ErasurePlan, plan_erasure
from personalpeft.types import Message, Stack, Verdict

SECRET = "Zorblax"


@pytest.fixture(params=["fake", pytest.param("torch", marks=pytest.mark.exhaustive)])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    if request.param == "fake":
        return "fake"
    request.getfixturevalue("tiny_base")
    return quick_card(tmp_path)


def holds(home: Path, text: str = SECRET) -> list[str]:
    """Return the files of the home that contain the text."""
    wanted = text.casefold().encode()
    files = [path for path in home.rglob("*") if path.is_file()]
    return [str(path.relative_to(home)) for path in files if wanted in path.read_bytes().lower()]


def use_app(user: User, *, with_secret: bool) -> str:
    """Record six prompts, edits for five of them, a fact and a skill, and learn all.

    With ``with_secret`` the third prompt has an edit too; return its id.
    """
    item = ""
    for number in range(6):
        reply = ask(user, f"question {number}")
        if number == 2 and with_secret:
            item = user.feedback(reply, edit=style(f"{SECRET} sleeps here."))
        elif number != 2:
            user.feedback(reply, edit=style(f"Answer {number}."))
    user.remember(
        "My dog is called Biscuit.",
        questions=["What is my dog called?", "My dog?"],
        answer="Biscuit",
    )
    for number in range(5):
        user.teach(f"Write to {number}.", f"Dear {number}", skill="email")
    user.learn()
    return item


def test_live_stack_equals_that_of_a_user_who_never_had_the_item(
    tmp_path: Path, base: str | Path
) -> None:
    stacks: list[Stack] = []
    for with_secret in (True, False):
        home = tmp_path / f"secret-{with_secret}"
        with open_runtime(home, base, clock=FakeTime().clock()) as runtime:
            ada = runtime.user("ada")
            item = use_app(ada, with_secret=with_secret)
            if with_secret:
                assert holds(home)
                report = ada.forget(item)
                assert len(report.revisions) == len(report.rebuilt) == 3
                assert runtime.verify() == ()
            stacks.append(ada.stack())
        assert holds(home) == []
    assert stacks[0] == stacks[1]
    assert len(stacks[0].entries) == 3


def test_rebuild_starts_from_an_older_revision_without_the_item(tmp_path: Path) -> None:
    stacks: list[Stack] = []
    for with_secret in (True, False):
        with open_runtime(tmp_path / f"secret-{with_secret}", clock=FakeTime().clock()) as runtime:
            ada = runtime.user("ada")
            correct(ada, 6)
            first = ada.learn()
            replies = [ask(ada, f"later {number}") for number in range(4)]
            for number, reply in enumerate(replies[:3]):
                ada.feedback(reply, edit=style(f"Later {number}."))
            item = ada.feedback(replies[3], edit=style(SECRET)) if with_secret else ""
            ada.learn()
            if with_secret:
                report = ada.forget(item)
                assert report.heads == {"style": first.revision}
                assert report.revisions
            stacks.append(ada.stack())
            assert [r.parent for r in ada.revisions()] == [None, first.revision]
    assert stacks[0] == stacks[1]


@pytest.fixture(scope="module")
def learned_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("learned") / "home"
    with open_runtime(home) as runtime:
        use_app(runtime.user("ada"), with_secret=True)
    return home


@pytest.fixture
def learned(learned_home: Path, ada: User) -> tuple[User, str]:
    """Return a user who learned, and the id of the edit with the secret."""
    (item,) = [signal.id for signal in ada.signals() if SECRET in str(signal)]
    return ada, item


def test_report_names_what_was_erased_and_rebuilt(home: Path, learned: tuple[User, str]) -> None:
    ada, item = learned
    stages: list[str] = []
    report = ada.forget(item, progress=lambda stage, done: stages.append(stage))
    assert (report.item, report.signals, report.complete) == (item, (item,), True)
    assert set(report.heads) == {"style", "skill.email", "memory"}
    assert [each.layer for each in report.rebuilt] == ["style", "skill.email", "memory"]
    assert item in str(report)
    assert SECRET not in str(report) + str(to_json(report))
    assert list(dict.fromkeys(stages))[:2] == ["Reading", "Erasing"]


def test_forgotten_id_raises_forgotten_and_not_unknown(
    learned: tuple[User, str],
) -> None:
    ada, item = learned
    report = ada.forget(item)
    for ask_for in (
        lambda: ada.forget(item),
        lambda: ada.retract_item(item),
        lambda: ada.rollback("style", report.revisions[-1]),
    ):
        with pytest.raises(Forgotten):
            ask_for()


def test_why_lists_forgotten_revisions(learned: tuple[User, str]) -> None:
    ada, item = learned
    reply = ask(ada, "Write to 7.", layers=["style", "skill.email"])
    report = ada.forget(item)
    why = ada.why(reply)
    assert why.parts == ()
    assert set(why.forgotten) <= set(report.revisions)


def test_dry_run_reports_the_same_and_changes_nothing(
    home: Path, learned: tuple[User, str]
) -> None:
    ada, item = learned
    with home_unchanged(home):
        dry = ada.forget(item, dry_run=True)
    done = ada.forget(item, rebuild=False)
    assert (dry.signals, dry.revisions, dry.emptied_replies) == (
        done.signals,
        done.revisions,
        done.emptied_replies,
    )


def test_forgetting_without_rebuild_leaves_the_build_to_the_next_learn(
    learned: tuple[User, str],
) -> None:
    ada, item = learned
    report = ada.forget(item, rebuild=False)
    assert set(report.not_rebuilt) == {"style", "skill.email", "memory"}
    assert ada.stack().entries == ()
    ada.learn()
    assert [entry.layer for entry in ada.stack().entries] == ["style", "skill.email", "memory"]


def test_layer_without_lessons_returns_to_the_base(ada: User) -> None:
    item = ada.remember(
        "My dog is called Biscuit.", questions=["What is my dog called?"], answer="Biscuit"
    )
    assert ada.learn().live
    report = ada.forget(item)
    assert (report.heads, set(report.not_rebuilt)) == ({"memory": None}, {"memory"})
    assert ada.stack().entries == ()
    assert ada.items() == ()


def test_cancelled_rebuild_leaves_nothing_of_the_item_live(
    home: Path, learned: tuple[User, str]
) -> None:
    ada, item = learned
    with home_unchanged(home), pytest.raises(Cancelled):
        ada.forget(item, cancelled=lambda: True)
    seen: list[str] = []
    report = ada.forget(
        item, progress=lambda stage, done: seen.append(stage), cancelled=lambda: "Learning" in seen
    )
    assert report.not_rebuilt
    assert holds(home) == []
    ada.learn()
    assert {entry.layer for entry in ada.stack().entries} == {"style", "skill.email", "memory"}


def conversation(user: User, *prompts: str) -> list[Reply]:
    messages: list[Message] = []
    replies = []
    for prompt in prompts:
        messages.append(Message("user", prompt))
        replies.append(ask(user, messages))  # type: ignore[arg-type]
        messages.append(Message("assistant", replies[-1].text))
    return replies


def test_turn_is_erased_with_its_signals_and_from_the_conversations_that_contain_it(
    home: Path, ada: User
) -> None:
    first, second, third = conversation(ada, f"I am {SECRET} of Ur.", "And my cat?", "Bye now.")
    ada.feedback(first, edit=f"Hail {SECRET}!")
    ada.feedback(second, rating=1)
    about = ada.feedback(third, edit="Farewell.")
    other = ask(ada, "What is two and two?")
    report = ada.forget(first)
    assert report.turns == (first.turn_id,)
    assert set(report.emptied_replies) == {second.turn_id, third.turn_id}
    assert holds(home) == []
    assert [
        (turn.messages[-1].content, len(turn.messages), bool(turn.reply)) for turn in ada.turns()
    ] == [
        ("What is two and two?", 1, True),
        ("Bye now.", 1, False),
        ("And my cat?", 1, False),
    ]
    assert ada.turn(other).reply == other.text
    assert ada.signals()[-1].id == about
    with pytest.raises(Forgotten):
        ada.feedback(first, rating=1)


def test_replies_with_the_fact_in_their_prompt_are_emptied(home: Path, ada: User) -> None:
    fact = ada.remember(f"My dog is called {SECRET}.")
    reply = ask(ada, "What is my dog called?")
    assert ada.turn(reply).used == (fact,)
    quoting = ada.feedback(reply, edit=f"{SECRET} it is.")
    ask(ada, "What is two and two?", memory=False)
    report = ada.forget(fact)
    assert set(report.signals) == {fact, quoting}
    assert report.emptied_replies == (reply.turn_id,)
    assert (ada.turn(reply).reply, ada.turn(reply).used) == ("", ())
    assert holds(home) == []


def test_others_write_while_a_forget_is_planned_and_it_covers_what_was_said_meanwhile(
    home: Path, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    fact = ada.remember(f"My dog is called {SECRET}.")
    meanwhile: list[str] = []

    def plan_slowly(*args: Any) -> ErasurePlan:
        plan = plan_erasure(*args)
        if not meanwhile:
            # Another process: the write lock does not nest.
            with open_runtime(home) as other:
                other.user("bo").remember("I am Bo.")
                meanwhile.append(ask(other.user("ada"), "What is my dog called?").turn_id)
        return plan

    monkeypatch.setattr(erasure, "plan_erasure", plan_slowly)
    report = ada.forget(fact)
    assert report.emptied_replies == tuple(meanwhile)
    assert not holds(home)


def test_reply_in_flight_of_an_erased_revision_is_not_kept(
    home: Path, learned: tuple[User, str]
) -> None:
    ada, item = learned
    stream = ada.stream("Write to 7.", layers=["style", "skill.email"])
    next(stream)
    report = ada.forget(item, rebuild=False)
    assert {entry.revision for entry in stream.stack.entries} & set(report.revisions)
    before = ada.turns()
    with pytest.raises(Forgotten):
        list(stream)
    with pytest.raises(Forgotten):
        _ = stream.reply
    assert ada.turns() == before
    assert holds(home) == []
    assert ada.turn(ask(ada, "Write to 7."))


def test_reply_in_flight_that_is_closed_after_forgetting_is_not_kept(
    learned: tuple[User, str],
) -> None:
    ada, item = learned
    stream = ada.stream("Write to 7.")
    next(stream)
    ada.forget(item, rebuild=False)
    before = ada.turns()
    stream.close()
    assert ada.turns() == before


def test_reply_in_flight_in_a_conversation_with_a_forgotten_turn_is_not_kept(
    home: Path, ada: User
) -> None:
    first = ask(ada, f"I live in {SECRET}.")
    stream = ada.stream(
        [
            Message("user", f"I live in {SECRET}."),
            Message("assistant", first.text),
            Message("user", "And now?"),
        ]
    )
    next(stream)
    ada.forget(first.turn_id)
    with pytest.raises(Forgotten):
        list(stream)
    assert ada.turns() == ()
    assert holds(home) == []


def test_reply_in_flight_in_another_process_is_not_kept(
    home: Path, learned: tuple[User, str]
) -> None:
    ada, item = learned
    with open_runtime(home) as elsewhere:
        stream = elsewhere.user("ada").stream("Write to 7.")
        next(stream)
        ada.forget(item, rebuild=False)
        with pytest.raises(Forgotten):
            list(stream)
    assert holds(home) == []


def test_reply_in_flight_of_another_user_is_kept(
    runtime: Runtime, learned: tuple[User, str]
) -> None:
    ada, item = learned
    stream = runtime.user("bob").stream("Write to 7.")
    next(stream)
    ada.forget(item, rebuild=False)
    list(stream)
    assert runtime.user("bob").turns()[0].id == stream.reply.turn_id


def test_comparison_from_before_a_forget_is_not_kept(home: Path, learned: tuple[User, str]) -> None:
    ada, item = learned
    comparison = ada.compare("question 2", "live", "base", layer="style")
    ada.forget(item, rebuild=False)
    before = ada.turns(), ada.signals()
    for answer in comparison.answers:
        if answer.text.strip():
            with pytest.raises(Forgotten):
                comparison.choose(answer.name)
    assert (ada.turns(), ada.signals()) == before
    assert holds(home) == []


def test_rule_is_erased_and_replies_that_do_not_quote_it_stay(home: Path, ada: User) -> None:
    rule = ada.feedback(ask(ada), comment=f"Call me {SECRET}.")
    reply = ask(ada, "Good morning")
    report = ada.forget(rule)
    assert (report.signals, report.emptied_replies) == ((rule,), ())
    assert ada.turn(reply).reply == reply.text
    assert holds(home) == []


def test_item_is_erased_with_its_earlier_versions(home: Path, ada: User) -> None:
    first = ada.remember(f"My dog is called {SECRET}.")
    second = ada.edit_item(first, f"My dog {SECRET} has died.").id
    third = ada.edit_item(second, "My dog has died.").id
    assert set(ada.forget(second).signals) == {first, second}
    assert [item.id for item in ada.items()] == [third]
    assert holds(home) == []


def test_same_text_in_another_turn_stays_and_is_reported(ada: User) -> None:
    mention = ask(ada, f"By the way, my dog is called {SECRET}.")
    fact = ada.remember(f"My dog is called {SECRET}.")
    report = ada.forget(fact)
    assert [each.id for each in report.remaining_mentions] == [mention.turn_id]
    assert mention.turn_id in str(report)


def test_other_users_are_unchanged(home: Path, runtime: Runtime, learned: tuple[User, str]) -> None:
    ada, item = learned
    bob = runtime.user("bob")
    use_app(bob, with_secret=True)
    before = (
        bob.turns(),
        bob.signals(),
        bob.revisions(),
        bob.reports(),
        bob.history(),
        bob.stack(),
        bob.signal_statuses(),
    )
    answer = ask(bob, "hello", memory=False).text
    report = ada.forget(item)
    assert ask(bob, "hello", memory=False).text == answer
    assert bob.turns()[2:] == before[0]
    assert (
        bob.signals(),
        bob.revisions(),
        bob.reports(),
        bob.history(),
        bob.stack(),
        bob.signal_statuses(),
    ) == before[1:]
    # Both users have adapters of the same bytes, so the files stay.
    assert report.files == 0


def test_forgetting_during_a_learn_is_refused(
    home: Path, runtime: Runtime, learned: tuple[User, str]
) -> None:
    ada, item = learned
    with (
        home_unchanged(home),
        runtime._services.store.leases.acquire("learn-ada"),
        pytest.raises(Busy),
    ):
        ada.forget(item)


@pytest.mark.parametrize(
    ("item", "error"),
    [
        ("", InvalidInput),
        ("style@123", InvalidInput),
        ("s_nobody", NotFound),
        ("t_", InvalidInput),
        ("s_é", NotFound),
    ],
)
def test_invalid_id_to_forget_is_refused(
    home: Path, learned: tuple[User, str], item: str, error: type[Exception]
) -> None:
    ada, _ = learned
    with home_unchanged(home), pytest.raises(error):
        ada.forget(item)


def test_revision_that_is_not_live_is_erased_too(
    home: Path, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(ada, 5)
    item = ada.feedback(ask(ada, "question 9"), edit=style(SECRET))
    report = ada.learn()
    ada.rollback("style", None)
    done = ada.forget(item)
    assert done.revisions == (report.revision,)
    # The user had rolled back to the base, so nothing is rebuilt.
    assert (done.heads, done.rebuilt) == ({}, ())
    assert ada.revisions() == ()
    assert report.verdict is Verdict.PROMOTED


def test_build_that_read_the_item_is_erased_after_the_clock_was_set_back(tmp_path: Path) -> None:
    time = FakeTime()
    with open_runtime(tmp_path / "home", clock=time.clock()) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        reply = ask(ada, "question 9")
        liked = ada.feedback(reply, rating=1)
        ada.feedback(reply, edit=style("Nine."))
        time.at -= timedelta(hours=1)
        report = ada.learn()
        assert liked not in ada.revisions()[0].signals
        assert ada.forget(liked, rebuild=False).revisions == (report.revision,)


def test_engine_keeps_no_adapter_of_a_forgotten_item(
    runtime: Runtime, learned: tuple[User, str]
) -> None:
    ada, item = learned
    ask(ada, "hello")
    assert runtime.engine()._scheduler.adapters.keys
    ada.forget(item, rebuild=False)
    assert runtime.engine()._scheduler.adapters.keys == ()


def test_forgetting_an_unrelated_turn_leaves_the_reports_as_they_are(tmp_path: Path) -> None:
    with open_runtime(tmp_path / "home") as runtime:
        user = runtime.user("ada")
        for number in range(6):
            reply = ask(user, f"question {number}")
            user.feedback(reply, edit=style(f"Answer {number}."))
        user.learn()
        unrelated = ask(user, "Something else.")
        before = [(each["reasons"], each["scores"]) for each in user.reports()]
        assert before
        user.forget(unrelated.turn_id)
        assert [(each["reasons"], each["scores"]) for each in user.reports()] == before


def test_an_empty_id_is_no_conversation(tmp_path: Path) -> None:
    with open_runtime(tmp_path / "home") as runtime:
        user = runtime.user("ada")
        # Turns of raw prompts are in no conversation.
        user.chat("Once upon a time", template=False)
        with home_unchanged(tmp_path / "home"), pytest.raises((NotFound, InvalidInput)):
            user.forget("", conversation=True)


def test_reply_whose_adapter_is_forgotten_before_it_is_loaded_says_so(
    home: Path, tmp_path: Path
) -> None:
    with open_runtime(home) as runtime:
        edits = correct(runtime.user("ada"), 6)
        assert runtime.user("ada").learn().live
    with open_runtime(home) as reading, open_runtime(home) as forgetting:
        stream = reading.user("ada").stream("hello")
        forgetting.user("ada").forget(edits[0], rebuild=False)
        with pytest.raises(Forgotten):
            list(stream)
        with pytest.raises(Forgotten):
            _ = stream.reply
        assert reading.user("ada").chat("hello").text
