"""Rules for the library's layout and names, checked on the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "personalpeft"
PLUGINS = [each for each in (ROOT / "plugins").glob("*/personalpeft_*") if each.is_dir()]

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
OLD_FACE_MODULES = re.findall(
    r"\w+",
    """
    opening texts failures show interrupt checks unlearning look say move care talk study own acts
    working desk call shapes values bodies asking running guard keeper chores ticking morning
    deciding facts probes line following broken_off inturn next words rooms
""",
)
# `Job` is left out: a job of the HTTP API is called so.
OLD_FACE_CLASSES = re.findall(
    r"\w+",
    """
    Common Finding OwnApi Desk Call Said Begun Ended Asked Offer Plain Written Happening Places
    Unsupported Keeper Chore Period Moment Past Coming Person Known Line Middle Panel Speaking
    Replying Studying Telling Threads Flowing Standing Talk Sure Reading Comparing Links Picked
    Wanted Turned Keyboard
""",
)
OLD_FACE_FUNCTIONS = re.findall(
    r"\w+",
    """
    opened given tell moment examine packed unpacked sent about acting_for administration holder
    for_anybody let_in outlook decide worth mains others go_last tried in_vain complain aloud
    opinion
""",
)
FACES = ROOT / "app"


def sources() -> Iterator[Path]:
    for package in (PACKAGE, *PLUGINS):
        yield from package.rglob("*.py")


def faces() -> Iterator[Path]:
    for kind in ("*.py", "*.js"):
        yield from FACES.rglob(kind)


def definitions(paths: Iterator[Path], pattern: str, former: list[str]) -> set[tuple[str, str]]:
    """Return the files that define a former name, with that name."""
    return {
        (str(path.relative_to(ROOT)), name)
        for path in paths
        for name in re.findall(pattern, path.read_text("utf-8"), re.MULTILINE)
        if name.lstrip("_") in former
    }


def test_no_renamed_module_or_class_is_left() -> None:
    modules = {path for path in sources() if path.stem in OLD_MODULES}
    packages = {path for path in sources() if path.parent.name in OLD_MODULES}
    classes = definitions(sources(), r"^ *class (\w+)", OLD_CLASSES)
    assert (modules, packages, classes) == (set(), set(), set())


def test_no_renamed_module_class_or_function_of_the_faces_is_left() -> None:
    modules = {path for path in faces() if {path.stem, path.parent.name} & {*OLD_FACE_MODULES}}
    classes = definitions(faces(), r"^ *(?:export )?class (\w+)", OLD_FACE_CLASSES)
    functions = definitions(
        faces(), r"^ *(?:export )?(?:async )?(?:def|function) ([a-zA-Z]\w+)", OLD_FACE_FUNCTIONS
    )
    assert (modules, classes, functions) == (set(), set(), set())


def patched_names(node: ast.AST) -> list[str]:
    """Return all names in the target of a patch: of what is replaced, and where it is."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Call) and re.search(r"\b(set|del)attr$", ast.unparse(node.func)):
        # The first argument may be a dotted name. Then a value follows.
        targets = node.args[: 1 if isinstance(node.args[0], ast.Constant) else 2]
    elif isinstance(node, ast.Assign):
        targets = [each for each in node.targets if not ast.unparse(each).startswith("self.")]
        targets = [each for each in targets if isinstance(each, ast.Attribute)]
    return [name for each in targets for name in re.findall(r"\w+", ast.unparse(each))]


def test_no_test_patches_a_private_name() -> None:
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "plugins").glob("*/tests/*.py")]
    patches = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for name in patched_names(node)
        if re.match("_(?!_)", name)
    ]
    assert patches == []


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
    script = ROOT / "docs" / "diagrams" / "draw.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
