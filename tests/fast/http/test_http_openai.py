"""OpenAI's own client works against the chat API; unsupported parameters are refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from http_makers import Caller, LocalServer, admin_caller
from runtime_makers import fix_reply
from tool_templates import CALLS

import personalpeft
from personalpeft import Runtime
from personalpeft.backends import fake
from personalpeft.types import ToolFormat
from personalpeft_app.http.server import make_app

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(site: LocalServer) -> Iterator[openai.OpenAI]:
    site.runtime.user("ada")
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=site.secret, max_retries=0) as made:
        yield made


def test_a_chat_is_answered_like_the_library_and_takes_feedback(
    site: LocalServer, client: openai.OpenAI
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="ada", messages=HELLO, temperature=0
    )
    got = raw.parse()
    ada = site.runtime.user("ada")
    expected = ada.chat("Hello", temperature=0)
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.total_tokens == expected.usage.prompt_tokens + expected.usage.completion_tokens
    about = got.model_extra["personalpeft"]
    assert about["stack"] == expected.stack.digest == raw.headers["X-PersonalPeft-Stack"]
    assert about["turn"] == raw.headers["X-PersonalPeft-Turn"]
    assert ada.feedback(about["turn"], rating=1)


def test_a_stream_is_the_same_reply_in_pieces(site: LocalServer, client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="ada",
            messages=HELLO,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    ada = site.runtime.user("ada")
    expected = ada.chat("Hello", temperature=0)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == expected.text
    assert len([piece for piece in pieces if piece]) == 4
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens
    assert ada.turn(chunks[-2].model_extra["personalpeft"]["turn"]).reply == expected.text


def test_each_event_of_a_stream_names_the_turn_that_feedback_takes(
    site: LocalServer, client: openai.OpenAI
) -> None:
    raw = client.chat.completions.with_raw_response.create(model="ada", messages=HELLO, stream=True)
    (named,) = {chunk.id for chunk in raw.parse()}
    assert named == raw.headers["X-PersonalPeft-Turn"]
    assert site.runtime.user("ada").feedback(named, rating=1)


def test_stop_seed_and_max_tokens_are_respected(site: LocalServer, client: openai.OpenAI) -> None:
    def ask(**more: object) -> openai.types.chat.ChatCompletion:
        return client.chat.completions.create(model="ada", messages=HELLO, **more)

    whole = ask(temperature=0).choices[0].message.content
    words = whole.split()
    assert ask(temperature=0, stop=[words[2]]).choices[0].message.content.split() == words[:2]
    short = ask(temperature=0, max_completion_tokens=1).choices[0]
    assert (short.message.content, short.finish_reason) == (words[0], "length")
    assert (
        ask(temperature=1, seed=7).choices[0].message
        == ask(temperature=1, seed=7).choices[0].message
    )
    # Without a seed one is drawn: 6 replies out of 12^4 are not all equal.
    assert len({ask(temperature=1).choices[0].message.content for _ in range(6)}) > 1


def test_several_choices_have_an_index_each(site: LocalServer, client: openai.OpenAI) -> None:
    asked = {"model": "ada", "messages": HELLO, "temperature": 1, "seed": 3, "n": 4}
    got = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in got.choices]
    ada = site.runtime.user("ada")
    assert texts == [ada.chat("Hello", temperature=1, seed=3 + n).text for n in range(4)]
    assert len(set(got.model_extra["personalpeft"]["turns"])) == 4
    pieces: dict[int, str] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + (choice.delta.content or "")
    assert [pieces[n] for n in range(4)] == texts


def test_logprobs_are_given_for_each_token(client: openai.OpenAI) -> None:
    asked = {"model": "ada", "messages": HELLO, "temperature": 0, "logprobs": True}
    choice = client.chat.completions.create(**asked).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content
    streamed = [
        token.logprob
        for chunk in client.chat.completions.create(**asked, stream=True)
        for part in chunk.choices
        for token in (part.logprobs.content if part.logprobs else [])
    ]
    assert streamed == [token.logprob for token in tokens]


def test_top_logprobs_list_the_alternatives(site: LocalServer, client: openai.OpenAI) -> None:
    asked = {
        "model": "ada",
        "messages": HELLO,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    tokens = client.chat.completions.create(**asked).choices[0].logprobs.content
    expected = site.runtime.user("ada").chat("Hello", temperature=0, top_logprobs=3).logprobs
    told = [[(each.token, each.logprob) for each in token.top_logprobs] for token in tokens]
    assert told == [[(each.text, each.logprob) for each in token.top] for token in expected]
    assert all(len(each) == 3 for each in told)
    streamed = [
        token.top_logprobs
        for chunk in client.chat.completions.create(**asked, stream=True)
        for part in chunk.choices
        for token in (part.logprobs.content if part.logprobs else [])
    ]
    assert streamed == [token.top_logprobs for token in tokens]
    known = (
        client.completions.create(model="ada", prompt="Once", temperature=0, logprobs=2)
        .choices[0]
        .logprobs
    )
    assert [len(each) for each in known.top_logprobs] == [2] * len(known.tokens)
    assert [max(each.values()) for each in known.top_logprobs] == known.token_logprobs


def test_a_completion_continues_the_raw_text(site: LocalServer, client: openai.OpenAI) -> None:
    got = client.completions.create(
        model="ada", prompt=["Once upon", "a time"], temperature=0, logprobs=0
    )
    assert [choice.index for choice in got.choices] == [0, 1]
    assert got.usage.prompt_tokens == len("Once upona time")
    assert "".join(got.choices[0].logprobs.tokens) == got.choices[0].text
    pieces = client.completions.create(model="ada", prompt="Once upon", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == got.choices[0].text
    assert site.runtime.user("ada").turns()[0].messages[0].content == "Once upon"


def test_models_are_the_base_the_users_and_their_revisions(
    site: LocalServer, client: openai.OpenAI
) -> None:
    ada = site.runtime.user("ada")
    before = ada.chat("Hello", temperature=0).text
    for n in range(5):
        ada.feedback(ada.chat(f"question {n}"), edit=f"the answer to question {n}")
    first = ada.learn().revision
    names = [model.id for model in client.models.list()]
    assert names == ["fake", site.runtime.embedder, "ada", f"ada@{first}"]
    assert client.models.retrieve(f"ada@{first}").id == f"ada@{first}"

    def ask(model: str) -> str | None:
        return (
            client.chat.completions.create(model=model, messages=HELLO, temperature=0)
            .choices[0]
            .message.content
        )

    assert ask("ada") == ask(f"ada@{first}") != before
    ada.rollback("style")
    assert ask("ada") == ask("fake") == before
    assert ask(f"ada@{first}") != before


def test_every_allowed_user_is_listed_before_the_first_request(
    admin: Caller, runtime: Runtime
) -> None:
    listed = [model["id"] for model in admin.get("/v1/models").json["data"]]
    assert listed == ["fake", runtime.embedder, "ada"]
    assert runtime.users() == ()
    assert (
        admin.post("/v1/chat/completions", {"model": "ada", "messages": HELLO}).status_code == 200
    )


def test_models_are_listed_in_pages_without_reading_all_users(
    admin: Caller, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"user{number:03}" for number in range(230)]
    for name in names:
        runtime.user(name)
    read: list[int] = []
    users = Runtime.users

    def counted(self: Runtime, **how: Any) -> Any:
        found = users(self, **how)
        read.append(len(found))
        return found

    monkeypatch.setattr(Runtime, "users", counted)
    first = admin.get("/v1/models").json
    # The owner is not created yet but is at the position of the name.
    assert [model["id"] for model in first["data"]] == [
        "fake",
        runtime.embedder,
        "ada",
        *names[:97],
    ]
    assert (first["first_id"], first["last_id"], first["has_more"]) == ("fake", "user096", True)
    assert sum(read) <= 101
    runtime.user("ada")
    listed, after, pages = [], "", 0
    while True:
        page = admin.get(f"/v1/models?limit=50{after}").json
        listed += [model["id"] for model in page["data"]]
        pages += 1
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert listed == ["fake", runtime.embedder, "ada", *names]
    assert pages == 5
    read.clear()
    assert admin.get("/v1/models/user229").json["created"] == int(
        users(runtime, after="user228")[0].since.timestamp()
    )
    assert admin.get(f"/v1/models/{runtime.embedder}").status_code == 200
    assert read == []


def test_a_limit_above_what_the_context_has_left_is_that_rest(admin: Caller) -> None:
    reply = admin.post(
        "/v1/chat/completions", {"model": "ada", "messages": HELLO, "max_tokens": 128_000}
    )
    assert reply.status_code == 200
    # The last leaves less than a reply needs. Clients then drop their oldest messages.
    for words, limit in ((5000, 5), (5000, 128_000), (800, 500)):
        long = [{"role": "user", "content": "word " * words}]
        sent = {"model": "ada", "messages": long, "max_tokens": limit}
        refused = admin.post("/v1/chat/completions", sent)
        assert refused.json["error"]["code"] == "context_length_exceeded"


def test_a_chat_may_drop_its_oldest_messages(admin: Caller) -> None:
    old = {"role": "user", "content": "word " * 3000}, {"role": "assistant", "content": "yes"}
    sent = {"model": "ada", "messages": [*old, *old, *HELLO], "max_tokens": 5}
    assert admin.post("/v1/chat/completions", sent).status_code == 400
    kept = admin.post("/v1/chat/completions", {**sent, "truncation": "auto"})
    assert kept.status_code == 200


def test_a_page_of_models_may_end_within_revisions_and_lists_only_the_callers(
    admin: Caller, ada: Caller, runtime: Runtime
) -> None:
    user = runtime.user("ada")
    for round in range(2):
        for n in range(5):
            user.feedback(user.chat(f"question {n}"), edit=f"the answer {round} to question {n}")
        user.learn()
    runtime.user("bob")
    revisions = [f"ada@{each.id}" for each in user.revisions()]
    assert len(revisions) > 1
    for asked in (admin, ada):
        whole = [model["id"] for model in asked.get("/v1/models").json["data"]]
        shared = ["fake", runtime.embedder]
        # Front ends preselect the first.
        own = ["ada", *shared, *revisions]
        assert whole == (own if asked is ada else [*shared, "ada", *revisions, "bob"])
        for n, name in enumerate(whole, 1):
            for key in ("after", "after_id"):
                page = asked.get(f"/v1/models?limit=1&{key}={name}").json
                assert [model["id"] for model in page["data"]] == whole[n : n + 1]
                assert page["has_more"] == (n + 1 < len(whole))
    for query in (
        "limit=0",
        "limit=1001",
        "limit=x",
        "after=NOBODY",
        "after=ada@style@00",
        "before_id=ada",
    ):
        got = admin.get(f"/v1/models?{query}")
        assert got.status_code == 400
        assert got.json["error"]["param"] == query.partition("=")[0]
    # Another user's cursor does not reveal whether that user exists.
    assert ada.get("/v1/models?after=bob").json == ada.get("/v1/models?after=nobody").json
    assert ada.get("/v1/models?after=bob").status_code == 400


def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(ada: Caller) -> None:
    body = {"model": "ada", "messages": [{"role": "user", "content": "word " * 15_000}]}
    got = ada.post("/v1/chat/completions", body)
    assert got.status_code == 400
    assert got.json["error"]["code"] == "context_length_exceeded"


def test_an_unknown_model_is_model_not_found(site: LocalServer) -> None:
    site.runtime.user("bob")
    errors = {}
    with openai.OpenAI(
        base_url=f"{site.url}/v1", api_key=site.api_key_of("ada"), max_retries=0
    ) as ada:
        for model in ("nobody", "ada@style@0123456789ab", "NOT AN ID", "bob@", "bob"):
            with pytest.raises(openai.NotFoundError) as refused:
                ada.chat.completions.create(model=model, messages=HELLO)
            assert refused.value.code == "model_not_found"
            errors[model] = str(refused.value)
        assert [each.id for each in ada.models.list()] == ["ada", "fake", site.runtime.embedder]
    # Another user's model and a missing one give the same error.
    assert errors["bob"].replace("bob", "nobody") == errors["nobody"]


def test_a_revision_in_a_model_name_must_fit_one_alone(admin: Caller, runtime: Runtime) -> None:
    user = runtime.user("ada")
    for round in range(2):
        for n in range(5):
            user.feedback(user.chat(f"question {n}"), edit=f"the answer {round} to question {n}")
        user.learn()
    older, *_, newest = sorted(user.revisions(), key=lambda each: each.at)
    assert older.id != newest.id

    def ask(model: str) -> Any:
        return admin.post("/v1/chat/completions", {"model": model, "messages": HELLO})

    for model in ("ada@", "ada@style", "ada@s"):
        assert ask(model).status_code == 404
    for each in (older, newest):
        assert ask(f"ada@{each.id}").json["personalpeft"]["revisions"] == [each.id]


def test_embeddings_come_in_both_encodings(site: LocalServer, client: openai.OpenAI) -> None:
    texts = ["the dog barks", "a dog barks"]
    name = site.runtime.embedder
    expected = site.runtime.embed(texts).vectors
    as_base64 = client.embeddings.create(model=name, input=texts)
    as_floats = client.embeddings.create(model=name, input=texts, encoding_format="float")
    for got in (as_base64, as_floats):
        assert np.allclose([each.embedding for each in got.data], expected)
        assert got.usage.prompt_tokens == 6
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="ada", input=texts)


def test_a_wrong_api_key_is_an_authentication_error(site: LocalServer) -> None:
    with (
        openai.OpenAI(base_url=f"{site.url}/v1", api_key="wrong", max_retries=0) as anonymous,
        pytest.raises(openai.AuthenticationError),
    ):
        anonymous.models.list()


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_a_tool_is_called_and_answered_with_and_without_streaming(
    site: LocalServer, client: openai.OpenAI
) -> None:
    asked = {"model": "ada", "temperature": 0, "tools": [WEATHER]}
    question = [{"role": "user", "content": "weather in Rome?"}]
    choice = client.chat.completions.create(messages=question, **asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert list(json.loads(call.function.arguments)) == ["city"]
    # The turn holds the reply as the model wrote it, and the tools that were offered.
    turn = site.runtime.user("ada").turns()[0]
    assert turn.reply.startswith("<tool_call>")
    assert turn.messages[-1].tools == (WEATHER,)

    told = [*question, choice.message.model_dump(exclude_none=True), _result(call.id, "sunny")]
    answer = client.chat.completions.create(messages=told, **asked).choices[0]
    assert (answer.finish_reason, bool(answer.message.content)) == ("stop", True)
    recorded = site.runtime.user("ada").turns()[0].messages
    assert [(each.role, each.tool_call_id) for each in recorded[1:]] == [
        ("assistant", ""),
        ("tool", call.id),
    ]

    chunks = [
        each.choices[0]
        for each in client.chat.completions.create(messages=question, stream=True, **asked)
    ]
    calls = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert [(part.index, part.function.name, part.function.arguments) for part in calls] == [
        (0, "weather", call.function.arguments)
    ]
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


def test_disabled_tools_are_not_offered(site: LocalServer, client: openai.OpenAI) -> None:
    asked = {
        "model": "ada",
        "temperature": 0,
        "messages": [{"role": "user", "content": "weather in Rome?"}],
    }
    off = client.chat.completions.create(**asked, tools=[WEATHER], tool_choice="none").choices[0]
    assert off.message == client.chat.completions.create(**asked).choices[0].message
    assert off.message.tool_calls is None


TIME = {"type": "function", "function": {"name": "time"}}
NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("choice", "called"), [("required", "weather"), (NAMED, "time")])
def test_a_required_tool_call_is_made_with_and_without_streaming(
    site: LocalServer, client: openai.OpenAI, choice: Any, called: str
) -> None:
    asked = {"model": "ada", "temperature": 0, "tools": [WEATHER, TIME], "messages": HELLO}
    free = client.chat.completions.create(**asked).choices[0]
    assert (free.finish_reason, free.message.tool_calls) == ("stop", None)
    forced = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
    assert (forced.finish_reason, forced.message.content) == ("tool_calls", None)
    assert [call.function.name for call in forced.message.tool_calls] == [called]
    chunks = [
        each.choices[0]
        for each in client.chat.completions.create(**asked, tool_choice=choice, stream=True)
    ]
    assert [call.function.name for chunk in chunks for call in chunk.delta.tool_calls or ()] == [
        called
    ]
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.exhaustive
def test_a_missing_required_tool_call_is_an_error_and_a_truncated_reply_is_not(
    site: LocalServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"model": "ada", "tools": [WEATHER], "messages": HELLO, "tool_choice": "required"}
    cut = client.chat.completions.create(**asked, max_tokens=3).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    fix_reply(monkeypatch, " nonsense")
    ada = site.runtime.user("ada")
    count = len(ada.turns())
    with pytest.raises(openai.InternalServerError):
        client.with_options(max_retries=2).chat.completions.create(**asked)
    assert len(ada.turns()) == count + 1
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(**asked, stream=True))


@pytest.mark.exhaustive
def test_without_parallel_calls_a_reply_ends_after_its_first_call(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>\n'
    fix_reply(monkeypatch, call * 2)
    for parallel, count in ((True, 2), (False, 1)):
        got = client.chat.completions.create(
            model="ada", messages=HELLO, tools=[WEATHER], parallel_tool_calls=parallel
        ).choices[0]
        assert (got.finish_reason, len(got.message.tool_calls)) == ("tool_calls", count)


@pytest.mark.parametrize("tool_format", CALLS)
def test_a_call_is_returned_in_whatever_format_the_base_writes_it(
    tool_format: ToolFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = replace(fake.fake_base(), tool_format=tool_format)
    monkeypatch.setattr(fake, "fake_base", lambda: base)
    call = CALLS[tool_format]
    several = {
        ToolFormat.HERMES: call * 2,
        ToolFormat.LLAMA3_JSON: f"{call}; {call}",
        ToolFormat.PHI4_MINI: call.partition("]<")[0] + ", " + call.partition("[")[2],
    }
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        caller = admin_caller(runtime, make_app(runtime, owner="ada"))
        for reply, parallel, count in (
            (call, True, 1),
            (several[tool_format], True, 2),
            (several[tool_format], False, 1),
        ):
            fix_reply(monkeypatch, reply)
            asked = {"tools": [WEATHER], "parallel_tool_calls": parallel}
            got = caller.post(
                "/v1/chat/completions", {"model": "ada", "messages": HELLO, **asked}
            ).json["choices"][0]
            calls = [each["function"] for each in got["message"]["tool_calls"]]
            assert (got["finish_reason"], got["message"]["content"]) == ("tool_calls", None)
            assert calls == [{"name": "f", "arguments": '{"x": [1]}'}] * count


def test_tools_are_refused_by_a_template_without_them(tmp_path: Path) -> None:
    with personalpeft.open(tmp_path / "home", base="tiny-random") as plain:
        caller = admin_caller(plain, make_app(plain, owner="ada"))
        for field, value in (
            ("tools", [WEATHER]),
            ("messages", [*HELLO, _result("call_1", "sunny")]),
        ):
            got = caller.post(
                "/v1/chat/completions", {"model": "tiny-random", "messages": HELLO, field: value}
            )
            assert (got.status_code, got.json["error"]["param"]) == (400, field)
            assert "tools" in got.json["error"]["message"]


def _result(call: str, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call, "content": text}


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "web_search"}]),
        ("tools", [TOOL, TOOL]),
        ("tools", [{"type": "function", "function": {"name": "no name"}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "strict": True}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", "sometimes"),
        ("tool_choice", ["required"]),
        ("parallel_tool_calls", "no"),
        ("functions", [{"name": "f"}]),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"50256": -100}),
        ("top_logprobs", 3),
        ("top_logprobs", 21),
        ("response_format", {"type": "json_object"}),
        ("nonsense", 1),
        ("store", True),
        ("n", 0),
        ("n", 17),
        ("n", True),
        ("temperature", 3),
        ("temperature", "hot"),
        ("top_p", 0),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("seed", -1),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("logprobs", 1),
        ("messages", []),
        ("messages", [{"role": "tool", "content": "x"}]),
        (
            "messages",
            [
                *HELLO,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "5"}}],
                },
                *HELLO,
            ],
        ),
        ("messages", [*HELLO, {"role": "assistant", "content": "x", "tool_calls": 5}, *HELLO]),
        (
            "messages",
            [*HELLO, {"role": "assistant", "content": "x", "function_call": {"name": "f"}}, *HELLO],
        ),
        (
            "messages",
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x"}}],
                }
            ],
        ),
        ("messages", None),
        ("model", None),
        ("model", 5),
    ],
)
def test_an_unsupported_parameter_is_refused_by_name(
    shared_admin: Caller, shared_runtime: Runtime, field: str, value: object
) -> None:
    body = {"model": "ada", "messages": HELLO, field: value}
    got = shared_admin.post("/v1/chat/completions", body)
    assert got.status_code == 400
    error = got.json["error"]
    assert re.split(r"[.[]", error["param"])[0] == field
    assert error["type"] == "invalid_request_error"
    assert shared_runtime.user("ada").turns() == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0),
        ("presence_penalty", 0.0),
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("tools", None),
        ("functions", []),
        ("tool_choice", "none"),
        ("parallel_tool_calls", False),
        ("user", "somebody"),
        ("logit_bias", None),
        ("n", 1),
    ],
)
def test_a_parameter_without_effect_is_accepted(
    shared_admin: Caller, field: str, value: object
) -> None:
    assert (
        shared_admin.post(
            "/v1/chat/completions", {"model": "ada", "messages": HELLO, field: value}
        ).status_code
        == 200
    )


def test_an_unknown_tool_choice_is_refused(admin: Caller, runtime: Runtime) -> None:
    runtime.user("ada")
    got = admin.post(
        "/v1/chat/completions",
        {"model": "ada", "messages": HELLO, "tools": [TOOL], "tool_choice": NAMED},
    )
    assert (got.status_code, got.json["error"]["param"]) == (400, "tool_choice")


def test_no_refusal_repeats_the_request(admin: Caller, runtime: Runtime) -> None:
    runtime.user("ada")
    secret = "my darling secret"
    for body in (
        {"model": "ada", "messages": [{"role": "user", "content": secret * 300}]},
        {
            "model": "ada",
            "messages": [
                {"role": "user", "content": secret},
                {"role": "assistant", "content": secret},
            ],
        },
        {"model": secret, "messages": HELLO},
        {"model": "ada", "messages": HELLO, "stop": [secret, 5]},
        {"model": "ada", "messages": [{"role": secret, "content": secret}]},
    ):
        got = admin.post("/v1/chat/completions", body)
        assert got.status_code in (400, 404)
        assert secret not in got.text
