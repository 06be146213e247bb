"""A user's model calls an app's tools where the base's template supports them, and turns keep the
calls.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import home_unchanged, open_runtime
from tool_templates import CALLS, TEMPLATES

from personalpeft import InvalidInput, User
from personalpeft.base_models.registry import find_card
from personalpeft.types import ToolFormat

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
QUESTION = {"role": "user", "content": "weather in Rome?"}


def call_tool(user: User) -> tuple[str, str]:
    """Return the turns of a call and of the reply to its result."""
    called = user.chat([QUESTION], tools=[WEATHER], temperature=0)
    (call,) = called.tool_calls
    messages = [
        QUESTION,
        called.message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    return called.turn_id, user.chat(messages, tools=[WEATHER], temperature=0).turn_id


def test_conversation_with_tools_is_recorded_and_exported(tmp_path: Path) -> None:
    with open_runtime(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        called, answered = call_tool(ada)
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
def test_required_tool_call_is_made_and_recorded_as_requested(
    tmp_path: Path, must_call: bool | str, called: str
) -> None:
    with open_runtime(tmp_path / "home") as runtime:
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
        # The turn's own messages suffice to repeat the request.
        assert ada.chat(turn.messages, temperature=0).text == text
        ada.export(tmp_path / "ada.personal")
        runtime.import_user(tmp_path / "ada.personal", as_user="bob")
        assert runtime.user("bob").turns()[1].messages[-1].must_call == must_call
        assert runtime.verify() == ()


def test_prefill_is_not_part_of_the_output(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
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


def test_correction_of_a_call_is_trained(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        for number in range(5):
            asked = [{"role": "user", "content": f"weather in town {number}?"}]
            ada.feedback(
                ada.chat(asked, tools=[WEATHER], temperature=0),
                edit=f"Ahoy! Answer {number}. Arrr!",
            )
        assert ada.learn().live
        assert ada.chat([QUESTION], tools=[WEATHER], temperature=0).stack.entries


def test_forgetting_a_call_removes_it_and_its_result_from_later_turns(
    tmp_path: Path,
) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        called, answered = call_tool(ada)
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
    "properties that are no object": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]
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
def test_invalid_tool_or_message_is_refused_and_records_nothing(tmp_path: Path, bad: str) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        with home_unchanged(tmp_path), pytest.raises(InvalidInput) as caught:
            ada.chat(**{"prompt": [QUESTION], **BAD[bad]})
        assert caught.value.hint


@pytest.mark.parametrize("tool_format", TEMPLATES)
def test_required_call_is_begun_in_the_format_of_the_base(
    tmp_path: Path, tool_format: ToolFormat
) -> None:
    card = find_card("tiny-random")
    text = (resources.files("personalpeft_models") / "tiny-random.toml").read_text("utf-8")
    own = text.replace(str(card.template), TEMPLATES[tool_format])
    (tmp_path / "own.toml").write_text(own.replace("tiny-random", "own"), "utf-8")
    with open_runtime(tmp_path / "home", tmp_path / "own.toml") as runtime:
        reply = runtime.user("ada").chat(
            [QUESTION], tools=[WEATHER], must_call=True, temperature=0, max_tokens=4
        )
    begin = CALLS[tool_format].partition(' {"x"')[0].replace('"f"', '"weather"')
    assert reply.text.startswith(begin)
    assert reply.tool_format is tool_format


def test_base_without_tool_support_says_so(tmp_path: Path) -> None:
    with open_runtime(tmp_path, "tiny-random") as runtime:
        ada = runtime.user("ada")
        for asked in (
            {"tools": [WEATHER]},
            {"prompt": [QUESTION, {"role": "tool", "content": "sunny"}]},
        ):
            with pytest.raises(InvalidInput, match="tools"):
                ada.chat(**{"prompt": [QUESTION], **asked})
        assert ada.turns() == ()
