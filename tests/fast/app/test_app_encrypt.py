"""``personalpeft encrypt`` turns encryption on, changes the key and turns it off."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import pytest
from app_makers import Shell, read_json, read_to_end

pytest.importorskip("sqlcipher3")

WORD = "Quetzalcoatl"


def words_are_in(home: Path) -> bool:
    return any(WORD.encode() in path.read_bytes() for path in home.rglob("*") if path.is_file())


def test_encrypt_rotate_and_off(shell: Shell, tmp_path: Path) -> None:
    env = {"PERSONALPEFT_KEYS": str(tmp_path / "keys")}
    shell.run("remember", f"My parrot is {WORD}.")
    assert words_are_in(shell.home)
    made = shell.run("encrypt", "--key", "file", "--json", **env)
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["source"] == "file"
    assert not words_are_in(shell.home)
    assert WORD in shell.run("memory", **env).stdout
    assert shell.run("encrypt", "--rotate", **env).exit_code == 0
    assert len(list((tmp_path / "keys").iterdir())) == 2
    assert WORD in shell.run("memory", **env).stdout
    stolen = shell.run("memory", "--json", PERSONALPEFT_KEYS=str(tmp_path))
    assert stolen.exit_code == 7
    assert json.loads(stolen.stderr)["error"]["kind"] == "HomeError"
    assert WORD not in stolen.output
    assert shell.run("encrypt", "--off", "--rotate", **env).exit_code == 2
    assert shell.run("encrypt", "--off", **env).exit_code == 0
    assert words_are_in(shell.home)


def test_server_of_an_encrypted_home_stores_no_api_key_as_text(
    shell: Shell, tmp_path: Path
) -> None:
    env = {"PERSONALPEFT_KEYS": str(tmp_path / "keys")}
    assert shell.run("encrypt", "--key", "file", **env).exit_code == 0
    first = shell.run("api-key", "first", **env)
    assert first.exit_code == 2
    assert "api-key make --admin" in first.stderr
    refused = shell.run("serve", "--port", "0", "--public", **env)
    assert refused.exit_code == 3
    assert "api-key make --admin" in refused.stderr
    secret = shell.run("api-key", "make", "--admin", **env).stdout.strip()
    server = shell.spawn("serve", "--port", "0", "--json", **env)
    said = read_json(server)
    assert (said["admin_key_file"], said["admin_key_created"]) == (None, False)
    asked = urllib.request.Request(
        f"{said['url']}/v1/models", headers={"Authorization": f"Bearer {secret}"}
    )
    with urllib.request.urlopen(asked) as answer:
        assert answer.status == 200
    server.send_signal(signal.SIGTERM)
    read_to_end(server)
    assert not (shell.home / "token").exists()


@pytest.mark.exhaustive
def test_passphrase_comes_from_the_environment_where_there_is_no_terminal(shell: Shell) -> None:
    assert shell.run("encrypt", "--key", "passphrase").exit_code == 2
    right = {"PERSONALPEFT_PASSPHRASE": "correct horse"}
    assert shell.run("encrypt", "--key", "passphrase", **right).exit_code == 0
    for wrong in ("", "wrong horse"):
        refused = shell.run("memory", PERSONALPEFT_PASSPHRASE=wrong)
        assert refused.exit_code == 7
        assert refused.stderr.startswith("error: The ")
    assert shell.run("users", **right).exit_code == 0
