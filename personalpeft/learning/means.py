"""What all who build layers work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from personalpeft.learning.examination import Scoping
from personalpeft.learning.gate import Margins
from personalpeft.learning.voices import Voices
from personalpeft.serving.engine import Engine
from personalpeft.store.base import Store
from personalpeft.types import Message

Heard: TypeAlias = Callable[[str, str, Sequence[Message]], tuple[Message, ...]]


@dataclass(frozen=True, slots=True)
class Means:
    """One home and one base. ``now`` gives aware datetimes, ``timer`` seconds that never go back; ``voices`` outlives a
    learn; ``heard`` says how a user's messages are heard with one of their rules or facts in the prompt.
    """

    store: Store
    engine: Engine
    voices: Voices
    scoping: Scoping
    margins: Margins
    now: Callable[[], datetime]
    timer: Callable[[], float]
    heard: Heard
