"""Revisions are built again from the ledger, and on another base, by commands alone."""

from __future__ import annotations

import json
from pathlib import Path

from app_makers import Shell


def test_live_revisions_and_named_ones_are_built_again_and_compared(learned: Shell) -> None:
    before = learned.snapshot()
    result = learned.run("rebuild", "--check", "--json")
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.stdout)["revisions"]
    assert (report["outcome"], report["equal"]) == ("equal", True)
    named = learned.run("rebuild", "--check", report["revision"][:12])
    assert named.exit_code == 0
    assert "EQUAL" in named.stdout
    everyone = learned.run("rebuild", "--check", "--all")
    assert everyone.stdout.startswith("ada · style@")
    assert learned.snapshot() == before


def test_revision_that_is_not_equal_is_an_exit_code_and_no_error(
    learned: Shell, tmp_path: Path
) -> None:
    assert learned.run("export-peft", str(tmp_path / "peft")).exit_code == 0
    assert learned.run("import-peft", str(tmp_path / "peft"), "--layer", "skill.x").exit_code == 0
    result = learned.run("rebuild", "--check")
    assert result.exit_code == 8
    assert "imported" in result.stdout
    assert "EQUAL" in result.stdout
    assert "error:" not in result.stderr


def test_rebuild_needs_check_and_one_choice(learned: Shell) -> None:
    assert learned.run("rebuild").exit_code == 2
    assert learned.run("rebuild", "--check", "style@1", "--all").exit_code == 2
    assert learned.run("rebuild", "--check", "style@000000").exit_code == 3
    assert learned.run("rebuild", "--check", "--user", "nobody").exit_code == 3


def test_verify_repairs_a_damaged_file_and_says_what_is_left(learned: Shell) -> None:
    (blob,) = [path for path in (learned.home / "blobs").rglob("*") if path.is_file()]
    whole = blob.read_bytes()
    blob.write_bytes(b"x" + whole[1:])
    assert "--repair" in learned.run("verify").stdout
    result = learned.run("verify", "--repair")
    assert result.exit_code == 0, result.output
    assert "REPAIRED" in result.stdout
    assert blob.read_bytes() == whole
    assert json.loads(learned.run("verify", "--repair", "--json").stdout)["problems"] == []
    assert learned.run("verify").exit_code == 0


def test_rebase_to_the_same_base_and_recipe_changes_nothing(learned: Shell) -> None:
    before = learned.snapshot()
    report = json.loads(learned.run("rebase", "--to", "fake", "--accept", "--json").stdout)
    assert (report["outcome"], report["verdict"], report["switched"]) == ("unchanged", None, False)
    assert [layer["trained"] for layer in report["layers"]] == [False]
    assert learned.snapshot() == before
    result = learned.run("rebase", "--to", "fake")
    assert result.exit_code == 0
    assert "--accept" not in result.stderr


def test_rebase_names_what_is_missing(shell: Shell, learned: Shell) -> None:
    assert learned.run("rebase").exit_code == 2
    assert learned.run("rebase", "--to", "fake", "--user", "nobody").exit_code == 3
    shell.run("remember", "My dog is called Biscuit.", "--user", "bo")
    result = learned.run("rebase", "--to", "fake", "--user", "bo")
    assert result.exit_code == 4
    assert "hint:" in result.stderr
