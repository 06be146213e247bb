"""Conversations are found again in a ledger that knows only turns."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from personalpeft.types import Message, Sampling, Signal, SignalKind, Stack, Turn, Usage
from personalpeft_app.tui.conversation import Conversation, shorten
from personalpeft_app.tui.conversations import conversations

_START = datetime(2026, 1, 1, tzinfo=UTC)


class Ledger:
    """Turns as an app would have made them."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.signals: list[Signal] = []

    def ask(self, told: list[dict[str, str]], reply: str) -> Turn:
        number = len(self.turns)
        messages = tuple(Message(each["role"], each["content"]) for each in told)  # type: ignore[arg-type]
        at = _START + timedelta(minutes=number)
        usage = Usage(1, 1)
        turn = Turn(
            f"t_{number:04}", "ada", at, messages, reply, Stack("base"), Sampling(), usage, "stop"
        )
        self.turns.append(turn)
        return turn

    def say(self, turn: Turn, kind: SignalKind, **payload: object) -> None:
        at = _START + timedelta(minutes=len(self.turns), seconds=len(self.signals))
        self.signals.append(Signal(f"s_{len(self.signals):04}", "ada", kind, at, payload, turn.id))

    @property
    def talks(self) -> tuple[Conversation, ...]:
        return conversations(self.turns, self.signals)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _model(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# Which of three conversations goes on, with one of few questions, so that much is said twice.
_PLAYS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc")), max_size=25)


@given(_PLAYS)
def test_conversations_that_go_on_in_turns_come_apart_again(play: list[tuple[int, str]]) -> None:
    ledger = Ledger()
    told: dict[int, list[dict[str, str]]] = {}
    for number, (which, text) in enumerate(play):
        so_far = told.setdefault(which, [])
        question, reply = f"{which} {text}", f"reply {number}"
        ledger.ask([*so_far, _user(question)], reply)
        told[which] = [*so_far, _user(question), _model(reply)]
    found = {
        tuple(text for each in talk.exchanges for text in (each.prompt, each.reply))
        for talk in ledger.talks
    }
    assert found == {tuple(each["content"] for each in messages) for messages in told.values()}


def test_a_reply_that_was_edited_is_gone_on_from() -> None:
    ledger = Ledger()
    first = ledger.ask([_user("one")], "a")
    ledger.say(first, SignalKind.EDIT, text="b")
    ledger.ask([_user("one"), _model("b"), _user("two")], "c")
    (talk,) = ledger.talks
    assert [each.text for each in talk.exchanges] == ["b", "c"]
    assert [each["content"] for each in talk.ask("three").messages(2)] == [
        "one",
        "b",
        "two",
        "c",
        "three",
    ]


def test_a_conversation_that_lost_its_beginning_is_still_one() -> None:
    ledger = Ledger()
    ledger.ask([_user("one")], "a")
    ledger.ask([_user("one"), _model("a"), _user("two")], "b")
    ledger.ask([_user("two"), _model("b"), _user("three")], "c")
    (talk,) = ledger.talks
    assert [each.prompt for each in talk.exchanges] == ["one", "two", "three"]


def test_a_reply_that_was_asked_for_again_stands_where_the_old_one_stood() -> None:
    ledger = Ledger()
    for reply in ("a", "b"):
        ledger.ask([_user("one")], reply)
    ledger.ask([_user("one"), _model("b"), _user("two")], "c")
    (talk,) = ledger.talks
    assert [each.reply for each in talk.exchanges] == ["b", "c"]


def test_a_comparison_is_no_conversation() -> None:
    ledger = Ledger()
    ledger.ask([_user("one")], "a")
    other = ledger.ask([_user("one")], "b")
    ledger.say(other, SignalKind.PREFERENCE, text="a", revision="style@0", layer="style")
    (talk,) = ledger.talks
    assert [each.reply for each in talk.exchanges] == ["a"]


def test_what_was_said_about_a_reply_is_known_again() -> None:
    ledger = Ledger()
    turn = ledger.ask([_user("one")], "a")
    ledger.say(turn, SignalKind.RATING, value=-1)
    ledger.say(turn, SignalKind.RATING, value=1)
    ledger.say(turn, SignalKind.COMMENT, text="short")
    ((exchange,),) = (talk.exchanges for talk in ledger.talks)
    assert (exchange.rating, exchange.comments) == (1, 1)


def test_what_is_left_out_of_a_long_conversation_is_its_oldest_part() -> None:
    told = [{"role": "system", "content": "s"}, _user("1"), _model("2"), _user("3")]
    assert shorten(told) == [{"role": "system", "content": "s"}, _user("3")]
    assert shorten([_user("3")]) is None
