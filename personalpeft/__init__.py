"""An embeddable runtime for personal models: one shared base and a small learned stack a user.

    import personalpeft

    with personalpeft.open() as runtime:
        ada = runtime.user("ada")
        reply = ada.chat("How do I boil an egg?")
        ada.feedback(reply, edit="Eight minutes in boiling water, then cold water.")
        print(ada.learn())

Importing this loads nothing heavy. ``open`` loads the store, and the first reply loads the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from personalpeft.arguments import check_functions, check_types
from personalpeft.clock import SYSTEM, Clock
from personalpeft.deprecation import accept_renamed_arguments, warn_renamed
from personalpeft.errors import (
    AdapterError,
    BaseMismatch,
    BuildMismatch,
    Busy,
    Cancelled,
    CardError,
    Damaged,
    DeadlineExceeded,
    Forgotten,
    HomeError,
    InvalidId,
    InvalidInput,
    LedgerMoved,
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
from personalpeft.settings import ImplicitFeedback, Serving, VllmServer, resolve
from personalpeft.types import DEFAULT_BASE, Verdict

if TYPE_CHECKING:
    from personalpeft.certificate import Certificate, verify_certificate
    from personalpeft.chat.compare import Comparison
    from personalpeft.chat.conversation import Conversation, ConversationSummary, TurnFeedback
    from personalpeft.chat.reply import Reply, Stream
    from personalpeft.encryption import EncryptionReport, decrypt, encrypt
    from personalpeft.learning.activity_summary import ActivitySummary
    from personalpeft.learning.report import LearnReport
    from personalpeft.learning.status import TrainingStatus
    from personalpeft.provenance import Provenance
    from personalpeft.rebase import RebaseReport
    from personalpeft.reproduction import RepairReport, ReproductionReport
    from personalpeft.restoration import RestoreReport, restore
    from personalpeft.runtime import Runtime
    from personalpeft.user import User

__all__ = [
    "DEFAULT_BASE",
    "ActivitySummary",
    "AdapterError",
    "BaseMismatch",
    "BuildMismatch",
    "Busy",
    "Cancelled",
    "CardError",
    "Certificate",
    "Comparison",
    "Conversation",
    "ConversationSummary",
    "Damaged",
    "DeadlineExceeded",
    "EncryptionReport",
    "Forgotten",
    "HomeError",
    "InvalidId",
    "InvalidInput",
    "LearnReport",
    "LedgerMoved",
    "MissingPackage",
    "NotFound",
    "NothingToLearn",
    "PersonalFileError",
    "PersonalPeftError",
    "PluginError",
    "PromptTooLong",
    "Provenance",
    "QueueFull",
    "RebaseReport",
    "RepairReport",
    "Reply",
    "ReproductionReport",
    "RestoreReport",
    "Runtime",
    "Serving",
    "ServingFailed",
    "Stream",
    "TrainingStatus",
    "TurnFeedback",
    "User",
    "Verdict",
    "VllmServer",
    "WeightsError",
    "decrypt",
    "encrypt",
    "open",
    "restore",
    "verify_certificate",
]

# Loaded on first use: these modules need numpy, SQLite or torch.
_LAZY = {
    "certificate": ("Certificate", "verify_certificate"),
    "chat.compare": ("Comparison",),
    "chat.conversation": ("Conversation", "ConversationSummary", "TurnFeedback"),
    "chat.reply": ("Reply", "Stream"),
    "encryption": ("EncryptionReport", "decrypt", "encrypt"),
    "learning.activity_summary": ("ActivitySummary",),
    "learning.report": ("LearnReport",),
    "learning.status": ("TrainingStatus",),
    "provenance": ("Provenance",),
    "rebase": ("RebaseReport",),
    "reproduction": ("RepairReport", "ReproductionReport"),
    "restoration": ("RestoreReport", "restore"),
    "runtime": ("Runtime",),
    "user": ("User",),
}
_MODULES = {name: module for module, names in _LAZY.items() for name in names}
_RENAMED = {
    "Digest": "ActivitySummary",
    "Learning": "TrainingStatus",
    "RebuildReport": "ReproductionReport",
    "Why": "Provenance",
}


@accept_renamed_arguments(observing="implicit_feedback")
def open(
    home: str | Path | None = None,
    base: str | Path = DEFAULT_BASE,
    backend: str = "auto",
    *,
    clock: Clock | None = None,
    progress: Callable[[str, float], None] = lambda stage, done: None,
    read_only: bool = False,
    serving: Serving | None = None,
    implicit_feedback: ImplicitFeedback = "off",
    train: bool = True,
    vllm: VllmServer | None = None,
    passphrase: str | None = None,
) -> Runtime:
    """Open a home folder on one base. A missing folder is created.

    Args:
        home: The folder. Defaults to ``PERSONALPEFT_HOME``, else the platform's data folder.
        base: The name of a model card, a path to a card, or a folder that holds a model.
        backend: "torch", "llamacpp", "vllm", "fake" or "auto". "torch" serves many users at once.
            "llamacpp" serves the base's GGUF file, fast for one user and in little memory, and
            loads torch to learn. "vllm" serves on an external server. "fake" needs no model, for
            tests. "auto" is "llamacpp" where the base comes as a GGUF file and ``serving`` asks for
            no more than two replies at once, else "torch".
        clock: Source of time and randomness. Defaults to the system's.
        progress: Called with a stage and the share of it that is done, 0 to 1. The base is prepared
            and loaded when it is first needed.
        read_only: Refuse every write to the home, except the list of folders with backups.
        serving: Limits of the engine: batch rows, adapter slots, queue length.
        implicit_feedback: Whether ``User.record_implicit_feedback`` records anything. "off" drops
            it. "kept" records it. "learned" also trains on it as weak ratings.
        train: Whether layers may be trained on signals that this runtime records. Each signal can
            say otherwise (``User.feedback``).
        vllm: The server of the "vllm" backend. Defaults to ``PERSONALPEFT_VLLM_URL``.
        passphrase: The passphrase of a home that is encrypted with one. Defaults to
            ``PERSONALPEFT_PASSPHRASE``, which other homes ignore.

    Returns:
        The open runtime. Close it, or use it as a context manager.

    Raises:
        HomeError: The home cannot be read, created or migrated, or its key is missing or wrong.
        NotFound: The base or backend is unknown.
        CardError: The model card is invalid.
        InvalidInput: An argument has a wrong value. Or a passphrase was given, and the home is not
            encrypted with one.
    """
    from personalpeft.runtime import Runtime
    from personalpeft.store.home_keys import check_takes_passphrase

    check_types(
        "personalpeft.open",
        home=(home, str | Path | None),
        base=(base, str | Path),
        backend=(backend, str),
        read_only=(read_only, bool),
        train=(train, bool),
        serving=(serving, Serving | None),
        vllm=(vllm, VllmServer | None),
        passphrase=(passphrase, str | None),
        clock=(clock, Clock | None),
    )
    check_functions(progress=progress)
    settings = resolve(home, os.environ, passphrase)
    if passphrase is not None:
        check_takes_passphrase(settings.home)
    return Runtime(
        replace(settings, vllm=vllm) if vllm else settings,
        base,
        backend,
        clock=clock or SYSTEM,
        progress=progress,
        read_only=read_only,
        serving=serving or Serving(),
        implicit_feedback=implicit_feedback,
        train=train,
    )


# Hidden from type checkers, which would otherwise accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _RENAMED:
            warn_renamed(f"personalpeft.{name}", _RENAMED[name])
            name = _RENAMED[name]
        if name in _MODULES:
            return getattr(import_module(f"personalpeft.{_MODULES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
