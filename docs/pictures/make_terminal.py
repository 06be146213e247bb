"""Draw the pictures of the HTTP and daemon pages: ``python docs/pictures/make_terminal.py``.

With the word ``demo`` it draws the picture of the README instead. That is the end of a real run of ``personalpeft demo``, on the
default base.

The pictures show answers of a real server to real clients, and the output of real commands. They run on the backend without a model,
in a temporary home with a fixed clock. So every run draws the same. Only that backend's words are made up.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from pace import steady
from rich.console import Console
from rich.text import Text

import personalpeft
from personalpeft import Runtime, clock
from personalpeft.backends.fake import FakeBackend
from personalpeft_app.cli import cli
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.http.concurrency import limiter_of
from personalpeft_app.http.server import make_app
from personalpeft_app.http.wsgi_server import Server

HERE = Path(__file__).parent
_WIDTH = 100
_BEFORE = "How nice of you to ask! That depends."
_EGG = ("How do I boil an egg?", "Eight minutes, then cold water.")
_LESSONS = {
    "How long does rice take?": "Twelve minutes, lid on.",
    "Which oil for frying?": "Rapeseed oil; it stands 200 °C.",
    "Can I freeze bread?": "Yes, sliced, for three months.",
    "How do I peel garlic?": "Crush it with the flat of the knife.",
    "How much salt in pasta water?": "Ten grams for each litre.",
    "Is raw milk safe?": "Not for children; boil it first.",
    "How long do lentils take?": "Red ones fifteen minutes, green ones thirty.",
    "Can I reheat rice?": "Once, until it steams.",
}
_SESSION = """\
client = openai.OpenAI(base_url=f"{address}/v1", api_key=api_key)
question = [{"role": "user", "content": "How do I boil an egg?"}]
reply = client.chat.completions.create(model="ada", messages=question)
reply.choices[0].message.content

ada = connect(address, api_key).user("ada")
ada.feedback(reply.personalpeft["turn"], edit="Eight minutes, then cold water.")
print(ada.learn())

client.chat.completions.create(model="ada", messages=question).choices[0].message.content
"""


def _say(self: FakeBackend, row: Any, stack: Any) -> tuple[int, ...]:
    prompt, taught = self.decode(row.prompt_tokens), dict((*_LESSONS.items(), _EGG))
    return self.encode(_BEFORE if stack is None else taught[max(taught, key=prompt.rfind)])


def _teach(runtime: Runtime, user: str, count: int) -> None:
    person = runtime.user(user)
    for question, answer in list(_LESSONS.items())[:count]:
        person.feedback(person.chat(question), edit=answer)


def _draw(name: str, title: str, text: str) -> None:
    console = Console(
        record=True, width=_WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    for line in text.rstrip("\n").split("\n"):
        typed = line.startswith(("$ ", ">>> "))
        console.print(Text(line, style="bold" if typed else ""), highlight=False, soft_wrap=False)
    (HERE / f"{name}.svg").write_text(console.export_svg(title=title, unique_id=name), "utf-8")
    print(f"docs/pictures/{name}.svg")


def _session(names: dict[str, Any]) -> str:
    """What a person sees who types this into Python."""
    seen = StringIO()
    with redirect_stdout(seen):
        for line in _SESSION.splitlines():
            print(f">>> {line}" if line else "")
            if line:
                exec(compile(line, "<session>", "single"), names)
    return seen.getvalue()


def _http(home: Path) -> str:
    import openai

    from personalpeft_app.client import connect

    runtime = personalpeft.open(home, backend="fake")
    _teach(runtime, "ada", 7)
    runtime.api_keys.ensure_admin_key()
    own, limiter = ApiV1(runtime), limiter_of(runtime)
    server = Server(
        make_app(runtime, limiter=limiter, more=[own.blueprint]), limiter, host="127.0.0.1", port=0
    )

    def close() -> None:
        own.close()
        runtime.close()

    thread = threading.Thread(target=lambda: server.run(grace=5, close=close))
    thread.start()
    try:
        api_key = runtime.api_keys.admin_key_file.read_text().strip()
        address = f"http://127.0.0.1:{server.port}"
        names = {"openai": openai, "connect": connect, "api_key": api_key, "address": address}
        return _session(names)
    finally:
        server.stop()
        thread.join()


def _daemon(home: Path) -> str:
    with personalpeft.open(home, backend="fake") as runtime:
        _teach(runtime, "ada", 8)
        _teach(runtime, "bo", 5)
    # Whatever this machine is about, and however it is powered.
    (home / "config.toml").write_text(
        "[daemon]\nload = 1\nrequire_ac_power = false\ntemperature = 999\n"
    )
    seen = []
    for words in ("daemon run-once", "daemon status", "daemon report"):
        told = CliRunner().invoke(cli, ["--home", str(home), "--backend", "fake", *words.split()])
        if told.exit_code:
            raise SystemExit(told.output)
        seen.append(f"$ personalpeft {words}\n{told.stdout}\n")
    # What was done once is what status tells of.
    return "".join(seen[1:])


def _demo() -> str:
    """Return what the demo prints on the real base, without its first two parts and the report's details."""
    text = CliRunner().invoke(cli, ["demo"]).stdout
    _, learned, unseen, undone = re.split(r"\n(?=[3-5]\. )", text.partition("\nDone in")[0])
    verdict = learned.partition("\n\n  signals")[0]
    title, rule, head, _, *rows, count = re.split(r"(?m)^(\+[-+]+\n)", unseen)
    table = f"{rule}{head}{rule}...\n{rule}{''.join(rows[-4:])}"
    return f"$ personalpeft demo\n...\n\n{verdict}\n...\n\n{title}{table}{count}\n{undone}"


def main() -> None:
    # Moments are shown in the time of the place, and lines in the width of the terminal.
    os.environ.update(TZ="UTC", COLUMNS=str(_WIDTH))
    time.tzset()
    if sys.argv[1:] == ["demo"]:
        _draw("demo", "personalpeft demo", _demo())
        return
    steadily = steady()
    for name in ("now", "timer", "entropy"):
        object.__setattr__(clock.SYSTEM, name, getattr(steadily, name))
    FakeBackend.reply = _say  # type: ignore[method-assign]  # only the pictures need fixed replies
    with tempfile.TemporaryDirectory() as folder:
        _draw("http", "python", _http(Path(folder) / "http"))
        _draw("daemon", "personalpeft daemon", _daemon(Path(folder) / "daemon"))


if __name__ == "__main__":
    main()
