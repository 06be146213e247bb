"""Commands that serve over HTTP and manage its API keys."""

from __future__ import annotations

import ipaddress
import logging
import sys
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING

import click

import personalpeft
from personalpeft.errors import InvalidInput, NotFound
from personalpeft.settings import ImplicitFeedback
from personalpeft_app import session
from personalpeft_app.interrupts import interruptible
from personalpeft_app.options import GlobalOptions, Group, command, flag, option
from personalpeft_app.output import emit, format_table, info

if TYPE_CHECKING:
    from personalpeft.store.api_keys import ApiKey

_RENAMED = {"token_file": "admin_key_file", "token_made": "admin_key_created"}
_LOOPBACK = "127.0.0.1"
_EVERYWHERE = "0.0.0.0"
_FEW = " For more than two users start it again when the home has them, or give --max-batch 16."


def _check_origins(
    context: click.Context, parameter: click.Parameter, origins: tuple[str, ...]
) -> tuple[str, ...]:
    """Return origins as browsers send them: without a path."""
    for origin in origins:
        scheme, mark, host = origin.partition("://")
        if not (scheme and mark and host) or set("/?# ") & set(host):
            raise click.BadParameter(
                f"{origin!a} is no origin. Give scheme and host, such as http://localhost:3000."
            )
    return origins


@command(
    "serve",
    examples=("serve", "serve --port 8080 --json", "serve --public --name models.home"),
    renamed={
        "--rows": "--max-batch",
        "--waiting": "--max-queue",
        "--observing": "--implicit-feedback",
    },
    surplus="Did you mean --port {}?",
)
@option("--port", type=click.IntRange(0, 65535), default=8080, help="0 takes a free one.")
@click.option(
    "--host",
    metavar="ADDRESS",
    help=f"The address to listen on.  [default: {_LOOPBACK}, with --public all]",
)
@flag("--public", help="Accept other machines. Needs an existing API key.")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="HOST",
    help="A host name of this server; can be repeated.",
)
@click.option(
    "--origin",
    "origins",
    multiple=True,
    metavar="URL",
    callback=_check_origins,
    help="The origin of another page or desktop app that may use this server, such as"
    " http://localhost:3000; can be repeated.",
)
@option(
    "--max-batch",
    type=click.IntRange(1, 256),
    help="Replies in one batch. Default: 2 where the home has at most two users and llama.cpp can"
    " serve them; else 32, and 128 on a GPU.",
)
@option("--max-queue", type=click.IntRange(1, 512), default=48, help="Requests in the queue.")
@option(
    "--implicit-feedback",
    type=click.Choice(["off", "kept", "learned"]),
    default="off",
    help="The use of signals without a user's act of feedback, such as a copied reply.",
)
@flag("--no-train", help="New feedback must not be trained on, unless a request says otherwise.")
@flag("--tinker", help="Serve Tinker's API below /tinker. Needs its plugin installed.")
@option(
    "--grace",
    type=click.FloatRange(0, 3600),
    default=30,
    help="Seconds for open replies at shutdown.",
)
def serve(
    common: GlobalOptions,
    port: int,
    host: str | None,
    public: bool,
    names: tuple[str, ...],
    origins: tuple[str, ...],
    max_batch: int | None,
    max_queue: int,
    implicit_feedback: ImplicitFeedback,
    no_train: bool,
    tinker: bool,
    grace: float,
) -> None:
    """Serve over HTTP and print the address.

    /v1 speaks the APIs of OpenAI and Anthropic, /api/v1 has everything else, and / is the page for
    a browser.

    A user's data needs an API key. The first start writes the first one into the file 'token' of
    the home, unless the home is encrypted.

    On a terminal it prints a link that signs in as the user, once and within ten minutes.

    Ctrl-C and SIGTERM let open replies end.
    """
    from personalpeft.backends.choice import ChoiceReason, default_batch
    from personalpeft.store.api_keys import ADMIN_KEY_FILE, KEYS_FILE
    from personalpeft.store.home_keys import ENCRYPTION
    from personalpeft_app.http import security
    from personalpeft_app.http.api_v1.blueprint import ApiV1
    from personalpeft_app.http.concurrency import limiter_of, share_of_a_user
    from personalpeft_app.http.server import make_app
    from personalpeft_app.http.wsgi_server import Server
    from personalpeft_app.web import page
    from personalpeft_app.web.sign_in import SECONDS, SignInCodes

    address = host or (_EVERYWHERE if public else _LOOPBACK)
    if not public and not _is_loopback(address):
        raise InvalidInput(
            f"Other machines could reach {address}.", hint="Give --public to allow that."
        )
    home = common.paths()[0]
    file, command = ADMIN_KEY_FILE, "first"
    if (home / ENCRYPTION).exists():
        file, command = KEYS_FILE, "make --admin"
    if public and not (home / file).exists():
        raise NotFound(
            "Other machines cannot be served: there is no API key yet.",
            hint=f"Run: personalpeft api-key {command}",
        )

    if tinker:
        # Its clients train on torch, and sample many replies at once.
        max_batch = max_batch or default_batch("torch")
    serving = personalpeft.Serving(
        max_batch=max_batch,
        max_queue=max_queue,
        max_queue_per_user=share_of_a_user(max_queue),
        users=None,
    )
    with session.open_runtime(
        common,
        "make",
        serving=serving,
        implicit_feedback=implicit_feedback,
        train=not no_train,
    ) as runtime:
        api = ApiV1(runtime)
        codes = SignInCodes(runtime.api_keys)
        limiter = limiter_of(runtime)
        extensions = []
        if tinker:
            extensions.append(runtime.http_extension("tinker", security.plugin_host()))
        app = make_app(
            runtime,
            owner=common.user_id(),
            names=names,
            origins=origins,
            limiter=limiter,
            more=[
                api.blueprint,
                page.blueprint(codes),
                *(extension.blueprint for extension in extensions),
            ],
        )
        # Before the slow load of the model, so that a port in use fails at once.
        server = Server(app, limiter, host=address, port=port)
        # After that, so that a start that fails leaves no API key, which --public asks for.
        created = runtime.api_keys.ensure_admin_key()
        with common.display:
            runtime.engine()
            choice = runtime.backend_choice()
        _log(common)
        url = f"http://{f'[{address}]' if ':' in address else address}:{server.port}"
        key_file = _admin_key_file(runtime)
        data = {
            "url": url,
            "admin_key_file": key_file,
            "admin_key_created": created,
            "backend": choice.name,
            "backend_reason": choice.reason,
            "max_batch": choice.max_batch,
        }
        emit(common, data, url, renamed=_RENAMED)
        sys.stdout.flush()
        few = _FEW if choice.reason is ChoiceReason.FEW_ROWS else ""
        info(common, f"Backend: {choice}.{few}")
        where = f"is in {key_file}" if key_file else "is made by: personalpeft api-key make"
        info(common, f"The API key {where}. Ctrl-C stops.")
        # A service's output is stored, and a secret has no place there.
        if sys.stderr.isatty():
            user, minutes = common.user_id(), SECONDS // 60
            link = _link(url, address, codes.issue(user))
            info(common, f"Sign in as {user}, once and within {minutes} minutes: {link}")

        def close() -> None:
            for extension in extensions:
                extension.close()
            api.close()
            runtime.close()

        with interruptible(server.stop), interruptible(server.stop, SIGTERM):
            server.run(grace=grace, close=close, stop_jobs=api.jobs.stop)
    info(common, "Stopped.")


def _admin_key_file(runtime: personalpeft.Runtime) -> Path | None:
    file = runtime.api_keys.admin_key_file
    return file if file.exists() else None


def _link(url: str, address: str, code: str) -> str:
    """Return the page's address with the code in the fragment. No browser sends that."""
    # The address of all interfaces is no destination.
    here = url.replace(address, _LOOPBACK) if address == _EVERYWHERE else url
    return f"{here}/#code={code}"


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _log(common: GlobalOptions) -> None:
    """Write the access log and errors to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logger = logging.getLogger("personalpeft")
    logger.handlers = [handler]
    logger.setLevel(logging.WARNING if common.quiet else logging.INFO)
    logger.propagate = False


@click.group(
    "api-key",
    cls=Group,
    default="list",
    examples=(
        "api-key",
        "api-key make --user ada",
        "api-key make --admin",
        "api-key revoke 5f0c",
    ),
)
def api_key() -> None:
    """List, create or revoke API keys.

    Without a command it lists them.
    """


@command("list", examples=("api-key list", "api-key list --json"))
def api_key_list(common: GlobalOptions) -> None:
    """List the API keys by their ids, oldest first."""
    with session.open_runtime(common, "read") as runtime:
        keys, file = runtime.api_keys.list_keys(), _admin_key_file(runtime)
    rows = [(each.id, _format_owner(each), each.at) for each in keys]
    data = {"api_keys": keys, "admin_key_file": file}
    renamed = {"tokens": "api_keys", "token_file": "admin_key_file"}
    emit(common, data, format_table(("API KEY", "OWNER", "SINCE"), rows), renamed=renamed)
    if file:
        info(common, f"The first administrator's API key is in {file}.")


@command(
    "first",
    examples=(
        "api-key first",
        '$ curl -H "Authorization: Bearer $(cat $(personalpeft api-key first))" ...',
    ),
)
def api_key_first(common: GlobalOptions) -> None:
    """Print the path of the first administrator's API key, and create it if needed.

    An encrypted home has no such file: see 'api-key make --admin'.
    """
    with session.open_runtime(common, "make") as runtime:
        created = runtime.api_keys.ensure_admin_key()
        where = _admin_key_file(runtime)
    if where is None:
        raise InvalidInput(
            "An encrypted home has no API key as text.",
            hint="Make one, which is shown once: personalpeft api-key make --admin",
        )
    data = {"admin_key_file": where, "admin_key_created": created}
    emit(common, data, str(where), renamed=_RENAMED)


@command(
    "make",
    examples=("api-key make --user ada", "api-key make --admin --json", "api-key make --worker"),
    renamed={"--administration": "--admin"},
    surplus="Did you mean --user {}?",
)
@flag("--admin", help="An API key with all rights on all users.")
@flag("--worker", help="An API key that only fetches stacks, for vLLM servers.")
def api_key_create(common: GlobalOptions, admin: bool, worker: bool) -> None:
    """Create an API key of one user and print it.

    It is shown once; only its digest is stored. It allows access to that user's data and to nothing
    else.
    """
    if sum((admin, worker, common.user is not None)) > 1:
        raise click.UsageError("--admin, --worker and --user exclude each other. Give one of them.")
    with session.open_runtime(common, "make") as runtime:
        user = None if admin or worker else common.user_id()
        key, secret = runtime.api_keys.create(user, worker=worker)
        is_new = user is not None and not _exists(runtime, user)
    data = {"id": key.id, "user": key.user, "worker": key.worker, "api_key": secret}
    emit(common, data, secret, renamed={"token": "api_key"})
    info(common, f"Its id is {key.id}: {_format_owner(key)}.")
    if is_new:
        info(common, f"The home has no user {user} yet: the first request creates it.")


def _exists(runtime: personalpeft.Runtime, user: str) -> bool:
    try:
        runtime.user(user, create=False)
    except NotFound:
        return False
    return True


@command("revoke", examples=("api-key revoke 5f0c",))
@click.argument("key_id", metavar="ID")
def api_key_revoke(common: GlobalOptions, key_id: str) -> None:
    """Revoke an API key. ID is its id or the beginning of it. Running servers refuse it at once."""
    with session.open_runtime(common, "change") as runtime:
        revoked = runtime.api_keys.revoke(key_id)
    emit(common, revoked, "")
    info(common, f"{revoked.id} no longer works.")


api_key.add_section("Commands", (api_key_list, api_key_first, api_key_create, api_key_revoke))


def _format_owner(key: ApiKey) -> str:
    return key.user or ("a worker" if key.worker else "administration")
