"""A card has the values of its file. An error names the file, line and key."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.base_models.model_card import parse_card, read_card
from personalpeft.errors import CardError, NotFound

GOOD = """\
name = "mine"
title = "Mine"
licence = "MIT"
targets = ["q_proj", "v_proj"]
context = 512
system = '''
kind = "not this one"
'''

[source]
kind = "package"
files = ["my_weights:data/a.gguf"]
digest = "sha256:00000000000000000000000000000000000000000000000000000000000000ff"
install = "pip install my-weights"

[sampling]
temperature = 0.5
top_p = 0.9
max_tokens = 64
stop = ["END"]

[learning]
learning_rate = 4e-4
schedule = "rex"
"""


def parse(text: str, folder: Path = Path("/cards")):
    return parse_card(text, where="mine.toml", folder=folder)


def test_card_has_the_values_of_its_file() -> None:
    card = parse(GOOD)
    assert (card.name, card.licence, card.context) == ("mine", "MIT", 512)
    assert card.targets == ("q_proj", "v_proj")
    assert card.source.files == ("my_weights:data/a.gguf",)
    assert card.source.install == "pip install my-weights"
    assert (card.sampling.temperature, card.sampling.top_p, card.sampling.max_tokens) == (
        0.5,
        0.9,
        64,
    )
    assert card.learning == {"learning_rate": 4e-4, "schedule": "rex"}
    assert card.template is None


def test_relative_folder_is_relative_to_the_card(tmp_path: Path) -> None:
    text = GOOD[: GOOD.index("[source]")] + '[source]\nkind = "folder"\npath = "weights"\n'
    (tmp_path / "mine.toml").write_text(text)
    assert read_card(tmp_path / "mine.toml").source.path == tmp_path / "weights"


MISTAKES = [
    ('title = "Mine"', 'titel = "Mine"', 2, "titel", "title"),
    ('licence = "MIT"\n', "", 1, "licence", ""),
    ('licence = "MIT"', 'licence = " "', 3, "licence", ""),
    ('name = "mine"', 'name = "My base"', 1, "name", ""),
    ('targets = ["q_proj", "v_proj"]', "targets = []", 4, "targets", ""),
    ('targets = ["q_proj", "v_proj"]', 'targets = "q_proj"', 4, "targets", ""),
    ('targets = ["q_proj", "v_proj"]', 'targets = ["q_proj", "q_proj"]', 4, "targets", ""),
    ("context = 512", "context = 0", 5, "context", ""),
    ("context = 512", "context = true", 5, "context", ""),
    ("context = 512", 'context = "512"', 5, "context", ""),
    ('kind = "package"', 'kind = "packge"', 11, "source.kind", "package"),
    ('kind = "package"', "", 10, "source.kind", ""),
    ('kind = "package"', 'kind = "hub"', 12, "source.files", ""),
    (
        'kind = "package"\nfiles = ["my_weights:data/a.gguf"]',
        'kind = "package"',
        10,
        "source.files",
        "",
    ),
    ('"my_weights:data/a.gguf"', '"my_weights:../a.gguf"', 12, "source.files", ""),
    ('"my_weights:data/a.gguf"', '"/etc/passwd"', 12, "source.files", ""),
    ("sha256:00", "sha256:0", 13, "source.digest", ""),
    ("sha256:00", "md5:00", 13, "source.digest", ""),
    ("[source]", "[sauce]", 10, "sauce", "source"),
    ("temperature = 0.5", "temperature = -0.5", 17, "sampling.temperature", ""),
    ("temperature = 0.5", "temperature = nan", 17, "sampling.temperature", ""),
    ("temperature = 0.5", "temprature = 0.5", 17, "sampling.temprature", "temperature"),
    ("top_p = 0.9", "top_p = 0", 18, "sampling.top_p", ""),
    ("top_p = 0.9", "top_p = 1.5", 18, "sampling.top_p", ""),
    ("max_tokens = 64", "max_tokens = 0", 19, "sampling.max_tokens", ""),
    ('stop = ["END"]', 'stop = [""]', 20, "sampling.stop", ""),
    ('stop = ["END"]', 'stop = ["END", ""]', 20, "sampling.stop", ""),
]


@pytest.mark.parametrize(("right", "wrong", "line", "key", "near"), MISTAKES)
def test_error_names_file_line_and_key(
    right: str, wrong: str, line: int, key: str, near: str
) -> None:
    assert right in GOOD
    with pytest.raises(CardError) as caught:
        parse(GOOD.replace(right, wrong, 1))
    assert str(caught.value).startswith(f"mine.toml, line {line}: {key}")
    assert caught.value.hint
    assert near in caught.value.hint


def test_deprecated_spelling_of_a_key_is_accepted() -> None:
    new = GOOD.replace("targets", "target_modules").replace("context", "context_length")
    new = new.replace("system", "chat_template")
    with pytest.warns(DeprecationWarning, match="targets is called target_modules now"):
        old = parse(GOOD)
    assert replace(parse(new), template=None, system=parse(new).template) == old
    with pytest.raises(CardError, match="line 5: context_length"):
        parse(new.replace("512", "0"))
    with pytest.raises(CardError, match="context_length"):
        parse("context = 5\n" + new)


def test_size_of_a_random_model_given_twice_is_refused() -> None:
    shape = (
        "hidden = 64\nintermediate = 128\nblocks = 2\nheads = 4\nkv_heads = 2\nhidden_size = 64\n"
    )
    text = GOOD[: GOOD.index("[source]")] + '[source]\nkind = "random"\n[source.shape]\n' + shape
    with pytest.raises(CardError, match=r"source\.shape\.hidden .* hidden_size"):
        parse(text)


def test_keys_are_located_in_inline_tables_and_dotted_keys() -> None:
    top = GOOD[: GOOD.index("[source]")]
    for source, line in (
        ('source = {kind = "moon"}', 10),
        ('source.kind = "moon"', 10),
        ('"source" . "kind" = "moon"', 10),
    ):
        with pytest.raises(CardError, match=rf"line {line}: source\.kind"):
            parse(top + source)


@pytest.mark.parametrize(
    "text",
    [
        "name = ",
        'name = "a\n',
        "[source\n",
        "a = 1\na = 2",
        "a = " + "[" * 5000,
        "x = " + "9" * 5000,
    ],
)
def test_invalid_toml_is_a_card_error_with_the_place(text: str) -> None:
    with pytest.raises(CardError, match=r"mine\.toml: .*TOML"):
        parse(text)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("heads = 4", "heads = 5"),
        ("kv_heads = 2", "kv_heads = 3"),
        ("blocks = 2", "blocks = 0"),
        ("blocks = 2", "layers = 2"),
    ],
)
def test_impossible_random_shape_is_refused(change: str, key: str) -> None:
    shape = "[source.shape]\nhidden = 64\nintermediate = 128\nblocks = 2\nheads = 4\nkv_heads = 2\n"
    text = GOOD[: GOOD.index("[source]")] + '[source]\nkind = "random"\n' + shape
    assert parse(text).source.shape.hidden == 64
    with pytest.raises(CardError, match=r"source\.shape\."):
        parse(text.replace(change, key, 1))


def test_missing_or_binary_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_card(tmp_path / "none.toml")
    with pytest.raises(NotFound):
        read_card(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(CardError, match=r"bytes\.toml"):
        read_card(tmp_path / "bytes.toml")


VALUES = st.recursive(
    st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.floats()),
    lambda inner: st.lists(inner, max_size=2),
)


@given(
    key=st.sampled_from(
        ["name", "title", "licence", "targets", "context", "system", "source", "sampling"]
    ),
    value=VALUES,
)
def test_any_value_gives_a_card_or_a_card_error(key: str, value: object) -> None:
    def toml(v: object) -> str:
        if isinstance(v, bool):
            return str(v).lower()
        if isinstance(v, str):
            return (
                '"'
                + "".join(c if c.isalnum() and c.isascii() else f"\\U{ord(c):08x}" for c in v)
                + '"'
            )
        return "[" + ", ".join(map(toml, v)) + "]" if isinstance(v, list) else repr(v)

    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{key} =")]
    with suppress(CardError):
        parse("\n".join([f"{key} = {toml(value)}", *lines]))


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("target_modules", 'targets = ["q_proj", "v_proj"]\n'),
        ("context_length", "context = 512\n"),
    ],
)
def test_missing_key_is_named_as_in_the_reference(key: str, line: str) -> None:
    assert line in GOOD
    with pytest.raises(CardError, match=f"{key} is missing"):
        parse_card(GOOD.replace(line, ""), where="card.toml", folder=Path())
