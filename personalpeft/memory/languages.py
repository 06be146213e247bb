"""The languages that texts are written in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from math import log

# Names and code are taken for any language, so a few texts of a dozen say nothing.
_MIN_SHARE = 0.25
_MIN_TEXTS = 2
# 10,000 to 1 against English. A single word ("question 1", "Restaurant") has up to 1,000 to 1, since
# the model takes its pieces for independent; a short question in another language has more.
_MIN_LOG_ODDS = log(10_000)

# The beginning of a text is enough, and a prompt may be a whole book.
_MAX_LENGTH = 1000

ENGLISH = "en"
"""The language of all users' general prompts, as an ISO 639 code."""


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
    """Return the ISO 639 code of a text's language, English in doubt."""
    # Its model takes a second to load.
    from py3langid import rank

    likeliest, *_ = ranked = rank(text[:_MAX_LENGTH])
    language, log_likelihood = likeliest
    return str(language) if log_likelihood - dict(ranked)[ENGLISH] > _MIN_LOG_ODDS else ENGLISH
