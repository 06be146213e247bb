"""Compare generated replies by the user's thumbs.

A liked reply is the model's own, and what the user likes is in few of its tokens. So its log-prob
hardly rises, also where the model's replies follow the thumbs. A linear classifier of character
n-grams finds what sets liked replies apart, in any language. It then compares what the live stack
and the candidate reply to prompts that were never trained on.

Invariant: a classifier that cannot predict thumbs it was not fit on says nothing. The gate reads
its cross-validated AUC for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from personalpeft.learning.gate.evidence import ThumbsResults

_NGRAMS = (1, 4)
_FOLDS = 5


def compare_replies(
    liked: Sequence[str], disliked: Sequence[str], before: Sequence[str], after: Sequence[str]
) -> ThumbsResults:
    """Count the replies that a classifier of the rated ones prefers to those before.

    Args:
        liked: The liked replies, at least two.
        disliked: The disliked replies, at least two.
        before: The replies of the live stack.
        after: Those of the candidate to the same prompts.
    """
    # Imported here, since scikit-learn takes seconds to load.
    from scipy.stats import mannwhitneyu, wilcoxon
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    texts, labels = [*liked, *disliked], [1] * len(liked) + [0] * len(disliked)
    folds = StratifiedKFold(min(_FOLDS, len(liked), len(disliked)))
    predict = partial(cross_val_predict, cv=folds, method="predict_proba")
    scores = predict(_make_classifier(), texts, labels)[:, 1]
    of_liked, of_disliked = scores[: len(liked)], scores[len(liked) :]
    test = mannwhitneyu(of_liked, of_disliked, alternative="greater", method="asymptotic")
    classifier = _make_classifier().fit(texts, labels)
    new, former = (classifier.predict_proba(replies)[:, 1] for replies in (after, before))
    changes = new - former
    return ThumbsResults(
        liked=len(liked),
        disliked=len(disliked),
        auc=float(test.statistic) / (len(liked) * len(disliked)),
        auc_p_value=float(test.pvalue),
        asked=len(after),
        better=int((changes > 0).sum()),
        worse=int((changes < 0).sum()),
        p_value=float(wilcoxon(changes, alternative="greater").pvalue) if changes.any() else 1.0,
    )


def _make_classifier() -> Any:
    from sklearn.ensemble import VotingClassifier
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    # L1 finds the one n-gram that decides, L2 what is spread over many, such as the length.
    options = {"class_weight": "balanced", "solver": "liblinear", "random_state": 0}
    regressions = [
        (name, LogisticRegression(l1_ratio=ratio, **options))
        for name, ratio in (("l2", 0), ("l1", 1))
    ]
    return make_pipeline(
        CountVectorizer(analyzer="char", ngram_range=_NGRAMS, binary=True, lowercase=False),
        VotingClassifier(regressions, voting="soft"),
    )
