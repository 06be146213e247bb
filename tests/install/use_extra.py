"""Use the library and the face of one extra, in an environment that has only that extra.

"wheels" is the default base in an environment that was installed without a compiler.

``try_extras.py`` runs this with the Python of a fresh environment. It ends with a traceback where
something does not work, and otherwise prints the packages of the environment as JSON.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from packages import packages

COMMAND = str(Path(sys.executable).with_name("personalpeft"))
MISSING_EXTRA = 10
TIMEOUT = 300

# A command that needs the extra. Without the extra its error names it.
FACES = {
    "llamacpp": ["ask", "Hello", "--backend", "llamacpp", "--base", "tiny-random"],
    "certificates": ["verify-certificate", "none.json"],
    "encryption": ["encrypt", "--key", "file"],
    "serve": ["serve", "--port", "0", "--backend", "fake"],
    "tui": ["tui", "--backend", "fake"],
    "daemon": ["daemon", "run-once", "--backend", "fake"],
}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *args], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def use_library() -> None:
    import personalpeft

    heavy = {"flask", "textual", "torch", "transformers"} & set(sys.modules)
    assert not heavy, f"import personalpeft loads {heavy}"
    with personalpeft.open(backend="fake") as runtime:
        ada = runtime.user("ada")
        reply = ada.chat("How do I boil an egg?")
        assert reply.text
        assert ada.feedback(reply, edit="Eight minutes in boiling water.")
        ada.teach("How do I boil an egg?", "Eight minutes.")
        for task in ("tea", "rice", "bread"):
            ada.feedback(ada.chat(f"How do I make {task}?"), edit="Slowly.")
        assert ada.learn().revision
        assert ada.export_peft("peft")
    # The torch backend needs no extra either.
    asked = run("ask", "Hello", "--max-tokens", "4", "--base", "tiny-random")
    assert asked.returncode == 0, asked.stderr
    examined = run("doctor", "--base", "tiny-random")
    assert examined.returncode == 0, examined.stdout + examined.stderr


def use_smollm2() -> None:
    asked = run("ask", "How do I boil an egg?", "--max-tokens", "8")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()


def use_wheels() -> None:
    """Use the default base where nothing was compiled: its weights, without llama.cpp."""
    assert "llama-cpp-python" not in packages()
    asked = run("ask", "How do I boil an egg?", "--max-tokens", "8", "--backend", "torch")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
    # Without --backend the same backend serves.
    use_smollm2()


def use_llamacpp() -> None:
    asked = run(*FACES["llamacpp"], "--max-tokens", "4")
    assert asked.returncode == 0, asked.stderr


def use_certificates() -> None:
    import personalpeft

    with personalpeft.open(backend="fake") as runtime:
        ada = runtime.user("ada")
        report = ada.forget(ada.remember("My dog is called Biscuit."), certificate=True)
        assert report.certificate
        file, _ = report.certificate.write("erased.json")
    checked = run("verify-certificate", str(file))
    assert checked.returncode == 0, checked.stderr


def use_scrub() -> None:
    import personalpeft

    with personalpeft.open(backend="fake") as runtime:
        ada = runtime.user("ada")
        for number in range(5):
            ada.teach(f"question {number}", f"Call +49 151 23456789 for {number}.")
        assert len(ada.learn("style", recipe={"scrub": ["DE"]}, dry_run=True).removed) == 5


def use_encryption() -> None:
    ended = run("encrypt", "--key", "file")
    assert ended.returncode == 0, ended.stderr
    ended = run("remember", "My dog is called Biscuit.", "--backend", "fake")
    assert ended.returncode == 0, ended.stderr


def use_serve() -> None:
    process = subprocess.Popen([COMMAND, *FACES["serve"]], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"http://[^\"\s]+:\d+", process.stdout.readline())
        assert address, "serve prints its address"
        with urllib.request.urlopen(f"{address[0]}/healthz", timeout=TIMEOUT) as answer:
            assert answer.status == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0


def use_tui() -> None:
    """Start the interface in a terminal of 80 columns, wait for its first picture, and leave with
    ctrl+q.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="80", LINES="24")
        os.execv(COMMAND, [COMMAND, *FACES["tui"]])
    picture, asked_to_leave, until = b"", False, time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        if not select.select([terminal], [], [], 1)[0]:
            if b"\x1b[" in picture:
                os.write(terminal, b"\x11")
                asked_to_leave = True
            continue
        try:
            picture += os.read(terminal, 65536)
        except OSError:  # Linux reports the end of the terminal's program as an error.
            break
    _, status = os.waitpid(child, 0)
    assert asked_to_leave, picture[-2000:]
    assert os.waitstatus_to_exitcode(status) == 0, picture[-2000:]


def use_daemon() -> None:
    ended = run(*FACES["daemon"])
    assert ended.returncode == 0, ended.stderr


def use_vllm() -> None:
    """Check that without a server the error is about the server and not about a package."""
    asked = run("ask", "Hello", "--backend", "vllm", "--base", "tiny-random")
    assert asked.returncode not in (0, MISSING_EXTRA), asked.stderr
    assert "PERSONALPEFT_VLLM_URL" in asked.stderr, asked.stderr


USES = {
    "smollm2": use_smollm2,
    "wheels": use_wheels,
    "llamacpp": use_llamacpp,
    "certificates": use_certificates,
    "scrub": use_scrub,
    "encryption": use_encryption,
    "serve": use_serve,
    "tui": use_tui,
    "daemon": use_daemon,
    "vllm": use_vllm,
}


def check_missing(extra: str) -> None:
    """Check that a face without its extra ends with one error line, a hint and its exit code."""
    ended = run(*FACES[extra])
    assert ended.returncode == MISSING_EXTRA, (extra, ended.returncode, ended.stderr)
    error, hint = ended.stderr.strip().splitlines()[-2:]
    assert error.startswith("error:"), ended.stderr
    assert f"personalpeft[{extra}]" in hint, ended.stderr


if __name__ == "__main__":
    installed = packages()
    here = {*sys.argv[1:]}
    if "llama-cpp-python" in installed:  # The default base includes it.
        here.add("llamacpp")
    use_library()
    for extra in sys.argv[1:]:
        USES[extra]()
    for extra in sorted(FACES.keys() - here):
        check_missing(extra)
    print(json.dumps(installed))
