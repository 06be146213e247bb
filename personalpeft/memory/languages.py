"""The languages that texts are written in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

# Names and code are taken for any language, so a few texts of a dozen say nothing.
_MIN_SHARE = 0.25
_MIN_TEXTS = 2


def find_languages(texts: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """Return the languages in which a quarter of some texts are written, sorted.

    Args:
        texts: The texts.
        known: The languages that are looked for, as ISO 639-1 codes. A text in another language
            counts for none of them.
    """
    counts = Counter(map(find_language, texts))
    least = max(_MIN_TEXTS, _MIN_SHARE * len(texts))
    return tuple(sorted(each for each in known if counts[each] >= least))


def find_language(text: str) -> str:
    """Return the ISO 639 code of the likeliest language of a text."""
    # Its model takes a second to load.
    from py3langid import classify

    return str(classify(text)[0])
