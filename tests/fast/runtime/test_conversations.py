"""Conversations: history, edits, regenerated replies, truncation, and implicit feedback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import open_runtime

from personalpeft import Forgotten, InvalidInput, NotFound, PromptTooLong, Reply, Runtime, User
from personalpeft.backends.fake import FakeBackend
from personalpeft.chat.conversation import TurnFeedback
from personalpeft.chat.implicit_feedback import classify_message
from personalpeft.types import Message, SignalKind, Turn


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """Record each prompt that the model reads, as roles and texts."""
    seen: list[list[tuple[str, str]]] = []
    render = FakeBackend.render

    def record(self: FakeBackend, messages: list[Message]) -> tuple[int, ...]:
        seen.append([(m.role, m.content) for m in messages])
        return render(self, messages)

    monkeypatch.setattr(FakeBackend, "render", record)
    return seen


@pytest.fixture
def observed_runtime(tmp_path: Path) -> Iterator[Runtime]:
    with open_runtime(tmp_path / "observed", implicit_feedback="kept") as runtime:
        yield runtime


def dialogue(messages: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(role, text) for role, text in messages if role != "system"]


def ratings(user: User) -> list[tuple[str | None, object]]:
    signals = user.signals() if user.turns() else ()
    return [(s.turn, s.payload.get("how")) for s in signals if s.kind is SignalKind.RATING]


def test_chat_starts_a_conversation_and_the_next_one_continues_it(
    ada: User, rendered: list[list[tuple[str, str]]]
) -> None:
    first = ada.chat("hello")
    assert first.conversation_id
    second = ada.chat("and then?", conversation_id=first.conversation_id)
    assert second.conversation_id == first.conversation_id
    assert dialogue(rendered[-1]) == [
        ("user", "hello"),
        ("assistant", first.text),
        ("user", "and then?"),
    ]
    assert ada.turn(second).previous == first.turn_id
    other = ada.chat("hello")
    assert other.conversation_id != first.conversation_id


def test_history_contains_edited_replies(ada: User, rendered: list[list[tuple[str, str]]]) -> None:
    first = ada.chat("hello")
    second = ada.chat("and then?", conversation_id=first.conversation_id)
    ada.feedback(first, edit="Good day.")
    ada.chat("what else?", conversation_id=first.conversation_id)
    assert dialogue(rendered[-1]) == [
        ("user", "hello"),
        ("assistant", "Good day."),
        ("user", "and then?"),
        ("assistant", second.text),
        ("user", "what else?"),
    ]


def test_regenerated_reply_replaces_the_old_one(
    ada: User, rendered: list[list[tuple[str, str]]]
) -> None:
    first = ada.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}])
    again = ada.chat("b", replaces=first)
    assert ("system", "Be brief.") in rendered[-1]
    assert again.conversation_id == first.conversation_id
    second = ada.chat("c", conversation_id=first.conversation_id)
    third = ada.chat("d", replaces=second.turn_id)
    conversation = ada.conversation(first.conversation_id or "")
    assert [turn.id for turn in conversation.turns] == [again.turn_id, third.turn_id]
    assert [m.content for m in conversation.messages() if m.role == "user"] == ["b", "d"]


def test_conversation_has_the_users_own_current_feedback_of_each_turn(
    observed_runtime: Runtime,
) -> None:
    ada = observed_runtime.user("ada")
    first = ada.chat("hello")
    second = ada.chat("and then?", conversation_id=first.conversation_id)
    ada.record_implicit_feedback(first, "copied")
    ada.feedback(first, rating=-1, source="judge")
    assert ada.conversation(first.conversation_id or "").feedback == {}
    for rating in (1, -1):
        ada.feedback(first, rating=rating)
    ada.feedback(second, edit="Good day.")
    ada.feedback(second, prefer="Hello.")
    for comment in ("Be brief.", "Be kind."):
        ada.feedback(second, comment=comment)
    ada.retract(ada.feedback(second, reward=0.5))
    assert ada.conversation(first.conversation_id or "").feedback == {
        first.turn_id: TurnFeedback(rating=-1),
        second.turn_id: TurnFeedback(
            edit="Good day.", preference="Hello.", comments=("Be brief.", "Be kind.")
        ),
    }


def test_conversations_are_listed_newest_first_in_pages(ada: User) -> None:
    replies = [ada.chat(f"topic   {n}") for n in range(5)]
    ada.chat("more", conversation_id=replies[1].conversation_id)
    listed = ada.conversations()
    assert [each.title for each in listed] == [f"topic {n}" for n in (1, 4, 3, 2, 0)]
    assert listed[0].num_turns == 2
    assert listed[0].last_turn == ada.turns(1)[0].id
    page = ada.conversations(2)
    assert page + ada.conversations(before=page[-1].id) == listed
    with pytest.raises(NotFound):
        ada.conversations(before="t-unknown")
    with pytest.raises(InvalidInput):
        ada.conversations(-1)


def test_client_that_sends_the_whole_history_continues_its_conversation(
    ada: User,
) -> None:
    first = ada.chat("hello")
    ada.feedback(first, edit="Good day.")
    for answer in (first.text, "Good day."):
        messages = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"after {answer}"},
        ]
        reply = ada.chat(messages)
        assert reply.conversation_id == first.conversation_id
        assert ada.turn(reply).previous == first.turn_id
    elsewhere = ada.chat([{"role": "user", "content": "bye"}, *messages[1:]])
    assert elsewhere.conversation_id != first.conversation_id


def test_chats_that_begin_alike_stay_apart_for_a_client_that_sends_the_history(ada: User) -> None:
    first, second = ada.chat("hi", temperature=0), ada.chat("hi", temperature=0)
    assert first.text == second.text

    def go_on(text: str) -> Reply:
        said = [("user", "hi"), ("assistant", first.text), ("user", text)]
        return ada.chat([{"role": role, "content": content} for role, content in said])

    cats, dogs = go_on("about cats"), go_on("about dogs")
    assert {cats.conversation_id, dogs.conversation_id} == {
        first.conversation_id,
        second.conversation_id,
    }
    again = go_on("about cats")
    assert again.conversation_id == cats.conversation_id
    assert ada.turn(again).previous == ada.turn(cats).previous


def test_tool_loop_of_a_client_that_sends_the_history_is_one_conversation(ada: User) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "clock"}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what time is it?"}]
    first = ada.chat(messages, tools=tools, must_call=True)
    assert [each.name for each in first.tool_calls] == ["clock"]
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    messages.append({"role": "tool", "content": "noon", "tool_call_id": "call_1"})
    second = ada.chat(messages)
    messages.append({"role": "assistant", "content": second.text})
    third = ada.chat([*messages, {"role": "user", "content": "thanks"}])
    assert {each.conversation_id for each in (second, third)} == {first.conversation_id}
    assert ada.turn(third).previous == second.turn_id
    assert ada.turn(second).previous == first.turn_id


def test_long_conversation_drops_its_oldest_messages_and_counts_them(
    ada: User, rendered: list[list[tuple[str, str]]]
) -> None:
    context = ada._services.base.card.context
    first = ada.chat("start", max_tokens=4)
    dropped = 0
    for n in range(40):
        reply = ada.chat(
            f"{n} " + "word " * (context // 8), max_tokens=4, conversation_id=first.conversation_id
        )
        dropped = reply.dropped_messages or dropped
        assert rendered[-1][-1][1].startswith(f"{n} ")
    assert dropped > 0
    assert dropped % 2 == 0
    assert len(ada.conversation(first.conversation_id or "").turns) == 41
    with pytest.raises(PromptTooLong):
        ada.chat(
            "x", max_tokens=context, conversation_id=first.conversation_id, truncation="disabled"
        )
    before = len(ada.turns())
    with pytest.raises(PromptTooLong):
        ada.chat("word " * context * 2, conversation_id=first.conversation_id)
    assert len(ada.turns()) == before


def test_conversation_takes_only_new_messages(ada: User, runtime: Runtime) -> None:
    first = ada.chat("hello")
    with pytest.raises(InvalidInput):
        ada.chat(
            [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "x"}],
            conversation_id=first.conversation_id,
        )
    with pytest.raises(NotFound):
        ada.chat("x", conversation_id="t-none")
    with pytest.raises(InvalidInput):
        ada.chat("x", conversation_id=ada.chat("other").conversation_id, replaces=first)
    with pytest.raises(InvalidInput):
        ada.chat("x", conversation_id=first.conversation_id, template=False)
    with pytest.raises(NotFound):
        runtime.user("bob").chat("x", conversation_id=first.conversation_id)
    assert len(ada.turns()) == 2


def test_tool_round_trip_stays_in_its_conversation(ada: User) -> None:
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    first = ada.chat("what time is it?")
    ada.feedback(first, edit=call)
    history = ada.conversation(first.conversation_id or "").messages()
    assert [m.role for m in history] == ["user", "assistant"]
    assert history[-1].tool_calls[0].name == "clock"
    assert history[-1].tool_calls[0].id


def test_forgotten_turn_leaves_its_conversation(ada: User) -> None:
    first = ada.chat("hello")
    ada.chat("and then?", conversation_id=first.conversation_id)
    ada.forget(first.turn_id)
    for each in ada.conversations():
        texts = [m.content for m in ada.conversation(each.id).messages()]
        assert "hello" not in texts
        assert first.text not in texts


def test_id_of_a_forgotten_conversation_says_so_and_an_ambiguous_one_lists_what_it_fits(
    ada: User,
) -> None:
    ids = [ada.chat(f"hello {n}").conversation_id or "" for n in range(3)]
    ada.forget(ids[0])
    for read in (ada.conversation, lambda name: ada.chat("again?", conversation_id=name)):
        with pytest.raises(Forgotten, match=ids[0]):
            read(ids[0])
        with pytest.raises(InvalidInput) as raised:
            read(ids[1][:3])
        assert all(each in raised.value.message for each in ids[1:])


def test_forgetting_a_middle_turn_keeps_the_turns_around_it(ada: User) -> None:
    first = ada.chat("hello")
    turns = [ada.chat(f"{n}", conversation_id=first.conversation_id).turn_id for n in range(4)]
    ada.forget(turns[1])
    conversation = ada.conversation(first.conversation_id or "")
    assert [turn.id for turn in conversation.turns] == [first.turn_id, turns[0], *turns[2:]]


def test_reply_can_be_regenerated_after_the_turn_before_it_was_forgotten(ada: User) -> None:
    first = ada.chat("hello")
    second = ada.chat("and then?", conversation_id=first.conversation_id)
    third = ada.chat("and after?", conversation_id=first.conversation_id)
    ada.forget(second.turn_id)
    again = ada.chat("and after?", conversation_id=first.conversation_id, replaces=third.turn_id)
    conversation = ada.conversation(first.conversation_id or "")
    assert [turn.id for turn in conversation.turns] == [first.turn_id, again.turn_id]


def test_forgetting_a_reply_does_not_restore_the_one_it_replaced(ada: User) -> None:
    first = ada.chat("hello")
    rejected = ada.chat("and then?", conversation_id=first.conversation_id)
    again = ada.chat("and then?", conversation_id=first.conversation_id, replaces=rejected.turn_id)
    last = ada.chat("and after?", conversation_id=first.conversation_id)
    ada.forget(again.turn_id)
    conversation = ada.conversation(first.conversation_id or "")
    assert [turn.id for turn in conversation.turns] == [first.turn_id, last.turn_id]


def test_exported_user_has_the_same_conversations(
    ada: User, runtime: Runtime, tmp_path: Path
) -> None:
    first = ada.chat("hello")
    ada.chat("and then?", conversation_id=first.conversation_id)
    ada.chat("bye")
    ada.export(tmp_path / "ada.personal")
    runtime.import_user(tmp_path / "ada.personal", as_user="eve")
    assert runtime.user("eve").conversations() == ada.conversations()


def test_losing_answer_of_a_comparison_is_in_no_conversation(tmp_path: Path) -> None:
    with open_runtime(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        first = ada.chat("hello")
        ledger = ada._services.store.ledger
        turn: Turn = ada.turn(first)
        lost = ledger.add_turn(
            "ada",
            messages=turn.messages,
            reply="other",
            stack=turn.stack,
            sampling=turn.sampling,
            usage=turn.usage,
            finish_reason="stop",
            conversation_id="",
        )
        assert [each.id for each in ada.conversations()] == [first.conversation_id]
        with pytest.raises(InvalidInput):
            ada.chat("x", replaces=lost)


def test_library_records_implicit_feedback(observed_runtime: Runtime) -> None:
    ada = observed_runtime.user("ada")
    first = ada.chat("hello")
    ada.chat("ありがとう！", conversation_id=first.conversation_id)
    assert ratings(ada) == [(first.turn_id, "thanked")]
    second = ada.chat("What is 2 + 2?")
    ada.chat("a b c", replaces=second)
    assert ratings(ada)[1:] == [(second.turn_id, "regenerated")]
    third = ada.chat("What is 2 + 3?")
    ada.chat(
        [
            {"role": "user", "content": "What is 2 + 3?"},
            {"role": "assistant", "content": third.text},
            {"role": "user", "content": "Das stimmt nicht."},
        ]
    )
    assert ratings(ada)[2:] == [(third.turn_id, "contradicted")]


def test_implicit_feedback_is_recorded_only_where_enabled(ada: User) -> None:
    first = ada.chat("hello")
    ada.chat("Thanks!", conversation_id=first.conversation_id)
    ada.chat("hello", replaces=first)
    assert ratings(ada) == []


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("Thanks!", "thanked"),
        ("Perfect, thank you so much 😊", "thanked"),
        ("谢谢", "thanked"),
        ("Спасибо большое!", "thanked"),
        ("¡Gracias!", "thanked"),
        ("Thanks. Great, thank you!", "thanked"),
        ("Danke, super!", "thanked"),
        ("thanks, but that’s wrong", None),
        ("Thanks! Still getting the same error.", None),
        ("Thanks. It crashes now.", None),
        ("Danke, das ist Quatsch.", None),
        ("Merci. Ça plante toujours.", None),
        ("ありがとう。まだ同じエラーが出ます。", None),
        ("No, thanks.", None),
        ("Perfect.", None),
        ("Ok. Wrong.", "contradicted"),
        ("danke, aber falsch", None),
        ("धन्यवाद", "thanked"),
        ("धन्यवाद, यह सही नहीं", None),
        ("شكرا، لكن هذا خطأ", None),
        ("ありがとう、でも違います", None),
        ("Thanks to my mother I know how.", None),
        ("Merci pour rien", None),
        ("That’s wrong.", "contradicted"),
        ("No, that is not what I asked.", "contradicted"),
        ("Nein, das stimmt nicht", "contradicted"),
        ("不对。", "contradicted"),
        ("خطأ", "contradicted"),
        ("wrong side of the road?", None),
        ("This is wrong, fix it: 2+2=5", None),
        ("What is wrong with that?", None),
        ("ok, " * 50_000, None),
        ("No.", None),
        ("", None),
    ],
)
def test_only_plain_thanks_and_contradictions_count(message: str, wanted: str | None) -> None:
    assert classify_message(message, "It is 4.") == wanted


def test_answer_to_a_question_contradicts_nothing() -> None:
    assert classify_message("Wrong.", "Is it right or wrong?") is None


def test_users_are_found_by_a_part_of_their_id(runtime: Runtime) -> None:
    for name in ("ada", "adam", "bob"):
        runtime.user(name).chat("hello")
    assert [user.id for user in runtime.users(search="ada")] == ["ada", "adam"]
    assert [user.id for user in runtime.users(search="ada", after="ada")] == ["adam"]
    assert runtime.users(search="%") == ()
