"""A text that has something of an erased one is found in any script, and no other text is."""

from __future__ import annotations

import pytest
from example_counts import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from personalpeft.learning.revealing_text import RevealingText, comparable

# By script: letters, with the marks that belong to them, and what stands between words.
SCRIPTS = {
    "Latin": ("abcdeghilmnorstuzéß", " "),
    "Arabic": ("ابتثجحدرسشعفقكلمنهوي", " "),
    "Hebrew": ("אבגדהוזחטיכלמנ", " "),
    "Devanagari": ("कखगघचजटडतदनपबमयरलवशसह", " "),
    "Han": ("我你他邻居的名字是欧阳锋先生狗猫饼干叫什么吗", ""),
    "Kana": ("あいうえおかきくけこさしすせそビスケットー", ""),
    "Hangul": ("가나다라마바사아자차옆집개는비스킷", ""),
    "Thai": ("กขคงจชซญดตถทนบปผพฟมยรลวสหอะาเแโ", ""),
    "Khmer": ("កខគឃងចឆជឈញដឋឌឍណតថទធនបផពភមយរលវសហ", ""),
    "Javanese": ("ꦲꦤꦕꦫꦏꦢꦠꦱꦮꦭꦥꦝꦗꦪꦚꦩꦒꦧꦛꦔ", ""),
}


@st.composite
def scripts(draw: st.DrawFn) -> tuple[st.SearchStrategy[str], st.SearchStrategy[str], str]:
    """Draw a script: its names, its texts, and what stands between two words."""
    letters, space = SCRIPTS[draw(st.sampled_from(sorted(SCRIPTS)))]
    names = st.text(letters, min_size=3, max_size=8)
    return names, st.lists(names, max_size=6).map(space.join), space


@examples(100)
@given(st.data())
def test_name_that_no_remaining_text_has_is_found_in_any_context(data: st.DataObject) -> None:
    names, texts, space = data.draw(scripts())
    name = data.draw(names)
    remaining = data.draw(st.lists(texts, max_size=5))
    assume(not any(comparable(name) in comparable(each) for each in remaining))
    item, reply = (
        space.join(filter(None, [data.draw(texts), name, data.draw(texts)])) for _ in range(2)
    )
    assert RevealingText([item], remaining).is_in([reply])


@examples(100)
@given(st.data())
@pytest.mark.exhaustive
def test_text_of_which_every_part_remains_elsewhere_is_not_found(data: st.DataObject) -> None:
    _, texts, space = data.draw(scripts())
    items = data.draw(st.lists(texts, min_size=1, max_size=3))
    reply = data.draw(texts)
    around = space.join(filter(None, [data.draw(texts), reply, data.draw(texts)]))
    revealing = RevealingText(items, [*data.draw(st.lists(texts, max_size=3)), around])
    assert not revealing.is_in([reply])


@examples(100)
@given(
    st.lists(st.text("ab", max_size=12), max_size=4),
    st.lists(st.text("ab", max_size=12), max_size=4),
    st.text("ab", max_size=12),
)
def test_runs_without_spaces_are_those_of_a_plain_search(
    erased: list[str], remaining: list[str], reply: str
) -> None:
    def in_kana(text: str) -> str:
        return text.replace("a", "か").replace("b", "さ")

    parts = {reply[i:j] for i in range(len(reply)) for j in range(i + 2, len(reply) + 1)}
    expected = any(
        any(part in text for text in erased) and not any(part in text for text in remaining)
        for part in parts
    )
    found = RevealingText(map(in_kana, erased), map(in_kana, remaining)).is_in([in_kana(reply)])
    assert found == expected


@pytest.mark.parametrize(
    ("item", "remaining", "reply"),
    [
        ("I met her.", "The weather is fine there, and the party starts at nine.", "Over there."),
        ("J'ai un chat.", "Le château est grand.", "Quel château !"),
        ("猫がいます。", "犬がいます。", "鳥がいます。"),
    ],
)
def test_what_is_common_to_the_language_of_the_texts_is_not_found(
    item: str, remaining: str, reply: str
) -> None:
    assert not RevealingText([item], [remaining]).is_in([reply])


_DIARY = {
    "Japanese": [
        "今日は朝から雨が降っていたので家で本を読みました。",
        "明日の会議は何時からですか。資料の名前を教えてください。",
        "私の娘は学校でピアノを習っています。",
    ],
    "Chinese": [
        "今天早上下雨了,我在家里看书。",
        "明天的会议几点开始?",
        "我女儿在学校学钢琴,名字很好听。",
    ],
}


@pytest.mark.parametrize(
    ("language", "item", "reply"),
    [
        ("Japanese", "息子は翔です。", "翔くん、おはよう。"),
        ("Chinese", "我儿子叫鹏。", "鹏,早上好!"),
    ],
)
def test_name_of_one_character_is_found_if_chance_would_have_put_it_into_the_other_texts(
    language: str, item: str, reply: str
) -> None:
    texts = _DIARY[language]
    assert RevealingText([item], texts).is_in([reply])
    # It remains elsewhere.
    assert not RevealingText([item], [*texts, reply[0]]).is_in([reply])
    # Of so few texts nothing can be said.
    assert not RevealingText([item], [texts[1][:4]]).is_in([reply])
    # A character that the other texts have too.
    assert not RevealingText([item], texts).is_in([texts[2][:3]])


@pytest.mark.parametrize(
    ("item", "mention"),
    [
        ("My dog is called Zoë.", "my dog  is\ncalled ZOE!"),
        ("私の犬はビスケットです。", "私の犬は\nビスケット です"),
        ("ﾋﾞｽｹｯﾄ", "ビスケット"),
        ("مُحَمَّد", "محمد"),
    ],
)
def test_same_words_in_other_spelling_are_comparable(item: str, mention: str) -> None:
    assert comparable(item) == comparable(mention)
