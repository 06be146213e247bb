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
            marks=pytest.mark.exhaustive,
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
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "เพื่อนบ้านของฉันชื่อสมหญิง",
            "เพื่อนบ้านของฉันชื่ออะไร",
            "ลองถามคุณสมหญิงดู",
            "เพื่อนบ้านชื่ออะไร",
            id="Thai",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "隣の人は佐々木です。",
            "隣の人はここです。",
            "佐々木さんでしょうか。",
            "隣の人です。",
            id="Japanese, with a repeated character",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "我邻居的名字是欧阳锋。",
            "我邻居的名字是欧阳吗？阳锋是什么？",
            "请问欧阳锋先生。",
            "你的邻居是欧阳？",
            id="Chinese, a name of parts that are used elsewhere",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "جاري يعيش بالقاهرة.",
            "جاري يعيش في البيت.",
            "ربما هو في القاهرة الآن.",
            "جارك يعيش في البيت.",
            id="Arabic, without the item's preposition",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "جاري اسمه مُحَمَّد.",
            "جاري اسمه هنا.",
            "اسأل محمد عن البيت.",
            "جارك اسمه هنا.",
            id="Arabic, without the item's vowels",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "שם השכן שלי הוא דנה.",
            "שם השכן שלי הוא מה?",
            "אולי לדנה יש.",
            "שם השכן שלי.",
            id="Hebrew, with a preposition before a short name",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "मेरे पड़ोसी का नाम श्री क\u094d\u200dमलेश है।",
            "मेरे पड़ोसी का नाम श्री है।",
            "शायद क\u094dमलेश जानता है।",
            "पड़ोसी का नाम श्री है।",
            id="Hindi, without an invisible joiner",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "옆집 개는 비스킷입니다.",
            "옆집 개는 여기입니다.",
            "혹시 비스킷이에요?",
            "옆집 개입니다.",
            id="Korean, with another ending",
        ),
        pytest.param(
            "ꦏꦸꦕꦶꦁꦏꦸꦗꦼꦤꦼꦁꦧꦶꦱ꧀ꦏꦶꦠ꧀",
            "ꦏꦸꦕꦶꦁꦏꦸꦗꦼꦤꦼꦁꦲꦥ",
            "ꦲꦥꦧꦶꦱ꧀ꦏꦶꦠ꧀ꦏꦸ",
            "ꦏꦸꦕꦶꦁꦏꦸ",
            id="Javanese",
            marks=pytest.mark.exhaustive,
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
    assert revealing in report.emptied_replies
    assert ada.turn(revealing).reply == ""
    assert ada.turn(harmless).reply == stays
    text = secret.encode()
    assert not [path for path in home.rglob("*") if path.is_file() and text in path.read_bytes()]


def test_mention_with_other_line_breaks_and_marks_is_reported(ada: User) -> None:
    mention = ask(ada, "ねえ、私の犬は\nビスケット、です。")
    other = ask(ada, "私の犬はここです。")
    report = ada.forget(ada.remember("私の犬はビスケットです。"))
    assert [each.id for each in report.remaining_mentions] == [mention.turn_id]
    assert ada.turn(other).reply
