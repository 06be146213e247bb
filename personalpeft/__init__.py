"""An embeddable runtime for personal models: one shared base, a small learned stack for each user, its whole history in
SQLite.

    import personalpeft

    with personalpeft.open() as runtime:
        ada = runtime.user("ada")
        reply = ada.chat("How do I boil an egg?")
        ada.feedback(reply, edit="Eight minutes in boiling water, then cold water.")
        print(ada.learn())

Importing this loads nothing heavy; ``open`` loads the store, and the first reply the model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from personalpeft.errors import (
    AdapterError,
    BaseMismatch,
    Busy,
    Cancelled,
    CardError,
    Damaged,
    DeadlineExceeded,
    Forgotten,
    HomeError,
    InvalidId,
    InvalidInput,
    MissingPackage,
    NotFound,
    NothingToLearn,
    PersonalFileError,
    PersonalPeftError,
    PluginError,
    PromptTooLong,
    QueueFull,
    ServingFailed,
    WeightsError,
)

if TYPE_CHECKING:
    from personalpeft.chat.compare import Comparison
    from personalpeft.chat.reply import Reply, Stream
    from personalpeft.clock import Clock
    from personalpeft.learning.activity_summary import Digest
    from personalpeft.learning.progress import Learning
    from personalpeft.learning.report import LearnReport
    from personalpeft.provenance import Why
    from personalpeft.runtime import Runtime
    from personalpeft.settings import Observing, Serving, VllmServer
    from personalpeft.types import Verdict
    from personalpeft.user import User

DEFAULT_BASE = "smollm2-135m-instruct"

__all__ = [
    "DEFAULT_BASE",
    "AdapterError",
    "BaseMismatch",
    "Busy",
    "Cancelled",
    "CardError",
    "Comparison",
    "Damaged",
    "DeadlineExceeded",
    "Digest",
    "Forgotten",
    "HomeError",
    "InvalidId",
    "InvalidInput",
    "LearnReport",
    "Learning",
    "MissingPackage",
    "NotFound",
    "NothingToLearn",
    "PersonalFileError",
    "PersonalPeftError",
    "PluginError",
    "PromptTooLong",
    "QueueFull",
    "Reply",
    "Runtime",
    "Serving",
    "ServingFailed",
    "Stream",
    "User",
    "Verdict",
    "VllmServer",
    "WeightsError",
    "Why",
    "open",
]

_LAZY = {
    "Comparison": "personalpeft.chat.compare",
    "Digest": "personalpeft.learning.activity_summary",
    "LearnReport": "personalpeft.learning.report",
    "Learning": "personalpeft.learning.progress",
    "Reply": "personalpeft.chat.reply",
    "Runtime": "personalpeft.runtime",
    "Serving": "personalpeft.settings",
    "Stream": "personalpeft.chat.reply",
    "User": "personalpeft.user",
    "VllmServer": "personalpeft.settings",
    "Verdict": "personalpeft.types",
    "Why": "personalpeft.provenance",
}


def open(
    home: str | Path | None = None,
    base: str | Path = DEFAULT_BASE,
    backend: str = "torch",
    *,
    clock: Clock | None = None,
    progress: Callable[[str, float], None] = lambda stage, done: None,
    read_only: bool = False,
    serving: Serving | None = None,
    observing: Observing = "off",
    vllm: VllmServer | None = None,
) -> Runtime:
    """Opens a home folder, and makes it where there is none, on one base.

    ``home`` defaults to PERSONALPEFT_HOME, else the platform's data folder. ``base`` is the name of a card, a path to a
    card or a folder with a model in it. ``backend`` is "torch"; "llamacpp", which serves the base's GGUF file in little
    memory and loads torch while it learns; "vllm", which does so on the server that ``vllm`` or PERSONALPEFT_VLLM_URL
    names; or "fake" for tests without a model. ``progress`` hears a stage and how much of
    it is done (0 to 1) while the base is prepared and loaded, which happens when it is first needed. ``serving`` says how
    much is served at once, and how much may wait. ``observing`` says what becomes of what the app sees without asking
    (``User.observe``): "off", "kept", or "learned" as weak ratings. Raises ``HomeError``, ``NotFound`` for an unknown base,
    ``CardError``, ``InvalidInput``.
    """
    import os
    from dataclasses import replace

    from personalpeft.clock import SYSTEM
    from personalpeft.runtime import Runtime
    from personalpeft.settings import Serving, resolve

    settings = resolve(home, os.environ)
    return Runtime(
        replace(settings, vllm=vllm) if vllm else settings,
        base,
        backend,
        clock=clock or SYSTEM,
        progress=progress,
        read_only=read_only,
        serving=serving or Serving(),
        observing=observing,
    )


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
