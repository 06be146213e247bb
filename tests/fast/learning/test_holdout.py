"""A held-out prompt stays held out, also after it is answered again."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_makers import ask, correct, open_runtime, pinned, style, trained_on

import personalpeft
from personalpeft.errors import NothingToLearn
from personalpeft.learning.outcomes import LearnOutcome, SignalUse


def test_version_of_the_holdout_changes_only_with_its_items(
    tmp_path: Path,
) -> None:
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        versions = []
        for name in ("ada", "bo"):
            user = runtime.user(name)
            for number in range(8):
                user.teach(f"question {number}", f"Ahoy! Answer {number}.")
            report = user.learn()
            versions.append(report.scores["questions"]["version"])
            assert f"version {versions[-1]}" in str(report)
            again = user.learn(start="scratch")
            assert again.revision == report.revision
            for number in range(8, 16):
                user.teach(f"question {number}", f"Ahoy! Answer {number}.")
            later = user.learn().scores["questions"]
            assert later["asked"] > report.scores["questions"]["asked"]
            assert later["version"] != versions[-1]
        assert versions[0] != versions[1]


def test_edit_that_supersedes_a_held_out_one_is_held_out_too(tmp_path: Path) -> None:
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        ada = runtime.user("ada")
        replies = [ada.chat(f"question {number}") for number in range(8)]
        for number, reply in enumerate(replies):
            ada.feedback(reply, edit=f"Answer {number}.")
        ada.learn()
        for wording in ("again", "once more"):
            successor = ada.feedback(replies[-1], edit=f"Answer {wording}.")
            (status,) = (each for each in ada.signal_statuses() if each.signal.id == successor)
            assert status.pinned
            lesson = ada.feedback(
                ada.chat(f"another question {wording}"), edit=f"Another answer {wording}."
            )
            ada.learn()
            revision = ada.revisions()[-1]
            assert revision.signals[successor] == "held_out"
            assert revision.signals[lesson] == "trained"


def test_learns_of_one_lesson_each_hold_out_new_lessons_too(tmp_path: Path) -> None:
    """A held-out lesson that judged once is no evidence again, so new ones have to come."""
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        user = runtime.user("ada")
        for number in range(8):
            user.teach(f"question {number}", f"Ahoy! Answer {number}.")
        user.learn()
        waited = []
        for number in range(8, 14):
            signal = user.teach(f"question {number}", f"Ahoy! Answer {number}.")
            try:
                user.learn()
            except NothingToLearn:
                waited.append(signal)
        roles = {k: v for each in user.revisions() for k, v in each.signals.items()}
        assert sum(role == "held_out" for role in roles.values()) >= 3
        # No lesson is lost: what waited is used by the next learn.
        assert waited
        assert set(waited[:-1]) <= roles.keys()


@pytest.mark.parametrize("how", ["consent", "rating", "retraction"])
def test_lesson_that_was_trained_on_and_is_given_again_never_judges(
    how: str, tmp_path: Path
) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        ids = correct(ada, 8)
        ada.learn()
        trained = next(each for each in ada.signals() if each.id in trained_on(ada) & {*ids})
        correct(ada, 4, first=20)
        if how == "consent":
            ada.retract(trained.id, training_only=True)
        elif how == "rating":
            ada.feedback(str(trained.turn), rating=1)
        else:
            ada.retract(trained.id)
        again = ada.feedback(str(trained.turn), edit=trained.payload["text"], train=True)
        report = ada.learn()
        assert again not in report.scores["spent_items"]
        assert ada.revisions()[-1].signals[again] == "trained"


def test_test_question_of_a_fact_is_not_taught_by_another_fact_with_its_questions(
    tmp_path: Path,
) -> None:
    text, questions = (
        "My dog is called Biscuit.",
        ["Dog?", "Its name?", "Dog's name?", "Who barks?"],
    )
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        first = ada.remember(text, questions=questions, answer="Biscuit")
        ada.learn()
        ada.remember("Biscuit barks.", questions=[*questions, "And the dog?"], answer="Biscuit")
        report = ada.learn()
        assert not {each.prompt for each in report.examples} & {*questions}
        assert first not in {each.signal for each in report.sources}
        assert report.source_counts[SignalUse.LEARNED_EARLIER] == 1


def test_lesson_whose_prompt_does_not_fit_the_context_is_left_out_by_name(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        correct(ada, 7)
        long = ada.teach("p " * 3000, style("Too long."))
        report = ada.learn()
        assert report.live
        uses = {each.signal: each.use_code for each in report.sources}
        assert uses[long] is SignalUse.TOO_LONG
        (status,) = (each for each in ada.signal_statuses() if each.signal.id == long)
        assert status.use_code is SignalUse.TOO_LONG
        assert long not in trained_on(ada)
        # With another user who has nothing else, that is the reason.
        bo = runtime.user("bo")
        for number in range(5):
            bo.teach(f"{number} " * 3000, "Too long.")
        nothing = bo.learn()
        assert nothing.outcome is LearnOutcome.NOTHING_TO_LEARN
        assert {each.use_code for each in nothing.sources} == {SignalUse.TOO_LONG}
        with pytest.raises(NothingToLearn) as caught:
            bo.learn()
        assert caught.value.hint


def test_edit_behind_the_cut_of_a_reply_is_left_out_by_name(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        correct(ada, 7)
        reply = ask(ada)
        behind = ada.feedback(reply, edit=f"{reply.text} Bye.")
        before = ada.feedback(ask(ada, "Another."), edit=f"Ahoy! {reply.text}")
        report = ada.learn("style", recipe={"max_length": 16})
        uses = {each.signal: each.use_code for each in report.sources}
        assert uses[behind] is SignalUse.TOO_LONG
        assert uses[before] is not SignalUse.TOO_LONG
        assert behind not in trained_on(ada)
        # A longer cut has room for it.
        ada.learn("style", recipe={"max_length": 64})
        assert behind in trained_on(ada) | pinned(ada)


QUESTIONS = ["Dog?", "Its name?", "Dog's name?", "Who barks?"]


@pytest.mark.parametrize("how", ["told again", "edited"])
def test_each_fact_is_judged_by_a_question_that_no_revision_was_trained_on(
    how: str, tmp_path: Path
) -> None:
    text, turned = "My dog is called Biscuit.", QUESTIONS[::-1]
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        first = ada.remember(text, questions=QUESTIONS, answer="Biscuit")
        ada.learn()
        if how == "edited":
            ada.edit_item(first, f"{text} A terrier.", questions=turned, answer="Biscuit")
        else:
            ada.remember(f"{text} A terrier.", questions=turned, answer="Biscuit")
        report = ada.learn()
        assert report.scores["target"]["asked"] == 1
        judged = {each.prompt for each in report.examples}
        assert judged
        assert not judged & {*QUESTIONS}
        with pytest.raises(NothingToLearn):
            ada.learn()


def test_retracted_lessons_go_although_the_only_new_one_is_too_long(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        lessons = correct(ada, 6)
        assert ada.learn().live
        for lesson in lessons:
            ada.retract(lesson)
        ada.teach("p " * 3000, style("Too long."))
        ada.learn()
        assert not ada.stack().entries
