"""What ``doctor`` reports of llama.cpp: the measured features, and with --load it measures them."""

from __future__ import annotations

import json
from typing import Any

from app_makers import Place

from personalpeft.backends.llamacpp.cpu_probe import probe_cpu
from personalpeft.base_models.gguf.file import source_gguf_file
from personalpeft.base_models.registry import find_card

_REAL = "smollm2-135m-instruct"


def found(place: Place, *args: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and each finding by its name."""
    result = place.run("doctor", *args, "--json", backend="llamacpp")
    assert "Traceback" not in result.output
    return result.exit_code, {each["name"]: each for each in json.loads(result.stdout)["checks"]}


def test_which_features_llamacpp_uses_is_said_once_that_was_tried(place: Place) -> None:
    code, before = found(place, "--base", _REAL)
    assert code == 0
    file = source_gguf_file(find_card(_REAL))
    assert file is not None
    tried = probe_cpu(file, place.cache)
    assert tried.reason not in before["device"]["message"]
    assert tried.reason in found(place, "--base", _REAL)[1]["device"]["message"]


def test_loading_says_what_serves_with_which_features_and_makes_no_home(place: Place) -> None:
    code, said = found(place, "--load", "--base", "tiny-random")
    assert code == 0, said
    (note,) = (place.cache / "llamacpp").iterdir()
    model = said["model"]["message"]
    assert json.loads(note.read_text("utf-8"))["why"] in model
    assert not place.home.exists()
    # What is kept is used again, whatever it says.
    note.write_text(json.dumps({"extra": False, "why": "written-here"}), "utf-8")
    assert "written-here" in found(place, "--load", "--base", "tiny-random")[1]["model"]["message"]
