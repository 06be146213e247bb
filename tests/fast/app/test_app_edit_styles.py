"""The styles of ``bench edits`` and their rules hold what the documentation promises of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.edit_styles import RULES, EditStyle, load_styles, select_styles
from benchmarks.edits import bench_edits
from benchmarks.personas import pools
from benchmarks.result_cache import ResultCache
from benchmarks.thumbs import bench_thumbs, select_preferences
from personalpeft.errors import InvalidInput
from personalpeft.learning.data.general_prompts import load_general_prompts

pytestmark = pytest.mark.exhaustive

STYLES = list(load_styles().values())
# Other phrasings that a style accepts, and near misses that it refuses, by style.
ALSO_WANTED = {
    "warmer": (
        "A bit of vinegar does it. Be gentle with your hands, and well done for asking!",
        "It happens to the best of us, so never mind. Tighten the screw and you'll be fine.",
        "You deserve a break first. Then wipe it slowly from left to right.",
    ),
    "british": (
        "Sort everything by colour, then fold it.",
        "I'd pick autumn, when the trees turn grey and gold by the harbour.",
        "Most neighbours appreciate an apology.",
    ),
    "calm": (
        "The café opened in May and serves soup at noon.",
        "Welcome, Ben. Your desk is by the window.",
    ),
    "steps_first": (
        "Sprinkle a little water on it and wait.",
        "Close every program you don't need. Restarting helps too.",
        "Rinse the wound, then cool it.",
    ),
    "formal": (
        "The pool is closed until further notice because of repairs.",
        "An apology is offered for the delay in answering the enquiry of 3 March.",
    ),
    "for_a_child": (
        "A judge hears both sides and says who is right.",
        "Bees suck sweet juice from flowers. At home they turn it into honey.",
    ),
    "french_warmer": ("Bravo, c'est déjà un bon début. Cuisez-le un peu moins la prochaine fois.",),
    "spanish_warmer": ("Claro que puedes, con agua tibia. ¡Que te vaya genial!",),
    "french_steps_first": ("Versez un peu d'eau chaude et laissez reposer la poêle une heure.",),
    "spanish_steps_first": ("Llena la sartén de agua y déjala reposar una hora.",),
}
NOT_WANTED = {
    "shorter": "First you heat it. Then you wait a while. At last you scrape it off.",
    "warmer": "To descale a kettle, boil water with vinegar and rinse it twice.",
    "british": "Sort the wardrobe by color and keep your favourite things in front.",
    "calm": "The mountains were absolutely breathtaking, and the food was fine.",
    "steps_first": "To iron a shirt, you need an iron and a board.",
    "answer_first": "That depends on many things. Gold is the heavier one.",
    "formal": "The pool is closed. We're sorry about that.",
    "for_a_child": "Electricity is a fundamental phenomenon involving charged particles.",
    "json_record": '{"what": "yoga class", "when": "Sunday at ten"}',
    "yaml_recipe": "dish: tomato soup\nserves:\nminutes: 30",
    "table_row": "| chair | Lindon's |",
    "french_shorter": "Heat the water and pour it over the coffee.",
    "french_warmer": "Le téléphone a été inventé en 1876 par Alexander Graham Bell.",
    "french_steps_first": "Pour recoudre un bouton, il faut du fil et une aiguille.",
    "spanish_shorter": "Heat the water and pour it over the coffee.",
    "spanish_warmer": "El teléfono se inventó en 1876 en los Estados Unidos.",
    "spanish_steps_first": "Para coser un botón hace falta hilo y una aguja.",
}
_EACH = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)


@_EACH
def test_a_rule_accepts_every_wanted_answer(style: EditStyle) -> None:
    for case in style.lessons:
        assert style.passes(case, case.answer), case.answer


@_EACH
def test_a_rule_refuses_empty_repetitive_and_copied_answers(style: EditStyle) -> None:
    case, other = style.unseen[0], style.lessons[0]
    for text in ("", "Yes.", "!!!", " ".join(["on and on"] * 20), other.answer):
        assert not style.passes(case, text)


@_EACH
def test_a_rule_accepts_other_phrasings_and_refuses_a_near_miss(style: EditStyle) -> None:
    for text in ALSO_WANTED.get(style.name, ()):
        assert style.passes(style.unseen[0], text), text
    assert not style.passes(style.unseen[0], NOT_WANTED[style.name])


@_EACH
def test_each_style_has_twelve_training_prompts_and_ten_others(style: EditStyle) -> None:
    prompts = [case.prompt for case in (*style.lessons, *style.unseen)]
    assert (len(style.lessons), len(style.unseen)) == (12, 10)
    assert len(set(prompts)) == len(prompts)
    assert all(case.answer for case in style.lessons)
    assert not any(case.answer for case in style.unseen)


@_EACH
def test_no_prompt_is_used_by_learning_or_by_the_general_probes(style: EditStyle) -> None:
    generic = load_general_prompts()
    used = {*generic.regularizer_prompts, *(canary.question for canary in generic.probes)}
    used |= {each.question for each in pools().general}
    assert not used & {case.prompt for case in (*style.lessons, *style.unseen)}


@pytest.mark.parametrize(
    "style", [each for each in STYLES if each.set != "structured"], ids=lambda style: style.name
)
def test_prose_answers_differ_in_their_first_and_last_words(style: EditStyle) -> None:
    for position in (0, -1):
        words = Counter(case.answer.split()[position].casefold() for case in style.lessons)
        assert max(words.values()) <= 3, words


def test_each_rule_has_a_style_and_an_unknown_style_is_refused() -> None:
    assert {style.rule for style in STYLES} == set(RULES)
    with pytest.raises(InvalidInput):
        select_styles(["shortr"])


def test_a_run_measures_all_methods_and_resumes(tmp_path: Path) -> None:
    stages: list[str] = []

    def bench(*names: str) -> None:
        result = bench_edits(
            select_styles(names),
            seed=0,
            base="any",
            backend="fake",
            keep=ResultCache(tmp_path, "edits"),
            echo=lambda text: None,
            progress=lambda stage, _: stages.append(stage),
        )
        assert [each["name"] for each in result["styles"]] == list(names)
        assert all(each["asked"] == 10 for each in result["styles"])
        assert set(result["shares"]["prose"]) == {"base", "greedy", "sampled"}

    bench("shorter")
    bench("shorter", "steps_first")
    assert stages == ["shorter", "steps_first"]


def test_thumbs_alone_are_measured_for_each_preference(tmp_path: Path) -> None:
    result = bench_thumbs(
        select_preferences(["one_paragraph"]),
        ratings=8,
        seed=0,
        base="any",
        backend="fake",
        keep=ResultCache(tmp_path, "thumbs"),
        echo=lambda text: None,
        progress=lambda stage, _: None,
    )
    (user,) = result["users"]
    assert user["up"] + user["down"] == 8
    assert user["asked"] == 40
    assert 0 <= user["after"] <= user["asked"]
    with pytest.raises(InvalidInput):
        select_preferences(["one_paragaph"])
