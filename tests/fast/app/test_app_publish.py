"""``personalpeft publish``, through the command line alone."""

from __future__ import annotations

import json
from pathlib import Path

from app_makers import Shell


def test_live_stacks_are_published_and_served_by_the_server_of_the_home(
    learned: Shell,
) -> None:
    learned.run("remember", "My dog is called Biscuit.", "--user", "bo")
    first = learned.run("publish")
    assert first.exit_code == 0, first.output
    (heading, row) = first.stdout.splitlines()
    assert heading.split() == ["USER", "NAME"]
    user, name = row.split()
    assert (user, name[:13], len(name)) == ("ada", "personalpeft:", 77)
    (there,) = learned.cache.glob("served/published_*/*")
    assert there.name == name[13:]
    again = json.loads(learned.run("publish", "--json").stdout)
    assert again == {
        "folder": str(there.parent),
        "stacks": [{"user": "ada", "name": name, "reason": ""}],
        "written": 0,
        "taken": 0,
    }


def test_named_users_are_published_to_a_named_folder(learned: Shell, tmp_path: Path) -> None:
    learned.run("remember", "My dog is called Biscuit.", "--user", "bo")
    to = ("--to", str(tmp_path / "stacks"))
    both = learned.run("publish", "ada", "bo", *to)
    named = {line.split()[0]: line.split()[1] for line in both.stdout.splitlines()}
    assert named["ada"].startswith("personalpeft:")
    assert not named["bo"].startswith("personalpeft:")
    assert len(list(tmp_path.glob("stacks/published_*/*"))) == 1
    # A named user excludes all others.
    assert "ada" not in learned.run("publish", "--user", "bo", *to).stdout
    unknown = learned.run("publish", "adaa", *to)
    assert unknown.exit_code != 0
    assert "ada" in unknown.stderr.partition("hint:")[2]
    assert learned.run("publish", "--to", str(learned.home / "personalpeft.db")).exit_code == 2


def test_without_a_home_nothing_is_published_and_none_is_created(shell: Shell) -> None:
    result = shell.run("publish")
    assert result.exit_code == 7
    assert not shell.home.exists()
    assert not shell.cache.exists()
