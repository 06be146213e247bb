"""Find and hash the files that a source names.

Invariants: finding them imports and runs nothing. Weights are safetensors or GGUF, never pickles.
A name inside a file cannot lead out of its folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from personalpeft.base_models.types import ModelCard
from personalpeft.errors import WeightsError
from personalpeft.types import canonical_digest, canonical_json

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MANIFEST = "base.json"
"""What the cache knows of a prepared base. It is no part of the model."""
_BLOCK = 1 << 20
_ORIGINAL = "original_max_position_embeddings"
FRESH_COPY = "Get a fresh copy of the model."


def gguf_parts(card: ModelCard) -> tuple[Path, ...]:
    """Return the parts of a card's GGUF file, or raise ``WeightsError``. Empty for other weights."""
    if card.source.kind == "package":
        return tuple(_resource(card, *file.split(":")) for file in card.source.files)
    if card.source.kind != "gguf" or card.source.path is None:
        return ()
    if not card.source.path.is_file():
        raise _incomplete(card, f"are missing: there is no file {card.source.path}")
    return (card.source.path,)


def _resource(card: ModelCard, package: str, inside: str) -> Path:
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    path = next((path for each in folders if (path := Path(each, inside)).is_file()), None)
    if path is None:
        what = "is not installed" if spec is None else f"has no file {inside}"
        raise _incomplete(card, f"are missing: package {package} {what}")
    return path


def folder_files(card: ModelCard, folder: Path) -> Mapping[str, Path]:
    """Return weights, config.json and tokenizer.json by name, or raise ``WeightsError``."""
    if not folder.is_dir():
        raise _incomplete(card, f"are missing: there is no folder {folder}")
    names = {each.name for each in weight_files(folder, _install_hint(card))}
    if SINGLE not in names:
        names.add(INDEX)
    paths = {name: folder / name for name in ("config.json", "tokenizer.json", *sorted(names))}
    for path in paths.values():
        if not path.is_file():
            raise _incomplete(card, f"are not complete: {path} is missing")
    return paths


def weight_files(folder: Path, hint: str = FRESH_COPY) -> list[Path]:
    """Return the safetensors files of a folder's model, or raise ``WeightsError``.

    Others may lie beside them. Mistral's folders have all weights a second time, under other names.

    Args:
        folder: The folder.
        hint: The hint of the error if there are none.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map")
        names = list(shards.values()) if isinstance(shards, dict) else []
        if not names or not all(
            isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name
            for name in names
        ):
            raise WeightsError(
                f"{folder / INDEX} does not name safetensors files beside it.", hint=FRESH_COPY
            )
        return [folder / name for name in sorted(set(names))]
    if next(folder.glob("*.bin"), None) is not None:
        raise WeightsError(
            f"The weights in {folder} are pickles (.bin), and a pickle can run any program.",
            hint="Get the model's safetensors files, or convert them on a machine without data.",
        )
    raise WeightsError(f"There are no weights in {folder}: {SINGLE} is missing.", hint=hint)


def weights_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights of a folder's model by name, one at a time, as views of the mapped files.

    Raises ``WeightsError`` for a damaged file.
    """
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    yield name, tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file} is damaged: {error}.", hint=FRESH_COPY) from error


def weights_status(card: ModelCard) -> str:
    """Return where a base's weights are: "here", "missing", "from the hub" or "random"."""
    try:
        digest = source_digest(card, lambda files: "")
    except WeightsError:
        return "missing"
    if digest is None:
        return "from the hub" if card.source.kind == "hub" else "random"
    return "here"


def hub_folder(card: ModelCard, report: Callable[[str, float], None]) -> Path:
    """Return the folder of a hub source, downloaded unless ``HF_HUB_OFFLINE`` is set."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    source = card.source
    report(f"Looking for {source.repo} in the hub", 0.0)
    try:
        folder = snapshot_download(
            str(source.repo),
            revision=source.revision,
            allow_patterns=["*.safetensors", "*.json", "*.jinja"],
            # Mistral's second copy of all weights.
            ignore_patterns=["*/*", "consolidated*"],
            tqdm_class=Silent,
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise WeightsError(
            f"The weights of {card.name} are missing: {source.repo} is not on this machine, "
            f"and the hub gives no copy: {reason.removeprefix('Got: ').rstrip('.')}.",
            hint="Go online without HF_HUB_OFFLINE, or copy the model to this machine and give its "
            "folder as the base.",
        ) from error
    return Path(str(folder))


def hash_files(files: Sequence[Path], report: Callable[[float], None] = lambda done: None) -> str:
    """Return the SHA-256 (hex) of the files' bytes in a row; report the share that is done."""
    digest, done, block = hashlib.sha256(), 0, bytearray(_BLOCK)
    view = memoryview(block)
    try:
        total = sum(path.stat().st_size for path in files) or 1
        for path in files:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(block):
                    digest.update(view[:count])
                    done += count
                    report(done / total)
    except OSError as error:
        raise _unreadable(error) from error
    return digest.hexdigest()


def source_digest(card: ModelCard, digest_of: Callable[[Sequence[Path]], str]) -> str | None:
    """Return the digest of a card's weights; None if its source is no file on this machine.

    ``digest_of`` returns the SHA-256 of files in a row. Raises ``WeightsError``.
    """
    if parts := gguf_parts(card):
        return digest_of(parts)
    if card.source.kind != "folder" or card.source.path is None:
        return None
    files = folder_files(card, card.source.path)
    return folder_digest({name: digest_of([path]) for name, path in files.items()})


def safetensors_header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the header of a safetensors file, whose tensors lie in the order of their names.

    Args:
        tensors: The dtype, the shape and the bytes of each tensor, by name.
        metadata: The file's ``__metadata__``.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape, size) in sorted(tensors.items()):
        begin, end = end, end + size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = canonical_json(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def folder_digest(digests: Mapping[str, str]) -> str:
    """Return one digest of files by name and SHA-256, in any order."""
    return canonical_digest(sorted(digests.items()))


def check_digest(card: ModelCard, digest: str, where: str) -> None:
    """Raise ``WeightsError`` unless the weights have the card's digest.

    Args:
        card: The card.
        digest: The digest of the weights.
        where: Their place, for the error.
    """
    expected = card.source.digest
    if expected is not None and expected != f"sha256:{digest}":
        raise WeightsError(
            f"The weights of {card.name} are changed: {where} hashes to {digest[:12]}, "
            f"the card expects {expected.removeprefix('sha256:')[:12]}.",
            hint=f"{_install_hint(card)} If you trust the new ones, put their digest into a card "
            f"of your own: sha256:{digest}.",
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or raise ``WeightsError``."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: {error}.", hint=FRESH_COPY) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is damaged: it holds no object.", hint=FRESH_COPY)
    return value


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a configuration allows, or None without a limit.

    Some models rotate all rows of a batch by the longest one, from a length on. They end there: the
    reply to one user must not depend on another's.
    """
    longest = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    # transformers refuses anything but a table.
    rope = rope if isinstance(rope, dict) else {}
    original = rope.get(_ORIGINAL) or config.get(_ORIGINAL)
    if (rope.get("rope_type") or rope.get("type")) in ("longrope", "dynamic") and original:
        longest = original
    return longest if isinstance(longest, int) and longest > 0 else None


def head_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return a configuration's attention heads, those of keys and values, and the size of a head."""
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return heads, kv_heads, int(config.get("head_dim") or int(config["hidden_size"]) // heads)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, or raise ``WeightsError``."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise WeightsError(f"{path} is damaged: it is not UTF-8.", hint=FRESH_COPY) from error
    except OSError as error:
        raise _unreadable(error) from error


def _unreadable(error: OSError) -> WeightsError:
    return WeightsError(
        f"{error.filename} cannot be read: {error.strerror}.",
        hint="Check that the file is there and its permissions.",
    )


def _incomplete(card: ModelCard, what: str) -> WeightsError:
    return WeightsError(f"The weights of {card.name} {what}.", hint=_install_hint(card))


def _install_hint(card: ModelCard) -> str:
    if card.source.install:
        return f"Install them: {card.source.install}."
    return "Get a fresh copy of the model, or correct the card."
