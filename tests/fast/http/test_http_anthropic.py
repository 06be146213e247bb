"""Anthropic's own client works against the Messages API, without unsupported parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from http_makers import Caller, LocalServer
from runtime_makers import fix_reply

from personalpeft import Runtime

HELLO = [{"role": "user", "content": "Hello"}]
# Anthropic's client has no type for it any more.
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}


@pytest.fixture
def client(site: LocalServer) -> Iterator[anthropic.Anthropic]:
    site.runtime.user("ada")
    with anthropic.Anthropic(base_url=site.url, api_key=site.secret, max_retries=0) as made:
        yield made


def test_a_message_is_answered_like_the_library_and_takes_feedback(
    site: LocalServer, client: anthropic.Anthropic
) -> None:
    got = client.messages.create(
        model="ada",
        max_tokens=50,
        messages=HELLO,
        system=[{"type": "text", "text": "Be brief."}],
        **GREEDY,
    )
    ada = site.runtime.user("ada")
    expected = ada.chat(
        [{"role": "system", "content": "Be brief."}, *HELLO], temperature=0, max_tokens=50
    )
    assert got.content[0].text == expected.text
    assert (got.stop_reason, got.stop_sequence) == ("end_turn", None)
    assert (got.usage.input_tokens, got.usage.output_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    assert ada.feedback(got.model_extra["personalpeft"]["turn"], rating=-1)


def test_a_stream_is_the_same_reply_in_pieces(
    site: LocalServer, client: anthropic.Anthropic
) -> None:
    with client.messages.stream(model="ada", max_tokens=50, messages=HELLO, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    expected = site.runtime.user("ada").chat("Hello", temperature=0, max_tokens=50)
    assert "".join(pieces) == final.content[0].text == expected.text
    assert len(pieces) == 4
    assert final.usage.input_tokens == expected.usage.prompt_tokens
    assert final.stop_reason == "end_turn"


@pytest.mark.exhaustive
def test_the_matched_stop_sequence_is_reported(
    site: LocalServer, client: anthropic.Anthropic
) -> None:
    words = site.runtime.user("ada").chat("Hello", temperature=0).text.split()
    parameters = {"model": "ada", "messages": HELLO, **GREEDY}
    got = client.messages.create(**parameters, max_tokens=50, stop_sequences=["never", words[2]])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", words[2])
    assert got.content[0].text.split() == words[:2]
    assert client.messages.create(**parameters, max_tokens=1).stop_reason == "max_tokens"
    with client.messages.stream(**parameters, max_tokens=50, stop_sequences=[words[1]]) as stream:
        assert stream.get_final_message().stop_sequence == words[1]


def test_tokens_are_counted_as_in_a_request_without_running_it(
    site: LocalServer, client: anthropic.Anthropic
) -> None:
    ada = site.runtime.user("ada")
    counted = client.messages.count_tokens(
        model="ada", messages=HELLO, system="Be brief."
    ).input_tokens
    assert ada.turns() == ()
    got = client.messages.create(model="ada", max_tokens=5, messages=HELLO, system="Be brief.")
    assert got.usage.input_tokens == counted


def test_errors_have_the_types_of_anthropics_client(
    site: LocalServer, client: anthropic.Anthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=5, messages=HELLO)
    long: Any = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="ada", max_tokens=5, messages=long)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with (
        anthropic.Anthropic(base_url=site.url, api_key="wrong", max_retries=0) as anonymous,
        pytest.raises(anthropic.AuthenticationError),
    ):
        anonymous.messages.create(model="ada", max_tokens=5, messages=HELLO)


def test_models_are_the_base_the_users_and_their_revisions(
    site: LocalServer, client: anthropic.Anthropic
) -> None:
    listed = [(model.id, model.type, model.display_name) for model in client.models.list()]
    assert listed == [(name, "model", name) for name in ("fake", site.runtime.embedder, "ada")]
    one = client.models.retrieve("ada")
    assert (one.id, one.created_at) == ("ada", site.runtime.users()[0].since.replace(microsecond=0))


WEATHER = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def test_a_tool_is_called_and_answered_with_and_without_streaming(
    site: LocalServer, client: anthropic.Anthropic
) -> None:
    parameters: dict[str, Any] = {"model": "ada", "max_tokens": 200, "tools": [WEATHER], **GREEDY}
    question: list[Any] = [{"role": "user", "content": "weather in Rome?"}]
    got = client.messages.create(messages=question, **parameters)
    (call,) = got.content
    assert (got.stop_reason, call.type, call.name, list(call.input)) == (
        "tool_use",
        "tool_use",
        "weather",
        ["city"],
    )
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "sunny"}],
    }
    history = [
        *question,
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(messages=history, **parameters)
    assert (answer.stop_reason, answer.content[0].type) == ("end_turn", "text")
    recorded = site.runtime.user("ada").turns()[0].messages
    assert [(each.role, each.content) for each in recorded[1:]] == [
        ("assistant", ""),
        ("tool", "sunny"),
    ]
    assert recorded[1].tool_calls[0].name == "weather"
    with client.messages.stream(messages=question, **parameters) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [(each.name, each.input) for each in final.content] == [("weather", call.input)]
    counted = client.messages.count_tokens(
        model="ada", messages=question, tools=[WEATHER]
    ).input_tokens
    assert counted == got.usage.input_tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("choice", "called"), [({"type": "any"}, "weather"), ({"type": "tool", "name": "time"}, "time")]
)
def test_a_required_tool_call_is_made_with_and_without_streaming(
    client: anthropic.Anthropic, choice: dict[str, str], called: str
) -> None:
    tools = [WEATHER, {"name": "time", "input_schema": {"type": "object"}}]
    parameters: dict[str, Any] = {
        "model": "ada",
        "max_tokens": 200,
        "tools": tools,
        "messages": HELLO,
        **GREEDY,
    }
    assert client.messages.create(**parameters).stop_reason == "end_turn"
    got = client.messages.create(**parameters, tool_choice=choice)
    with client.messages.stream(**parameters, tool_choice=choice) as stream:
        final = stream.get_final_message()
    for message in (got, final):
        assert (message.stop_reason, [block.name for block in message.content]) == (
            "tool_use",
            [called],
        )
    counted = client.messages.count_tokens(
        model="ada", messages=HELLO, tools=tools, tool_choice=choice
    )
    assert counted.input_tokens == got.usage.input_tokens


@pytest.mark.exhaustive
def test_a_reply_without_its_required_tool_call_is_an_error(
    site: LocalServer, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters: dict[str, Any] = {
        "model": "ada",
        "max_tokens": 200,
        "tools": [WEATHER],
        "messages": HELLO,
    }
    fix_reply(monkeypatch, " nonsense")
    with pytest.raises(anthropic.InternalServerError):
        client.with_options(max_retries=2).messages.create(
            **parameters, tool_choice={"type": "any"}
        )
    assert len(site.runtime.user("ada").turns()) == 1


@pytest.mark.exhaustive
def test_without_parallel_calls_a_reply_ends_after_its_first_call(
    client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>\n'
    fix_reply(monkeypatch, call * 2)
    parameters: dict[str, Any] = {
        "model": "ada",
        "max_tokens": 200,
        "tools": [WEATHER],
        "messages": HELLO,
    }
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(client.messages.create(**parameters).content) == 2
    got = client.messages.create(**parameters, tool_choice=alone)
    assert (got.stop_reason, got.stop_sequence, len(got.content)) == ("tool_use", None, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "bash_20250124", "name": "bash"}]),
        ("tools", [{"name": "no name", "input_schema": {"type": "object"}}]),
        ("tools", [{**WEATHER, "strict": True}]),
        ("tool_choice", {"type": "any"}),
        ("tool_choice", {"type": "tool", "name": "weather"}),
        ("tool_choice", "auto"),
        ("top_k", 5),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}),
        ("temperature", 1.5),
        ("max_tokens", None),
        ("seed", 1),
        ("messages", [{"role": "system", "content": "x"}]),
        (
            "messages",
            [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}],
                },
                {"role": "user", "content": "x"},
            ],
        ),
        (
            "messages",
            [
                {
                    "role": "user",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                },
            ],
        ),
        (
            "messages",
            [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}],
                }
            ],
        ),
        ("system", 5),
    ],
)
def test_an_unsupported_parameter_is_refused_by_name(
    shared_admin: Caller, shared_runtime: Runtime, field: str, value: object
) -> None:
    got = shared_admin.post(
        "/v1/messages", {"model": "ada", "max_tokens": 5, "messages": HELLO, field: value}
    )
    assert got.status_code == 400
    assert got.json["type"] == "error"
    assert field in got.json["error"]["message"]
    assert shared_runtime.user("ada").turns() == ()
