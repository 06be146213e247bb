"""Names: the grammar that ids follow, and new ids for turns and signals."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

from personalpeft.errors import InvalidId, InvalidInput

USER_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SKILL_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
LAYER_NAME = re.compile(rf"style|memory|skill\.{SKILL_NAME.pattern}")

SOURCE = re.compile(r"[a-z][a-z0-9._-]{0,31}")
# Templates put it between quotation marks as it is.
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


def check_user_id(value: str) -> str:
    """The id itself, if it is one. The grammar keeps an id usable as a file name and a URL part; look-alikes are not in
    it.
    """
    if not isinstance(value, str) or USER_ID.fullmatch(value) is None or ".." in value:
        shown = ascii(
            value if not isinstance(value, str) or len(value) <= 64 else value[:61] + "..."
        )
        raise InvalidId(
            f"{shown} cannot be a user id.",
            hint="Use 1 to 64 of a-z, 0-9, '.', '_' and '-', starting with a letter or digit, without '..'.",
        )
    return value


def check_layer_name(value: str) -> str:
    """The name itself, if it is one: ``style``, ``memory`` or ``skill.<name>``."""
    if not isinstance(value, str) or LAYER_NAME.fullmatch(value) is None:
        raise InvalidId(
            f"{ascii(value)[:80]} cannot be a layer.",
            hint="Layers are called style, memory or skill.<name>.",
        )
    return value


def check_skill(value: str) -> str:
    """The name of a skill itself, if it is one."""
    if not isinstance(value, str) or SKILL_NAME.fullmatch(value) is None:
        raise InvalidInput(
            f"{ascii(value)[:80]} cannot be the name of a skill.", hint="Use a-z, 0-9, '_' and '-'."
        )
    return value


def check_source(value: str) -> str:
    """The name of who gave a signal itself, if it is one."""
    if not isinstance(value, str) or SOURCE.fullmatch(value) is None:
        raise InvalidId(
            f"{ascii(value)[:80]} cannot be the source of a signal.",
            hint="A person is 'person'; another is named with up to 32 of a-z, 0-9, '.', '_' and '-'.",
        )
    return value


def new_id(prefix: str, at: datetime, entropy: Callable[[int], bytes]) -> str:
    """``<prefix>_<26 characters>``: 48 bits of milliseconds, then 80 random bits, so that ids sort by time (the ULID
    layout).
    """
    number = int(at.timestamp() * 1000) << 80 | int.from_bytes(entropy(10))
    return f"{prefix}_" + "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))
