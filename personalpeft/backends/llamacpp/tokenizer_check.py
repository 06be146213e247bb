"""Check that llama.cpp tokenizes texts, from a GGUF file, as the base's own tokenizer does.

A GGUF file names one of llama.cpp's pre-tokenizers and has no rules of its own. So both tokenize
texts of the kinds that tokenizers disagree on. ``User.export_merged`` checks each GGUF file so. The
backend does not: it serves tokens of the base's own tokenizer, so this stands alone.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from personalpeft.backends.llamacpp.binding import GgufTokenizer
from personalpeft.base_models.gguf.writer import AS_SAFETENSORS
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError

# All characters are composed: some tokenizers normalise to NFC, llama.cpp does not.
_TEXTS = (
    "Hello, world! How are you?",
    "In 1984 there were 1,234,567.89 of them, 0x1F of 007, 50% and 3rd; 12345678901234567890",
    "Zwölf ١٢٣ ४५६ Ⅷ ½ ² of １２３",
    " one  two   three    four\tfive\t\tsix ",
    "   leading, and trailing   ",
    "a line\nanother\n\n\na third\r\n\r\nwindows \n  indented\n\t\ttwice \n",
    "\u00a0no\u00a0break\u2003em\u200bzero\u3000wide\ufeff",
    "I'm sure they'll say we've, you'd, she's and don't; I'M SURE THEY'LL SAY WE'VE, YOU'D",
    "it’s ‘quoted’ “so” — and–so…",
    "Straße, naïve café, Ångström, œuvre, ﬁve İstanbul ıssız",
    "今日は世界。你好，世界！안녕하세요 세계 ひらがなカタカナ",
    "Привет, мир! Γειά σου Κόσμε! שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "👍 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👋🏽 ☕️ 𝒳 𓂀",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2} # ok\n\n\tif x != y && !z || w->v: pass;",
    "https://example.org/a_b?c=d&e=%20f#g ada@example.org C:\\dir\\file.txt",
    "!!!??? ... ---- ____ ==== ~~~ ^^ $5 €5 £5 ©®™ ∑∫√ ←→ ▁ Ġ Ċ",
    "camelCase snake_case SCREAMING_CASE kebab-case x86_64 COVID-19 v1.2.3-rc4",
    "</s> <s> <unk> [INST] <|endoftext|> <|im_start|>system",
)


def check_tokenizer(base: Base, file: Path) -> None:
    """Raise ``WeightsError`` if llama.cpp tokenizes otherwise with a GGUF file of this base."""
    from personalpeft.backends.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(base)
    # Added tokens are found before a text is split.
    file_of_base = json.loads((base.folder / "tokenizer.json").read_text("utf-8"))
    added = [each["content"] for each in file_of_base.get("added_tokens", ())]
    texts = (*_TEXTS, *(f"so {token} it{token}{token}\n{token} is" for token in added))
    with closing(GgufTokenizer(file)) as gguf:
        for control in (False, True):
            for text in texts:
                expected = tokenizer.encode(text, control=control)
                if gguf.tokenize(text, control=control) != expected:
                    raise WeightsError(
                        f"llama.cpp and the tokenizer of {base.card.name} must agree; they differ "
                        f"on {text!a}.",
                        hint=AS_SAFETENSORS,
                    )
