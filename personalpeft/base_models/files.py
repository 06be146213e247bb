"""The files that a source names: where they lie now, and what they hash to.

Invariants: nothing is imported or run to find them; weights are safetensors or GGUF, never pickles; a name inside a file cannot lead
out of its folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from personalpeft.base_models.types import ModelCard, Source
from personalpeft.errors import WeightsError
from personalpeft.types import canonical_digest

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_BLOCK = 1 << 20


def package_files(card: ModelCard) -> tuple[Path, ...]:
    """The resources of a package source, in the card's order. Does not import the packages.

    Raises ``WeightsError`` for one that is not installed; the hint is the card's way to install it.
    """
    found = []
    for file in card.source.files:
        package, _, inside = file.partition(":")
        spec = find_spec(package)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        path = next(
            (Path(place, inside) for place in places if Path(place, inside).is_file()), None
        )
        if path is None:
            what = "is not installed" if spec is None else f"has no file {inside}"
            raise WeightsError(
                f"The weights of {card.name} are missing: package {package} {what}.",
                hint=_install_hint(card),
            )
        found.append(path)
    return tuple(found)


@contextmanager
def find_source_gguf(card: ModelCard) -> Iterator[Path]:
    """The one GGUF file of a package source; where it is in parts, joined for the while. Raises ``WeightsError``."""
    parts = package_files(card)
    if len(parts) == 1:
        yield parts[0]
        return
    with TemporaryDirectory(prefix="personalpeft-") as folder:
        whole = Path(folder, "joined.gguf")
        join(parts, whole)
        yield whole


def join(parts: Sequence[Path], whole: Path) -> None:
    """Writes files one after the other into one."""
    with whole.open("wb") as out:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, out, _BLOCK)


def folder_files(card: ModelCard, folder: Path) -> Mapping[str, Path]:
    """Weights, config.json and tokenizer.json of a folder by their names. Raises ``WeightsError`` for what is missing in it."""
    if not folder.is_dir():
        raise WeightsError(
            f"The weights of {card.name} are missing: there is no folder {folder}.",
            hint=_install_hint(card),
        )
    names = ["config.json", "tokenizer.json", *_weight_names(card, folder)]
    for name in names:
        if not (folder / name).is_file():
            raise WeightsError(
                f"The weights of {card.name} are not complete: {folder / name} is missing.",
                hint=_install_hint(card),
            )
    return {name: folder / name for name in names}


def _weight_names(card: ModelCard, folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map")
        names = set(shards.values()) if isinstance(shards, dict) and shards else {None}
        if not all(
            isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name
            for name in names
        ):
            raise WeightsError(
                f"{folder / INDEX} does not name safetensors files beside it.",
                hint="Get a fresh copy of the model.",
            )
        return [INDEX, *sorted(str(name) for name in names)]
    if next(folder.glob("*.bin"), None) is not None:
        raise WeightsError(
            f"The weights in {folder} are pickles (.bin), and a pickle can run any program.",
            hint="Get the model's safetensors files, or convert them on a machine that you can afford to lose.",
        )
    raise WeightsError(
        f"There are no weights in {folder}: {SINGLE} is missing.", hint=_install_hint(card)
    )


def hub_folder(card: ModelCard, report: Callable[[str, float], None]) -> Path:
    """The folder of a hub source, downloaded if need be (never with ``HF_HUB_OFFLINE``). Raises ``WeightsError`` if it cannot be had."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]  # the hub's own

    source = card.source
    report(f"Looking for {source.repo} in the hub", 0.0)
    try:
        found = snapshot_download(
            str(source.repo),
            revision=source.revision,
            allow_patterns=["*.safetensors", "*.json", "*.jinja"],
            ignore_patterns=["*/*"],
            tqdm_class=Silent,
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        why = (
            "and the hub may not be asked (HF_HUB_OFFLINE)"
            if constants.HF_HUB_OFFLINE
            else f"and the hub said: {_line(error)}"
        )
        raise WeightsError(
            f"The weights of {card.name} are missing: {source.repo} is not on this machine, {why}.",
            hint='Copy the model into a folder and point a card at it: [source] kind = "folder", path = "...".',
        ) from error
    return Path(str(found))


def hash_files(files: Sequence[Path], report: Callable[[float], None] = lambda done: None) -> str:
    """SHA-256 (hex) over the bytes of the files, one after the other. ``report`` hears what part of them is done.

    Raises ``WeightsError`` for a file that cannot be read.
    """
    digest, done, block = hashlib.sha256(), 0, bytearray(_BLOCK)
    view = memoryview(block)
    try:
        whole = sum(path.stat().st_size for path in files) or 1
        for path in files:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(block):
                    digest.update(view[:count])
                    done += count
                    report(done / whole)
    except OSError as error:
        raise _unreadable(error) from error
    return digest.hexdigest()


def folder_digest(digests: Mapping[str, str]) -> str:
    """One digest for named files: over each name and the SHA-256 of its bytes, whatever their order."""
    return canonical_digest(sorted(digests.items()))


def check_digest(card: ModelCard, found: str, where: str) -> None:
    """Raises ``WeightsError`` where weights are not the ones that the card names."""
    expected = card.source.digest
    if expected is not None and expected != f"sha256:{found}":
        raise WeightsError(
            f"The weights of {card.name} are changed: {where} hashes to {found[:12]}, the card expects "
            f"{expected.removeprefix('sha256:')[:12]}.",
            hint=_install_hint(card)
            + " If you trust the new ones, put their digest into a card of your own: "
            f"sha256:{found}.",
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ``WeightsError`` if it is damaged or cannot be read."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path} is damaged: {error}.", hint="Get a fresh copy of the model."
        ) from error
    if not isinstance(value, dict):
        raise WeightsError(
            f"{path} is damaged: it holds no object.", hint="Get a fresh copy of the model."
        )
    return value


def read_text(path: Path) -> str:
    """The text in a file; ``WeightsError`` if it is not UTF-8 or cannot be read."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise WeightsError(
            f"{path} is damaged: it is not UTF-8.", hint="Get a fresh copy of the model."
        ) from error
    except OSError as error:
        raise _unreadable(error) from error


def _unreadable(error: OSError) -> WeightsError:
    return WeightsError(
        f"{error.filename} cannot be read: {error.strerror}.",
        hint="Check that the file is there and its permissions.",
    )


def _install_hint(card: ModelCard) -> str:
    source: Source = card.source
    return (
        f"Install them: {source.install}."
        if source.install
        else "Get a fresh copy of the model, or correct the card."
    )


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
