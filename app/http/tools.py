"""Tools as OpenAI's and Anthropic's clients speak of them, and the library's words for the same.

Invariant: what is offered here goes through the base's chat template, or the request is refused by the name of the parameter; a tool is
never called here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from personalpeft.bases.tools import CallReader, Said
from personalpeft.errors import InvalidInput
from personalpeft.prompts import Tool, check_prompt, check_tools
from personalpeft.types import ToolCall
from personalpeft_app.http.bodies import Body
from personalpeft_app.http.failures import Unsupported
from personalpeft_app.http.models import Models


def offered(models: Models, body: Body, listed: Any, *, off: bool) -> tuple[Tool, ...]:
    """The tools of a request, none where they are switched ``off``. Raises ``Unsupported``."""
    if not body.get("tools"):
        return ()
    if not models.take_tools:
        raise Unsupported("tools: the chat template of this base knows no tools.", "tools")
    try:
        tools = check_tools(listed)
    except InvalidInput as error:
        raise Unsupported(f"tools: {error}", "tools") from error
    return () if off else tools


def checked(models: Models, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages, if what they say of tools can be read. Raises ``Unsupported``."""
    if any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        if not models.take_tools:
            raise Unsupported("messages: the chat template of this base knows no tools.", "messages")
        try:
            check_prompt(messages)
        except InvalidInput as error:
            raise Unsupported(f"messages: {error}", "messages") from error
    return messages


def openai_choice(body: Body) -> bool:
    """Whether tools are switched off. Raises ``Unsupported`` for a choice that no template can promise."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise Unsupported("tool_choice must be auto or none: a template can offer tools, not see to it.", "tool_choice")
    return bool(choice == "none")


def openai_message(each: Mapping[str, Any], place: str) -> dict[str, Any]:
    """What a message says of tools."""
    if each["role"] == "tool" and not isinstance(each.get("tool_call_id"), str):
        raise Unsupported(f"{place}.tool_call_id is missing.", f"{place}.tool_call_id")
    return {key: each[key] for key in ("tool_calls", "tool_call_id") if each.get(key)}


def openai_call(call: ToolCall) -> dict[str, Any]:
    """A call as OpenAI's clients read it."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def anthropic_tools(listed: Any) -> Any:
    """Anthropic's tools as OpenAI's."""
    if not isinstance(listed, list):
        return listed
    made = []
    for number, each in enumerate(listed):
        if not isinstance(each, dict) or each.get("type", "custom") != "custom":
            raise Unsupported(f"tools[{number}]: only tools of one's own can be offered.", f"tools[{number}]")
        about = {"name": each.get("name"), "description": each.get("description") or ""}
        made.append({"type": "function", "function": {**about, "parameters": each.get("input_schema") or {}}})
    return made


def anthropic_choice(body: Body) -> bool:
    """As ``openai_choice``."""
    choice = body.get("tool_choice")
    kind = "auto" if choice is None else choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "none"):
        raise Unsupported("tool_choice must be auto or none: a template can offer tools, not see to it.", "tool_choice")
    return bool(kind == "none")


def anthropic_messages(listed: Any) -> Any:
    """Anthropic's messages with calls and results as parts, as OpenAI's with both as messages of their own."""
    if not isinstance(listed, list):
        return listed
    return [said for each in listed for said in _apart(each)]


def anthropic_call(call: ToolCall) -> dict[str, Any]:
    """A call as a block of content."""
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": call.name,
        "input": dict(call.arguments),
    }


def reader(tools: Sequence[Tool]) -> CallReader | Plain:
    """What tells calls from text in a reply; all is text where no tool was offered."""
    return CallReader() if tools else Plain()


def read(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """A whole reply as its text and the calls in it."""
    reading = reader(tools)
    said = [*reading.push(text), *reading.finish()]
    calls = [each for each in said if isinstance(each, ToolCall)]
    return "".join(each for each in said if isinstance(each, str)), calls


class Plain:
    """A reader that finds no calls."""

    def push(self, text: str) -> Sequence[Said]:
        return (text,)

    def finish(self) -> Sequence[Said]:
        return ()


def _apart(each: Any) -> Iterator[Any]:
    content = each.get("content") if isinstance(each, dict) else None
    if not isinstance(content, list):
        yield each
        return
    kinds = {"user": "tool_result", "assistant": "tool_use"}
    kind = kinds.get(str(each.get("role")))
    own = [part for part in content if isinstance(part, dict) and part.get("type") == kind]
    rest = [part for part in content if part not in own]
    if not own:
        yield each
    elif kind == "tool_use":
        calls = [
            {"id": part.get("id"), "function": {"name": part.get("name"), "arguments": part.get("input")}}
            for part in own
        ]
        yield {"role": "assistant", "content": rest, "tool_calls": calls}
    else:
        for part in own:
            yield {"role": "tool", "content": part.get("content") or "", "tool_call_id": part.get("tool_use_id")}
        if rest:
            yield {"role": "user", "content": rest}
