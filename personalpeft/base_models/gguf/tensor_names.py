"""Map a base's tensors to llama.cpp's names and row order.

Invariant: a base that llama.cpp would compute in another way than transformers is refused.

llama.cpp rotates each head of a Llama (RoPE) by pairs of neighbours, transformers by halves. So
GGUF files and GGUF adapters of that architecture have the rows of Q and K in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from personalpeft.base_models.files import head_sizes, read_json
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError

if TYPE_CHECKING:
    from gguf import TensorNameMap

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
"""GGUF's names of the architectures of transformers."""


@dataclass(frozen=True, slots=True)
class GgufNames:
    """The names of one base's tensors."""

    architecture: str  # GGUF's name
    config: Mapping[str, Any]  # the base's config.json
    blocks: int
    block_path: str
    heads: Mapping[str, int]  # of the projections whose rows are permuted

    @classmethod
    def of_config(
        cls, kind: str, config: Mapping[str, Any], blocks: int, block_path: str
    ) -> GgufNames:
        """Return the names of one base's tensors.

        Args:
            kind: A model type that ``ARCHITECTURES`` has.
            config: The base's config.json.
            blocks: How many blocks it has.
            block_path: The path of its list of blocks.
        """
        architecture, heads = ARCHITECTURES[kind], {}
        if architecture == "llama":
            queries, keys, _ = head_sizes(config)
            heads = {"self_attn.q_proj": queries, "self_attn.k_proj": keys}
        return cls(architecture, config, blocks, block_path, heads)

    @property
    def full(self) -> bool:
        """Whether the base computes in float32."""
        return self.config.get("dtype") == "float32"

    @property
    def bytes_per_token(self) -> int:
        """The size of one token's keys and values."""
        _, kv_heads, size = head_sizes(self.config)
        return self.blocks * 2 * kv_heads * size * (4 if self.full else 2)

    def tensor(self, name: str) -> str:
        """Return GGUF's name for a weight of transformers, or raise ``WeightsError``."""
        gguf_name = _table(self.architecture, self.blocks).get_name(
            name, try_suffixes=(".weight", ".bias")
        )
        if gguf_name is None:
            raise WeightsError(
                f"llama.cpp has no tensor for {name} in a {self.architecture} model.",
                hint="Open the base with torch.",
            )
        return str(gguf_name)

    def projection(self, name: str, block: int) -> str:
        """Return GGUF's name for the weight of a projection in a block."""
        return self.tensor(f"{self.block_path}.{block}.{name}.weight")

    def to_gguf(self, projection: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a projection's outputs (the first axis) in the file's order."""
        return self._permute(projection, rows, (2, -1))

    def from_gguf(self, projection: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a projection's outputs in transformers' order."""
        return self._permute(projection, rows, (-1, 2))

    def _permute(
        self, projection: str, rows: npt.NDArray[Any], pairs: tuple[int, int]
    ) -> npt.NDArray[Any]:
        if projection not in self.heads:
            return rows
        heads = rows.reshape(self.heads[projection], *pairs, *rows.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))


def gguf_names(base: Base, hint: str = "Use torch and PEFT folders with it.") -> GgufNames:
    """Return a base's names, or raise ``WeightsError`` if llama.cpp may compute it differently."""
    kind, shape = base.architecture.model_type, base.architecture
    if kind not in ARCHITECTURES:
        raise WeightsError(
            f"For llama.cpp a base must be one of {', '.join(ARCHITECTURES)}; "
            f"{base.card.name} is {kind}.",
            hint=hint,
        )
    config = read_json(base.folder / "config.json")
    return GgufNames.of_config(kind, config, shape.blocks, shape.block_path)


@cache
def _table(architecture: str, blocks: int) -> TensorNameMap:
    """Return GGUF's names of an architecture's weights."""
    import gguf

    number = next(
        number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture
    )
    return gguf.get_tensor_name_map(number, blocks)
