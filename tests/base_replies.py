"""Write the replies of bases to the general prompts into the file that ships with the library.

``python tests/base_replies.py BASE…``, after the general prompts changed. It
takes a minute or two for each base. Replies of other bases in the file stay.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import personalpeft
from personalpeft.engine.engine import Request
from personalpeft.learning.data import general_prompts
from personalpeft.types import Message, Stack

FILE = Path(general_prompts.__file__).with_name("base_replies.json")


def reply(name: str) -> tuple[str, dict[str, str]]:
    """Return the digest of a base, and its replies on this machine by prompt."""
    prompts = general_prompts.load_general_prompts().replied_to
    with tempfile.TemporaryDirectory() as home, personalpeft.open(home, name, "torch") as runtime:
        engine = runtime.engine()
        base = engine.backend.base.digest
        messages = ((Message("user", prompt),) for prompt in prompts)
        texts = engine.complete(
            [
                Request("", each, Stack(base), general_prompts.BASE_SAMPLING, background=True)
                for each in messages
            ]
        )
    return base, dict(zip(prompts, texts, strict=True))


def main(names: Sequence[str]) -> None:
    """Write the replies of some bases, by name."""
    replies = {**general_prompts.load_base_replies(), **dict(map(reply, names))}
    FILE.write_text(json.dumps(replies, indent=0, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
