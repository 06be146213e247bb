"""Opens the parts and wires them: one home, one base, one backend, any number of users. Holds no logic of its own.

The base is loaded when something first needs it, so that a program that only records feedback or lists revisions starts
at once.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, get_args

from personalpeft.adapters.formats.packed import unpack
from personalpeft.adapters.formats.published import read_served
from personalpeft.adapters.types import Adapter
from personalpeft.archive import Imported, read_in
from personalpeft.backends import BACKENDS, load_backend
from personalpeft.base_models.registry import all_cards, find_card
from personalpeft.base_models.resolve import prepare
from personalpeft.base_models.types import Base, Card
from personalpeft.chat.routing import AdapterRouter
from personalpeft.chat.validation import check_written
from personalpeft.clock import SYSTEM, Clock
from personalpeft.engine.completion_cache import CompletionCache
from personalpeft.engine.engine import Engine
from personalpeft.errors import InvalidInput, NotFound, nearest
from personalpeft.ids import check_layer_name, check_user_id
from personalpeft.learning.evaluate.completion_cache import open_completion_cache
from personalpeft.learning.evaluate.probes import general_prompts
from personalpeft.learning.learner import Learner
from personalpeft.learning.options import Order, never, silent
from personalpeft.learning.report import LearnReport
from personalpeft.learning.train.config import Start
from personalpeft.memory.embedder import HashEmbedder, MiniLM
from personalpeft.memory.items import Memory
from personalpeft.memory.types import Embedding
from personalpeft.plugins import Plugins
from personalpeft.publishing import Published, publish
from personalpeft.services import LazyModel, Services
from personalpeft.settings import Observing, Serving, Settings
from personalpeft.store import open_store
from personalpeft.store.api_keys import Tokens
from personalpeft.store.base import Collected, Problem, UserSummary
from personalpeft.store.maintenance import Upkeep
from personalpeft.types import Progress
from personalpeft.user import User


class Runtime:
    """An open home with one base. Make it with ``personalpeft.open``; use it as a context manager, or close it."""

    def __init__(
        self,
        settings: Settings,
        base: str | Path,
        backend: str,
        *,
        clock: Clock = SYSTEM,
        progress: Progress = lambda stage, done: None,
        read_only: bool = False,
        serving: Serving = Serving(),
        observing: Observing = "off",
    ) -> None:
        if backend not in BACKENDS:
            raise NotFound(
                f"There is no backend called {backend!r}.",
                hint=nearest(backend, BACKENDS, what="backend"),
            )
        if observing not in get_args(Observing):
            raise InvalidInput(
                f"observing cannot be {observing!a}.",
                hint=f"Give one of {', '.join(get_args(Observing))}.",
            )
        self.settings = settings
        self._card = (
            find_card(base, cards=[settings.home / "models"]) if backend != "fake" else None
        )
        self._backend = backend
        self.serving = serving
        self._clock = clock
        self._progress = progress
        store = open_store(settings.home, now=clock.now, entropy=clock.entropy, read_only=read_only)
        memory = Memory(
            store.ledger, store.catalog, HashEmbedder() if backend == "fake" else MiniLM()
        )
        self._tokens = Tokens(store.home, now=clock.now, entropy=clock.entropy, lease=store.lease)
        self._services = Services(
            store=store,
            memory=memory,
            router=AdapterRouter(store, memory, general_prompts),
            clock=clock,
            plugins=Plugins(settings.plugins),
            model=LazyModel(self._load_base, self._load_engine, self._load_completions),
            observing=observing,
        )
        # A reply that is still being written when the program ends is recorded while the store can still write.
        atexit.register(self.close)

    def user(self, user_id: str, *, create: bool = True) -> User:
        """One user, made on first use unless ``create=False``. Raises ``InvalidId``; ``NotFound`` with the nearest
        name.
        """
        check_user_id(user_id)
        if create:
            self._services.store.catalog.ensure_user(user_id)
        else:
            self._services.store.catalog.user(user_id)
        return User(user_id, self._services)

    def users(self, *, after: str | None = None, limit: int = 100) -> tuple[UserSummary, ...]:
        """A page of this home's users, by id: at most ``limit`` of those after the id ``after``. One that is shorter is the
        last; the next begins after the last id of this one. Raises ``InvalidInput``.
        """
        return self._services.store.catalog.users(after=after, limit=limit)

    def import_user(self, file: str | Path, *, as_user: str | None = None) -> Imported:
        """Takes in the user of a ``.personal`` file, as ``User.export`` wrote it, under their own name or another.

        Everything that was said comes along. What was built does where all of it was built on the open base and the file
        holds the adapters: then the same revisions are live at once, to the byte. Else it is left out, and the next learn
        builds from what was said. Every digest in the file is derived again and every adapter read as a stranger's before
        anything is kept; the verdict of what came in says that it was imported. Raises ``PersonalFileError`` for a file
        that is damaged, hostile or too new, ``InvalidInput`` where there is a user of that name, ``InvalidId``.
        """
        return read_in(self._services.store, self._services.model.base, Path(file), as_user)

    def learn_many(
        self,
        users: Sequence[str],
        layer: str | None = None,
        *,
        start: Start = "auto",
        seconds: float | None = None,
        steps: int | None = None,
        memory: float | None = None,
        dry_run: bool = False,
        accept: bool = False,
        progress: Progress = silent,
        cancelled: Callable[[], bool] = never,
        paused: Callable[[], bool] = never,
    ) -> tuple[LearnReport, ...]:
        """As ``User.learn`` for each of these ids, all at once: their layers train in one pass over the shared base, and
        each comes out as it would alone, to the rounding of the backend. One report for each, in the same order.

        What one user cannot do (nothing new, another learn runs, unknown) is that user's report, with ``error`` the name
        of what ``User.learn`` would have raised; so is being cancelled. An unexpected error of one user is "ServingFailed" in
        that user's report, which names its kind; what ``progress``, ``cancelled`` or ``paused`` raise ends the learn of all and is
        raised. ``seconds`` and ``memory`` are for all of them
        together, ``steps`` for each layer; where memory is short, fewer train at once. Raises ``InvalidId``, and
        ``InvalidInput`` where a user is named twice.
        """
        if isinstance(users, str) or not isinstance(users, Iterable):
            raise InvalidInput(
                "The users are no list of ids.", hint="Give a list of ids, also of a single one."
            )
        named = [check_user_id(user) for user in users]
        if len(set(named)) != len(named):
            raise InvalidInput("A user is named twice.", hint="Name each user once.")
        if layer is not None:
            check_layer_name(layer)
        order = Order(
            start=start,
            seconds=seconds,
            steps=steps,
            memory=memory,
            dry_run=dry_run,
            accept=accept,
            progress=progress,
            cancelled=cancelled,
            paused=paused,
        )
        return Learner.from_services(self._services).learn_many(named, layer, order)

    def models(self) -> tuple[Card, ...]:
        """Every base that can be opened: those that ship, and the user's own in the home's ``models/``. Raises
        ``CardError``.
        """
        return all_cards([self.settings.home / "models"])

    @property
    def embedder(self) -> str:
        """The name of the model that facts are looked up with."""
        return self._services.memory.embedder.name

    def embed(self, texts: Sequence[str]) -> Embedding:
        """What the model that facts are looked up with makes of texts: vectors whose dot product is the cosine of their
        meanings. It reads the beginning of a long one. Raises ``InvalidInput``, ``MissingPackage``.
        """
        if isinstance(texts, str) or not texts:
            raise InvalidInput("There are no texts.", hint="Give a list of texts.")
        said = [check_written(text, what="text") for text in texts]
        embedder = self._services.memory.embedder
        return Embedding(
            embedder.name, embedder.embed(said), sum(embedder.tokens(text) for text in said)
        )

    @property
    def tokens(self) -> Tokens:
        """Who may ask a server of this home."""
        return self._tokens

    @property
    def upkeep(self) -> Upkeep:
        """What a program that looks after this home at its own times needs of it, as the daemon does."""
        return self._services.store.upkeep

    def served(self, digest: str, file: str) -> bytes:
        """A file of the folder in which servers elsewhere get a stack that they know as ``personalpeft:<digest>``:
        adapter_config.json or adapter_model.safetensors. It is there while somebody may be answered with it, whichever program
        serves it, and as long as it is published. Loads no model. Raises ``NotFound``.
        """
        return read_served(self._shared(), digest, file)

    def publish(
        self,
        users: Sequence[str] | None = None,
        *,
        to: str | Path | None = None,
        progress: Progress = lambda stage, done: None,
    ) -> Published:
        """Puts what is live of these users, None: of everybody, where servers elsewhere find it by ``personalpeft:<digest>``,
        whoever is served here now: below the folder ``to`` in a part of this home's own for the open base, or where ``served`` reads.

        That part then has one stack for each user who was ever published there: what was live when they were published last.
        So publish again after a learn. Of whom nothing is live, or nothing that others could serve, nothing stays there, and
        the answer says why. What is there already is not written again, and each folder comes whole or not at all. A
        forgetting that destroys revisions takes all away that is published of the user, where it can be reached. Loads no
        model. Raises ``InvalidId``, ``NotFound``, ``InvalidInput`` for a folder that cannot be written, a disk that is full,
        ``HomeError``, and ``Busy`` while another program publishes from this home.
        """
        place = self._shared() if to is None else Path(to).expanduser().absolute()
        return publish(self._services, self._adapter, place, users, progress)

    def verify(self) -> tuple[Problem, ...]:
        """Derives every digest in the home again; an empty answer means that all is as it should be."""
        return self._services.store.verify()

    def collect(
        self, *, dry_run: bool = False, progress: Progress = lambda stage, done: None
    ) -> Collected:
        """Takes away what nothing needs: adapter files that no revision has named for a day, halves of files, and what learns
        kept that nobody resumed for a week. Safe while others use the home. ``dry_run`` only says what there is. Raises
        ``HomeError``, ``Busy``.
        """
        return self._services.store.collect(
            dry_run=dry_run, progress=lambda done: progress("Collecting", done)
        )

    def base(self) -> Base:
        """The open base, its files found and hashed. Raises ``WeightsError``, ``CardError``."""
        return self._services.base

    def engine(self) -> Engine:
        """The serving engine, with the base loaded."""
        return self._services.engine

    def close(self) -> None:
        """Closes the home and lets go of the model; a stream that is still open ends as a cancelled turn. Closing twice
        is fine.
        """
        for stream in tuple(self._services.streams):
            stream.close()
        self._services.model.close()
        self._services.store.close()
        # A program that opens many homes, one after another, would keep them all to its end.
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _shared(self) -> Path:
        """Where programs put the stacks that servers elsewhere look for."""
        server = self.settings.vllm
        return (server and server.folder) or self.settings.cache / "served"

    def _load_base(self) -> Base:
        if self._card is None:
            from personalpeft.backends.fake import fake_base

            return fake_base()
        return prepare(self._card, cache=self.settings.cache, progress=self._progress)

    def _load_engine(self, base: Base) -> Engine:
        self._progress("Loading the model", 0.0)
        backend = load_backend(
            self._backend,
            base,
            slots=self.serving.slots,
            rows=self.serving.rows,
            cache=self.settings.cache,
            vllm=self.settings.vllm,
            entropy=self._clock.entropy,
        )
        engine = Engine(backend, self._adapter, self.serving, self._clock)
        self._progress("Loading the model", 1.0)
        return engine

    def _load_completions(self, engine: Engine) -> CompletionCache:
        return open_completion_cache(engine, self.settings.cache)

    def _adapter(self, digest: str) -> Adapter:
        base = self.base()
        return unpack(
            self._services.store.blobs.read(digest),
            source=str(self._services.store.blobs.path(digest)),
            architecture=base.architecture,
            base=base.digest,
            known=True,
        )
