"""Chat through the public surface: memory items, streams, stacks, provenance and isolation of
users.
"""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from runtime_makers import (
    ask,
    correct,
    greedy,
    home_contents,
    home_unchanged,
    open_runtime,
    style,
    trained_on,
)

import personalpeft
from personalpeft import (
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    PersonalPeftError,
    QueueFull,
    Runtime,
    Serving,
    User,
)
from personalpeft.backends.fake import FakeBackend
from personalpeft.clock import Clock
from personalpeft.types import Message, SignalKind


def rendered_messages(user: User, prompt: str, **more: object) -> list[Message]:
    """Return the messages that the backend rendered last for a chat with this prompt."""
    backend = user._services.engine.backend
    seen: list[list[Message]] = []
    render = type(backend).render
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(backend),
            "render",
            lambda self, messages: seen.append(list(messages)) or render(self, messages),
        )
        ask(user, prompt, **more)
    return seen[-1]


def joined_text(messages: list[Message]) -> str:
    return "\n".join(message.content for message in messages)


def test_reply_has_its_metadata_and_is_recorded(ada: User) -> None:
    reply = ask(ada)
    assert (reply.text, reply.finish_reason, str(reply)) == (str(reply), "stop", reply.text)
    assert reply.usage.prompt_tokens > 0 < reply.usage.completion_tokens
    (turn,) = ada.turns()
    assert (turn.id, turn.reply, turn.stack, turn.usage) == (
        reply.turn_id,
        reply.text,
        reply.stack,
        reply.usage,
    )
    assert ada.turn(reply) == ada.turn(reply.turn_id) == ada.turn(turn) == ada.turn("last") == turn
    assert ada.turn(reply.turn_id[:-2]) == turn


def test_chat_renders_its_prompt_once(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[object] = []
    render = FakeBackend.render

    def counted(self: FakeBackend, messages: Any) -> Any:
        rendered.append(messages)
        return render(self, messages)

    monkeypatch.setattr(FakeBackend, "render", counted)
    reply = ada.chat("hello")
    assert len(rendered) == 1
    assert reply.usage.prompt_tokens > 0


def test_string_and_messages_are_the_same_request(ada: User) -> None:
    assert (
        ask(ada, "hello").text
        == ada.chat([{"role": "user", "content": "hello"}], temperature=0).text
    )
    assert ask(ada, "hello").text == ada.chat([Message("user", "hello")], temperature=0).text
    more = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    assert ada.chat(more, temperature=0).text != ask(ada, "hello").text
    assert ada.turn("last").messages == (Message("user", "hello"),)


def test_same_stack_prompt_and_seed_give_the_same_text(ada: User) -> None:
    replies = [ada.chat("hello", temperature=1.0, seed=seed).text for seed in (1, 2, 3, 1, 2, 3)]
    assert replies[:3] == replies[3:]
    assert len(set(replies)) > 1


def test_joined_stream_equals_the_reply(ada: User) -> None:
    stream = ada.stream("hello", temperature=0)
    with pytest.raises(NotFound):
        _ = stream.reply
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == stream.reply.text == ask(ada, "hello").text
    assert ada.turn(stream.reply).finish_reason == "stop"


def test_stream_is_closed_by_leaving_its_block(ada: User) -> None:
    with ada.stream("hello", temperature=0) as stream:
        first = next(stream)
    assert (stream.reply.text, stream.reply.finish_reason) == (first, "cancelled")
    assert list(stream) == []


def test_stream_that_its_reader_leaves_is_recorded_at_once(ada: User) -> None:
    """Without a garbage collector, which would record the turn at any later line of any thread."""
    gc.disable()
    try:
        first = next(ada.stream("hello", temperature=0))
        (turn,) = ada.turns()
    finally:
        gc.enable()
    assert (turn.reply, turn.finish_reason) == (first, "cancelled")


def test_stream_closed_early_is_recorded_as_cancelled(ada: User) -> None:
    stream = ada.stream("hello", temperature=0)
    first = next(stream)
    stream.close()
    assert list(stream) == []
    turn = ada.turn("last")
    assert (turn.reply, turn.finish_reason, turn.usage.completion_tokens) == (first, "cancelled", 1)
    assert stream.turn_id == stream.reply.turn_id == turn.id
    assert ask(ada, "hello").text.startswith(first)


def test_cancelled_reply_keeps_its_text_so_far(ada: User) -> None:
    looks = itertools.count()
    reply = ask(ada, "hello", cancelled=lambda: next(looks) >= 2)
    assert reply.finish_reason == "cancelled"
    assert ask(ada, "hello").text.startswith(reply.text)
    assert ada.turn(reply).finish_reason == "cancelled"


def test_unread_stream_leaves_no_turn(ada: User, home: Path) -> None:
    with home_unchanged(home):
        stream = ada.stream("hello")
        stream.close()
        del stream
        gc.collect()


def test_stream_open_at_the_close_of_the_runtime_is_recorded_as_cancelled(home: Path) -> None:
    with open_runtime(home) as runtime:
        stream, unread = (runtime.user("ada").stream("hello") for _ in range(2))
        first = next(stream)
    assert list(stream) == list(unread) == []
    assert stream.reply.finish_reason == "cancelled"
    with open_runtime(home) as runtime:
        assert [turn.reply for turn in runtime.user("ada").turns()] == [first]


def test_more_users_than_slots_each_get_their_own_stack(home: Path) -> None:
    with open_runtime(home, serving=Serving(slots=2, max_batch=3)) as runtime:
        users = [runtime.user(f"user-{n}") for n in range(5)]
        for n, user in enumerate(users):
            for m in range(4):
                user.teach(f"question {m}", f"Answer {n}.")
            user.learn()
        alone = [ask(user, "hello").text for user in users]
        streams = [user.stream("hello", temperature=0) for user in users]
        begun = [next(stream) for stream in streams]
        assert [
            first + "".join(stream) for first, stream in zip(begun, streams, strict=True)
        ] == alone
        assert len(set(alone)) == 5


class StepGate:
    """Blocks each step of the fake backend until ``open`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        step = FakeBackend.step

        def gated(backend: FakeBackend) -> object:
            self.entered.set()
            assert self.open.wait(20)
            return step(backend)

        monkeypatch.setattr(FakeBackend, "step", gated)


def test_reply_refused_by_a_full_queue_leaves_no_turn(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = StepGate(monkeypatch)
    with open_runtime(home, serving=Serving(max_batch=1, max_queue=1)) as runtime:
        ada, bo, cy = (runtime.user(name) for name in ("ada", "bo", "cy"))
        texts: list[str] = []
        threads = []
        for user, waiting in ((ada, 0), (bo, 1)):
            threads.append(
                threading.Thread(target=lambda user=user: texts.append(ask(user, "hello").text))
            )
            threads[-1].start()
            assert gate.entered.wait(20)
            while runtime.engine().metrics()["num_requests_waiting"] != waiting:
                threading.Event().wait(0.002)
        for act in (lambda: cy.chat("hello"), lambda: next(cy.stream("hello"))):
            with home_unchanged(home), pytest.raises(QueueFull) as busy:
                act()
            assert busy.value.retry_after == 1.0
        gate.open.set()
        for thread in threads:
            thread.join(20)
        assert len(texts) == 2
        assert ask(cy).text


def test_reply_past_its_deadline_is_recorded_as_far_as_it_came(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[None]()
    # Each step takes a second.
    with open_runtime(home, clock=Clock(timer=lambda: float(len(steps)))) as runtime:
        ada = runtime.user("ada")
        whole = ask(ada, "hello").text
        step = FakeBackend.step
        monkeypatch.setattr(
            FakeBackend, "step", lambda backend: steps.append(None) or step(backend)
        )
        stream = ada.stream("hello", temperature=0, timeout=3)
        heard: list[str] = []
        with pytest.raises(DeadlineExceeded) as late:
            heard.extend(stream)
        assert isinstance(late.value, TimeoutError)
        turn = ada.turn("last")
        assert (turn.finish_reason, turn.usage.completion_tokens) == ("cancelled", 3)
        assert whole.startswith(turn.reply)
        assert stream.reply.turn_id == turn.id
        with pytest.raises(DeadlineExceeded):
            ada.chat("hello", timeout=1)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "soon", True])
def test_invalid_timeout_is_refused(ada: User, home: Path, timeout: float) -> None:
    with home_unchanged(home), pytest.raises(InvalidInput, match="timeout") as raised:
        ada.chat("hello", timeout=timeout)
    assert raised.value.hint


def test_stream_read_by_another_thread_at_close_is_recorded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = StepGate(monkeypatch)
    with open_runtime(home) as runtime:
        stream = runtime.user("ada").stream("hello")
        reader = threading.Thread(target=lambda: list(stream))
        reader.start()
        assert gate.entered.wait(20)
        closer = threading.Thread(target=runtime.close)
        closer.start()
        while not stream._reader.outputs._group.closed:
            threading.Event().wait(0.002)
        gate.open.set()
        closer.join(20)
        reader.join(20)
        assert not closer.is_alive()
        assert not reader.is_alive()
    with open_runtime(home) as runtime:
        (turn,) = runtime.user("ada").turns()
        assert turn.finish_reason == "cancelled"
        assert runtime.verify() == ()


def test_new_head_is_loaded_in_its_slot_before_it_is_live(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_runtime(home, serving=Serving(slots=2)) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        engine, catalog = runtime.engine(), type(runtime._services.store.catalog)
        slots, ready = engine._scheduler.adapters, list[set[str]]()
        for name in ("add_revision", "move_head"):
            move = getattr(catalog, name)

            def moved(*args: object, move: Any = move, **more: Any) -> object:
                ready.append({key for key in slots.keys if slots.is_ready(key)})
                return move(*args, **more)

            monkeypatch.setattr(catalog, name, moved)
        report = ada.learn()
        live = ada.stack().digest
        assert live in ready[-1]
        ada.rollback("style", None)
        for n in range(1, 4):
            other = runtime.user(f"other-{n}")
            correct(other, 5, first=10 * n)
            other.learn()
        assert live not in ready[-1]
        ada.rollback("style", report.revision)
        assert ada.stack().digest == live
        assert live in ready[-1]
        before = engine.metrics()
        ask(ada, "hello")
        after = engine.metrics()
        assert after["stack_hits_total"] == before["stack_hits_total"] + 1
        assert after["stack_misses_total"] == before["stack_misses_total"]


@pytest.mark.parametrize("slots", [1, 2])
def test_learn_waits_for_room_and_is_never_refused(home: Path, slots: int) -> None:
    with open_runtime(
        home, serving=Serving(slots=slots, max_batch=1, max_queue=1, max_queue_per_user=1)
    ) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        assert ada.learn().verdict == "promoted"
        correct(ada, 5, first=20)
        assert ada.learn(start="scratch").revision


def test_rollback_loads_no_model(home: Path) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        ada.learn()
    with open_runtime(home) as runtime:
        runtime.user("ada").rollback("style")
        assert runtime._services.model._engine is None


def test_fact_is_in_the_next_prompt_until_it_is_removed(ada: User) -> None:
    fact = ada.remember("My dog is called Biscuit.", questions=["What is my dog called?"])
    heard = rendered_messages(ada, "What is my dog called?")
    assert "Biscuit" in joined_text(heard)
    assert heard[-1].content.count("What is my dog called?") == 1
    assert ada.turn("last").used == (fact,)
    assert [item.id for item in ada.items()] == [fact]
    edited = ada.edit_item(fact, "My dog is called Rusk.")
    assert "Rusk" in joined_text(rendered_messages(ada, "What is my dog called?"))
    assert "Biscuit" not in joined_text(rendered_messages(ada, "What is my dog called?"))
    ada.retract_item(edited.id)
    assert ada.items() == ()
    assert "Rusk" not in joined_text(rendered_messages(ada, "What is my dog called?"))


def test_comment_is_a_rule_from_the_next_turn_on(ada: User) -> None:
    plain = ask(ada, "hello").text
    ada.feedback("last", comment="Always answer in one word.")
    assert "Always answer in one word." in joined_text(
        rendered_messages(ada, "Why is the sky blue?")
    )
    assert ask(ada, "hello").text != plain
    assert ask(ada, "hello", memory=False).text == plain


def test_memory_false_keeps_items_out_of_prompt_and_turn(ada: User) -> None:
    ada.remember("My dog is called Biscuit.", questions=["What is my dog called?"])
    assert "Biscuit" not in joined_text(
        rendered_messages(ada, "What is my dog called?", memory=False)
    )
    assert ada.turn("last").used == ()


def test_turn_records_the_request_without_memory_items(ada: User) -> None:
    ada.remember("My dog is called Biscuit.", questions=["What is my dog called?"])
    ask(ada, "What is my dog called?")
    assert ada.turn("last").messages == (Message("user", "What is my dog called?"),)


def test_no_layers_and_weight_zero_both_give_the_bare_base(ada: User) -> None:
    before = greedy(ada)
    correct(ada, 5)
    ada.learn()
    learned = ask(ada, "hello").text
    bare = ask(ada, "hello", layers=[])
    assert (bare.text, bare.stack.entries) == (before[0], ())
    assert ask(ada, "hello", layers=["style"]).text == learned != bare.text
    ada.set_weight("style", 0)
    assert ask(ada, "hello").text == bare.text
    ada.set_weight("style", 1)
    assert ask(ada, "hello").text == learned
    assert [layer.weight for layer in ada.layers()] == [1.0]


def test_why_names_revisions_signals_and_items(ada: User) -> None:
    bare = ask(ada)
    assert (ada.why(bare).parts, ada.why(bare).items) == ((), ())
    correct(ada, 5)
    first = ada.learn()
    correct(ada, 3, first=10)
    second = ada.learn()
    assert second.verdict == "promoted", second.reason
    fact = ada.remember("My dog is called Biscuit.", questions=["What is my dog called?"])
    why = ada.why(ask(ada, "What is my dog called?"))
    (part,) = why.parts
    assert (part.revision.id, part.revision.parent) == (second.revision, first.revision)
    assert {signal.id for signal in part.signals} == trained_on(ada)
    assert [signal.at for signal in part.signals] == sorted(signal.at for signal in part.signals)
    assert [signal.id for signal in why.items] == [fact]
    data = why.as_json()
    assert data["turn"]["id"] == why.turn.id
    assert data["turn"]["stack"]["digest"] == why.turn.stack.digest
    assert second.revision in str(why)
    assert "Biscuit" in str(why)
    assert {s["id"] for s in data["parts"][0]["signals"]} == trained_on(ada)


def test_turn_keeps_its_provenance_after_a_rollback_and_superseded_signals(ada: User) -> None:
    replies = [ask(ada, f"question {n}") for n in range(5)]
    for reply in replies:
        ada.feedback(reply, edit=style("Yes."))
    revision = ada.learn().revision
    answered = ask(ada)
    before = ada.why(answered).as_json()
    ada.rollback("style", None)
    ada.feedback(replies[0], edit="No.")
    assert ada.why(answered).as_json() == before
    assert before["parts"][0]["revision"]["id"] == revision


def test_later_of_two_signals_counts_and_both_are_kept(ada: User) -> None:
    reply = ask(ada)
    first, second = ada.feedback(reply, rating=1), ada.feedback(reply, rating=-1)
    edited, again = ada.feedback(reply, edit="One."), ada.feedback(reply.turn_id, edit="Two.")
    assert [signal.id for signal in ada.signals()] == [second, again]
    assert [signal.id for signal in ada.signals(current=False)] == [first, second, edited, again]
    assert [signal.kind for signal in ada.signals()] == [SignalKind.RATING, SignalKind.EDIT]


def test_repeating_the_last_feedback_records_nothing(ada: User) -> None:
    reply = ask(ada)
    first = ada.feedback(reply, rating=1)
    assert ada.feedback(reply, rating=1) == first
    assert ada.feedback(reply, rating=1, source="judge") != first
    assert ada.feedback(reply, rating=1) == first
    ada.feedback(reply, rating=-1)
    assert ada.feedback(reply, rating=1) != first


def test_reward_preference_and_rating_may_share_a_turn(ada: User) -> None:
    reply = ask(ada)
    for texts in (
        {"reward": 0.5},
        {"prefer": "Better."},
        {"rating": 1},
        {"comment": "Be brief."},
        {"edit": "Best."},
    ):
        ada.feedback(reply, **texts)  # type: ignore[arg-type]
    assert len(ada.signals()) == 5


# Two users in one home


ACTS = st.lists(
    st.sampled_from(["ask", "correct", "remember", "rule", "learn", "rollback", "weigh"]),
    max_size=6,
)


@examples(3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=ACTS)
def test_act_of_one_user_changes_nothing_for_another(
    tmp_path_factory: pytest.TempPathFactory, acts: list[str]
) -> None:
    with open_runtime(tmp_path_factory.mktemp("two") / "home") as runtime:
        ada, bo = runtime.user("ada"), runtime.user("bo")
        correct(bo, 5)
        bo.learn()
        bo.remember("My cat is called Tom.", questions=["What is my dog called?"])
        before = (view(bo), ask(bo, "What is my dog called?", seed=3).text)
        for act in ["remember", "correct", *acts]:
            if act == "ask":
                ask(ada, "What is my dog called?")
            elif act == "correct":
                correct(ada, 5)
            elif act == "remember":
                ada.remember("My dog is called Biscuit.", questions=["What is my dog called?"])
            elif act == "rule":
                ada.feedback("last", comment="Always say Biscuit.")
            elif act == "learn":
                ada.learn(start="scratch")
            elif act == "rollback" and ada.history():
                ada.rollback("style")
            elif act == "weigh" and ada.layers():
                ada.set_weight("style", 0.5)
        assert "Biscuit" not in joined_text(rendered_messages(bo, "What is my dog called?"))
        assert ask(bo, "What is my dog called?", seed=3).text == before[1]
        assert view(bo) == before[0]


def view(user: User) -> tuple[object, ...]:
    """Return all that a user can see of their data, except the turns of this test."""
    return (
        user.signals(current=False),
        user.items(),
        user.layers(),
        user.revisions(),
        user.history(),
        user.reports(),
        user.stack(),
    )


def test_concurrent_chats_of_two_users_equal_sequential_ones(home: Path) -> None:
    with open_runtime(home) as runtime:
        users = [runtime.user(name) for name in ("ada", "bo")]
        for n, user in enumerate(users):
            correct(user, 5, first=10 * n)
            user.learn()
        alone = {user.id: [ask(user, f"prompt {n}").text for n in range(6)] for user in users}
        heard: dict[str, list[str]] = {}
        failed: list[Exception] = []

        def talk(user: User) -> None:
            try:
                heard[user.id] = [ask(user, f"prompt {n}").text for n in range(6)]
                user.remember(f"I am {user.id}.")
                user.feedback("last", rating=1)
            except Exception as error:  # noqa: BLE001
                failed.append(error)

        threads = [threading.Thread(target=talk, args=(user,)) for user in users for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert heard == alone
        assert all(item.text == f"I am {user.id}." for user in users for item in user.items())
        assert runtime.verify() == ()


def test_user_can_chat_and_give_feedback_during_their_learn(ada: User) -> None:
    correct(ada, 5)
    texts: list[str] = []

    def talk(stage: str, done: float) -> None:
        texts.append(ask(ada, "hello").text)
        ada.remember(f"{stage} {done}")

    report = ada.learn(progress=talk)
    assert report.revision
    assert len(set(texts)) == 1
    assert len(ada.items()) == len(texts)


# Files in and out


@pytest.fixture(scope="module")
def learned_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("learned") / "home"
    with open_runtime(home) as runtime:
        correct(runtime.user("ada"), 5)
        runtime.user("ada").learn()
    return home


@pytest.fixture
def learned(learned_home: Path, ada: User) -> User:
    return ada


def test_exported_style_is_imported_by_another_user_with_the_same_replies(
    learned: User, runtime: Runtime, tmp_path: Path
) -> None:
    folder = learned.export_peft(tmp_path / "mine", layer="style")
    bo = runtime.user("bo")
    revision = bo.import_peft(folder)
    assert bo.stack().entries[0].revision == revision.id
    assert (revision.verdict, revision.reason) == ("promoted", "imported by name, not judged")
    (before,) = learned.revisions()
    ours, theirs = (learned._services.engine.read_adapter(r.digest) for r in (before, revision))
    assert {name: pair.b.tobytes() for name, pair in ours.weights.items()} == {
        name: pair.b.tobytes() for name, pair in theirs.weights.items()
    }
    assert greedy(bo) == greedy(learned)
    assert [move.cause for move in bo.history()] == ["import"]
    bo.rollback("style")
    assert bo.stack().entries == ()
    bo.import_peft(folder)
    bo.import_peft(folder)
    assert len(bo.revisions()) == 1
    assert runtime.verify() == ()


def test_adapter_whose_products_overflow_is_not_imported(
    learned: User, runtime: Runtime, tmp_path: Path
) -> None:
    folder = learned.export_peft(tmp_path / "mine", layer="style")
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    huge = {name: np.full_like(each, 1e30, np.float32) for name, each in tensors.items()}
    safetensors.numpy.save_file(huge, file)
    bo = runtime.user("bo")
    with pytest.raises(personalpeft.AdapterError) as caught:
        bo.import_peft(folder)
    assert caught.value.hint
    assert bo.revisions() == ()


def test_imported_revision_can_be_built_on(learned: User, runtime: Runtime, tmp_path: Path) -> None:
    bo = runtime.user("bo")
    imported = bo.import_peft(learned.export_peft(tmp_path / "mine", layer="style"))
    correct(bo, 5, first=20)
    report = bo.learn()
    assert {revision.id: revision.parent for revision in bo.revisions()}[
        report.revision or ""
    ] == imported.id


@pytest.mark.parametrize("spoil", ["config", "weights", "pickle", "torn"])
def test_hostile_folder_is_refused_and_leaves_nothing(
    learned: User, home: Path, tmp_path: Path, spoil: str
) -> None:
    folder = learned.export_peft(tmp_path / "mine", layer="style")
    weights = folder / "adapter_model.safetensors"
    if spoil == "config":
        (folder / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "auto_mapping": {"__import__": "os"}}'
        )
    elif spoil == "weights":
        weights.write_bytes(weights.read_bytes().replace(b"lora_A", b"lora_C", 1))
    elif spoil == "pickle":
        weights.rename(folder / "adapter_model.bin")
    else:
        weights.write_bytes(weights.read_bytes()[:-7])
    with home_unchanged(home), pytest.raises(personalpeft.AdapterError) as raised:
        learned.import_peft(folder)
    assert raised.value.hint
    assert str(folder) in raised.value.message or folder.name in raised.value.message


# The runtime


def test_users_are_listed_by_id_with_their_counts(runtime: Runtime) -> None:
    for name in ("bo", "ada"):
        ask(runtime.user(name))
    assert [(u.id, u.turns, u.signals, u.revisions) for u in runtime.users()] == [
        ("ada", 1, 0, 0),
        ("bo", 1, 0, 0),
    ]
    assert runtime.user("ada").summary() == runtime.users()[0]


def test_closing_twice_is_allowed_and_turns_persist(home: Path) -> None:
    runtime = personalpeft.open(home, backend="fake")
    ada = runtime.user("ada")
    correct(ada, 5)
    ada.learn()
    texts, all_of_it = greedy(ada), home_contents(home)
    runtime.close()
    runtime.close()
    assert home_contents(home) == all_of_it
    with open_runtime(home) as again:
        assert greedy(again.user("ada")) == texts
        assert again.verify() == ()


def test_models_that_can_be_opened_are_listed(runtime: Runtime) -> None:
    names = [card.name for card in runtime.models()]
    assert {"smollm2-135m-instruct", "tiny-random", "gemma3-270m"} <= set(names)


def test_closed_runtime_loads_no_model(tmp_path: Path) -> None:
    loaded: list[str] = []
    runtime = personalpeft.open(
        tmp_path / "home", backend="fake", progress=lambda stage, done: loaded.append(stage)
    )
    user = runtime.user("ada")
    user.chat("hello")
    runtime.close()
    loaded.clear()
    for use in (lambda: user.chat("again"), runtime.engine, runtime.learning_engine):
        with pytest.raises(PersonalPeftError):
            use()
    assert loaded == []
