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

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from personalpeft.deprecation import warn_renamed
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

if TYPE_CHECKING:
    from personalpeft.certificate import Certificate, verify_certificate
    from personalpeft.chat.compare import Comparison
    from personalpeft.chat.conversation import Conversation, ConversationSummary, TurnFeedback
    from personalpeft.chat.reply import Reply, Stream
    from personalpeft.clock import Clock
    from personalpeft.encryption import EncryptionReport
    from personalpeft.learning.activity_summary import ActivitySummary
    from personalpeft.learning.report import LearnReport
    from personalpeft.learning.status import TrainingStatus
    from personalpeft.provenance import Provenance
    from personalpeft.rebase import RebaseReport
    from personalpeft.recovery import RestoreReport
    from personalpeft.reproduction import RebuildReport, RepairReport
    from personalpeft.runtime import Runtime
    from personalpeft.settings import Observing, Serving, Settings, VllmServer
    from personalpeft.types import Verdict
    from personalpeft.user import User

DEFAULT_BASE = "smollm2-135m-instruct"

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
    "RebuildReport",
    "RepairReport",
    "Reply",
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
    "ActivitySummary": "personalpeft.learning.activity_summary",
    "Certificate": "personalpeft.certificate",
    "Comparison": "personalpeft.chat.compare",
    "Conversation": "personalpeft.chat.conversation",
    "ConversationSummary": "personalpeft.chat.conversation",
    "EncryptionReport": "personalpeft.encryption",
    "LearnReport": "personalpeft.learning.report",
    "Provenance": "personalpeft.provenance",
    "RebaseReport": "personalpeft.rebase",
    "RebuildReport": "personalpeft.reproduction",
    "RepairReport": "personalpeft.reproduction",
    "Reply": "personalpeft.chat.reply",
    "RestoreReport": "personalpeft.recovery",
    "Runtime": "personalpeft.runtime",
    "Serving": "personalpeft.settings",
    "Stream": "personalpeft.chat.reply",
    "TrainingStatus": "personalpeft.learning.status",
    "TurnFeedback": "personalpeft.chat.conversation",
    "User": "personalpeft.user",
    "Verdict": "personalpeft.types",
    "verify_certificate": "personalpeft.certificate",
    "VllmServer": "personalpeft.settings",
}
_RENAMED = {"Digest": "ActivitySummary", "Learning": "TrainingStatus", "Why": "Provenance"}


def open(
    home: str | Path | None = None,
    base: str | Path = DEFAULT_BASE,
    backend: str = "auto",
    *,
    clock: Clock | None = None,
    progress: Callable[[str, float], None] = lambda stage, done: None,
    read_only: bool = False,
    serving: Serving | None = None,
    observing: Observing = "off",
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
        read_only: Refuse every write to the home.
        serving: Limits of the engine: batch rows, adapter slots, queue length.
        observing: What happens to implicit feedback (``User.observe``). "off" drops it. "kept"
            records it. "learned" also trains on it as weak ratings.
        train: Whether layers may be trained on signals that this runtime records. Each signal can
            say otherwise (``User.feedback``).
        vllm: The server of the "vllm" backend. Defaults to ``PERSONALPEFT_VLLM_URL``.
        passphrase: The passphrase of a home that is encrypted with one. Defaults to
            ``PERSONALPEFT_PASSPHRASE``.

    Returns:
        The open runtime. Close it, or use it as a context manager.

    Raises:
        HomeError: The home cannot be read, created or migrated, or its key is missing or wrong.
        NotFound: The base or backend is unknown.
        CardError: The model card is invalid.
        InvalidInput: An argument has a wrong value.
    """
    from dataclasses import replace

    from personalpeft.clock import SYSTEM
    from personalpeft.runtime import Runtime
    from personalpeft.settings import Serving

    settings = _resolve(home, passphrase)
    return Runtime(
        replace(settings, vllm=vllm) if vllm else settings,
        base,
        backend,
        clock=clock or SYSTEM,
        progress=progress,
        read_only=read_only,
        serving=serving or Serving(),
        observing=observing,
        train=train,
    )


def restore(
    backup: str | Path,
    home: str | Path | None = None,
    base: str | Path = DEFAULT_BASE,
    *,
    replace: bool = False,
    forgotten_in: Sequence[str | Path] = (),
    passphrase: str | None = None,
    clock: Clock | None = None,
    progress: Callable[[str, float], None] = lambda stage, done: None,
) -> RestoreReport:
    """Put a backup in place of a home. What was forgotten since is forgotten again first.

    What was forgotten stands in ``forgotten.jsonl`` in the home and beside its backups. Both are
    read, as far as they are there. Loads no model.

    Args:
        backup: A copy that ``Maintenance.back_up`` made, or a folder of them, for the newest.
        home: The home to restore. Defaults to ``PERSONALPEFT_HOME``, else the platform's data
            folder.
        base: The base, as for ``open``.
        replace: Whether a home that is there may be replaced. It is kept beside the new one.
        forgotten_in: More folders with a ``forgotten.jsonl``, or with a newer database.
        passphrase: The passphrase of the backup, as for ``open``.
        clock: Source of time and randomness. Defaults to the system's.
        progress: Called with a stage and the share of it that is done, 0 to 1.

    Returns:
        What was done.

    Raises:
        NotFound: There is no backup.
        InvalidInput: The home is not empty.
        Damaged: The backup is not whole. Nothing was restored.
        Busy: Another program writes to the home.
        HomeError: The home cannot be written.
    """
    from personalpeft.clock import SYSTEM
    from personalpeft.recovery import restore as restore_backup

    return restore_backup(
        Path(backup),
        _resolve(home, passphrase),
        base,
        replace=replace,
        forgotten_in=tuple(map(Path, forgotten_in)),
        clock=clock or SYSTEM,
        progress=progress,
    )


def encrypt(
    home: str | Path | None = None,
    key: str | None = None,
    *,
    rotate: bool = False,
    passphrase: str | None = None,
    new_passphrase: str | None = None,
    clock: Clock | None = None,
    progress: Callable[[str, float], None] = lambda stage, done: None,
) -> EncryptionReport:
    """Encrypt a home, or give an encrypted one new keys. A missing folder is created.

    The home is copied with the new keys. The copy is verified and then replaces the home. A kill at
    any moment loses nothing. No other program may have the home open. Checkpoints of unfinished
    learns are dropped.

    Args:
        home: The folder, as for ``open``.
        key: Where the home's key comes from. "keyring" is that of the operating system. "file" is a
            file in ``PERSONALPEFT_KEYS``, else in the platform's folder for settings. "passphrase"
            derives it. None: as before; else a passphrase if one is given, else the keyring if the
            system has one, else a file.
        rotate: Whether the home is encrypted already and gets new keys.
        passphrase: The passphrase, as for ``open``.
        new_passphrase: Another passphrase from now on.
        clock: Source of time and randomness. Defaults to the system's.
        progress: Called with a stage and the share of it that is done, 0 to 1.

    Raises:
        InvalidInput: The home is encrypted already, or is not; there is no keyring or passphrase.
        Busy: Another program has the home open.
        Damaged: The home is not whole; see ``Runtime.verify``.
        HomeError: The present key is missing or wrong, or the home cannot be written.
        MissingPackage: The extra ``encryption`` is not installed.
    """
    from personalpeft import encryption
    from personalpeft.clock import SYSTEM

    return encryption.encrypt(
        _resolve(home, passphrase),
        key,
        rotate=rotate,
        new_passphrase=new_passphrase,
        clock=clock or SYSTEM,
        progress=progress,
    )


def decrypt(
    home: str | Path | None = None,
    *,
    passphrase: str | None = None,
    clock: Clock | None = None,
    progress: Callable[[str, float], None] = lambda stage, done: None,
) -> EncryptionReport:
    """Store an encrypted home without encryption again. Its key stays, for older backups.

    Args:
        home: The folder, as for ``open``.
        passphrase: The passphrase, as for ``open``.
        clock: Source of time and randomness. Defaults to the system's.
        progress: Called with a stage and the share of it that is done, 0 to 1.

    Raises:
        InvalidInput: The home is not encrypted.
        PersonalPeftError: As ``encrypt``.
    """
    from personalpeft import encryption
    from personalpeft.clock import SYSTEM

    return encryption.decrypt(_resolve(home, passphrase), clock=clock or SYSTEM, progress=progress)


def _resolve(home: str | Path | None, passphrase: str | None) -> Settings:
    """Return the settings of the environment, with a passphrase if one is given."""
    import os
    from dataclasses import replace

    from personalpeft.settings import resolve

    settings = resolve(home, os.environ)
    if passphrase is None:
        return settings
    return replace(settings, keys=replace(settings.keys, passphrase=passphrase))


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warn_renamed(f"personalpeft.{name}", _RENAMED[name])
        name = _RENAMED[name]
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
