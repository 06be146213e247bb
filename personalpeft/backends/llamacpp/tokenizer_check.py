"""Whether llama.cpp, by the GGUF file that is written of a base, splits texts as the base's own tokenizer does.

What is written names a way of splitting that llama.cpp has, and says nothing of how it goes about it. So texts of the kinds that
tokenizers part over are split by both before such a file is given to anybody.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from personalpeft.backends.llamacpp.binding import Vocabulary
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError

# All characters composed: some tokenizers compose them first (NFC), which llama.cpp leaves to whoever writes.
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


def check_splitting(base: Base, file: Path) -> None:
    """That llama.cpp splits texts by a GGUF file of this base as the base does. Raises ``WeightsError``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(base.folder / "tokenizer.json"))
    texts = (*_TEXTS, *_around_added(base))
    with closing(Vocabulary(file)) as theirs:
        for control in (False, True):
            tokenizer.encode_special_tokens = not control
            for text in texts:
                wanted = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
                if theirs.tokens(text, control=control) != wanted:
                    raise WeightsError(
                        f"llama.cpp would not split texts as the tokenizer of {base.card.name} does: {text!a}, for one.",
                        hint="Write it as safetensors, and convert that with the model's own tools.",
                    )


def _around_added(base: Base) -> Iterator[str]:
    """The tokens that are found in a text before it is split, among others."""
    told = json.loads((base.folder / "tokenizer.json").read_text("utf-8"))
    for each in told.get("added_tokens", ()):
        token = each["content"]
        yield f"so {token} it{token}{token}\n{token} is"
