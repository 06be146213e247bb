"""Writes docs/api.md from the table: ``python -m personalpeft_app.http.api_v1.reference > docs/api.md``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from personalpeft_app.http.api_v1.openapi import described_types, statuses
from personalpeft_app.http.api_v1.operations import OPERATIONS, PERSONAL, PREFIX, Operation
from personalpeft_app.http.api_v1.serialization import query_properties

_HEAD = """\
# Our own API

This page is made by `make docs` from the table of operations (`app/http/api_v1/operations.py`), as are the routes, the client and the
OpenAPI 3.1 document that a running server gives at `/api/v1/openapi.json`. What an operation promises is said by the library's
method of the same name ([embedding.md](embedding.md)).

## Ask it

```sh
personalpeft serve --port 8080
token=$(cat "$(personalpeft path)/token")
curl -s localhost:8080/api/v1/users/ada/chat -H "Authorization: Bearer $token" \\
  -H 'Content-Type: application/json' -d '{"prompt": "How do I boil an egg?"}'
```

Every request needs a token. One of administration may act for everybody, one of a user for that user alone, one of a worker
for nobody. What is sent is read strictly: a key that is not known is refused by its name, and so is a number out of its bounds. A page
says in `next` what to send as `after` for the one that follows; null is the last.

## From Python

The client has the methods, values and errors of the library, and passes the same tests. It needs neither Flask nor a model.

```python
from personalpeft_app.client import connect

ada = connect(address, token).user("ada")
reply = ada.chat("How do I boil an egg?")
ada.feedback(reply, edit="Eight minutes in boiling water, then cold water.")
report = ada.learn(dry_run=True, progress=lambda stage, done: None)
reports = connect(address, token).learn_many(["ada", "bo"], dry_run=True)
```

A learn runs in the server; who leaves `learn` in the middle (Ctrl-C too) stops it there, and the next one goes on from its last
step. Besides the library's errors a call raises `NotAllowed` and `Unreachable`.

## Errors

`{"error": {"kind", "message", "hint"}}`; `kind` is the class of the error, and the status that of the table in
[commands.md](commands.md). Besides those, on every route:

| status | kind | when |
| --- | --- | --- |
| 401 | `Unauthorized` | There is no token that is known. |
| 403 | `Forbidden` | The token is for another user, or the request is a page's of another origin. |
| 413, 415 | `RequestEntityTooLarge`, `UnsupportedMediaType` | The body is too large, or no JSON. |
| 429 | `TooManyRequests`, `QueueFull` | Too much is asked at once; `Retry-After` says in how many seconds to try again. |

## Events

A streamed reply and a job that is followed are server-sent events: `event: NAME`, `data: JSON`, an empty line; a line that begins with
`:` says only that the server is there. A reply begins with `begun`, whose name stops it with a DELETE, then `piece`s, then `ended`
with all of it and its turn id. What goes wrong before the first event is an answer with a status, what goes wrong later an
`error` event.

A learn, a practice and a forgetting are jobs: the POST answers 202 with the job and its `Location`; the job says its `state`
(running, stopping, done, failed, cancelled), `stage` and `progress`, and in the end its `report` or `error`. DELETE stops it after the
running step. Jobs live as long as the server's process; what was learned is under `reports` for ever.

A learn of many (`POST /api/v1/learns`, of administration) is one job with the `users` it is about, and with a report for each of them in
`reports`: their layers train in one pass over the base. Under `/api/v1/jobs` administration sees, follows and stops every job.
"""


def render() -> str:
    """The whole page."""
    lines: list[str] = []
    for section in dict.fromkeys(each.section for each in OPERATIONS):
        lines += ["", f"## {section}"]
        for operation in OPERATIONS:
            if operation.section == section:
                lines += _one(operation)
    return _HEAD + "".join(f"{line}\n" for line in lines)


def _one(operation: Operation) -> Iterator[str]:
    alone = (
        f" Administration{' and workers' if operation.workers else ''} only."
        if operation.everybody
        else ""
    )
    yield from (
        "",
        f"### `{operation.method} {PREFIX}{operation.path}`",
        "",
        f"{operation.text}{alone}",
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
        yield from (f"The body is {operation.file} ({PERSONAL}).", "")
    yield f"Answers {operation.status}: {_answer(operation)}. Errors: {', '.join(map(str, statuses(operation)))}."


def _answer(operation: Operation) -> str:
    if operation.events:
        return "events " + ", ".join(
            f"`{name}` ({kind.__name__})" for name, kind in operation.events.items()
        )
    if operation.download:
        return operation.file
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
    """A schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(_words(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2].removesuffix('-Input')}`"
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
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


if __name__ == "__main__":
    sys.stdout.write(render())
