"""Rules for the library's layout and names, checked on the code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

import personalpeft

PACKAGE = Path(personalpeft.__file__).parent
PLUGINS = [each for each in (PACKAGE.parent / "plugins").glob("*/personalpeft_*") if each.is_dir()]

# Private names that were renamed. None of them comes back.
OLD_MODULES = re.findall(
    r"\w+",
    """
    saying talking telling parts means scopes nearness comparing personal transfer replies
    wording account anchors build curriculum digest examination generic habits ways knowing leaks
    lessons lineage manner order pending rules sense spoken voices standing underway objectives
    skills coach drill diary practice serving bases kernels residency residents learning_side
    writing faults blocks slots kv trained gradients outputs programs plain native lanes library
    loras probe splitting wire shelf card survey making prepare strict served_folder modelfile
    entries lookup builds forgetting errands stones portable collect upkeep tokens selfcheck calls
""",
)
OLD_CLASSES = re.findall(
    r"\w+",
    """
    Asked Parts Means Region Choice Noted Part Why Account Anchor Builder Room Digest Paper Sitting
    Answering Patiently Canary Routing Manner Shown Order News Opinion Explained Course Desk Manners
    Learning Supervised Preferred Thumbs Distilled Term Coach Drill Exercise Diary Standing
    Verifying Shaped Hand Rota Unfit Ticket Call Replies Row Piece Live Speaks TextStream Pool Pass
    Shelf Pointers EachItsOwn OneForAll Projection Bound Wide References Stretch Places Chunk Lane
    Seat Told Pair Share Composed Chains Voices Spoken Lineage Job Holder Residents Given
""",
)


def sources() -> Iterator[Path]:
    for package in (PACKAGE, *PLUGINS):
        yield from package.rglob("*.py")


def test_no_renamed_module_or_class_is_left() -> None:
    modules = {path for path in sources() if path.stem in OLD_MODULES}
    packages = {path for path in sources() if path.parent.name in OLD_MODULES}
    classes = {
        (str(path.relative_to(PACKAGE.parent)), name)
        for path in sources()
        for name in re.findall(r"^ *class (\w+)", path.read_text("utf-8"), re.MULTILINE)
        if name.lstrip("_") in OLD_CLASSES
    }
    assert (modules, packages, classes) == (set(), set(), set())


def test_no_two_modules_import_each_other_directly_or_indirectly() -> None:
    graph = grimp.build_graph("personalpeft")
    circles = [
        module
        for module in sorted(graph.modules)
        if any(
            graph.chain_exists(imported, module)
            for imported in graph.find_modules_directly_imported_by(module)
        )
    ]
    assert circles == []


def test_the_diagrams_of_the_architecture_page_are_those_of_the_code() -> None:
    script = PACKAGE.parent / "docs" / "diagrams" / "draw.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
