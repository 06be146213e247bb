"""Each invalid input raises its own error with a message and a hint, and changes nothing."""

from __future__ import annotations

import inspect
import itertools
import re
import shutil
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from runtime_makers import ask, correct, home_unchanged, open_runtime, quick_card

import personalpeft
from personalpeft import (
    AdapterError,
    BaseMismatch,
    CardError,
    HomeError,
    InvalidId,
    InvalidInput,
    NotFound,
    PersonalPeftError,
    PromptTooLong,
    Runtime,
    User,
    WeightsError,
)
from personalpeft.former_names import rename_recipe, rename_report, rename_scores
from personalpeft.types import Message

_STORED_KEYS = [
    "practice",
    "scores",
    "above",
    "event",
    "target",
    "text_quality",
    "sense",
    "rl",
    "room",
]
some = examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class SampleHome:
    """A home with a user who has turns, feedback, items and a live revision, and a second user."""

    home: Path
    runtime: Runtime
    ada: User
    bo: User


@pytest.fixture(scope="module")
def sample_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleHome]:
    home = tmp_path_factory.mktemp("bad-input") / "home"
    with open_runtime(home) as runtime:
        ada, bo = runtime.user("ada"), runtime.user("bo")
        correct(ada, 5)
        ada.learn()
        ada.remember("My dog is called Biscuit.")
        ada.feedback("last", comment="Be brief.")
        ask(bo)
        # Store the cached vectors of all items.
        ask(ada)
        yield SampleHome(home, runtime, ada, bo)


def refused(
    sample_home: SampleHome, act: Callable[[], object], error: type[PersonalPeftError], *words: str
) -> PersonalPeftError:
    """Run ``act``, check its error and check that the home is unchanged."""
    with home_unchanged(sample_home.home), pytest.raises(error) as raised:
        act()
    assert type(raised.value) is error
    for word in words:
        assert word in raised.value.message
    assert raised.value.hint, raised.value.message
    assert "\n" not in raised.value.message
    return raised.value


PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt is empty"),
    (" \n\t ", "prompt is empty"),
    ("\u200b\u00a0", "prompt is empty"),
    ([], "prompt is empty"),
    (None, "list of messages"),
    (17, "list of messages"),
    (b"bytes", "list of messages"),
    ({"role": "user", "content": "x"}, "list of messages"),
    ("\ud800", "prompt"),
    ("a\0b", "not text"),
    ("a\ud800b", "not text"),
    ("x" * 100_001, "100001"),
    ([{"role": "user", "content": "x"}, {"role": "robot", "content": "y"}], "Message 2"),
    ([{"role": "user"}], "Message 1"),
    ([{"role": "user", "content": 5}], "Message 1"),
    ([{"role": ["user"], "content": "x"}], "Message 1"),
    (["hello"], "Message 1"),
    ([Message("robot", "x"), Message("user", "x")], "Message 1"),  # type: ignore[arg-type]
    ([Message("user", 5)], "Message 1"),  # type: ignore[arg-type]
    ([{"role": "system", "content": "a\0b"}, {"role": "user", "content": "x"}], "message 1"),
    (
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        "assistant",
    ),
    ([{"role": "user", "content": " "}], "prompt is empty"),
]


@pytest.mark.parametrize(
    ("prompt", "words"), PROMPTS, ids=[repr(prompt)[:30] for prompt, _ in PROMPTS]
)
def test_empty_or_malformed_prompt_is_refused(
    sample_home: SampleHome, prompt: Any, words: str
) -> None:
    refused(sample_home, lambda: sample_home.ada.chat(prompt), InvalidInput, words)
    refused(sample_home, lambda: sample_home.ada.stream(prompt), InvalidInput, words)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": 5}, "stop"),
    ],
)
def test_number_out_of_range_is_refused(
    sample_home: SampleHome, more: dict[str, Any], words: str
) -> None:
    refused(sample_home, lambda: sample_home.ada.chat("hello", **more), InvalidInput, words)


def test_prompt_beyond_the_context_says_by_how_much(sample_home: SampleHome) -> None:
    whole = sample_home.ada._services.engine.backend.base.card.context
    long = refused(
        sample_home,
        lambda: sample_home.ada.chat("x" * whole, max_tokens=10, memory=False),
        PromptTooLong,
    )
    over = re.search(
        r"has (\d+) tokens; with 10 for the reply that is (\d+) more than the (\d+)", long.message
    )
    assert over
    tokens, more, context = map(int, over.groups())
    assert (context, tokens + 10 - context) == (whole, more)
    refused(sample_home, lambda: sample_home.ada.chat("hello", max_tokens=10**9), PromptTooLong)


def test_prompt_that_fits_still_fits_with_all_memory_items(
    sample_home: SampleHome, tmp_path: Path
) -> None:
    with open_runtime(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        for n in range(60):
            ada.remember(
                f"Fact {n}: my dog number {n} is called Biscuit and likes long walks by the sea."
            )
            if n < 20:
                ada.feedback(
                    ask(ada, f"question {n}"),
                    comment=f"Rule {n}: be brief and kind and clear in all you say.",
                )
        assert ask(ada, "What is my dog called?").usage.prompt_tokens < 4096


@pytest.mark.parametrize(
    "layers", [["memory"], ["styl"], "style", ["style", "skill.none"], ["../x"], [5]]
)
def test_unknown_layer_is_refused(sample_home: SampleHome, layers: Any) -> None:
    with home_unchanged(sample_home.home), pytest.raises((NotFound, InvalidInput)) as raised:
        sample_home.ada.chat("hello", layers=layers)
    assert raised.value.hint


UNKNOWN = [
    "turn_",
    "turn_zzz",
    "nonsense",
    "",
    "%",
    "_",
    "turn\0x",
    "' or 1=1 --",
    "\ud800",
    "x" * 300,
]


@pytest.mark.parametrize("turn", UNKNOWN, ids=ascii)
def test_unknown_turn_is_refused(sample_home: SampleHome, turn: str) -> None:
    for act in (
        lambda: sample_home.ada.feedback(turn, rating=1),
        lambda: sample_home.ada.why(turn),
        lambda: sample_home.ada.turn(turn),
    ):
        with home_unchanged(sample_home.home), pytest.raises((NotFound, InvalidInput)) as raised:
            act()
        assert raised.value.hint


@pytest.mark.parametrize("turn", ["turn_", "", "%", "_"])
def test_empty_id_prefix_is_refused_even_with_one_turn(sample_home: SampleHome, turn: str) -> None:
    with home_unchanged(sample_home.home), pytest.raises((NotFound, InvalidInput)):
        sample_home.bo.feedback(turn, rating=1)


@pytest.mark.parametrize(
    "turn",
    [None, 5, b"turn_1", object(), ["last"]],
    ids=["none", "number", "bytes", "object", "list"],
)
def test_object_that_is_no_reply_is_refused(sample_home: SampleHome, turn: Any) -> None:
    with home_unchanged(sample_home.home), pytest.raises((NotFound, InvalidInput)):
        sample_home.ada.feedback(turn, rating=1)


def test_turn_of_a_user_without_turns_is_refused(sample_home: SampleHome, tmp_path: Path) -> None:
    with open_runtime(tmp_path / "home") as runtime:
        nobody = runtime.user("nobody")
        for act in (
            lambda: nobody.turn("last"),
            lambda: nobody.why("last"),
            lambda: nobody.rollback("style"),
        ):
            with home_unchanged(tmp_path / "home"), pytest.raises(NotFound) as raised:
                act()
            assert raised.value.hint


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, "feedback"),
        ({"rating": 1, "edit": "x"}, "feedback"),
        ({"rating": 0}, "rating"),
        ({"rating": 2}, "rating"),
        ({"rating": True}, "rating"),
        ({"rating": "1"}, "rating"),
        ({"rating": float("nan")}, "rating"),
        ({"reward": 1.01}, "reward"),
        ({"reward": float("nan")}, "reward"),
        ({"reward": "much"}, "reward"),
        ({"edit": ""}, "edit is empty"),
        ({"edit": 5}, "edit"),
        ({"edit": "a\0"}, "edit"),
        ({"prefer": " "}, "preferred text is empty"),
        ({"comment": ""}, "comment is empty"),
        ({"comment": 5}, "comment"),
    ],
)
def test_empty_or_ambiguous_feedback_is_refused(
    sample_home: SampleHome, said: dict[str, Any], words: str
) -> None:
    refused(sample_home, lambda: sample_home.ada.feedback("last", **said), InvalidInput, words)


@pytest.mark.parametrize("what", ["edit", "prefer"])
def test_edit_equal_to_the_reply_is_refused(sample_home: SampleHome, what: str) -> None:
    same = sample_home.ada.turn("last").reply
    for text in (same, f" {same}\n"):
        refused(
            sample_home,
            lambda text=text: sample_home.ada.feedback("last", **{what: text}),
            InvalidInput,
            "reply",
        )


def test_feedback_on_another_users_turn_is_refused(sample_home: SampleHome) -> None:
    theirs = sample_home.bo.turn("last")
    for turn in (theirs, theirs.id):
        refused(
            sample_home,
            lambda turn=turn: sample_home.ada.feedback(turn, rating=1),
            NotFound,
            theirs.id,
        )


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda ada: ada.teach("", "x"), "prompt is empty"),
        (lambda ada: ada.teach("x", " "), "answer is empty"),
        (lambda ada: ada.teach("x", None), "answer"),
        (lambda ada: ada.teach("x", "y", skill="E Mail"), "'E Mail'"),
        (lambda ada: ada.teach("x", "y", skill=""), "''"),
        (lambda ada: ada.teach("x", "y", skill="s" * 300), "sss"),
        (lambda ada: ada.remember(""), "fact is empty"),
        (lambda ada: ada.remember("x" * 10**6), "fact"),
        (lambda ada: ada.remember("x", questions=[""]), "question is empty"),
        (lambda ada: ada.remember("x", answer=" "), "answer"),
        (lambda ada: ada.set_weight("style", 3), "3"),
        (lambda ada: ada.set_weight("style", float("nan")), "nan"),
        (lambda ada: ada.set_weight("style", "much"), "'much'"),
        (lambda ada: ada.remember("I am 40.", questions="Age?", answer="40"), "list"),
        (lambda ada: ada.remember("I am 40.", questions=None), "list"),
        (lambda ada: ada.remember("I am 40.", questions=[5]), "question"),
        (lambda ada: ada.learn(steps=1.5), "steps"),
        (lambda ada: ada.learn(seconds="5"), "seconds"),
        (lambda ada: ada.learn(max_memory_mb=True), "max_memory_mb"),
        (lambda ada: ada.practice("sums", verifier="sums", rounds=1.5), "rounds"),
        (lambda ada: ada.practice("sums", verifier="sums", seconds="x"), "seconds"),
        (lambda ada: ada.activity_summary("24h"), "'24h'"),
        (lambda ada: ada.rollback("style", 5), "must be a string, got 5"),
        (lambda ada: ada.compare("x", None), "must be a string, got None"),
        (lambda ada: ada.scope(5, "near"), "must be a string, got 5"),
        (lambda ada: ada.record_implicit_feedback("last", []), "event"),
        (lambda ada: ada.compare("Hello there").choose([]), "[]"),
    ],
)
def test_impossible_operation_is_refused(
    sample_home: SampleHome, act: Callable[[User], object], words: str
) -> None:
    refused(sample_home, lambda: act(sample_home.ada), InvalidInput, words)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda runtime, ada: ada.chat("x", layers=5), "layers must be a list, got int"),
        (lambda runtime, ada: ada.chat("x", layers=[{}]), "got {}"),
        (lambda runtime, ada: ada.chat("x", memory="no"), "memory must be True or False"),
        (lambda runtime, ada: ada.chat("x", cancelled=5), "cancelled must be a function"),
        (lambda runtime, ada: ada.teach_many(None), "demonstrations must be a list"),
        (lambda runtime, ada: ada.scope({}, "near"), "must be a string, got {}"),
        (lambda runtime, ada: ada.learn(accept="no"), "accept must be True or False, got 'no'"),
        (lambda runtime, ada: ada.learn(progress=5), "progress must be a function"),
        (lambda runtime, ada: ada.learn("style", recipe=5), "recipe must be a mapping"),
        (lambda runtime, ada: ada.forget("last", dry_run="no"), "dry_run"),
        (lambda runtime, ada: ada.forget("last", cancelled=5), "cancelled"),
        (lambda runtime, ada: ada.signals(current="no"), "current"),
        (lambda runtime, ada: ada.retract("last", training_only="no"), "training_only"),
        (lambda runtime, ada: ada.export(5), "file must be a path, got 5"),
        (lambda runtime, ada: ada.import_peft(None), "folder must be a path"),
        (lambda runtime, ada: ada.apply_learn(5), "result must be bytes"),
        (lambda runtime, ada: runtime.users(search=[]), "must be a string, got []"),
        (lambda runtime, ada: runtime.rebase("ada", 5), "to must be str or Path"),
        (lambda runtime, ada: runtime.forget_user("ada", dry_run="no"), "dry_run"),
        (lambda runtime, ada: runtime.learn_bundles(5), "bundles must be a list"),
        (lambda runtime, ada: runtime.learn_bundles(["x"]), "bundle must be bytes"),
        (lambda runtime, ada: runtime.embed(5), "texts must be a list"),
        (lambda runtime, ada: runtime.items_with_text(None, "x"), "certificate"),
        (lambda runtime, ada: runtime.collect_garbage(dry_run="no"), "dry_run"),
        (lambda runtime, ada: runtime.plugin_data(5), "name must be str"),
        (lambda runtime, ada: ada.activity_summary(until="x"), "no time zone"),
    ],
)
def test_argument_of_a_wrong_type_is_refused(
    sample_home: SampleHome, act: Callable[[Runtime, User], object], words: str
) -> None:
    with home_unchanged(sample_home.home), pytest.raises(InvalidInput) as raised:
        act(sample_home.runtime, sample_home.ada)
    assert words in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize(
    "act",
    [
        lambda ada: ada.rollback("memory"),
        lambda ada: ada.rollback("style", "style@ffffffffffff"),
        lambda ada: ada.rollback("style", ""),
        lambda ada: ada.rollback("style", "%"),
        lambda ada: ada.revisions("skill.none"),
        lambda ada: ada.set_weight("memory", 0.5),
        lambda ada: ada.retract_item("sig_zzz"),
        lambda ada: ada.edit_item("sig_zzz", "x"),
        lambda ada: ada.export_peft("/never", layer="memory"),
    ],
)
def test_unknown_id_is_refused(sample_home: SampleHome, act: Callable[[User], object]) -> None:
    with home_unchanged(sample_home.home), pytest.raises((NotFound, InvalidInput)) as raised:
        act(sample_home.ada)
    assert raised.value.hint


def test_unknown_name_suggests_the_nearest(sample_home: SampleHome) -> None:
    revision = sample_home.ada.revisions()[0].id
    wrong = revision[:-1] + ("0" if revision[-1] != "0" else "1")
    assert (
        revision
        in refused(
            sample_home, lambda: sample_home.ada.rollback("style", wrong), NotFound, wrong
        ).hint
    )
    assert (
        "'ada'"
        in refused(
            sample_home, lambda: sample_home.runtime.user("adda", create=False), NotFound, "adda"
        ).hint
    )
    assert (
        "style"
        in refused(
            sample_home, lambda: sample_home.ada.revisions("skill.styl"), NotFound, "skill.styl"
        ).hint
    )
    turn = sample_home.ada.turn("last").id
    wrong = turn[:-1] + ("0" if turn[-1] != "0" else "1")
    assert turn in refused(sample_home, lambda: sample_home.ada.why(wrong), NotFound, wrong).hint


HOSTILE = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            ".",
            "..",
            "../ada",
            "a/b",
            "a\\b",
            "/etc",
            "ada\n",
            "ada ",
            " ada",
            "Ada",
            "ADA",
            "аda",
            "ada\u200b",
            "ａｄａ",
            "ada\0",
            "-ada",
            ".ada",
            "_ada",
            "a..b",
            "a" * 65,
            "a" * 300,
            "ada'--",
            "ada;",
            "~",
            "%",
            "ada%00",
            "\ud800",
            "ı",
            "ſ",
            "K",
        ]
    ),
    st.text("abz09._-", min_size=60, max_size=300),
)


@some
@given(name=HOSTILE)
def test_invalid_user_id_is_refused(sample_home: SampleHome, name: str) -> None:
    if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name, re.ASCII) and ".." not in name:
        assert sample_home.runtime.user(name).id == name
        return
    error = refused(sample_home, lambda: sample_home.runtime.user(name), InvalidId)
    assert error.message.isascii()
    assert len(error.message) < 800  # Each of 64 characters may take ten in ASCII.
    refused(sample_home, lambda: sample_home.runtime.user(name, create=False), InvalidId)


@pytest.mark.parametrize("name", [None, 5, b"ada", ["ada"]])
def test_user_id_that_is_not_text_is_refused(sample_home: SampleHome, name: Any) -> None:
    refused(sample_home, lambda: sample_home.runtime.user(name), InvalidId)


@pytest.mark.parametrize(
    ("users", "words"),
    [
        ("bo", "list"),
        (None, "list"),
        (["ada", "ada"], "twice"),
        (iter(["ada", "ada"]), "twice"),
    ],
)
def test_invalid_list_of_users_for_learn_many_is_refused(
    sample_home: SampleHome, users: Any, words: str
) -> None:
    refused(sample_home, lambda: sample_home.runtime.learn_many(users), InvalidInput, words)


def test_looking_up_an_unknown_user_does_not_create_it(sample_home: SampleHome) -> None:
    refused(
        sample_home,
        lambda: sample_home.runtime.user("somebody", create=False),
        NotFound,
        "somebody",
    )


# Opening


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"backend": "torhc"}, NotFound, "'torhc'"),
        ({"base": "smollm2-135m"}, NotFound, "smollm2-135m"),
        ({"base": "no-such-card.toml"}, PersonalPeftError, "no-such-card.toml"),
        ({"base": "./no/folder"}, PersonalPeftError, "no/folder"),
        ({"base": None}, InvalidInput, "base"),
        ({"backend": None}, InvalidInput, "backend"),
        ({"serving": {"max_batch": 2}}, InvalidInput, "serving"),
        ({"progress": 5}, InvalidInput, "progress"),
        ({"train": "no"}, InvalidInput, "train"),
        ({"home": ""}, InvalidInput, "home"),
        ({"home": "a\0b"}, InvalidInput, "home"),
        ({"home": "h" * 5000}, InvalidInput, "home"),
        ({"clock": 1}, InvalidInput, "clock"),
        ({"implicit_feedback": "on"}, InvalidInput, "implicit_feedback"),
    ],
)
def test_refused_open_creates_no_home(
    tmp_path: Path, more: dict[str, Any], error: type[PersonalPeftError], words: str
) -> None:
    with pytest.raises(error) as raised:
        personalpeft.open(**{"home": tmp_path / "home", **more})
    assert words in raised.value.message
    assert raised.value.hint
    assert not (tmp_path / "home").exists()


def test_the_fake_refuses_an_unknown_base_too(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as raised:
        personalpeft.open(tmp_path / "home", "smollm2-135m-instruckt", backend="fake")
    assert "smollm2-135m-instruct" in raised.value.hint
    assert not (tmp_path / "home").exists()


def test_card_error_names_file_line_and_key(tmp_path: Path) -> None:
    card = quick_card(tmp_path)
    card.write_text(card.read_text().replace("context_length = 1024", 'context_length = "many"'))
    line = card.read_text().splitlines().index('context_length = "many"') + 1
    with pytest.raises(CardError, match=r"context") as raised:
        personalpeft.open(tmp_path / "home", base=card)
    assert re.search(rf"line {line}\b|:{line}\b", raised.value.message)
    assert str(card) in raised.value.message
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "line",
    [
        "ranks = 4",
        "steps = -1",
        'targets = ["never_proj"]',
        "batch = 1.5",
        "rank = 0",
        "learning_rate = nan",
        "held_out = 2",
        "steps = 0",
        "batch = 0",
    ],
)
def test_invalid_training_configuration_is_refused_before_training(
    tmp_path: Path, line: str, tiny_base: object
) -> None:
    card, key = quick_card(tmp_path), line.partition(" ")[0]
    kept = [
        each
        for each in card.read_text().splitlines()
        if not each.startswith(f"{key} ") or key == "targets"
    ]
    card.write_text("\n".join([*kept, line]) + "\n")
    with open_runtime(tmp_path / "home", card) as runtime:
        ada = runtime.user("ada")
        for n in range(5):
            ada.teach(f"question {n}", "Ahoy!")
        named = "never_proj" if key == "targets" else key
        with home_unchanged(tmp_path / "home"), pytest.raises(CardError, match=named) as raised:
            ada.learn()
        assert raised.value.hint


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("max_probe_lost = 1", "'max_probes_lost'"),
        ("max_regressed = 2", "0.1"),
        ("max_kl = true", "2.0"),
    ],
)
def test_invalid_margins_are_refused_before_training(
    tmp_path: Path, line: str, hint: str, tiny_base: object
) -> None:
    card = quick_card(tmp_path)
    card.write_text(f"{card.read_text()}\n[gate]\n{line}\n")
    with open_runtime(tmp_path / "home", card) as runtime:
        ada = runtime.user("ada")
        for n in range(5):
            ada.teach(f"question {n}", "Ahoy!")
        with (
            home_unchanged(tmp_path / "home"),
            pytest.raises(CardError, match=line.partition(" ")[0]) as raised,
        ):
            ada.learn()
        assert hint in raised.value.hint


def test_card_chooses_the_target_modules(tmp_path: Path, tiny_base: object) -> None:
    card = quick_card(tmp_path)
    card.write_text(card.read_text().replace("[learning]\n", '[learning]\ntargets = ["q_proj"]\n'))
    with open_runtime(tmp_path / "home", card) as runtime:
        ada = runtime.user("ada")
        for n in range(5):
            ada.teach(f"question {n}", "Ahoy!")
        ada.learn()
        assert ada.revisions()[0].recipe["target_modules"] == ["self_attn.q_proj"]


def test_missing_weights_are_reported_when_first_needed(tmp_path: Path) -> None:
    card = tmp_path / "mine.toml"
    card.write_text(
        'name = "mine"\ntitle = "Mine"\nlicence = "MIT"\ntargets = ["q_proj"]\ncontext = 512\n'
        '[source]\nkind = "folder"\npath = "not-there"\n'
    )
    with open_runtime(tmp_path / "home", card) as runtime:
        ada = runtime.user("ada")
        with (
            home_unchanged(tmp_path / "home"),
            pytest.raises(WeightsError, match="not-there") as raised,
        ):
            ada.chat("hello")
        assert raised.value.hint


def test_file_as_home_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("mine")
    with pytest.raises(HomeError, match="home") as raised:
        personalpeft.open(tmp_path / "home", backend="fake")
    assert raised.value.hint
    assert (tmp_path / "home").read_text() == "mine"


def test_folder_with_other_content_is_no_home(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(HomeError) as raised:
        personalpeft.open(tmp_path, backend="fake")
    assert raised.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_home_of_a_newer_version_is_left_alone(sample_home: SampleHome, tmp_path: Path) -> None:
    copy = tmp_path / "home"
    shutil.copytree(sample_home.home, copy)
    with sqlite3.connect(copy / "personalpeft.db") as db:
        (version,) = db.execute("pragma user_version").fetchone()
        tables = {
            name for (name,) in db.execute("select name from sqlite_master where type = 'table'")
        }
        if version:
            db.execute(f"pragma user_version = {version + 1000}")
        else:
            assert "_sqlite_migrations" in tables, tables
            db.execute(
                "insert into _sqlite_migrations (migration_set, name, applied_at) values ('personalpeft', 'm9999', 'x')"
            )
    db.close()
    with home_unchanged(copy), pytest.raises(HomeError, match="newer") as raised:
        personalpeft.open(copy, backend="fake")
    assert raised.value.hint


@pytest.mark.parametrize("name", ["", ".", "..", "../evil", "blobs", "notes", "a/b", "A", "\0"])
def test_a_plugin_keeps_its_data_in_a_folder_of_its_own(sample_home: SampleHome, name: str) -> None:
    refused(sample_home, lambda: sample_home.runtime.plugin_data(name), InvalidInput)


@pytest.mark.parametrize("path", ["", "a\0b", "a\ud800b"])
def test_text_that_is_no_path_is_refused(
    sample_home: SampleHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    runtime, ada = sample_home.runtime, sample_home.ada
    for act in (
        lambda: ada.export(path),
        lambda: ada.import_peft(path),
        lambda: runtime.import_user(path),
        lambda: runtime.publish(to=path),
        lambda: runtime.maintenance.back_up(path),
        lambda: personalpeft.restore(path, sample_home.home, replace=True),
    ):
        refused(sample_home, act, InvalidInput)
    assert not list(tmp_path.iterdir())


def test_a_file_name_that_is_too_long_is_refused(sample_home: SampleHome, tmp_path: Path) -> None:
    for act in (sample_home.ada.export, sample_home.ada.export_gguf):
        refused(sample_home, lambda act=act: act(tmp_path / ("a" * 300)), InvalidInput)  # type: ignore[misc]


def test_ids_of_any_length_are_looked_up(sample_home: SampleHome) -> None:
    for act in (sample_home.ada.turn, sample_home.ada.why, sample_home.ada.retract_item):
        refused(sample_home, lambda act=act: act("a" * 60_000), NotFound)  # type: ignore[misc]


@pytest.mark.parametrize(
    "act",
    [
        lambda runtime, ada: ada.turns(2**63),
        lambda runtime, ada: ada.conversations(2**70),
        lambda runtime, ada: runtime.users(limit=2**70),
        lambda runtime, ada: runtime.count_users(2**70),
    ],
)
def test_numbers_that_no_database_can_hold_are_refused(
    sample_home: SampleHome, act: Callable[[Runtime, User], object]
) -> None:
    refused(sample_home, lambda: act(sample_home.runtime, sample_home.ada), InvalidInput)


def test_text_that_no_database_can_hold_is_not_found(sample_home: SampleHome) -> None:
    assert sample_home.runtime.users(search="\ud800") == ()
    refused(sample_home, lambda: sample_home.ada.scope("\ud800", "always"), NotFound)
    refused(sample_home, lambda: sample_home.ada.turn("\ud800"), NotFound)


def test_read_only_runtime_writes_nothing(sample_home: SampleHome) -> None:
    with open_runtime(sample_home.home, read_only=True) as looking:
        ada = looking.user("ada", create=False)
        assert ada.turns()
        for act in (
            lambda: ada.remember("x"),
            lambda: ada.feedback("last", rating=1),
            lambda: ada.rollback("style", None),
            lambda: looking.user("new"),
            lambda: looking.plugin_data("parrots").put_file(b"x"),
            lambda: looking.plugin_data("parrots").connect(),
        ):
            refused(sample_home, act, HomeError)


def test_rollback_across_a_base_change_is_refused(
    sample_home: SampleHome, tmp_path: Path, tiny_base: object
) -> None:
    copy = tmp_path / "home"
    shutil.copytree(sample_home.home, copy)
    with open_runtime(copy, quick_card(tmp_path)) as runtime:
        ada = runtime.user("ada")
        revision = ada.revisions()[0].id
        for act in (
            lambda: ada.chat("hello"),
            lambda: ada.stack(),
            lambda: ada.rollback("style", revision),
            lambda: ada.learn(start="scratch"),
        ):
            with home_unchanged(copy), pytest.raises(BaseMismatch) as raised:
                act()
            assert raised.value.hint
        ada.rollback("style", None)
        assert ada.chat("hello", max_tokens=2).text is not None
        with home_unchanged(copy), pytest.raises(BaseMismatch):
            ada.rollback("style", revision)


def test_folder_without_an_adapter_for_this_base_is_refused(
    sample_home: SampleHome, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (empty, tmp_path / "none", sample_home.home):
        refused(
            sample_home,
            lambda folder=folder: sample_home.ada.import_peft(folder),
            AdapterError,
            folder.name,
        )
    refused(
        sample_home, lambda: sample_home.ada.import_peft(empty, layer="Style"), InvalidId, "'Style'"
    )


def test_export_never_overwrites_a_folder_with_content(
    sample_home: SampleHome, tmp_path: Path
) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    refused(sample_home, lambda: sample_home.ada.export_peft(tmp_path), InvalidInput, tmp_path.name)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    refused(sample_home, lambda: sample_home.bo.export_peft(tmp_path / "new"), NotFound, "bo")
    assert not (tmp_path / "new").exists()


def test_a_home_that_cannot_be_written_refuses_a_question_before_the_model_loads(
    tmp_path: Path,
) -> None:
    with open_runtime(tmp_path / "home") as runtime:
        runtime.user("ada")
    stages: list[str] = []
    with personalpeft.open(
        tmp_path / "home",
        backend="fake",
        read_only=True,
        progress=lambda stage, done: stages.append(stage),
    ) as runtime:
        with pytest.raises(HomeError):
            runtime.user("ada", create=False).chat("hello")
        assert stages == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(_STORED_KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)


@some
@given(values=st.dictionaries(st.sampled_from(_STORED_KEYS), _JSON))
def test_stored_values_of_any_shape_are_read(values: dict[str, Any]) -> None:
    """They may come from a folder or a file of a stranger."""
    for read in (rename_recipe, rename_scores, rename_report):
        assert isinstance(read(values), dict)


@pytest.mark.parametrize("home", ["", " "])
def test_an_empty_home_is_not_the_default_one(home: str) -> None:
    with pytest.raises(InvalidInput, match="home"):
        personalpeft.open(home, backend="fake")


def test_a_relative_path_in_a_deleted_folder_is_refused_by_name(
    sample_home: SampleHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = tmp_path / "deleted"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    with pytest.raises(InvalidInput, match="home"):
        personalpeft.open("home", backend="fake")
    monkeypatch.setenv("PERSONALPEFT_HOME", "home")
    with pytest.raises(InvalidInput, match="current folder"):
        personalpeft.open(backend="fake")
    for write in (sample_home.ada.export, sample_home.ada.export_peft):
        refused(sample_home, lambda write=write: write("ada"), InvalidInput, "current folder")


# Values that no argument of the public surface takes, or not in this place.
_WRONG = (None, 1, -1, 1.5, "", b"x", [], {}, object(), True, "x\0y", "é" * 5000)


def test_an_argument_of_any_kind_ends_in_a_documented_error(
    sample_home: SampleHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runtime, ada = sample_home.runtime, sample_home.ada
    # One that closes the home, and the names of earlier versions, which warn.
    methods = [
        method
        for owner, hidden in ((ada, set()), (runtime, {"close"}))
        for name, method in inspect.getmembers(owner, callable)
        if not name.startswith("_") and name not in hidden
    ]
    for method in methods:
        parameters = inspect.signature(method).parameters.values()
        named = [
            each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        needed = {each.name: "style" for each in named if each.default is each.empty}
        for wrong, tried in itertools.product(_WRONG, named):
            values = {**needed, tried.name: wrong}
            with warnings.catch_warnings(), suppress(PersonalPeftError):
                warnings.simplefilter("ignore")
                method(
                    *(
                        values.pop(e.name)
                        for e in named
                        if e.kind is e.POSITIONAL_ONLY and e.name in values
                    ),
                    **values,
                )
