"""A person's model calls the tools of an app where its base's template knows tools, and what was said of them is kept like all else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runtime_makers import nothing_changes, opened

from personalpeft import InvalidInput, User

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
QUESTION = {"role": "user", "content": "weather in Rome?"}


def talk(user: User) -> tuple[str, str]:
    """The turns of a call and of what was said of its result."""
    called = user.chat([QUESTION], tools=[WEATHER], temperature=0)
    (call,) = called.tool_calls
    told = [QUESTION, called.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    return called.turn_id, user.chat(told, tools=[WEATHER], temperature=0).turn_id


def test_a_conversation_with_tools_is_kept_and_travels_in_a_file(tmp_path: Path) -> None:
    with opened(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        called, answered = talk(ada)
        assert ada.turn(called).messages[-1].tools == (WEATHER,)
        _, said, result = ada.turn(answered).messages
        assert (said.tool_calls[0].name, said.tool_calls[0].id) == ("weather", result.tool_call_id)
        ada.export(tmp_path / "ada.personal")
        runtime.import_user(tmp_path / "ada.personal", as_user="bob")
        assert [turn.messages for turn in runtime.user("bob").turns()] == [
            turn.messages for turn in ada.turns()
        ]
        assert runtime.verify() == ()


@pytest.mark.parametrize(
    ("must_call", "called"), [(True, "weather"), ("weather", "weather"), ("time", "time")]
)
def test_a_reply_that_must_call_a_tool_does_and_is_kept_as_it_was_asked(
    tmp_path: Path, must_call: bool | str, called: str
) -> None:
    with opened(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        asked: dict[str, Any] = {"prompt": "Hello", "tools": [WEATHER, TIME], "temperature": 0}
        assert ada.chat(**asked).tool_calls == ()
        stream = ada.stream(**asked, must_call=must_call)
        text = "".join(stream)
        reply = stream.reply
        assert reply.text == text
        assert [call.name for call in reply.tool_calls] == [called]
        turn = ada.turn(reply)
        assert (turn.reply, turn.messages[-1].must_call) == (text, must_call)
        # What was asked once can be asked again: the turn's own messages have all of it.
        assert ada.chat(turn.messages, temperature=0).text == text
        ada.export(tmp_path / "ada.personal")
        runtime.import_user(tmp_path / "ada.personal", as_user="bob")
        assert runtime.user("bob").turns()[1].messages[-1].must_call == must_call
        assert runtime.verify() == ()


def test_what_was_begun_is_no_part_of_what_was_written(tmp_path: Path) -> None:
    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        asked: dict[str, Any] = {
            "prompt": "Hello",
            "tools": [WEATHER],
            "temperature": 0,
            "logprobs": True,
        }
        free, forced = ada.chat(**asked), ada.chat(**asked, must_call=True)
        begun = forced.text.removesuffix("".join(token.text for token in forced.logprobs))
        assert begun == '<tool_call>\n{"name": "weather", "arguments":'
        assert forced.usage.prompt_tokens == free.usage.prompt_tokens + len(begun)
        assert forced.usage.completion_tokens == len(forced.logprobs)
        assert ada.chat(**asked, must_call=True, cancelled=lambda: True).text in ("", begun)


def test_a_correction_of_a_call_is_learned(tmp_path: Path) -> None:
    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        for number in range(5):
            asked = [{"role": "user", "content": f"weather in town {number}?"}]
            ada.feedback(
                ada.chat(asked, tools=[WEATHER], temperature=0),
                edit=f"Ahoy! Answer {number}. Arrr!",
            )
        assert ada.learn().live
        assert ada.chat([QUESTION], tools=[WEATHER], temperature=0).stack.entries


def test_a_call_that_is_forgotten_is_gone_from_what_followed_with_its_result(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        called, answered = talk(ada)
        ada.forget(called, rebuild=False)
        left = ada.turn(answered)
        assert (
            left.reply,
            [message.content for message in left.messages if "weather" in message.content],
        ) == ("", [])
        assert not any(
            message.tool_calls or message.content == "sunny" for message in left.messages
        )


BAD: dict[str, dict[str, Any]] = {
    "tools that are no list": {"tools": 5},
    "a tool that is no function": {"tools": [{"type": "search"}]},
    "a name with a quotation mark": {"tools": [{"type": "function", "function": {"name": 'f"'}}]},
    "the same name twice": {"tools": [WEATHER, WEATHER]},
    "a call of nothing": {"must_call": True},
    "a call of what is not offered": {"tools": [WEATHER], "must_call": "wether"},
    "a call that is neither": {"tools": [WEATHER], "must_call": 1},
    "a number that is none": {
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"x": float("nan")}}}
        ]
    },
    "a user who calls": {
        "prompt": [{**QUESTION, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    },
    "a call without arguments": {
        "prompt": [
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
            QUESTION,
        ]
    },
    "calls that are no list": {
        "prompt": [{"role": "assistant", "content": "x", "tool_calls": 5}, QUESTION]
    },
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_offered_or_said_is_refused_and_keeps_nothing(
    tmp_path: Path, bad: str
) -> None:
    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        with nothing_changes(tmp_path), pytest.raises(InvalidInput) as caught:
            ada.chat(**{"prompt": [QUESTION], **BAD[bad]})
        assert caught.value.hint


def test_a_base_whose_template_knows_no_tools_says_so(tmp_path: Path) -> None:
    with opened(tmp_path, "tiny-random") as runtime:
        ada = runtime.user("ada")
        for asked in (
            {"tools": [WEATHER]},
            {"prompt": [QUESTION, {"role": "tool", "content": "sunny"}]},
        ):
            with pytest.raises(InvalidInput, match="tools"):
                ada.chat(**{"prompt": [QUESTION], **asked})
        assert ada.turns() == ()
