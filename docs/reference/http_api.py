"""The page of the HTTP API, from the table of operations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from personalpeft_app.http import (
    anthropic_messages,
    openai_chat,
    openai_responses,
    openai_rest,
)
from personalpeft_app.http.api_v1.openapi import described_types, statuses
from personalpeft_app.http.api_v1.operations import OPERATIONS, PERSONAL, PREFIX, Operation
from personalpeft_app.http.api_v1.serialization import query_properties
from personalpeft_app.http.validation import Body

_COMPATIBLE: dict[str, type[Body]] = {
    "/v1/chat/completions": openai_chat.ChatBody,
    "/v1/completions": openai_chat.CompletionBody,
    "/v1/responses": openai_responses.ResponseBody,
    "/v1/embeddings": openai_rest.EmbeddingBody,
    "/v1/messages": anthropic_messages.MessageBody,
    "/v1/messages/count_tokens": anthropic_messages.CountBody,
}

_HEAD = """\
# HTTP API

`make docs` writes this page from the table of operations (`app/http/api_v1/operations.py`). Routes,
client and the OpenAPI 3.1 document at `/api/v1/openapi.json` come from the same table. The
library's method of the same name documents each operation ([In an app of your own](../how-to/embed.md)).

## First request

```sh
personalpeft serve --port 8080
api_key=$(cat "$(personalpeft api-key first)")
curl -s localhost:8080/api/v1/users/ada/chat -H "Authorization: Bearer $api_key" \\
  -H 'Content-Type: application/json' -d '{"prompt": "How do I boil an egg?"}'

# The reply names its turn. Feedback goes to a turn, or to the last one.
curl -s localhost:8080/api/v1/users/ada/turns/last/feedback -H "Authorization: Bearer $api_key" \\
  -H 'Content-Type: application/json' -d '{"edit": "Eight minutes in boiling water."}'
```

Every request needs an API key. An admin API key acts for every user, a user's API key for that user, and a
worker's API key for none. Requests are validated: unknown keys and values out of bounds are errors
that name the key. `next` of a page is the `after` of the following one; null is the last.

## Conversations

A chat without `conversation_id` starts a conversation; the reply names it. With it, `prompt` is the
next message and the server adds the history. `replaces` answers a turn again, in its place.
`truncation` is `auto` there by default: the oldest messages are dropped until the prompt fits, and
`dropped_messages` counts them.

## From Python

The client has the methods, values and errors of the library, and passes the same tests. It needs
neither Flask nor a model.

```python
from personalpeft_app.client import connect

ada = connect(address, api_key).user("ada")
reply = ada.chat("How do I boil an egg?")
ada.feedback(reply, edit="Eight minutes in boiling water, then cold water.")
report = ada.learn(dry_run=True, progress=lambda stage, done: None)
reports = connect(address, api_key).learn_many(["ada", "bo"], dry_run=True)
```

A learn runs in the server. Leaving `learn` early (Ctrl-C too) stops it, and the next one continues
from its last step. Besides the library's errors a call raises `NotAllowed` and `Unreachable`.

## Errors

`{"error": {"kind", "message", "hint"}}`; `kind` is the class of the error, and
[Errors](errors.md) lists the status of each. Every route also has these:

| status | kind | when |
| --- | --- | --- |
| 401 | `Unauthorized` | The API key is missing or unknown. |
| 403 | `Forbidden` | The API key is for another user, or the request is of another origin. |
| 413, 415 | `RequestEntityTooLarge`, `UnsupportedMediaType` | The body is too large, or not JSON. |
| 429 | `TooManyRequests`, `QueueFull` | Too many requests; `Retry-After` says when to try again. |

## Events

A streamed reply and a followed job are server-sent events: `event: NAME`, `data: JSON`, an empty
line. A line that begins with `:` is a sign of life. A reply begins with `begun`, whose name a
DELETE stops it by, then `piece` events, then `ended` with the whole reply. An error before the
first event is a response with a status, a later one an `error` event.

A learn, a practice and a forget are jobs: the POST answers 202 with the job and its `Location`. A
job has a `state` (running, stopping, done, failed, cancelled), `stage` and `progress`, and at the
end its `report` or `error`. DELETE stops it after the running step. Jobs live as long as the
server process; reports are stored.

A learn of several users (`POST /api/v1/learns`, admin only) is one job with `users`, and with a
report for each of them in `reports`. Their layers train in one pass over the base. The admin sees,
follows and stops every job under `/api/v1/jobs`.
"""

_COMPATIBLE_HEAD = """\
The bodies of these routes are models too. Null is the same as no value. A field that may have only one
value has the one that changes nothing. Other fields are refused by name; objects in a body may have
fields that nothing here reads. [How to use them](../how-to/serve-openai-clients.md)."""


def render() -> str:
    """Return the whole page."""
    lines: list[str] = []
    for section in dict.fromkeys(each.section for each in OPERATIONS):
        lines += ["", f"## {section}"]
        for operation in OPERATIONS:
            if operation.section == section:
                lines += _one(operation)
    lines += ["", "## OpenAI's and Anthropic's APIs", "", _COMPATIBLE_HEAD]
    for path, kind in _COMPATIBLE.items():
        lines += ["", f"### `POST {path}`", "", *_fields_of(kind.model_json_schema())]
    return _HEAD + "".join(f"{line}\n" for line in lines)


def _fields_of(schema: dict[str, Any]) -> Iterator[str]:
    yield from ("| field | | default |", "| --- | --- | --- |")
    needed = schema.get("required", [])
    for name, each in schema["properties"].items():
        if each.get("description") != "ignored":
            # A schema has no default that is a list.
            default = json.dumps(each.get("default", []))
            default = "must be given" if name in needed else f"`{default}`"
            yield f"| `{name}` | {_words(each)} | {default} |"
    ignored = [
        f"`{n}`" for n, v in schema["properties"].items() if v.get("description") == "ignored"
    ]
    if ignored:
        yield from ("", f"Ignored: {', '.join(ignored)}.")


def _one(operation: Operation) -> Iterator[str]:
    alone = (
        f" Needs an admin{' or worker' if operation.workers else ''} API key."
        if operation.admin
        else ""
    )
    former = operation.former_path and f" Formerly `{operation.former_path}`, for one release."
    yield from (
        "",
        f"### `{operation.method} {PREFIX}{operation.path}`",
        "",
        f"{operation.text}{alone}{former}",
        "",
    )
    definitions = described_types()[1]
    rows = [(name, each, "query") for name, each in query_properties(operation.query).items()]
    needed: list[str] = []
    if operation.body is not None:
        schema = definitions[operation.body.__name__]
        needed = schema.get("required", [])
        rows += [(name, each, "body") for name, each in schema["properties"].items()]
    if rows:
        yield from ("| field | in | | default |", "| --- | --- | --- | --- |")
    for name, each, where in rows:
        default = "must be given" if name in needed else f"`{json.dumps(each.get('default'))}`"
        yield f"| `{name}` | {where} | {_words(each)} | {default} |"
    if rows:
        yield ""
    if operation.upload:
        yield from (f"The body is {operation.upload} ({PERSONAL}).", "")
    yield f"Answers {operation.status}: {_answer(operation)}. Errors: {', '.join(map(str, statuses(operation)))}."


def _answer(operation: Operation) -> str:
    if operation.events:
        return "events " + ", ".join(
            f"`{name}` ({kind.__name__})" for name, kind in operation.events.items()
        )
    if operation.download:
        return operation.download
    if operation.answer is bytes:
        return "the file"
    if operation.answer is None:
        return "nothing"
    described, definitions = described_types()
    if operation.paged:
        page = described[operation.name]["$ref"].rpartition("/")[2]
        return f"a page of {_words(definitions[page]['properties']['items']['items'])}"
    return _words(described[operation.name])


def _words(schema: dict[str, Any]) -> str:
    """Return a schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(_words(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2].removesuffix('-Input').lstrip('_')}`"
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if schema.get("type") == "array":
        return f"list of {_words(schema['items'])}"
    limits = [
        f"{word} {schema[key]:,}" if isinstance(schema[key], int) else f"{word} {schema[key]:g}"
        for key, word in (
            ("exclusiveMinimum", "above"),
            ("minimum", "from"),
            ("maximum", "to"),
            ("maxLength", "up to"),
        )
        if key in schema
    ]
    return " ".join((str(schema.get("type", "any")), *limits))
