"""``forget`` finds the text of an item in replies of any language and script."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_makers import ask, correct

from personalpeft import User


def add_reply(user: User, text: str) -> str:
    """Add a turn with this reply by the live stack, and return its id."""
    turn = user.turn(ask(user, "And now?"))
    return user._services.store.ledger.add_turn(
        user.id,
        messages=turn.messages,
        reply=text,
        stack=turn.stack,
        sampling=turn.sampling,
        usage=turn.usage,
        finish_reason=turn.finish_reason,
    ).id


@pytest.mark.parametrize(
    ("secret", "other", "reveals", "stays"),
    [
        pytest.param(
            "My neighbour Zorblax sleeps here.",
            "My neighbour sleeps here.",
            "Ask the Zorblaxes.",
            "Your neighbour is here.",
            id="English, in another form",
        ),
        pytest.param(
            "隣の家の犬はビスケットです。",
            "隣の家の犬はここです。",
            "それはビスケットちゃんかもしれません。",
            "隣の犬です。",
            id="Japanese",
        ),
        pytest.param(
            "我邻居的名字是欧阳锋。",
            "我邻居的名字是什么？",
            "请问欧阳锋先生。",
            "你的邻居是谁？",
            id="Chinese",
        ),
        pytest.param(
            "جاري يعيش في القاهرة.",
            "جاري يعيش في البيت.",
            "ربما هو بالقاهرة الآن.",
            "جارك يعيش في البيت.",
            id="Arabic, with a preposition",
        ),
        pytest.param(
            "मेरे पड़ोसी का नाम बिरजू है।",
            "मेरे पड़ोसी का नाम क्या है?",
            "शायद बिरजू जानता है।",
            "पड़ोसी का नाम क्या है?",
            id="Hindi",
        ),
        pytest.param(
            "เพื่อนบ้านของฉันชื่อสมหญิง",
            "เพื่อนบ้านของฉันชื่ออะไร",
            "ลองถามคุณสมหญิงดู",
            "เพื่อนบ้านชื่ออะไร",
            id="Thai",
        ),
    ],
)
def test_reply_that_repeats_a_forgotten_text_is_emptied_and_another_stays(
    home: Path, ada: User, secret: str, other: str, reveals: str, stays: str
) -> None:
    correct(ada, 5)
    item = ada.feedback(ask(ada, "question 5"), edit=secret)
    ada.feedback(ask(ada, "question 6"), comment=other)
    assert ada.learn("style", accept=True).live
    revealing, harmless = add_reply(ada, reveals), add_reply(ada, stays)
    report = ada.forget(item, rebuild=False)
    assert revealing in report.emptied
    assert ada.turn(revealing).reply == ""
    assert ada.turn(harmless).reply == stays
    text = secret.encode()
    assert not [path for path in home.rglob("*") if path.is_file() and text in path.read_bytes()]
