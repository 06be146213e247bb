"""The native operations take the arguments that their C++ sources declare.

A wrong declaration would corrupt memory silently. Some operations run on some processors only, so
the sources are read instead.
"""

from __future__ import annotations

import ctypes
import re
from importlib import resources

from personalpeft.backends.torch.ops.native_library import SIGNATURES

_EXPORTED = re.compile(r'extern "C" \{\n(.*)\n\}  // extern "C"', re.DOTALL)
_FUNCTION = re.compile(r"^(?:void|int32_t) (\w+)\(([^)]*)\)\s*\{", re.MULTILINE)


def test_arguments_of_each_operation_are_those_of_its_source() -> None:
    folder = resources.files("personalpeft.backends.torch.ops") / "csrc"
    sources = [each.read_text() for each in folder.iterdir() if each.name.endswith(".cpp")]
    exported = [found[1] for text in sources if (found := _EXPORTED.search(text))]
    declared = {
        name: tuple(map(_kind_in_source, filter(None, map(str.strip, arguments.split(",")))))
        for text in exported
        for name, arguments in _FUNCTION.findall(text)
    }
    assert declared == {name: tuple(map(_kind, types)) for name, types in SIGNATURES.items()}


def _kind_in_source(argument: str) -> str:
    if "*" in argument or "&" in argument:
        return "address"
    kind, _ = argument.removeprefix("const ").split()
    return kind


def _kind(argument: object) -> str:
    return {ctypes.c_int64: "int64_t", ctypes.c_float: "float"}.get(argument, "address")
