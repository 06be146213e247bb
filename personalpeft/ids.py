"""The grammar of names and ids, and new ids for turns and signals."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

from personalpeft.errors import InvalidId, InvalidInput

USER_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SKILL_NAME = re.compile(r"[a-z0-9](?:\.?[a-z0-9_-]){0,31}")
LAYER_NAME = re.compile(rf"style|memory|skill\.{SKILL_NAME.pattern}")
SOURCE = re.compile(r"[a-z][a-z0-9._-]{0,31}")
# Chat templates put the name between quotation marks without escaping it.
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

LAST = "last"
"""Stands for the id of the newest."""

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


def check_user_id(value: str) -> str:
    """Return a valid user id, or raise ``InvalidId``. It is usable as part of a file name or URL."""
    if not isinstance(value, str) or USER_ID.fullmatch(value) is None or ".." in value:
        near = re.sub(r"\s+", "-", value.strip().lower()) if isinstance(value, str) else ""
        raise InvalidId(
            f"A user id must be 1 to 64 of a-z, 0-9, '.', '_' and '-', got {value!a:.80}.",
            hint=f"Did you mean {near!r}?"
            if USER_ID.fullmatch(near) and ".." not in near
            else "Start it with a letter or digit, and leave out '..'.",
        )
    return value


def check_layer_name(value: str) -> str:
    """Return a valid layer name, or raise ``InvalidId``."""
    if not isinstance(value, str) or LAYER_NAME.fullmatch(value) is None:
        raise InvalidId(
            f"A layer must be style, memory or skill.<name>, got {value!a:.80}.",
            hint="A name is 1 to 32 of a-z, 0-9, '_' and '-', with single dots between them.",
        )
    return value


def check_skill_name(value: str) -> str:
    """Return a valid skill name, or raise ``InvalidInput``."""
    is_name = isinstance(value, str) and SKILL_NAME.fullmatch(value)
    # Most likely the name of its layer.
    if not is_name or value.startswith("skill."):
        raise InvalidInput(
            f"A skill's name must be 1 to 32 of a-z, 0-9, '_' and '-', got {value!a:.80}.",
            hint="Start it with a letter or digit, and leave out 'skill.'. Single dots may stand "
            "between.",
        )
    return value


def check_source(value: str) -> str:
    """Return a valid name of a signal's source, or raise ``InvalidId``."""
    if not isinstance(value, str) or SOURCE.fullmatch(value) is None:
        raise InvalidId(
            f"A source must be 1 to 32 of a-z, 0-9, '.', '_' and '-', got {value!a:.80}.",
            hint="The user is 'person'; start another name with a letter.",
        )
    return value


def new_id(prefix: str, at: datetime, entropy: Callable[[int], bytes]) -> str:
    """Return ``<prefix>_<26 characters>``, which sorts by time.

    The prefix is "t" for a turn and "s" for a signal. The characters hold 48 bits of milliseconds
    and 80 random bits, in the layout of a ULID. ``entropy`` returns that many random bytes.
    """
    number = int(at.timestamp() * 1000) << 80 | int.from_bytes(entropy(10))
    return f"{prefix}_" + "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))
