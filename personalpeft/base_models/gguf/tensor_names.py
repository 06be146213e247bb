"""How llama.cpp calls the parts of a base, and in which order it keeps their rows.

Invariant: a base that llama.cpp would compute in another way than transformers does is refused here, by name, and not
served wrongly.

llama.cpp turns the two halves of each head of a Llama by pairs of neighbours, transformers by halves. So in a GGUF file of
that architecture the rows of Q and K lie in another order (``permuted``), those of an adapter too; all else is as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from personalpeft.base_models.files import read_json
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError

if TYPE_CHECKING:
    from gguf import TensorNameMap

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
_TURNED_BY_PAIRS = frozenset({"llama"})


@dataclass(frozen=True, slots=True)
class GgufNames:
    """``architecture`` is GGUF's name for it, ``config`` the base's config.json. ``heads`` has the number of heads of each
    projection whose rows lie in another order.
    """

    architecture: str
    config: Mapping[str, Any]
    blocks: int
    block_path: str
    heads: Mapping[str, int]

    @property
    def full(self) -> bool:
        """Whether the base's numbers are in float32, and what is computed from them is to be too."""
        return self.config.get("dtype") == "float32"

    @property
    def bytes_per_token(self) -> int:
        """What the keys and values of one token take."""
        heads = int(self.config["num_attention_heads"])
        size = int(self.config.get("head_dim") or int(self.config["hidden_size"]) // heads)
        return (
            self.blocks
            * 2
            * int(self.config.get("num_key_value_heads") or heads)
            * size
            * (4 if self.full else 2)
        )

    def tensor(self, name: str) -> str:
        """GGUF's name for a weight that transformers calls so, with its ".weight" or ".bias". Raises ``WeightsError``."""
        found = _table(self.architecture, self.blocks).get_name(
            name, try_suffixes=(".weight", ".bias")
        )
        if found is None:
            raise WeightsError(
                f"llama.cpp has no place for {name} in a {self.architecture} model.",
                hint="Open the base with torch.",
            )
        return str(found)

    def projection(self, name: str, block: int) -> str:
        """GGUF's name for the weight of a projection (``self_attn.q_proj``) in a block."""
        return self.tensor(f"{self.block_path}.{block}.{name}.weight")

    def to_gguf(self, projection: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The outputs of a projection (the first axis) in the file's order."""
        heads = self.heads.get(projection)
        return (
            rows if heads is None else _swapped(rows, rows.reshape(heads, 2, -1, *rows.shape[1:]))
        )

    def from_gguf(self, projection: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The outputs of a projection in transformers' order."""
        heads = self.heads.get(projection)
        return (
            rows if heads is None else _swapped(rows, rows.reshape(heads, -1, 2, *rows.shape[1:]))
        )


def _swapped(rows: npt.NDArray[Any], heads: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))


def gguf_names(base: Base) -> GgufNames:
    """Raises ``WeightsError`` for a base that llama.cpp does not compute as transformers does, as far as is known here."""
    kind = base.architecture.model_type
    architecture = _ARCHITECTURES.get(kind)
    if architecture is None:
        raise WeightsError(
            f"{base.card.name} is a {kind} model, of which llama.cpp is not known here to compute the same.",
            hint=f"Use torch and PEFT folders with it. Known are {', '.join(_ARCHITECTURES)}.",
        )
    config = read_json(base.folder / "config.json")
    heads = {}
    if architecture in _TURNED_BY_PAIRS:
        queries = int(config["num_attention_heads"])
        heads = {
            "self_attn.q_proj": queries,
            "self_attn.k_proj": int(config.get("num_key_value_heads") or queries),
        }
    return GgufNames(
        architecture, config, base.architecture.blocks, base.architecture.block_path, heads
    )


@cache
def _table(architecture: str, blocks: int) -> TensorNameMap:
    import gguf

    number = next(
        number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture
    )
    return gguf.get_tensor_name_map(number, blocks)
