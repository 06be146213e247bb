"""An open home with one base: wires the parts and hands out users.

The base is loaded on first use, so a program that only records feedback starts at once.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Self

from personalpeft import file_system
from personalpeft.adapters.formats.packed import unpack
from personalpeft.adapters.formats.published import read_published_adapter
from personalpeft.adapters.types import Adapter
from personalpeft.archive import ImportSummary, import_user
from personalpeft.arguments import (
    check_choice,
    check_flags,
    check_functions,
    check_list,
    check_path,
    check_types,
)
from personalpeft.backends import load_backend
from personalpeft.backends.base import TrainingBackend
from personalpeft.backends.choice import FEW, BackendChoice, check_backend, choose_backend
from personalpeft.base_models.cache import collect_bases, find_changed_files
from personalpeft.base_models.files import weights_status
from personalpeft.base_models.registry import all_cards, find_card
from personalpeft.base_models.resolve import resolve_base, unpacked_folder
from personalpeft.base_models.types import Base, ModelCard
from personalpeft.certificate import Certificate
from personalpeft.chat.examples import ExampleSelector
from personalpeft.chat.routing import AdapterRouter
from personalpeft.chat.validation import check_text
from personalpeft.clock import SYSTEM, Clock
from personalpeft.deprecation import RenamedAttributes, accept_renamed_arguments
from personalpeft.engine.engine import Engine
from personalpeft.erasure import ForgetUserReport, forget_user
from personalpeft.erasure_certificate import items_with_text
from personalpeft.errors import InvalidInput, NotFound
from personalpeft.ids import check_layer_name, check_user_id
from personalpeft.learn_bundles import learn_bundles
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft.learning.data.general_prompts import open_completion_cache, probe_questions
from personalpeft.learning.data.lesson_assignment import load_style_examples
from personalpeft.learning.learner import Learner
from personalpeft.learning.options import LearnOptions, no_progress, not_cancelled
from personalpeft.learning.report import LearnReport
from personalpeft.learning.train.config import Start
from personalpeft.memory.embedder import HashEmbedder, MiniLM
from personalpeft.memory.items import Memory
from personalpeft.memory.types import Embedder, Embedding
from personalpeft.plugins import HttpExtension, HttpHost, Plugins
from personalpeft.publishing import PublishReport, publish
from personalpeft.rebase import RebaseReport, rebase
from personalpeft.reproduction import RepairReport, repair
from personalpeft.services import LazyModel, Services
from personalpeft.settings import ImplicitFeedback, Serving, Settings
from personalpeft.store.api_keys import ApiKeys
from personalpeft.store.gc import collect_garbage
from personalpeft.store.home import open_store
from personalpeft.store.integrity import verify
from personalpeft.store.maintenance import Maintenance
from personalpeft.store.plugin_data import PluginData
from personalpeft.store.types import GarbageReport, Problem, UserSummary
from personalpeft.types import Progress
from personalpeft.user import User


class Runtime(
    RenamedAttributes,
    renamed={
        "collect": "collect_garbage",
        "served": "read_published_file",
        "tokens": "api_keys",
        "upkeep": "maintenance",
    },
):
    """An open home with one base. Make it with ``personalpeft.open``; close it after use.

    ``User`` says what ``progress`` and ``cancelled`` are, and when ``Busy``, ``Cancelled`` and
    ``ServingFailed`` are raised.
    """

    def __init__(
        self,
        settings: Settings,
        base: str | Path,
        backend: str,
        *,
        clock: Clock = SYSTEM,
        progress: Progress = no_progress,
        read_only: bool = False,
        serving: Serving = Serving(),
        implicit_feedback: ImplicitFeedback = "off",
        train: bool = True,
    ) -> None:
        check_choice("implicit_feedback", implicit_feedback, ImplicitFeedback)
        self.settings = settings
        # The fake serves its own base, and an unknown one is an error there too.
        is_own = base == backend == "fake"
        card = None if is_own else find_card(base, cards=[settings.home / "models"])
        self._card = None if backend == "fake" else card
        self._backend = check_backend(backend)
        self.serving = serving
        self._clock = clock
        self._progress = progress
        file_system.remove_leftover_folders()
        store = open_store(
            settings.home,
            now=clock.now,
            entropy=clock.entropy,
            read_only=read_only,
            keys=settings.keys,
        )
        embedder: Embedder = HashEmbedder() if backend == "fake" else MiniLM()
        memory = Memory(store.ledger, store.catalog, embedder)
        self._api_keys = ApiKeys(store)
        self._services = Services(
            store=store,
            memory=memory,
            router=AdapterRouter(store, memory, probe_questions, settings.cache),
            examples=ExampleSelector(store, memory, partial(load_style_examples, store)),
            clock=clock,
            plugins=Plugins(settings.plugins),
            model=LazyModel(
                self._load_base,
                self._choose,
                self._open_engine,
                lambda engine: open_completion_cache(engine, settings.cache),
            ),
            implicit_feedback=implicit_feedback,
            train=train,
        )
        self._pid = os.getpid()
        # Streams that are open at exit are recorded while the store can still write.
        atexit.register(self.close)

    def __repr__(self) -> str:
        base = "fake" if self._card is None else self._card.name
        return f"Runtime({str(self.settings.home)!r}, base={base!r}, backend={self._backend!r})"

    def user(self, user_id: str, *, create: bool = True) -> User:
        """Return a user, created on first use unless ``create=False``.

        Raises ``InvalidId``, and ``NotFound`` with the nearest existing name.
        """
        check_flags(create=create)
        if create:
            self._services.store.catalog.ensure_user(user_id)
        else:
            self._services.store.catalog.user(check_user_id(user_id))
        return User(user_id, self._services)

    def users(
        self, *, after: str | None = None, limit: int = 100, search: str = ""
    ) -> tuple[UserSummary, ...]:
        """Return a page of the users by id. A page shorter than ``limit`` is the last.

        Args:
            after: The page begins after this id, which need not exist.
            limit: The most users to return, at least 1.
            search: Only users whose id contains this text.

        Raises:
            InvalidInput: The limit is below 1.
        """
        return self._services.store.catalog.users(after=after, limit=limit, search=search)

    def iter_users(self) -> Iterator[UserSummary]:
        """Yield all users by id. Users may be made and forgotten meanwhile."""
        return self._services.store.catalog.iter_users()

    def activity_summaries(
        self, since: datetime | timedelta = timedelta(days=1), until: datetime | None = None
    ) -> tuple[ActivitySummary, ...]:
        """Summarize what learning did for each user with any activity, by id.

        The arguments are those of ``User.activity_summary``.
        """
        summaries = []
        for each in self.iter_users():
            if each.turns or each.signals or each.revisions:
                with suppress(NotFound):  # The user was forgotten after the page was read.
                    user = self.user(each.id, create=False)
                    summaries.append(user.activity_summary(since, until))
        return tuple(summary for summary in summaries if not summary.is_empty)

    def import_user(self, file: str | Path, *, as_user: str | None = None) -> ImportSummary:
        """Import the user of a ``.personal`` file of ``User.export``, perhaps under another id.

        The ledger is always imported. Revisions are imported if the file holds the adapters and the
        live ones were built on the open base. Then the same revisions are live at once. Otherwise
        the next learn builds new ones. Every digest is recomputed, and every adapter validated.

        Raises ``PersonalFileError`` for a file that is damaged, hostile or too new,
        ``InvalidInput`` if the user exists, ``InvalidId``.
        """
        path = check_path("file", file)
        return import_user(self._services.store, self._services.model.base, path, as_user)

    def forget_user(
        self,
        user_id: str,
        *,
        dry_run: bool = False,
        certificate: bool = False,
        progress: Progress = no_progress,
    ) -> ForgetUserReport:
        """Erase a user for good: the whole ledger, all layers, published copies and API keys.

        No file of the home holds the id or a text of the user afterwards. Replies that are being
        generated end with ``Forgotten`` and are not recorded. After a kill the user is whole or
        gone. The next opening of the home deletes remaining files. The id may be used again for a
        new user. docs/explanation/privacy.md says what is out of reach.

        Args:
            user_id: The exact id.
            dry_run: Only report what would be erased.
            certificate: Make a signed certificate, ``report.certificate``. It measures how far the
                model knew some of the items, and the bare base, which takes a minute or more.
            progress: See ``User``.

        Raises:
            NotFound: There is no such user.
            InvalidId: The id is invalid.
            Busy: A learn of this user runs, or another program writes.
            HomeError: The home or a folder with published stacks cannot be written.
            MissingPackage: A certificate needs the package cryptography.
        """
        check_user_id(user_id)
        check_flags(dry_run=dry_run, certificate=certificate)
        check_functions(progress=progress)
        return forget_user(
            self._services,
            self._api_keys,
            user_id,
            dry_run=dry_run,
            certificate=certificate,
            progress=progress,
        )

    def items_with_text(self, certificate: Certificate, text: str) -> tuple[str, ...]:
        """Return the ids of the items in a certificate of this home that had exactly a text.

        Only this home can tell, since it has the key that names them. Raises ``InvalidInput`` if
        another home made the certificate, ``HomeError``, ``Damaged``, and ``MissingPackage``.
        """
        check_types(
            "Runtime.items_with_text", certificate=(certificate, Certificate), text=(text, str)
        )
        return items_with_text(self._services.store, certificate, text)

    @accept_renamed_arguments(memory="max_memory_mb")
    def learn_many(
        self,
        users: Sequence[str],
        layer: str | None = None,
        *,
        start: Start = "auto",
        seconds: float | None = None,
        steps: int | None = None,
        max_memory_mb: float | None = None,
        dry_run: bool = False,
        accept: bool = False,
        progress: Progress = no_progress,
        cancelled: Callable[[], bool] = not_cancelled,
        paused: Callable[[], bool] = not_cancelled,
    ) -> tuple[LearnReport, ...]:
        """Learn for several users at once, as ``User.learn`` does for each.

        Their layers train in one pass over the shared base. Each result equals that of learning
        alone, up to the backend's rounding. An error of one user becomes that user's report. Its
        ``error`` is the name of the exception, or "ServingFailed" for unexpected errors. What the
        caller's functions raise ends the learn of all users and is raised.

        Args:
            users: The ids, each once.
            seconds: Budget of training time of all users together.
            max_memory_mb: The most MB that all training may take. If it is short, fewer layers
                train at once.
            layer, start, steps, dry_run, accept: As for ``User.learn``.
            progress, cancelled, paused: As for ``User.learn``.

        Returns:
            One report a user, in the same order.

        Raises:
            InvalidId: An id is invalid.
            InvalidInput: A user is named twice, or an argument has a wrong value.
        """
        check_list("users", users)
        ids = [check_user_id(user) for user in users]
        if len(set(ids)) != len(ids):
            raise InvalidInput("A user is named twice.", hint="Name each user once.")
        if layer is not None:
            check_layer_name(layer)
        options = LearnOptions(
            start=start,
            seconds=seconds,
            steps=steps,
            max_memory_mb=max_memory_mb,
            dry_run=dry_run,
            accept=accept,
            progress=progress,
            cancelled=cancelled,
            paused=paused,
        )
        return Learner.from_services(self._services).learn_many(ids, layer, options)

    def rebase(
        self,
        user_id: str,
        to: str | Path,
        *,
        accept: bool = False,
        compare_only: bool = False,
        progress: Progress = no_progress,
        cancelled: Callable[[], bool] = not_cancelled,
    ) -> RebaseReport:
        """Build a user's layers anew on another base, compare, and switch if the gate agrees.

        Each layer is built from the ledger, with the recipe of the other base's card. Both stacks
        are asked the same held-out questions. Where the user had layers on that base before, these
        are continued, so going back trains nothing that is not new. Naming the open base builds the
        layers from scratch, such as after a change of its recipe. The former revisions stay. After
        the switch the layers answer on the other base only: open it. A cancelled rebase finds what
        it built again.

        Both bases are in memory meanwhile.

        Args:
            user_id: The user.
            to: The other base, as for ``personalpeft.open``.
            accept: Switch whatever the gate says. It abstains where the base of the live layers is
                not the open one, such as after an update of its weights: the new stack is then
                compared with its bare base.
            compare_only: Build and compare, and switch nothing. A rebase with ``accept`` switches
                to it later, and trains nothing again.
            progress, cancelled: See ``User``.

        Returns:
            The report. It shows both sides, and ``switched`` whether the new stack is live.

        Raises:
            NotFound: The user or the base is unknown.
            NothingToLearn: No layer is live.
            InvalidInput: ``accept`` and ``compare_only`` are both set.
            Busy, Cancelled, ServingFailed: See ``User``.
        """
        self.user(user_id, create=False)
        check_types("Runtime.rebase", to=(to, str | Path))
        check_flags(accept=accept, compare_only=compare_only)
        check_functions(progress=progress, cancelled=cancelled)
        other = Runtime(
            self.settings,
            to,
            self._backend,
            clock=self._clock,
            progress=self._progress,
            serving=self.serving,
        )
        with other:
            # With another card of the same weights the recipe may differ.
            here, there = self.base(), other.base()
            is_same = (here.digest, here.card) == (there.digest, there.card)
            new = self._services if is_same else other._services
            report = rebase(
                self._services,
                new,
                user_id,
                accept=accept,
                compare_only=compare_only,
                progress=progress,
                cancelled=cancelled,
            )
        self._services.drop_user_caches(user_id)
        return report

    def learn_bundles(
        self,
        bundles: Sequence[bytes],
        *,
        max_memory_mb: float | None = None,
        progress: Progress = no_progress,
        cancelled: Callable[[], bool] = not_cancelled,
        paused: Callable[[], bool] = not_cancelled,
    ) -> tuple[bytes, ...]:
        """Learn for users of other homes, and return what each home records by ``apply_learn``.

        The users are copied into this home, learn together as in ``learn_many``, and are erased
        again, also after an error. So open a home that has no users.

        Args:
            bundles: What ``User.bundle_learn`` returned, one for each user.
            max_memory_mb, progress, cancelled, paused: As for ``learn_many``.

        Returns:
            One result for each bundle, in the same order. The error of one user is in the user's
            result.

        Raises:
            BaseMismatch: A bundle is for another base. Nothing was learned.
            BuildMismatch: A bundle is for another build format, recipe or retrieval model.
            PersonalFileError: A bundle is damaged, hostile or too new.
            InvalidInput: A user is in two bundles, or is a user of this home.
            WeightsError, CardError: The base cannot be used.
            HomeError: The home cannot be written.
        """
        check_list("bundles", bundles)
        bundles = tuple(bundles)
        for bundle in bundles:
            check_types("Runtime.learn_bundles", bundle=(bundle, bytes))
        options = LearnOptions(
            max_memory_mb=max_memory_mb, progress=progress, cancelled=cancelled, paused=paused
        )
        return learn_bundles(self._services, bundles, options)

    def models(self) -> tuple[ModelCard, ...]:
        """Return the cards of the package and of the home's ``models/``. Raises ``CardError``."""
        return all_cards([self.settings.home / "models"])

    def available_bases(self) -> tuple[ModelCard, ...]:
        """Return those of them whose weights are on this machine, and first the open one.

        These can be named in a rebase. Raises ``CardError``, ``WeightsError``.
        """
        here = self.base().card
        others = (card for card in self.models() if weights_status(card) == "here")
        return (here, *(card for card in others if card.name != here.name))

    @property
    def embedder(self) -> str:
        """The name of the model that embeds facts."""
        return self._services.memory.embedder.name

    def embed(self, texts: Sequence[str]) -> Embedding:
        """Embed texts with the model that looks up facts. It reads the beginning of a long text.

        Raises ``InvalidInput``, ``MissingPackage``.
        """
        check_list("texts", texts)
        if not texts:
            raise InvalidInput(
                "texts must be a list that is not empty.", hint="Give a list of texts."
            )
        checked = [check_text(text, what="text") for text in texts]
        embedder = self._services.memory.embedder
        tokens = sum(embedder.tokens(text) for text in checked)
        return Embedding(embedder.name, embedder.embed(checked), tokens)

    @property
    def api_keys(self) -> ApiKeys:
        """The API keys of servers on this home."""
        return self._api_keys

    @property
    def maintenance(self) -> Maintenance:
        """Locks, notes and backups for programs that maintain this home, such as the daemon."""
        return self._services.maintenance

    def plugin_data(self, name: str) -> PluginData:
        """Return what the plugin ``name`` keeps in this home: SQLite databases and immutable files.

        Backups have it, and in an encrypted home it is encrypted. Raises ``InvalidInput`` for a name
        that a plugin's folder cannot have.
        """
        check_types("Runtime.plugin_data", name=(name, str))
        store = self._services.store
        return PluginData(store.home, name, store.cipher, read_only=store.read_only)

    def read_published_file(self, digest: str, file: str) -> bytes:
        """Return a file of a published stack, by the digest in its name ``personalpeft:<digest>``.

        The file is adapter_config.json or adapter_model.safetensors. It exists while the stack is
        published or serves a request. Loads no model. Raises ``NotFound``.
        """
        check_types("Runtime.read_published_file", digest=(digest, str), file=(file, str))
        return read_published_adapter(self._published_folder(), digest, file)

    def publish(
        self,
        users: Sequence[str] | None = None,
        *,
        to: str | Path | None = None,
        progress: Progress = no_progress,
    ) -> PublishReport:
        """Publish the live stacks of users, for other servers to load as ``personalpeft:<digest>``.

        The place then holds one stack for each user ever published there, that of the user's last
        publication. Publish again after a learn. Existing stacks are not written again. Forgetting
        revisions removes what was published of the user. Loads no model.

        Args:
            users: The ids; None is everyone.
            to: A folder, used below a subfolder of this home and base. Defaults to the folder that
                ``read_published_file`` reads.
            progress: See ``User``.

        Returns:
            What lies there now, and why a user has nothing there.

        Raises:
            InvalidId, NotFound: A user id is invalid or unknown.
            InvalidInput: The folder cannot be written, or the disk is full.
            Busy: Another program publishes from this home.
            HomeError: The home cannot be written.
        """
        if users is not None:
            check_list("users", users)
        check_functions(progress=progress)
        place = self._published_folder()
        if to is not None:
            place = check_path("to", to)
        return publish(self._services, self._adapter, place, users, progress)

    def verify(self) -> tuple[Problem, ...]:
        """Recompute every digest in the home and of prepared bases; return the problems found."""
        changed = tuple(
            Problem(str(path), "differs from when it was prepared", "The next start prepares it.")
            for path in find_changed_files(self.settings.cache)
        )
        return (*verify(self._services.store), *changed)

    def repair(
        self,
        *,
        progress: Progress = no_progress,
        cancelled: Callable[[], bool] = not_cancelled,
    ) -> RepairReport:
        """Build lost and damaged adapter files again from the ledger, and put them back.

        A file is put back only if its digest comes out as recorded. Elsewhere, such as on another
        kind of processor, nothing changes: the head stays, and the report says what can be done.
        Deletes what killed programs left unfinished in the home and in the folders of its backups.
        Loads the model only if a file is lost. After a kill or a cancel each file is whole or still
        lost; repeat it.

        Args:
            progress, cancelled: See ``User``.

        Returns:
            What was repaired, what was not, and the problems that are left.

        Raises:
            Busy: A user learns whose file is lost, or another program writes.
            Cancelled, ServingFailed: See ``User``.
            HomeError: The home cannot be written.
        """
        check_functions(progress=progress, cancelled=cancelled)
        report = repair(self._services, progress=progress, cancelled=cancelled)
        return dataclasses.replace(report, problems=self.verify())

    def collect_garbage(
        self, *, dry_run: bool = False, progress: Progress = no_progress
    ) -> GarbageReport:
        """Delete files that are no longer used. Safe while other programs use the home.

        It deletes adapter files that no revision has named for a day, and partial files. It deletes
        training state that was not resumed for a week, and prepared bases in the cache that were
        not opened for 30 days.

        ``dry_run`` only reports. Raises ``HomeError``, ``Busy``.
        """
        check_flags(dry_run=dry_run)
        check_functions(progress=progress)
        report = collect_garbage(
            self._services.store,
            dry_run=dry_run,
            progress=lambda done: progress("Collecting", done),
        )
        bases = collect_bases(self.settings.cache, dry_run=dry_run)
        return dataclasses.replace(report, bases=len(bases), bytes=report.bytes + sum(bases))

    def http_extension(self, name: str, host: HttpHost) -> HttpExtension:
        """Return the routes that a plugin adds to an HTTP server.

        Args:
            name: The plugin, by its entry point in ``personalpeft.http``.
            host: The server.

        Raises:
            NotFound: No plugin of this name may be loaded.
            PluginError: It cannot be loaded, or is no extension.
        """
        return self._services.plugins.http_extension(name, self, host)

    def base(self) -> Base:
        """Return the open base, files hashed. Raises ``WeightsError``, ``CardError``."""
        return self._services.base

    def model_folder(self) -> Path:
        """Return a folder with the open base that vLLM and transformers load.

        It holds config, tokenizer and weights. A GGUF file is unpacked into the cache the first
        time, which takes two bytes a parameter of disk. Raises ``WeightsError``.
        """
        return unpacked_folder(self.base(), progress=self._progress)

    def engine(self) -> Engine:
        """Return the engine that serves, with the base loaded."""
        return self._services.engine

    def learning_engine(self) -> Engine:
        """Return the engine that learns, with the base loaded. It stays until the runtime closes.

        It is the engine that serves, except with llama.cpp and vLLM, which do not train.
        """
        self._services.model.keep_learning_engine()
        return self._services.learning_engine

    def training_backend(self) -> TrainingBackend:
        """Return the backend of ``learning_engine``."""
        self.learning_engine()
        return self._services.training_backend

    def backend_choice(self) -> BackendChoice:
        """Return the backend that serves, and why it was chosen. Raises as ``base``."""
        return self._services.model.choice()

    @property
    def max_requests(self) -> int:
        """Requests that may run or wait at once. Loads nothing."""
        return self._choose().max_batch + self.serving.max_queue

    def count_users(self, limit: int) -> int:
        """Return how many users there are, at most ``limit``. An owner of an API key is one."""
        users = {user.id for user in self.users(limit=limit)}
        users |= {key.user for key in self.api_keys.list_keys() if key.user is not None}
        return min(limit, len(users))

    def close(self) -> None:
        """Close the home and release the model. Open streams end as cancelled turns.

        Closing twice is allowed. In a child of ``os.fork`` it does nothing: all is the parent's. A
        signal handler must not call it, since it may wait for what it interrupted. Let the handler
        raise, as ``sys.exit`` does.
        """
        if self._pid != os.getpid():
            return
        # Also when a turn cannot be recorded, the rest is closed, and then the error is raised.
        with ExitStack() as parts:
            # A registered method would keep this home in memory until the program exits.
            parts.callback(atexit.unregister, self.close)
            parts.callback(self._services.store.close)
            parts.callback(self._services.model.close)
            for stream in self._services.streams.snapshot():
                parts.callback(stream.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _published_folder(self) -> Path:
        """Return the folder where programs on this machine publish stacks."""
        server = self.settings.vllm
        return (server and server.folder) or self.settings.cache / "served"

    def _load_base(self) -> Base:
        if self._card is None:
            from personalpeft.backends.fake import fake_base

            return fake_base()
        return resolve_base(self._card, cache=self.settings.cache, progress=self._progress)

    def _choose(self, base: Base | None = None) -> BackendChoice:
        """Return the backend that serves, as far as the card tells without the base."""
        serving, card = self.serving, self._card or self.base().card
        users = self.count_users(FEW + 1) if serving.users is None else serving.users
        return choose_backend(self._backend, card, serving.max_batch, users=users, base=base)

    def _open_engine(
        self, base: Base, choice: BackendChoice, give_way: Callable[[float], None] | None
    ) -> Engine:
        self._progress("Loading the model", 0.0)
        backend = load_backend(
            choice.name,
            base,
            slots=self.serving.slots,
            rows=choice.max_batch,
            cache=self.settings.cache,
            vllm=self.settings.vllm,
            entropy=self._clock.entropy,
            weights=self.settings.weights,
            learning_device=self.settings.learning_device,
            serves=give_way is None,
            progress=self._progress,
        )
        engine = Engine(
            backend, self._adapter, self.serving, self._clock, give_way or (lambda seconds: None)
        )
        self._progress("Loading the model", 1.0)
        return engine

    def _adapter(self, digest: str) -> Adapter:
        base = self.base()
        return unpack(
            self._services.store.blobs.read(digest),
            source=str(self._services.store.blobs.path(digest)),
            architecture=base.architecture,
            base=base.digest,
            known=True,
        )
