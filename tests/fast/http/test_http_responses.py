"""OpenAI's own client finds its newer way of asking, without state."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from http_makers import Caller, Served

from personalpeft import Runtime


@pytest.fixture
def client(site: Served) -> Iterator[openai.OpenAI]:
    site.runtime.user("ada")
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=site.secret, max_retries=0) as made:
        yield made


def test_a_response_is_answered_as_the_library_answers(site: Served, client: openai.OpenAI) -> None:
    got = client.responses.create(model="ada", input="Hello", instructions="Be brief.", temperature=0)
    ada = site.runtime.user("ada")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = ada.chat(messages, temperature=0)
    assert got.output_text == expected.text
    assert got.status == "completed"
    assert got.usage.output_tokens == expected.usage.completion_tokens
    assert ada.feedback(got.model_extra["personalpeft"]["turn"], rating=1)


def test_what_was_answered_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    first = client.responses.create(model="ada", input="Hello", temperature=0)
    again = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}, *first.output]
    second = client.responses.create(
        model="ada", input=[*again, {"role": "user", "content": "And now?"}], temperature=0, store=False
    )
    assert second.output_text


def test_a_stream_of_events_ends_with_the_whole_response(site: Served, client: openai.OpenAI) -> None:
    with client.responses.stream(model="ada", input="Hello", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    expected = site.runtime.user("ada").chat("Hello", temperature=0)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected.text
    assert final.output_text == expected.text
    assert [e.sequence_number for e in events] == list(range(len(events)))


def test_a_reply_that_was_cut_is_incomplete(client: openai.OpenAI) -> None:
    got = client.responses.create(model="ada", input="Hello", max_output_tokens=1)
    assert got.status == "incomplete"
    assert got.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model="ada", input="Hello", max_output_tokens=1, stream=True))
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("store", True),
        ("conversation", "c"),
        ("tools", [{"type": "web_search"}]),
        ("reasoning", {"effort": "high"}),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", None),
    ],
)
def test_what_needs_state_or_tools_is_refused_by_name(
    admin: Caller, runtime: Runtime, field: str, value: object
) -> None:
    runtime.user("ada")
    got = admin.post("/v1/responses", {"model": "ada", "input": "Hello", field: value})
    assert got.status_code == 400
    assert got.json["error"]["param"].partition("[")[0] == field
