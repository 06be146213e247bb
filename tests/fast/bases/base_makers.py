"""Sources of bases: packages on the path, and a GGUF file of the tiny base."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from gguf_models import write_out
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from personalpeft.base_models.types import Base, ModelCard, Source

TARGETS = ("q_proj", "v_proj")
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def package(folder: Path, name: str, file: str, content: bytes) -> None:
    """Create an installed package with one data file.

    Importing it fails, since weights must be found without an import.
    """
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / name / file).write_bytes(content)


def card(source: Source, **more: object) -> ModelCard:
    return ModelCard(
        **{
            "name": "mine",
            "title": "Mine",
            "licence": "MIT",
            "source": source,
            "targets": TARGETS,
            "context": 256,
            **more,
        }
    )


def tiny_gguf(tiny: Base, path: Path) -> bytes:
    """Write the tiny base's weights and tokenizer as a GGUF file that splits text as SmolLM does.

    Only the row order of Q and K differs from the tiny base.
    """
    shape = tiny.card.source.shape
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(tiny.card.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_block_count(shape.blocks)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)

    tokenizer = Tokenizer.from_file(str(tiny.folder / "tokenizer.json"))
    tokens = [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())] + [
        "Ġ1"
    ]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in tiny.control else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges(["Ġ 1"])
    writer.add_bos_token_id(tokenizer.token_to_id("<|im_start|>"))
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_chat_template(tiny.template)

    for name, weight in load_file(tiny.folder / "model.safetensors").items():
        if weight.shape[0] == len(tokens) - 1:
            weight = np.vstack([weight, weight[:1]])
        plain = name.removesuffix(".weight").removeprefix("model.")
        if plain.startswith("layers."):
            _, block, inside = plain.split(".", 2)
            plain = f"blk.{block}.{_NAMES[inside]}"
        else:
            plain = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[
                plain
            ]
        writer.add_tensor(f"{plain}.weight", weight.astype(np.float32))
    write_out(writer)
    return path.read_bytes()
