"""OpenAI's own client works against the Responses API, which is stateless."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_makers import Caller, LocalServer, admin_caller
from runtime_makers import fix_reply

import personalpeft
from personalpeft import Runtime
from personalpeft_app.http.server import make_app


@pytest.fixture
def client(site: LocalServer) -> Iterator[openai.OpenAI]:
    site.runtime.user("ada")
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=site.secret, max_retries=0) as made:
        yield made


def test_a_response_is_answered_like_the_library(site: LocalServer, client: openai.OpenAI) -> None:
    got = client.responses.create(
        model="ada", input="Hello", instructions="Be brief.", temperature=0
    )
    ada = site.runtime.user("ada")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = ada.chat(messages, temperature=0)
    assert got.output_text == expected.text
    assert got.status == "completed"
    assert got.usage.output_tokens == expected.usage.completion_tokens
    assert ada.feedback(got.model_extra["personalpeft"]["turn"], rating=1)


def test_a_response_can_be_sent_back_unchanged(client: openai.OpenAI) -> None:
    first = client.responses.create(model="ada", input="Hello", temperature=0)
    again = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}, *first.output]
    second = client.responses.create(
        model="ada",
        input=[*again, {"role": "user", "content": "And now?"}],
        temperature=0,
        store=False,
    )
    assert second.output_text


@pytest.mark.exhaustive
def test_a_long_input_loses_its_beginning_with_automatic_truncation(
    client: openai.OpenAI,
) -> None:
    long = [
        {"role": "user", "content": "a word or two " * 1000},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Hello"},
    ]
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="ada", input=long)
    got = client.responses.create(model="ada", input=long, truncation="auto")
    assert got.truncation == "auto"
    assert got.model_extra["personalpeft"]["dropped_messages"] == 2


def test_a_stream_of_events_ends_with_the_whole_response(
    site: LocalServer, client: openai.OpenAI
) -> None:
    with client.responses.stream(model="ada", input="Hello", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    expected = site.runtime.user("ada").chat("Hello", temperature=0)
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected.text
    )
    assert final.output_text == expected.text
    assert [e.sequence_number for e in events] == list(range(len(events)))


@pytest.mark.exhaustive
def test_an_error_in_a_stream_continues_the_numbers_of_its_events(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_reply(monkeypatch, "No.")
    events = list(
        client.responses.create(
            model="ada", input="Hello", tools=[WEATHER], tool_choice="required", stream=True
        )
    )
    assert events[-1].type == "error"
    assert events[-1].code == "ServingFailed"
    assert [e.sequence_number for e in events] == list(range(len(events)))


@pytest.mark.exhaustive
def test_log_probs_are_returned_on_request(site: LocalServer, client: openai.OpenAI) -> None:
    parameters: dict[str, Any] = {
        "model": "ada",
        "input": "Hello",
        "temperature": 0,
        "top_logprobs": 2,
    }
    parameters["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**parameters)
    with client.responses.stream(**parameters) as stream:
        told = [
            each for e in stream if e.type == "response.output_text.delta" for each in e.logprobs
        ]
        final = stream.get_final_response()
    expected = site.runtime.user("ada").chat("Hello", temperature=0, top_logprobs=2).logprobs
    for logprobs in (
        whole.output[0].content[0].logprobs,
        final.output[0].content[0].logprobs,
        told,
    ):
        assert [(each.token, each.logprob) for each in logprobs] == [
            (each.text, each.logprob) for each in expected
        ]
        assert [len(each.top_logprobs) for each in logprobs] == [2] * len(expected)
    plain = client.responses.create(model="ada", input="Hello")
    assert plain.output[0].content[0].logprobs == []


@pytest.mark.exhaustive
def test_a_truncated_reply_is_incomplete(client: openai.OpenAI) -> None:
    got = client.responses.create(model="ada", input="Hello", max_output_tokens=1)
    assert got.status == "incomplete"
    assert got.incomplete_details.reason == "max_output_tokens"
    events = list(
        client.responses.create(model="ada", input="Hello", max_output_tokens=1, stream=True)
    )
    assert events[-1].type == "response.incomplete"


WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "How it is outside.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


def test_a_tool_is_called_and_answered(site: LocalServer, client: openai.OpenAI) -> None:
    parameters: dict[str, Any] = {"model": "ada", "temperature": 0, "tools": [WEATHER]}
    got = client.responses.create(input="weather in Rome?", **parameters)
    (call,) = got.output
    assert (call.type, call.name, list(json.loads(call.arguments))) == (
        "function_call",
        "weather",
        ["city"],
    )
    assert (got.status, got.output_text) == ("completed", "")
    ada = site.runtime.user("ada")
    about = {key: WEATHER[key] for key in ("name", "description", "parameters")}
    assert ada.turns()[0].messages[-1].tools[0] == {
        "type": "function",
        "function": {**about, "strict": False},
    }

    told = [
        {"role": "user", "content": "weather in Rome?"},
        *got.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    answer = client.responses.create(input=told, **parameters)
    assert [item.type for item in answer.output] == ["message"]
    recorded = ada.turns()[0].messages
    assert [(each.role, each.content) for each in recorded[1:]] == [
        ("assistant", ""),
        ("tool", "sunny"),
    ]
    assert (recorded[1].tool_calls[0].name, recorded[1].tool_calls[0].id) == (
        "weather",
        call.call_id,
    )


@pytest.mark.exhaustive
def test_tool_calls_are_streamed_with_the_text_around_them(
    site: LocalServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = 'Let me see.\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\nSo much for that.'
    fix_reply(monkeypatch, said)
    parameters: dict[str, Any] = {"model": "ada", "input": "Hello", "tools": [WEATHER]}
    whole = client.responses.create(**parameters)
    with client.responses.stream(**parameters) as stream:
        events = list(stream)
        final = stream.get_final_response()
    for got in (whole, final):
        assert [item.type for item in got.output] == ["message", "function_call", "message"]
        assert got.output[0].content[0].text == "Let me see."
        assert json.loads(got.output[1].arguments) == {"city": "Rome"}
        assert got.output[2].content[0].text == "So much for that."
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.output_index for e in events if e.type == "response.output_item.done"] == [0, 1, 2]
    # Text and calls of an assistant between two prompts are one message to the model.
    again = [{"role": "user", "content": "Hello"}, *whole.output[:2]]
    result = {"type": "function_call_output", "call_id": whole.output[1].call_id, "output": "sunny"}
    client.responses.create(model="ada", input=[*again, result], tools=[WEATHER])
    recorded = site.runtime.user("ada").turns()[0].messages
    assert [(each.role, len(each.tool_calls)) for each in recorded] == [
        ("user", 0),
        ("assistant", 1),
        ("tool", 0),
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_tool_call_can_be_required(client: openai.OpenAI, choice: Any) -> None:
    parameters: dict[str, Any] = {
        "model": "ada",
        "input": "Hello",
        "tools": [WEATHER],
        "temperature": 0,
    }
    assert [item.type for item in client.responses.create(**parameters).output] == ["message"]
    forced = client.responses.create(**parameters, tool_choice=choice)
    assert [(item.type, item.name) for item in forced.output] == [("function_call", "weather")]
    assert forced.model_dump()["tool_choice"] == choice
    assert client.responses.create(**parameters, tool_choice="none").output[0].type == "message"


def test_tools_are_refused_by_a_template_without_them(tmp_path: Path) -> None:
    with personalpeft.open(tmp_path / "home", base="tiny-random") as plain:
        caller = admin_caller(plain, make_app(plain, owner="ada"))
        called = {
            "type": "function_call",
            "call_id": "call_1",
            "name": "weather",
            "arguments": "{}",
        }
        result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
        for field, value in (("tools", [WEATHER]), ("input", [called, result])):
            got = caller.post(
                "/v1/responses", {"model": "tiny-random", "input": "Hello", field: value}
            )
            assert (got.status_code, got.json["error"]["param"]) == (400, field)
            assert "tools" in got.json["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("store", True),
        ("conversation", "c"),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{**WEATHER, "strict": True}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "file_search"}),
        ("input", [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "5"}]),
        ("input", [{"type": "function_call_output", "output": "x"}]),
        ("input", [{"role": "tool", "content": "x", "tool_call_id": "c"}]),
        ("input", [{"role": ["user"], "content": "x"}]),
        ("reasoning", {"effort": "high"}),
        ("include", ["reasoning.encrypted_content"]),
        ("top_logprobs", 2),
        ("top_logprobs", 21),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", None),
    ],
)
def test_stateful_and_invalid_parameters_are_refused_by_name(
    shared_admin: Caller, shared_runtime: Runtime, field: str, value: object
) -> None:
    got = shared_admin.post("/v1/responses", {"model": "ada", "input": "Hello", field: value})
    assert got.status_code == 400
    assert re.split(r"[.[]", got.json["error"]["param"])[0] == field
