"""A user over HTTP keeps the promises of a user in the library: the same calls, values and errors."""

from __future__ import annotations

import threading
import time
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from http_makers import LocalServer, SlowSteps, serve_locally
from runtime_makers import quick_card
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.serving import make_server

import personalpeft
from personalpeft import (
    AdapterError,
    Busy,
    Cancelled,
    Forgotten,
    InvalidId,
    InvalidInput,
    LearnReport,
    NotFound,
    NothingToLearn,
    PersonalFileError,
    PersonalPeftError,
    PromptTooLong,
    Runtime,
    Serving,
    Stream,
    TrainingStatus,
    User,
    verify_certificate,
)
from personalpeft.adapters.formats import published
from personalpeft.base_models.types import Base
from personalpeft.deprecation import former_names
from personalpeft.formatting import to_json
from personalpeft.learning.learner import Learner
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.outcomes import Placement, ReasonCode, ReproductionOutcome
from personalpeft.learning.status import Pending, TriggerKind
from personalpeft.types import SignalKind
from personalpeft_app.client import (
    Client,
    NotAllowed,
    RemoteStream,
    RemoteUser,
    Unreachable,
    connect,
)
from personalpeft_app.client.transport import Transport
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.http.api_v1.serialization import from_json
from personalpeft_app.http.server import make_app
from personalpeft_app.peft_archive import unzip_adapter

BASE = personalpeft.DEFAULT_BASE


@pytest.fixture
def site(runtime: Runtime) -> Iterator[LocalServer]:
    api = ApiV1(runtime)
    with serve_locally(runtime, more=[api.blueprint]) as site:
        yield site
        api.close()


@pytest.fixture
def client(site: LocalServer) -> Client:
    return connect(site.url, site.secret)


@pytest.fixture(params=["library", pytest.param("client", marks=pytest.mark.exhaustive)])
def runtime_or_client(request: pytest.FixtureRequest, runtime: Runtime) -> Runtime | Client:
    return runtime if request.param == "library" else request.getfixturevalue("client")


@pytest.fixture
def ada(runtime_or_client: Any) -> Any:
    return runtime_or_client.user("ada")


@pytest.fixture
def library_user(runtime: Runtime) -> User:
    """Ada through the library, where everything recorded over HTTP is visible."""
    return runtime.user("ada")


def correct(user: Any, count: int = 5, first: int = 0) -> None:
    for number in range(first, first + count):
        user.feedback(
            user.chat(f"question {number}", temperature=0), edit=f"Ahoy! Answer {number}. Arrr!"
        )


def test_a_user_is_created_on_first_use_unless_refused(runtime_or_client: Any) -> None:
    with pytest.raises(NotFound, match="bob"):
        runtime_or_client.user("bob", create=False)
    bob = runtime_or_client.user("bob")
    assert bob.summary().id == "bob"
    assert [user.id for user in runtime_or_client.users()] == ["bob"]
    with pytest.raises(InvalidId):
        runtime_or_client.user("../bob")


def test_an_api_key_identifies_its_user(
    site: LocalServer, client: Client, runtime: Runtime
) -> None:
    base = runtime.base().card.title
    for secret in (site.secret, site.api_key_of("ada")):
        known = runtime.api_keys.authenticate(secret)
        assert known is not None
        told = connect(site.url, secret).whoami()
        assert (told.user, told.base) == (known.user, base)
    with pytest.raises(NotAllowed):
        connect(site.url, "pp_wrong").whoami()


def test_users_are_listed_in_pages(runtime_or_client: Any) -> None:
    for name in ("a", "b", "c"):
        runtime_or_client.user(name)
    assert [user.id for user in runtime_or_client.users(limit=2)] == ["a", "b"]
    assert [user.id for user in runtime_or_client.users(after="b", limit=2)] == ["c"]
    assert [user.id for user in runtime_or_client.users(search="b")] == ["b"]


def test_a_reply_names_its_turn_stack_and_usage(ada: Any, library_user: User) -> None:
    reply = ada.chat("How do I boil an egg?", temperature=0, max_tokens=5)
    turn = library_user.turn(reply.turn_id)
    assert (reply.text, reply.stack, reply.usage, reply.finish_reason) == (
        turn.reply,
        turn.stack,
        turn.usage,
        turn.finish_reason,
    )
    assert reply.stack.digest == turn.stack.digest
    assert ada.turn("last") == ada.turn(reply) == turn
    assert ada.turns() == library_user.turns()


def test_a_prompt_may_be_messages(ada: Any) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello."}]
    reply = ada.chat(messages, temperature=0)
    assert [message.role for message in ada.turn(reply).messages] == ["system", "user"]


def test_a_conversation_is_continued_by_its_id_and_regenerated(
    ada: Any, library_user: User
) -> None:
    first = ada.chat("How do I boil an egg?", temperature=0)
    second = ada.chat("And a soft one?", conversation_id=first.conversation_id, temperature=0)
    again = ada.chat("And a soft one?", replaces=second, seed=1)
    assert second.conversation_id == again.conversation_id == first.conversation_id
    assert [message.role for message in ada.turn(again).messages] == ["user", "assistant", "user"]
    assert ada.turn(again).previous == first.turn_id
    found = ada.conversation(str(first.conversation_id))
    assert [turn.id for turn in found.turns] == [first.turn_id, again.turn_id]
    assert found == library_user.conversation(found.id)
    other = ada.chat("Hello")
    assert [each.id for each in ada.conversations()] == [other.conversation_id, found.id]
    assert ada.conversations() == library_user.conversations()
    assert [each.id for each in ada.conversations(1)] == [other.conversation_id]
    assert [each.id for each in ada.conversations(before=other.conversation_id)] == [found.id]
    with pytest.raises(NotFound):
        ada.chat("Hello", conversation_id="c_0000")
    with pytest.raises(NotFound):
        ada.conversation("c_0000")


def test_a_regenerated_reply_has_another_seed_by_default(ada: Any, library_user: User) -> None:
    reply = ada.chat("Hello", temperature=1)
    texts, seeds = [reply.text], [ada.turn(reply).sampling.seed]
    for _ in range(3):
        reply = ada.chat("Hello", temperature=1, replaces=reply)
        texts.append(reply.text)
        seeds.append(ada.turn(reply).sampling.seed)
    assert seeds == [0, 1, 2, 3]
    assert texts == [library_user.chat("Hello", temperature=1, seed=n).text for n in range(4)]
    assert len(set(texts)) == 4
    last = ada.chat("Hello", seed=2**63 - 1)
    assert ada.turn(ada.chat("Hello", replaces=last)).sampling.seed == 0


def test_a_long_conversation_is_truncated_where_allowed(ada: Any) -> None:
    long = "a word or two " * 1000
    messages = [
        {"role": "user", "content": long},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Hello"},
    ]
    with pytest.raises(PromptTooLong):
        ada.chat(messages)
    assert ada.chat(messages, truncation="auto").dropped_messages == 2


def test_tools_are_offered_called_and_answered(ada: Any, library_user: User) -> None:
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"properties": {"city": {}}}},
    }
    question = {"role": "user", "content": "weather in Rome?"}
    reply = ada.chat([question], tools=[tool], temperature=0, max_tokens=200)
    (call,) = reply.tool_calls
    assert (call.name, list(call.arguments)) == ("weather", ["city"])
    assert library_user.turn(reply.turn_id).messages[-1].tools == (tool,)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = ada.chat([question, reply.message, result], tools=[tool], temperature=0)
    assert answer.tool_calls == ()
    assert [message.role for message in ada.turn(answer).messages] == ["user", "assistant", "tool"]
    assert ada.turn(answer) == library_user.turn(answer.turn_id)
    assert ada.turn(answer).messages[1].tool_calls == (call,)


def test_a_tool_call_can_be_required(ada: Any, library_user: User) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    for must_call in (True, "weather"):
        reply = ada.chat("Hello", tools=[tool], must_call=must_call, temperature=0)
        assert [call.name for call in reply.tool_calls] == ["weather"]
        assert ada.turn(reply) == library_user.turn(reply)
        assert (
            ada.turn(reply).messages[-1].must_call
            == library_user.turn(reply).messages[-1].must_call
            == must_call
        )
    with pytest.raises(InvalidInput):
        ada.chat("Hello", tools=[tool], must_call="time")
    with pytest.raises(InvalidInput):
        ada.chat("Hello", must_call=True)


def test_stream_chunks_join_to_the_reply(ada: Any) -> None:
    stream = ada.stream("Tell me about ducks and geese and swans.", temperature=0)
    first = next(stream)
    with pytest.raises(NotFound):
        stream.reply  # noqa: B018
    assert first + "".join(stream) == stream.reply.text
    assert ada.turns()[0].id == stream.reply.turn_id


def test_a_closed_stream_is_recorded_as_a_cancelled_turn(ada: Any) -> None:
    stream = ada.stream("Tell me about ducks and geese and swans.", temperature=0)
    next(stream)
    stream.close()
    assert ada.turns()[0].id == stream.reply.turn_id
    assert ada.turns()[0].finish_reason == stream.reply.finish_reason


def test_a_stream_that_is_closed_unread_asks_for_nothing(ada: Any, library_user: User) -> None:
    with ada.stream("Tell me about ducks.") as stream:
        pass
    assert list(stream) == []
    with pytest.raises(NotFound):
        stream.reply  # noqa: B018
    assert library_user.turns() == ()


def test_leaving_the_block_of_a_stream_records_a_cancelled_turn(
    ada: Any, library_user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowSteps(monkeypatch, 0.1)
    with ada.stream("Tell me about ducks and geese and swans.", temperature=0) as stream:
        next(stream)
    assert stream.reply.finish_reason == "cancelled"
    assert library_user.turns()[0].id == stream.reply.turn_id


def test_a_stream_is_closed_from_another_thread(ada: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    SlowSteps(monkeypatch, 0.1)
    stream = ada.stream("Tell me about ducks and geese and swans.", temperature=0)
    next(stream)
    closing_thread = threading.Thread(target=stream.close)
    closing_thread.start()
    for _ in stream:
        pass
    closing_thread.join(10)
    assert not closing_thread.is_alive()
    assert stream.reply.finish_reason == "cancelled"


def test_a_stream_has_its_stack_prompt_tokens_and_logprobs(ada: Any, library_user: User) -> None:
    stream = ada.stream("Hello", temperature=0, logprobs=True)
    stack, prompt_tokens = stream.stack, stream.prompt_tokens
    stream.begin()
    next(stream)
    assert stream.logprobs
    list(stream)
    assert (
        stream.logprobs
        == stream.reply.logprobs
        == library_user.chat("Hello", temperature=0, logprobs=True).logprobs
    )
    assert (stack.digest, prompt_tokens) == (
        stream.reply.stack.digest,
        stream.reply.usage.prompt_tokens,
    )


def test_an_error_of_cancelled_is_raised(ada: Any) -> None:
    def fail() -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ada.chat("Tell me about ducks.", cancelled=fail)


@pytest.mark.exhaustive
def test_a_reply_that_waits_for_a_row_is_cancelled_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowSteps(monkeypatch, 0.5)
    with personalpeft.open(
        tmp_path / "home", backend="fake", serving=Serving(max_batch=1)
    ) as runtime:
        api = ApiV1(runtime)
        with serve_locally(runtime, more=[api.blueprint]) as site:
            ada = connect(site.url, site.secret).user("ada")
            with runtime.user("bo").stream("Tell me of swans.", temperature=0) as holding:
                next(holding)
                begun = time.monotonic()
                reply = ada.chat("Hello", cancelled=lambda: time.monotonic() - begun > 0.2)
                assert time.monotonic() - begun < 2
                assert (reply.text, reply.finish_reason) == ("", "cancelled")
            api.close()


def test_stopping_a_reply_returns_its_beginning(ada: Any) -> None:
    reply = ada.chat("Tell me about ducks.", cancelled=lambda: True)
    assert ada.turn(reply).reply == reply.text


FEEDBACK: list[dict[str, Any]] = [
    {"rating": 1},
    {"rating": -1},
    {"edit": "Eight minutes."},
    {"prefer": "Nine minutes."},
    {"comment": "Use metric units."},
    {"reward": 0.7},
    {"rating": 1, "source": "judge"},
]


@pytest.mark.parametrize("feedback", FEEDBACK, ids=lambda feedback: "-".join(feedback))
def test_feedback_is_recorded(ada: Any, library_user: User, feedback: dict[str, Any]) -> None:
    reply = ada.chat("How do I boil an egg?")
    signal = ada.feedback(reply, **feedback)
    assert [each.id for each in library_user.signals()] == [signal]
    assert ada.signals() == library_user.signals()
    assert ada.signal_statuses() == library_user.signal_statuses()


def test_superseded_signals_are_listed_on_request(ada: Any, library_user: User) -> None:
    reply = ada.chat("Hello")
    ada.feedback(reply, rating=1)
    ada.feedback(reply, rating=-1)
    assert [signal.payload["value"] for signal in ada.signals()] == [-1]
    assert ada.signals(current=False) == library_user.signals(current=False)
    assert [account.use for account in ada.signal_statuses(current=False)] == [
        account.use for account in library_user.signal_statuses(current=False)
    ]


def test_facts_and_rules_are_recorded_edited_and_removed(ada: Any, library_user: User) -> None:
    fact = ada.remember(
        "My dog is called Biscuit.", questions=["What is my dog called?"], answer="Biscuit"
    )
    assert [item.id for item in ada.items()] == [fact]
    item = ada.edit_item(fact, "My dog is called Crumpet.", answer="Crumpet")
    assert ada.items() == library_user.items() == (item,)
    ada.retract_item(item.id)
    assert ada.items() == ()
    with pytest.raises(NotFound):
        ada.retract_item(item.id)


def test_signals_are_retracted_all_or_none(ada: Any, library_user: User) -> None:
    reply = ada.chat("Hello")
    feedback = [
        ada.feedback(reply, rating=1),
        ada.teach("Write to Bo.", "Dear Bo"),
        ada.remember("I live in Oslo."),
    ]
    with pytest.raises(NotFound) as caught:
        ada.retract(*feedback, "s_nothing")
    assert caught.value.hint
    assert [signal.id for signal in library_user.signals()] == feedback
    everything = library_user.signals()
    assert ada.retract(*feedback) == everything
    assert library_user.signals() == ()
    with pytest.raises(NotFound, match="retracted"):
        ada.retract(feedback[0])
    assert library_user.signals(current=False) == everything


def test_a_skill_is_taught(ada: Any, library_user: User) -> None:
    ada.teach("Write to Bo.", "Dear Bo", skill="email")
    assert library_user.signals()[0].kind == SignalKind.DEMONSTRATION
    assert ada.signal_statuses()[0].layer == "skill.email"


def test_the_source_of_a_signal_is_recorded(ada: Any, library_user: User) -> None:
    ada.teach("Write to Bo.", "Dear Bo", source="judge")
    ada.remember("My dog is called Biscuit.", source="crm")
    ada.teach("Write to Cy.", "Dear Cy")
    assert [signal.source for signal in library_user.signals()] == ["judge", "crm", "person"]


def test_implicit_feedback_is_recorded_only_where_enabled(ada: Any) -> None:
    reply = ada.chat("Hello")
    assert ada.record_implicit_feedback(reply, "copied") is None
    with pytest.raises(InvalidInput):
        ada.record_implicit_feedback(reply, "frowned")


def test_feedback_excluded_from_training_is_listed_and_consent_can_be_withdrawn(
    ada: Any, library_user: User
) -> None:
    reply = ada.chat("Hello")
    feedback = [
        ada.feedback(reply, rating=1, train=False),
        ada.teach("Write to Bo.", "Dear Bo", train=False),
        ada.remember("I live in Oslo.", train=False),
        ada.teach("Write to Cy.", "Dear Cy"),
    ]
    assert ada.record_implicit_feedback(reply, "copied", train=False) is None
    code = ReasonCode.TRAINING_FORBIDDEN
    assert [
        each.signal.id for each in ada.signal_statuses() if each.reason.code is code
    ] == feedback[:3]
    (withdrawn,) = ada.retract(feedback[3], training_only=True)
    assert withdrawn.id == feedback[3]
    assert {each.reason.code for each in ada.signal_statuses()} == {code}
    assert ada.signal_statuses() == library_user.signal_statuses()
    assert ada.items() == library_user.items() != ()
    with pytest.raises(NotFound):
        ada.retract(feedback[0], training_only=True)


def test_a_learn_reports_changes_the_stack_and_can_be_rolled_back(
    ada: Any, library_user: User
) -> None:
    before = ada.chat("Hello", temperature=0).text
    correct(ada)
    progress: list[tuple[str, float]] = []
    report = ada.learn(progress=lambda stage, done: progress.append((stage, done)))
    assert report.live
    assert to_json([report]) == [{**ada.reports()[-1], "above": []}]
    assert all(stage and 0 <= done <= 1 for stage, done in progress)
    assert progress
    assert "personalpeft rollback style" in str(report)
    after = ada.chat("Hello", temperature=0)
    assert after.text != before
    assert ada.why(after) == library_user.why(after.turn_id)
    assert str(ada.why(after)) == str(library_user.why(after.turn_id))
    assert ada.stack() == library_user.stack() == after.stack
    assert ada.layers() == library_user.layers()
    assert ada.revisions() == ada.revisions("style") == library_user.revisions()
    move = ada.rollback("style")
    assert ada.history()[-1] == move == library_user.history()[-1]
    assert ada.chat("Hello", temperature=0).text == before
    assert ada.rollback("style", to=report.revision).after == report.revision
    assert ada.rollback("style", to=None).after is None
    digest = ada.activity_summary(timedelta(hours=1))
    assert [each.revision for each in digest.reports] == [report.revision]
    assert digest.live == {"style": None}


def test_layers_are_rebased_compared_and_switched_by_name(
    runtime_or_client: Any, ada: Any, library_user: User
) -> None:
    for first in (0, 5):
        correct(ada, first=first)
        ada.learn()
    with pytest.raises(Cancelled):
        runtime_or_client.rebase("ada", BASE, cancelled=lambda: True)
    progress: list[str] = []
    report = runtime_or_client.rebase(
        "ada", BASE, compare_only=True, progress=lambda stage, done: progress.append(stage)
    )
    (layer,) = report.layers
    assert layer.before == library_user.layers()[0].head != layer.after
    assert report.improved + report.regressed + report.tied == len(report.questions) > 0
    assert report.examples
    assert progress
    assert not report.switched
    switched = runtime_or_client.rebase("ada", BASE, accept=True)
    assert switched.switched
    assert library_user.layers()[0].head == layer.after


@pytest.mark.exhaustive
def test_one_rebase_runs_at_a_time_in_a_server(
    client: Client, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ada", "bo"):
        runtime.user(name)
    caught: list[Exception] = []

    def rebase(self: Runtime, user: str, *args: Any, progress: Any, **options: Any) -> None:
        with pytest.raises(Busy) as refused:
            client.rebase("bo", BASE)
        caught.append(refused.value)
        raise NothingToLearn("Nothing is live.", hint="Learn first.")

    monkeypatch.setattr(Runtime, "rebase", rebase)
    with pytest.raises(NothingToLearn):
        client.rebase("ada", BASE)
    assert caught


def test_a_rebase_over_http_takes_names_of_bases_alone(client: Client, tmp_path: Path) -> None:
    ada = client.user("ada")
    correct(ada)
    ada.learn()
    (tmp_path / "card.toml").write_text("")
    for wrong in ("no-such-base", str(tmp_path / "card.toml"), "card.toml", "../card", "~"):
        with pytest.raises(NotFound):
            client.rebase("ada", wrong)
    assert BASE in [base.name for base in client.bases()]


def test_a_dry_run_reports_the_planned_learn(ada: Any) -> None:
    correct(ada)
    report = ada.learn("style", dry_run=True)
    assert report.dry_run
    assert report.sources
    assert ada.revisions() == ()


def test_pending_signals_are_counted_and_probations_are_reviewed(
    ada: Any, library_user: User
) -> None:
    correct(ada)
    assert ada.pending() == library_user.pending()
    assert ada.pending().triggers
    ada.learn()
    assert ada.pending() == library_user.pending()
    assert ada.review_probation() == ()


def test_the_training_status_is_visible_during_a_learn(ada: Any, library_user: User) -> None:
    assert ada.training_status() is None
    correct(library_user)
    seen: list[TrainingStatus | None] = []
    report = library_user.learn(progress=lambda stage, done: seen.append(ada.training_status()))
    assert [(each.layer, each.steps) for each in seen if each and each.steps] == [
        ("style", report.steps)
    ] * len(seen[1:])
    assert ada.training_status() is None


def test_a_chat_takes_all_generation_options(ada: Any) -> None:
    reply = ada.chat("Hello", temperature=0, logprobs=True)
    assert "".join(token.text for token in reply.logprobs) == reply.text
    likely = ada.chat("Hello", temperature=0, top_logprobs=2).logprobs
    assert [token.top[0].text for token in likely] == [token.text for token in reply.logprobs]
    assert all(len(token.top) == 2 for token in likely)
    with pytest.raises(InvalidInput):
        ada.chat("Hello", top_logprobs=21)
    assert ada.chat("Once upon a time", template=False, temperature=0).text
    with pytest.raises(NotFound):
        ada.chat("Hello", revision="style@000000000000")


def test_a_learn_without_new_signals_says_so(ada: Any) -> None:
    with pytest.raises(NothingToLearn) as caught:
        ada.learn()
    assert caught.value.hint


def test_a_cancelled_learn_says_so(ada: Any) -> None:
    correct(ada)
    with pytest.raises(Cancelled):
        ada.learn(cancelled=lambda: True)


def test_a_learn_of_several_users_reports_each_error_separately(
    runtime_or_client: Any, runtime: Runtime
) -> None:
    for name in ("ada", "bo", "cy"):
        correct(runtime_or_client.user(name), 0 if name == "cy" else 5)
    progress: list[tuple[str, float]] = []
    reports = runtime_or_client.learn_many(
        ["cy", "bo", "nobody", "ada"], progress=lambda *feedback: progress.append(feedback)
    )
    assert [report.user for report in reports] == ["cy", "bo", "nobody", "ada"]
    assert [report.error for report in reports] == ["NothingToLearn", "", "NotFound", ""]
    assert [report.live for report in reports] == [False, True, False, True]
    assert to_json([reports[3]]) == [{**runtime.user("ada").reports()[-1], "above": []}]
    assert all(stage and 0 <= done <= 1 for stage, done in progress)
    assert progress


def test_a_cancelled_learn_of_several_users_says_so_for_each(runtime_or_client: Any) -> None:
    for name in ("ada", "bo"):
        correct(runtime_or_client.user(name))
    assert [
        report.error
        for report in runtime_or_client.learn_many(["ada", "bo"], cancelled=lambda: True)
    ] == ["Cancelled"] * 2
    assert all(
        report.live for report in runtime_or_client.learn_many(["ada", "bo"], "style", steps=10_000)
    )


@pytest.mark.parametrize(
    ("users", "error"),
    [(["ada", "ada"], InvalidInput), (["Ada!"], InvalidId), (["ada", ""], InvalidId)],
)
def test_an_invalid_list_of_users_is_refused(
    runtime_or_client: Any, ada: Any, users: list[str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        runtime_or_client.learn_many(users)
    with pytest.raises(InvalidInput):
        runtime_or_client.learn_many(["ada"], steps=0)
    assert runtime_or_client.learn_many([]) == ()


def test_erasure_removes_a_signal_and_the_revisions_built_from_it(
    ada: Any, library_user: User
) -> None:
    correct(ada, 6)
    ada.learn()
    (revision,) = ada.revisions()
    signal = next(signal for signal, role in revision.signals.items() if role == "trained")
    would = ada.forget(signal, dry_run=True)
    assert (would.signals, would.revisions, would.dry_run) == ((signal,), (revision.id,), True)
    assert ada.stack().entries
    report = ada.forget(signal, rebuild=False)
    assert (report.signals, report.revisions) == ((signal,), (revision.id,))
    assert signal in str(report)
    assert signal not in [each.id for each in library_user.signals()]
    assert library_user.stack().entries == ()
    with pytest.raises(Forgotten):
        ada.forget(signal)
    with pytest.raises(NotFound):
        ada.forget("s_0000")


def test_a_certificate_names_what_was_erased_and_is_verified(
    ada: Any, runtime_or_client: Any, tmp_path: Path
) -> None:
    fact = ada.remember("My dog is called Zorblax.")
    certificates = [
        ada.forget(fact, certificate=True).certificate,
        runtime_or_client.forget_user("ada", certificate=True).certificate,
    ]
    for number, certificate in enumerate(certificates):
        path, _ = certificate.write(tmp_path / f"{number}.json")
        assert verify_certificate(path) == certificate
        assert "Zorblax" not in path.read_text()
    assert certificates[0].statement["items"][0]["id"] == fact


def test_a_user_archive_is_imported_under_another_name(
    runtime_or_client: Any, ada: Any, tmp_path: Path
) -> None:
    correct(ada)
    ada.learn()
    file = tmp_path / "ada.personal"
    exported = ada.export(file)
    assert (exported.path, exported.bytes, exported.revisions) == (file, file.stat().st_size, 1)
    with pytest.raises(InvalidInput):
        ada.export(file)
    with pytest.raises(InvalidInput):
        runtime_or_client.import_user(file)
    imported = runtime_or_client.import_user(file, as_user="bob")
    assert (imported.user, imported.original, imported.left_out) == ("bob", "ada", 0)
    bob = runtime_or_client.user("bob", create=False)
    assert bob.stack().digest == ada.stack().digest
    file.write_bytes(b"no such file")
    with pytest.raises(PersonalFileError) as caught:
        runtime_or_client.import_user(file, as_user="cy")
    assert caught.value.hint
    assert [user.id for user in runtime_or_client.users()] == ["ada", "bob"]


@pytest.mark.exhaustive
def test_a_stack_is_exported_and_imported_as_gguf(tiny_base: Base, tmp_path: Path) -> None:
    assert tiny_base.architecture.model_type == "llama"
    with (
        personalpeft.open(tmp_path / "home", quick_card(tmp_path)) as runtime,
        closing(ApiV1(runtime)) as api,
        serve_locally(runtime, more=[api.blueprint]) as site,
    ):
        ada, bob = (connect(site.url, site.secret).user(name) for name in ("ada", "bob"))
        with pytest.raises(NotFound):
            ada.export_gguf(tmp_path / "nothing.gguf")
        correct(ada)
        ada.learn(accept=True)
        file = ada.export_gguf(tmp_path / "ada.gguf")
        with pytest.raises(InvalidInput):
            ada.export_gguf(file)
        revision = bob.import_gguf(file)
        assert bob.stack().entries[0].revision == revision.id
        library_user = runtime.user("bob").chat("hello", temperature=0, memory=False).text
        assert library_user == runtime.user("ada").chat("hello", temperature=0, memory=False).text
        file.write_bytes(b"GGUF and no more")
        for damaged in (file, tmp_path / "nowhere.gguf"):
            with pytest.raises(AdapterError) as caught:
                bob.import_gguf(damaged)
            assert "personalpeft-private" not in caught.value.message


def test_a_base_without_gguf_support_says_so(
    runtime_or_client: Any, ada: Any, tmp_path: Path
) -> None:
    correct(ada)
    ada.learn()
    with pytest.raises(InvalidInput):
        ada.export_gguf(tmp_path / "ada.gguf")
    assert not (tmp_path / "ada.gguf").exists()


def test_a_stack_is_exported_and_imported_as_a_peft_folder(
    runtime_or_client: Any, ada: Any, tmp_path: Path
) -> None:
    with pytest.raises(NotFound):
        ada.export_peft(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    correct(ada)
    ada.learn()
    folder = ada.export_peft(tmp_path / "peft")
    names = ["adapter_config.json", "adapter_model.safetensors", "personalpeft.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    with pytest.raises(InvalidInput):
        ada.export_peft(folder)
    bob = runtime_or_client.user("bob")
    revision = bob.import_peft(folder, layer="skill.email")
    assert bob.stack().entries[0].revision == revision.id
    assert bob.revisions() == (revision,)
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    for damaged in (folder, tmp_path / "nowhere"):
        with pytest.raises(AdapterError):
            bob.import_peft(damaged)
    assert bob.revisions() == (revision,)


@pytest.mark.parametrize(
    "names",
    [["../adapter_config.json"], ["/etc/x"], ["adapter_model.bin"], ["adapter_config.json"] * 2],
)
def test_an_archive_cannot_choose_where_it_is_unpacked(tmp_path: Path, names: list[str]) -> None:
    with zipfile.ZipFile(tmp_path / "sent.zip", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            archive.writestr(name, "{}")
    (tmp_path / "into").mkdir()
    with pytest.raises(AdapterError):
        unzip_adapter(tmp_path / "sent.zip", tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["into", "sent.zip"]


def test_only_the_administrator_maintains_a_home(
    runtime_or_client: Any, ada: Any, runtime: Runtime, site: LocalServer
) -> None:
    correct(ada)
    assert runtime_or_client.verify() == ()
    lost = runtime.settings.home / "blobs" / "ab" / ("ab" * 32)
    lost.parent.mkdir(parents=True, exist_ok=True)
    lost.write_bytes(b"nobody's")
    (problem,) = runtime_or_client.verify()
    assert problem == runtime.verify()[0]
    assert str(runtime.settings.home) not in f"{problem}"
    assert runtime_or_client.collect_garbage(dry_run=True) == runtime.collect_garbage(dry_run=True)
    mine = connect(site.url, site.api_key_of("ada"))
    for forbidden in (mine.verify, mine.collect_garbage):
        with pytest.raises(NotAllowed):
            forbidden()


def test_a_user_is_erased_by_the_administrator_or_by_the_user_only(
    runtime_or_client: Any, ada: Any, runtime: Runtime, site: LocalServer
) -> None:
    correct(ada)
    would = runtime_or_client.forget_user("ada", dry_run=True)
    assert (would.signals, would.dry_run) == (ada.summary().signals, True)
    runtime.user("bob").chat("hello")
    others = connect(site.url, site.api_key_of("bob"))
    with pytest.raises(NotAllowed):
        others.forget_user("ada")
    assert runtime_or_client.forget_user("ada").signals == would.signals
    for act in (ada.summary, lambda: runtime_or_client.forget_user("ada")):
        with pytest.raises(NotFound):
            act()
    assert others.forget_user("bob").turns == 1
    with pytest.raises(NotAllowed):
        others.whoami()
    assert runtime.users() == ()


def test_a_published_stack_is_downloaded_by_digest_by_the_administrator_only(
    runtime_or_client: Any, ada: Any, runtime: Runtime, site: LocalServer
) -> None:
    files = {"adapter_config.json": b"{}\n", "adapter_model.safetensors": bytes(range(256)) * 5000}
    stack = published.PublishedAdapter(published.compute_digest(files), 8, files)
    with closing(
        published.PublishedAdapterFolder(runtime.settings.cache / "served", "another")
    ) as folders:
        folders.put(stack)
        assert {
            name: runtime_or_client.read_published_file(stack.digest, name) for name in files
        } == files
        for digest, name in (
            ("0" * 64, "adapter_config.json"),
            (stack.digest, "../x"),
            (".." * 32, "adapter_config.json"),
        ):
            with pytest.raises(NotFound):
                runtime_or_client.read_published_file(digest, name)
        with pytest.raises(NotAllowed):
            connect(site.url, site.api_key_of("ada")).read_published_file(
                stack.digest, "adapter_config.json"
            )
    with pytest.raises(NotFound):
        runtime_or_client.read_published_file(stack.digest, "adapter_config.json")


def test_turns_are_listed_in_pages(ada: Any, library_user: User) -> None:
    correct(ada)
    whole = library_user.turns()
    assert ada.turns(2) == whole[:2]
    assert ada.turns(2, before=whole[1].id) == whole[2:4]
    assert ada.turns(before=whole[-1].id) == ()
    with pytest.raises(NotFound):
        ada.turns(before="t_0000")


def test_an_activity_summary_can_end_in_the_past(ada: Any, library_user: User) -> None:
    correct(ada)
    assert ada.activity_summary(timedelta(hours=1)).signals == {"edit": 5}
    first = library_user.turns()[-1].at
    assert not ada.activity_summary(
        first - timedelta(days=2), until=first - timedelta(days=1)
    ).signals
    with pytest.raises(InvalidInput):
        ada.activity_summary(first, until=first - timedelta(days=1))


def test_a_user_switches_training_off_once(ada: Any) -> None:
    ada.set_training(False)
    assert not ada.summary().training
    withheld = ada.teach("Write to Bo.", "Dear Bo")
    ada.set_training(True)
    assert ada.summary().training
    ada.teach("Write to Cy.", "Dear Cy")
    forbidden = [each.signal.id for each in ada.signal_statuses() if each.signal.forbids_training]
    assert forbidden == [withheld]
    with pytest.raises(InvalidInput):
        ada.set_training("no")


def test_a_layer_is_weighted_and_scoped(ada: Any) -> None:
    correct(ada)
    ada.learn()
    ada.set_weight("style", 0.5)
    ada.scope("style", "near")
    assert [(layer.weight, layer.scope) for layer in ada.layers()] == [(0.5, "near")]
    with pytest.raises(InvalidInput):
        ada.set_weight("style", 3)
    with pytest.raises(InvalidInput):
        ada.scope("style", "sometimes")
    with pytest.raises(NotFound):
        ada.set_weight("memory", 1)


def test_a_comparison_is_blind_and_the_choice_is_recorded(ada: Any, library_user: User) -> None:
    correct(ada)
    ada.learn()
    comparison = ada.compare("How do I boil an egg?")
    head = library_user.stack().entries[0].revision
    assert head not in str(comparison) + str(comparison.as_json())
    assert not comparison.same
    choice = comparison.choose(comparison.answers[0].name)
    assert {choice.chosen, choice.other} == {head, "base"}
    signal = library_user.signals()[-1]
    assert (signal.id, signal.turn) == (choice.signal, choice.turn)
    assert signal.payload["text"] == comparison.answers[0].text
    with pytest.raises(InvalidInput):
        comparison.choose(3)


def test_a_skill_is_practiced(ada: Any) -> None:
    report = ada.practice("sums", verifier="sums", rounds=1)
    assert report.layer == "skill.sums"
    with pytest.raises(NotFound):
        ada.practice("sums", verifier="no-such-plugin")


def test_practice_options_reach_the_library(ada: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (budget,) = ada.practice("sums", verifier="sums", max_memory_mb=0.001).reasons
    assert budget.code is ReasonCode.MEMORY_BUDGET
    options: list[LearnOptions] = []
    practice = Learner.practice

    def record(learner: Learner, *args: Any) -> LearnReport:
        options.append(args[-1])
        return practice(learner, *args)

    monkeypatch.setattr(Learner, "practice", record)
    ada.practice(
        "sums", verifier="sums", seconds=60, rounds=1, steps=3, max_memory_mb=100, accept=True
    )
    (order,) = options
    assert (order.seconds, order.steps, order.max_memory_mb, order.accept) == (60, 3, 100, True)


WRONG: dict[str, tuple[type[PersonalPeftError], Any]] = {
    "an empty prompt": (InvalidInput, lambda user: user.chat("")),
    "a prompt that is no text": (InvalidInput, lambda user: user.chat(5)),
    "a prompt of spaces": (InvalidInput, lambda user: user.chat("   ")),
    "half a character": (InvalidInput, lambda user: user.chat("\ud800")),
    "a reply's role last": (
        InvalidInput,
        lambda user: user.chat([{"role": "assistant", "content": "Hi"}]),
    ),
    "too hot": (InvalidInput, lambda user: user.chat("Hello", temperature=11)),
    "no number": (InvalidInput, lambda user: user.chat("Hello", temperature=float("nan"))),
    "no tokens": (InvalidInput, lambda user: user.chat("Hello", max_tokens=0)),
    "a negative seed": (InvalidInput, lambda user: user.chat("Hello", seed=-1)),
    "an empty stop": (InvalidInput, lambda user: user.chat("Hello", stop=[""])),
    "a layer that is not there": (NotFound, lambda user: user.chat("Hello", layers=["memory"])),
    "too long": (PromptTooLong, lambda user: user.chat("word " * 15_000)),
    "no time": (InvalidInput, lambda user: user.chat("Hello", timeout=0)),
    "a rating of 3": (InvalidInput, lambda user: user.feedback(user.chat("Hello"), rating=3)),
    "a rating that is true": (
        InvalidInput,
        lambda user: user.feedback(user.chat("Hello"), rating=True),
    ),
    "two things at once": (
        InvalidInput,
        lambda user: user.feedback(user.chat("Hello"), rating=1, reward=1),
    ),
    "nothing": (InvalidInput, lambda user: user.feedback(user.chat("Hello"))),
    "an unknown turn": (NotFound, lambda user: user.feedback("t_0000", rating=1)),
    "no turn yet": (NotFound, lambda user: user.why("last")),
    "a turn that is none": (NotFound, lambda user: user.turn("../../etc")),
    "an item that is none": (NotFound, lambda user: user.edit_item("no item", "Text")),
    "a skill with a slash": (InvalidInput, lambda user: user.teach("A", "B", skill="a/b")),
    "an empty source": (InvalidId, lambda user: user.teach("A", "B", source="")),
    "an invalid source": (InvalidId, lambda user: user.remember("A", source="A Judge")),
    "nothing to retract": (InvalidInput, lambda user: user.retract()),
    "a signal that is none": (NotFound, lambda user: user.retract("no signal")),
    "an answer without a question": (InvalidInput, lambda user: user.remember("A", answer="B")),
    "a layer that cannot be": (InvalidId, lambda user: user.learn("no layer")),
    "an odd start": (InvalidInput, lambda user: user.learn(start="somewhere")),
    "no budget": (InvalidInput, lambda user: user.learn(seconds=0)),
    "nothing to roll back": (NotFound, lambda user: user.rollback("style")),
    "nothing to compare": (NotFound, lambda user: user.compare("Hello")),
    "a future": (InvalidInput, lambda user: user.activity_summary(timedelta(days=-1))),
    "less than no turns": (InvalidInput, lambda user: user.turns(-1)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_invalid_call_has_the_same_error_and_hint_and_records_nothing(
    ada: Any, library_user: User, wrong: str
) -> None:
    kind, call = WRONG[wrong]
    with pytest.raises(kind) as caught:
        call(ada)
    assert type(caught.value) is kind
    assert caught.value.hint
    assert library_user.signals() == library_user.revisions() == library_user.reports() == ()


# The client alone


def test_the_client_has_the_methods_of_a_user() -> None:
    public = {name for name in dir(User) if not name.startswith("_")}
    # Exporting writes a copy of the whole base, which only makes sense on the server's own disk.
    # Thousands of demonstrations are taught, plugins propose and copy adapters, and revisions are built
    # again to be checked where the home is. A learn elsewhere is of the server that has the home.
    public -= {
        "apply_learn",
        "bundle_learn",
        "copy_layer",
        "export_merged",
        "propose_peft",
        "reproduce",
        "teach_many",
    }
    assert public == {name for name in dir(RemoteUser) if not name.startswith("_")}
    public = {name for name in dir(Stream) if not name.startswith("_")}
    public |= {"stack", "prompt_tokens"}  # Attributes of an instance.
    assert public == {name for name in dir(RemoteStream) if not name.startswith("_")}


# Arguments that a client cannot pass: callbacks and objects that run during the call, and what an
# operator decides.
_LIBRARY_ONLY = {
    **{name: {"paused"} for name in ("learn_many", "practice")},
    "learn": {"paused", "recipe", "verifier"},
    "compare": {"cancelled"},
    "collect_garbage": {"progress"},
    "forget_user": {"progress"},
}


@pytest.mark.parametrize(
    ("here", "there"), [(User, RemoteUser), (Runtime, Client), (Stream, RemoteStream)]
)
def test_client_methods_have_the_signatures_of_the_library(here: type, there: type) -> None:
    # ``chat`` is left out: it has the parameters of ``stream``.
    shared = {name for name in set(dir(here)) & set(dir(there)) if not name.startswith("_")}
    for name in sorted(shared - {"chat"}):
        if not callable(getattr(here, name)):
            continue
        local, remote = (
            [
                (each.name, each.kind, each.default)
                for each in signature(getattr(kind, name)).parameters.values()
            ]
            for kind in (here, there)
        )
        assert remote == [each for each in local if each[0] not in _LIBRARY_ONLY.get(name, ())], (
            name
        )


def test_a_second_learn_of_a_user_is_busy(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = client.user("ada")
    correct(ada)
    # Progress arrives over the network with a delay: the learn must still be running by then.
    SlowSteps(monkeypatch, 0.05)
    caught: list[Exception] = []

    def again(stage: str, done: float) -> None:
        if not caught:
            with pytest.raises(Busy) as refused:
                ada.learn()
            caught.append(refused.value)

    ada.learn(progress=again)
    assert caught


@pytest.mark.exhaustive
@pytest.mark.parametrize("cut", ["with an error", "silently"])
def test_a_learn_outlives_a_connection_that_breaks_for_a_moment(
    client: Client, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    ada = client.user("ada")
    correct(ada)
    SlowSteps(monkeypatch, 0.05)
    events, cuts = Transport.events, list[str]()

    def break_off(self: Transport, *args: Any, **path: str) -> Iterator[Any]:
        for event in events(self, *args, **path):
            yield event
            if not cuts:
                cuts.append(cut)
                if cut == "silently":
                    return
                raise Unreachable("The connection broke off.")

    monkeypatch.setattr(Transport, "events", break_off)
    report = ada.learn()
    assert cuts
    assert report.revision == ada.revisions()[0].id


def test_an_unknown_or_foreign_api_key_is_refused(site: LocalServer) -> None:
    with pytest.raises(NotAllowed):
        connect(site.url, "pp_nobody").user("ada")
    ada = connect(site.url, site.api_key_of("ada"))
    assert ada.user("ada").summary().id == "ada"
    with pytest.raises(NotAllowed):
        ada.user("bob")
    with pytest.raises(NotAllowed):
        ada.users()


def test_a_server_below_a_path_of_another_app_is_reached(runtime: Runtime) -> None:
    _, secret = runtime.api_keys.create("ada")
    api = ApiV1(runtime)
    app = make_app(runtime, more=[api.blueprint])
    mounted = DispatcherMiddleware(Flask("shop"), {"/model": app})
    with make_server("127.0.0.1", 0, mounted, threaded=True) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for path in ("/model", "/model/"):
            ada = connect(f"http://127.0.0.1:{server.port}{path}", secret).user("ada")
            assert ada.turn(ada.chat("Hello")) == runtime.user("ada").turns()[0]
        server.shutdown()
        thread.join(10)
    api.close()


def test_an_unreachable_server_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unreachable):
        connect("http://127.0.0.1:9", "pp_x", timeout=5).user("ada")
    for address in ("127.0.0.1:80", "ftp://host", "http://host/?a=b", "http://host:port"):
        with pytest.raises(InvalidInput):
            connect(address, "pp_x")


def test_the_client_loads_neither_flask_nor_a_model() -> None:
    import subprocess
    import sys

    code = "import personalpeft_app.client, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"flask", "werkzeug", "torch", "transformers"} & set(loaded)
    assert personalpeft.__name__ in loaded


def test_client_reads_the_codes_of_an_earlier_server() -> None:
    trigger = {"key": "style@1", "kind": "stack below changed", "layer": "style"}
    pending = from_json(Pending, {"user": "ada", "news": [], "triggers": [trigger]})
    assert [each.kind for each in pending.triggers] == [TriggerKind.STACK_BELOW_CHANGED]
    assert [from_json(Placement, each) for each in ("profile", "prompt", "kept")] == [
        Placement.RULE,
        Placement.RULE,
        Placement.UNUSED,
    ]
    outcome = from_json(ReproductionOutcome, "inputs missing")
    assert outcome is ReproductionOutcome.INPUTS_MISSING


def test_old_names_of_a_users_methods_lead_to_methods_of_the_client() -> None:
    for old, new in former_names(RemoteUser).items():
        assert callable(getattr(RemoteUser, new)), old
