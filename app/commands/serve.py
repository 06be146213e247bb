"""The HTTP face, and the tokens that it asks for."""

from __future__ import annotations

import ipaddress
import logging
import sys
from typing import TYPE_CHECKING

import click

from personalpeft.errors import InvalidInput, NotFound
from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, Group, command, global_options
from personalpeft_app.output import emit, format_table, info
from personalpeft_app.progress import Display

if TYPE_CHECKING:
    from personalpeft.settings import Observing
    from personalpeft.store.api_keys import ApiKey

_LOOPBACK = "127.0.0.1"
_EVERYWHERE = "0.0.0.0"


@command(
    "serve",
    examples=(
        "personalpeft serve",
        "personalpeft serve --port 8080 --json",
        "personalpeft serve --public --name models.home",
    ),
    renamed={
        "--rows": "--max-batch",
        "--waiting": "--max-queue",
        "--observing": "--implicit-feedback",
    },
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="0: any that is free.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    help=f"Where to listen.  [default: {_LOOPBACK}, with --public everywhere]",
)
@click.option(
    "--public", is_flag=True, help="Let other machines ask too. Needs a token that was made before."
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="HOST",
    help="A host name to answer to; may be given again.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(1, 256),
    default=16,
    show_default=True,
    help="Replies written at once.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(1, 512),
    default=48,
    show_default=True,
    help="Requests that may wait.",
)
@click.option(
    "--implicit-feedback",
    type=click.Choice(["off", "kept", "learned"]),
    default="off",
    show_default=True,
    help="What becomes of what pages and apps see without asking, such as a copied reply.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0, 3600),
    default=30,
    show_default=True,
    help="Seconds to end in.",
)
def serve(
    common: GlobalOptions,
    port: int,
    host: str | None,
    public: bool,
    names: tuple[str, ...],
    max_batch: int,
    max_queue: int,
    implicit_feedback: Observing,
    grace: float,
) -> None:
    """Answer over HTTP.

    As OpenAI and Anthropic do under /v1, in our own words under /api/v1, for a browser at /. Prints the address.

    Whatever is somebody's needs a token. The first is made at the first start, in the file 'token' of the home.

    On a terminal it prints a link that opens the page signed in as the user, once and within ten minutes.

    Ctrl-C and SIGTERM let what is being written end.
    """
    from personalpeft import Serving
    from personalpeft.store.api_keys import ADMIN_KEY_FILE
    from personalpeft_app.http.api_v1.routes import ApiV1
    from personalpeft_app.http.concurrency import limiter_of
    from personalpeft_app.http.server import make_app
    from personalpeft_app.http.wsgi_server import Server, stopping_on_signals
    from personalpeft_app.web import page
    from personalpeft_app.web.sign_in import SECONDS, SignInCodes

    address = host or (_EVERYWHERE if public else _LOOPBACK)
    if not public and not _is_loopback(address):
        raise InvalidInput(
            f"Other machines could reach {address}.", hint="Say --public if they shall."
        )
    if public and not (common.paths()[0] / ADMIN_KEY_FILE).exists():
        raise NotFound(
            "There is no token yet, so nothing is served to other machines.",
            hint="Run: personalpeft token first",
        )
    serving = Serving(max_batch=max_batch, max_queue=max_queue)
    display = Display(common)
    with session.open_runtime(common, "make", display, serving, implicit_feedback) as runtime:
        made = runtime.api_keys.ensure_admin_key()
        own = ApiV1(runtime)
        codes = SignInCodes(runtime.api_keys)
        places = limiter_of(runtime)
        app = make_app(
            runtime,
            owner=common.user_id(),
            names=names,
            places=places,
            more=[own.blueprint, page.blueprint(codes)],
        )
        # Before the model, which takes a while to load: a port that another has is said at once.
        server = Server(app, places, host=address, port=port)
        with display:
            runtime.engine()
        _log(common)
        url = f"http://{f'[{address}]' if ':' in address else address}:{server.port}"
        emit(
            common,
            {"url": url, "token_file": runtime.api_keys.admin_key_file, "token_made": made},
            url,
        )
        sys.stdout.flush()
        info(
            common,
            f"The token {'was made and ' if made else ''}lies in {runtime.api_keys.admin_key_file}. Ctrl-C stops.",
        )
        # Where what is said here is kept, as a service's is, a secret has no place.
        if sys.stderr.isatty():
            link = _link(url, address, codes.issue(common.user_id()))
            info(
                common,
                f"The page, signed in as {common.user_id()}, once and within {SECONDS // 60} minutes: {link}",
            )

        def close() -> None:
            own.close()
            runtime.close()

        with stopping_on_signals(server.stop):
            server.run(grace=grace, close=close)
    info(common, "Stopped.")


def _link(url: str, address: str, code: str) -> str:
    """Return the page's address with the code behind the ``#``, which a browser sends to no server."""
    # An address that means every one of this machine's is none to go to.
    here = url.replace(address, _LOOPBACK) if address == _EVERYWHERE else url
    return f"{here}/#code={code}"


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _log(common: GlobalOptions) -> None:
    """The access log and what went wrong, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    for name, level in (
        ("personalpeft", logging.WARNING if common.quiet else logging.INFO),
        ("waitress", logging.ERROR),
    ):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


@click.group(
    "token",
    cls=Group,
    invoke_without_command=True,
    examples=(
        "personalpeft token",
        "personalpeft token make --user ada",
        "personalpeft token make --admin",
        "personalpeft token revoke 5f0c",
    ),
)
@global_options
@click.pass_context
def token(ctx: click.Context) -> None:
    """List, make or revoke what lets somebody ask.

    Without a command it lists them.
    """
    if ctx.invoked_subcommand is None:
        _list(ctx.ensure_object(GlobalOptions))


@command("list", examples=("personalpeft token list", "personalpeft token list --json"))
def token_list(common: GlobalOptions) -> None:
    """List the tokens by their ids, oldest first."""
    _list(common)


@command(
    "first",
    examples=(
        "personalpeft token first",
        'curl -H "Authorization: Bearer $(cat $(personalpeft token first))" ...',
    ),
)
def token_first(common: GlobalOptions) -> None:
    """Print where the first token of administration lies.

    Makes it where there is none.
    """
    with session.open_runtime(common, "make") as runtime:
        made = runtime.api_keys.ensure_admin_key()
        where = runtime.api_keys.admin_key_file
    emit(common, {"token_file": where, "token_made": made}, str(where))


@command(
    "make",
    examples=(
        "personalpeft token make --user ada",
        "personalpeft token make --admin --json",
        "personalpeft token make --worker",
    ),
    renamed={"--administration": "--admin"},
)
@click.option("--admin", is_flag=True, help="One that may do everything for everybody.")
@click.option(
    "--worker",
    is_flag=True,
    help="One that fetches stacks and nothing else, for vLLM servers elsewhere.",
)
def token_create(common: GlobalOptions, admin: bool, worker: bool) -> None:
    """Make a token of one user and print it.

    It is shown this once; only a digest of it is kept. Its holder may see and change what is that user's, and nothing else.
    """
    if admin and worker:
        raise InvalidInput(
            "A token is of an administrator or of a worker.", hint="Give one of the two."
        )
    with session.open_runtime(common, "make") as runtime:
        made, secret = runtime.api_keys.create(
            None if admin or worker else common.user_id(), worker=worker
        )
    emit(common, {"id": made.id, "user": made.user, "worker": made.worker, "token": secret}, secret)
    info(common, f"Its id is {made.id}: {_format_owner(made)}.")


@command("revoke", examples=("personalpeft token revoke 5f0c",))
@click.argument("token_id", metavar="ID")
def token_revoke(common: GlobalOptions, token_id: str) -> None:
    """End a token. ID is its id or the beginning of it. A running server refuses it from the next request on."""
    with session.open_runtime(common, "change") as runtime:
        ended = runtime.api_keys.revoke(token_id)
    emit(common, ended, "")
    info(common, f"{ended.id} no longer works.")


token.add_section("Commands", (token_list, token_first, token_create, token_revoke))


def _format_owner(token: ApiKey) -> str:
    return token.user or ("a worker" if token.worker else "administration")


def _list(common: GlobalOptions) -> None:
    with session.open_runtime(common, "read") as runtime:
        known, first = runtime.api_keys.list_keys(), runtime.api_keys.admin_key_file
        there = first.exists()
    rows = [(each.id, _format_owner(each), each.at) for each in known]
    data = {"tokens": known, "token_file": first if there else None}
    emit(common, data, format_table(("TOKEN", "WHOSE", "SINCE"), rows))
    info(
        common,
        f"The first, of administration, {'lies in' if there else 'is made at the first start, in'} {first}.",
    )
