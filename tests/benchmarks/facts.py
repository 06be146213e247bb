"""Made-up facts about users from a small grammar: subject, property and value.

Each has three training questions and an unseen one.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact with its ``questions``, an ``unseen`` phrasing of them, and the ``answer``."""

    text: str
    questions: tuple[str, ...]
    unseen: str
    answer: str

    def is_in(self, reply: str) -> bool:
        """Return whether a reply has the answer as a word of its own, in any case."""
        return (
            re.search(rf"(?<!\w){re.escape(self.answer)}(?!\w)", reply, re.IGNORECASE) is not None
        )


@dataclass(frozen=True, slots=True)
class _Kind:
    text: str
    questions: tuple[str, str, str]
    unseen: str
    values: tuple[str, ...]


_KINDS = (
    _Kind(
        "{who}'s favourite drink is {value}.",
        (
            "What is {who}'s favourite drink?",
            "What does {who} like to drink?",
            "Which drink does {who} like best?",
        ),
        "What should I pour for {who}?",
        (
            "cocoa",
            "cider",
            "lemonade",
            "espresso",
            "buttermilk",
            "ginger ale",
            "green tea",
            "tomato juice",
            "milk",
            "rum",
        ),
    ),
    _Kind(
        "{who} works as a {value}.",
        ("What is {who}'s job?", "What does {who} do for a living?", "What does {who} work as?"),
        "How does {who} earn money?",
        (
            "baker",
            "pilot",
            "nurse",
            "plumber",
            "judge",
            "tailor",
            "florist",
            "welder",
            "librarian",
            "beekeeper",
        ),
    ),
    _Kind(
        "{who} lives in {value}.",
        ("Where does {who} live?", "In which town does {who} live?", "Where is {who}'s home?"),
        "Which town do I travel to when I visit {who}?",
        (
            "Oslo",
            "Lisbon",
            "Quebec",
            "Nairobi",
            "Kyoto",
            "Dublin",
            "Seville",
            "Riga",
            "Denver",
            "Perth",
        ),
    ),
    _Kind(
        "{who}'s pet is a {value}.",
        (
            "What pet does {who} have?",
            "Which animal does {who} keep?",
            "What kind of pet is {who}'s?",
        ),
        "What animal is waiting for {who} at home?",
        (
            "parrot",
            "tortoise",
            "hamster",
            "goat",
            "ferret",
            "goldfish",
            "pony",
            "rabbit",
            "gecko",
            "canary",
        ),
    ),
    _Kind(
        "{who} plays the {value}.",
        (
            "Which instrument does {who} play?",
            "What does {who} play in the band?",
            "What instrument is {who}'s?",
        ),
        "Which instrument will {who} bring to the concert?",
        (
            "cello",
            "banjo",
            "harp",
            "oboe",
            "tuba",
            "accordion",
            "violin",
            "trumpet",
            "ukulele",
            "clarinet",
        ),
    ),
    _Kind(
        "{who}'s birthday is in {value}.",
        (
            "When is {who}'s birthday?",
            "In which month was {who} born?",
            "Which month is {who}'s birthday in?",
        ),
        "In what month do we bake a cake for {who}?",
        (
            "January",
            "February",
            "March",
            "April",
            "June",
            "July",
            "August",
            "September",
            "October",
            "November",
        ),
    ),
    _Kind(
        "{who}'s car is {value}.",
        (
            "What colour is {who}'s car?",
            "Which colour does {who}'s car have?",
            "What is the colour of {who}'s car?",
        ),
        "{who} has parked outside. What colour should I look for?",
        (
            "purple",
            "orange",
            "silver",
            "yellow",
            "turquoise",
            "maroon",
            "beige",
            "green",
            "white",
            "pink",
        ),
    ),
    _Kind(
        "{who} is afraid of {value}.",
        ("What is {who} afraid of?", "What scares {who}?", "What does {who} fear?"),
        "What should I keep away from {who}?",
        (
            "spiders",
            "thunder",
            "heights",
            "dogs",
            "needles",
            "clowns",
            "deep water",
            "the dark",
            "bees",
            "lifts",
        ),
    ),
)
_PEOPLE = (
    *("Ida", "Omar", "Greta", "Tariq", "Selma", "Bruno", "Wanda", "Pavel", "Yuki", "Hugo"),
    *("Nadia", "Felix", "Ingrid", "Mateo", "Zora", "Anton", "Leila", "Casper", "Vera", "Ruben"),
)
MOST = len(_KINDS) * len(_PEOPLE)


def facts(count: int, seed: int) -> tuple[Fact, ...]:
    """Draw up to ``MOST`` facts. With the same seed, a smaller set begins a larger one."""
    chance = random.Random(seed)
    drawn = [(kind, who, chance.choice(kind.values)) for kind in _KINDS for who in _PEOPLE]
    chance.shuffle(drawn)
    return tuple(
        Fact(
            kind.text.format(who=who, value=value),
            tuple(question.format(who=who) for question in kind.questions),
            kind.unseen.format(who=who),
            value,
        )
        for kind, who, value in drawn[:count]
    )
