"""Every command and Python block of the documentation works: tutorials run, the rest is checked."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from gguf_models import TEMPLATE, write_model

from personalpeft.base_models.types import Base
from personalpeft_app.cli import cli

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "plugins").rglob("README.md")]
)
TUTORIALS = ROOT / "docs/tutorials"
# Pages of the command line whose blocks print usage, not commands.
GENERATED = {"commands.md"}


def blocks(page: Path, *languages: str) -> list[str]:
    pattern = rf"```(?:{'|'.join(languages)})\n(.*?)```"
    return re.findall(pattern, page.read_text("utf-8"), re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of each `personalpeft` command in the shell blocks of a page."""
    found = []
    for block in blocks(page, "sh", "console", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ").strip()
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words[:1] == ["personalpeft"]:
                ends = [
                    at for at, word in enumerate(words) if word in ("|", "&&", "&", ";", "<", ">")
                ]
                found.append(words[1 : min(ends, default=len(words))])
    return found


def parse(arguments: list[str]) -> None:
    """Parse a command line as the program does, without running it."""
    command: click.Command = cli
    parent: click.Context | None = None
    name = "personalpeft"
    while True:
        context = command.make_context(name, list(arguments), parent=parent)
        if not isinstance(command, click.Group):
            return
        rest = [*context._protected_args, *context.args]
        if not rest and command.invoke_without_command:
            return
        found, resolved, arguments = command.resolve_command(context, rest)
        assert resolved is not None
        name, command, parent = str(found), resolved, context


@pytest.mark.parametrize("arguments", ["learn --nope", "api-key nope", "teach one", "nope"])
def test_a_command_missing_from_the_program_is_found(arguments: str) -> None:
    with pytest.raises(click.UsageError):
        parse(arguments.split())


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name
)
def test_the_program_accepts_every_command_of_a_page(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in commands(page):
        try:
            parse(arguments)
        except click.exceptions.Exit:
            pass
        except click.FileError:
            pass
        except click.BadParameter as error:
            # A reader's files are missing here; everything else must be right.
            if "exist" not in error.message and "No such file" not in error.message:
                pytest.fail(f"{arguments}: {error.format_message()}")
        except click.UsageError as error:
            pytest.fail(f"{arguments}: {error.format_message()}")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_every_python_block_compiles_and_imports_names_that_exist(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import):
                for name in node.names:
                    importlib.import_module(name.name)
            elif isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                for name in node.names:
                    if not hasattr(module, name.name):
                        importlib.import_module(f"{node.module}.{name.name}")


@pytest.mark.exhaustive
def test_the_commands_of_the_page_about_own_bases_run(
    tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSONALPEFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PERSONALPEFT_BASE", "my-model")
    monkeypatch.chdir(tmp_path)
    write_model("qwen3", tiny_base, tmp_path / "my-model.gguf")
    shutil.copytree(tiny_base.folder, "my-folder")
    (tmp_path / "my-folder" / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    found = commands(ROOT / "docs/how-to/own-base.md")
    assert len(found) > 5
    for arguments in found:
        ended = CliRunner().invoke(cli, arguments)
        assert ended.exit_code == 0, f"{arguments}: {ended.output}"


def test_generated_pages_are_up_to_date() -> None:
    check = [sys.executable, str(ROOT / "docs/reference/write.py"), "--check"]
    ended = subprocess.run(check, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.exhaustive
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / ".mkdocs.yml")]
    ended = subprocess.run(
        [*build, "-d", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "search" / "search_index.json").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_heading_resolves(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text("utf-8")):
        text = (page.parent / target if target else page).read_text("utf-8")
        headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
        slugs = {
            re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings
        }
        assert anchor in slugs, f"{target}#{anchor}"


def test_the_first_adapter_tutorial_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSONALPEFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERSONALPEFT_USER", "ada")
    outputs: list[tuple[str, str]] = []
    for arguments in commands(TUTORIALS / "first-adapter.md"):
        result = CliRunner().invoke(cli, [*arguments, "--backend", "fake"])
        assert result.exit_code == 0, (arguments, result.output)
        outputs.append((arguments[0], result.stdout))
    replies = [output for name, output in outputs if name == "ask"]
    assert len(replies) == 3
    (why,) = (output for name, output in outputs if name == "why")
    assert "style@" in why
    assert "In short: " in why
    assert replies[1] != replies[2]
    (report,) = (output for name, output in outputs if name == "learn")
    assert "promoted" in report.lower()


def test_the_app_of_the_flask_tutorial_turns_corrections_into_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = blocks(TUTORIALS / "flask-thumbs.md", "python")
    monkeypatch.setenv("PERSONALPEFT_HOME", str(tmp_path / "home"))
    names: dict[str, Any] = {"__name__": "thumbs"}
    on_the_fake = block.replace("personalpeft.open()", 'personalpeft.open(backend="fake")')
    exec(compile(on_the_fake, "thumbs.py", "exec"), names)
    browser = names["app"].test_client()
    with names["runtime"] as runtime:
        ada = runtime.user("ada")
        for n in range(6):
            assert browser.post("/chat", data={"prompt": f"question {n}"}).status_code == 302
            turn = ada.turns(1)[0]
            edit = {"edit": f"Ahoy! Answer {n}. Arrr!"}
            assert browser.post(f"/turns/{turn.id}", data=edit).status_code == 302
        browser.post(f"/turns/{turn.id}", data={"rating": "1"})
        browser.post("/learn")
        assert "promoted" in browser.get("/").get_data(as_text=True)
        assert [str(signal.kind) for signal in ada.signals()] == ["edit"] * 6 + ["rating"]
        assert ada.layers()[0].head is not None
        # An unknown turn is a message on the page, not a traceback.
        browser.post("/turns/t_0000", data={"rating": "1"})
        assert "t_0000" in browser.get("/").get_data(as_text=True)
