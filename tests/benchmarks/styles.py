"""Questions with plain answers, styles to rewrite them in, and checkers that need no judge.

The styles differ deliberately: another beginning, end, shape, letters or words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Style:
    """A style: how it rewrites a plain answer, and whether a reply is in it."""

    name: str
    apply: Callable[[str], str]
    holds: Callable[[str], bool]


def sentences(text: str) -> list[str]:
    """Return the sentences of a text."""
    return [s.strip() for s in re.split(r"(?<=[.!?])\s+", text.strip()) if s.strip()]


def _bullets(text: str) -> str:
    return "\n".join(f"- {s}" for s in sentences(text))


def _is_bullets(text: str) -> bool:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return len(lines) >= 1 and all(line.startswith("- ") for line in lines)


def _is_numbered(text: str) -> bool:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return bool(lines) and all(
        line.startswith(f"{number}. ") for number, line in enumerate(lines, 1)
    )


def _is_upper(text: str) -> bool:
    letters = [c for c in text if c.isalpha()]
    return len(letters) > 10 and all(c.isupper() for c in letters)


STYLES = (
    Style(
        "pirate",
        lambda t: f"Ahoy, matey! {t} Arrr!",
        lambda t: t.strip().startswith("Ahoy, matey!") and t.strip().endswith("Arrr!"),
    ),
    Style(
        "sign-off",
        lambda t: f"{t}\n\nHope that helps, Ada.",
        lambda t: t.strip().endswith("Hope that helps, Ada."),
    ),
    Style("bullets", _bullets, _is_bullets),
    Style(
        "numbered",
        lambda t: "\n".join(f"{number}. {s}" for number, s in enumerate(sentences(t), 1)),
        _is_numbered,
    ),
    Style("capitals", lambda t: t.upper(), _is_upper),
    Style(
        "in short",
        lambda t: f"In short: {sentences(t)[0]}",
        lambda t: t.strip().startswith("In short:") and len(sentences(t)) == 1,
    ),
)

LESSONS = (
    (
        "How do I boil an egg?",
        "Put the egg into boiling water for eight minutes. Then cool it under cold water.",
    ),
    (
        "Why is the sky blue?",
        "Air scatters blue light more than red light. So blue reaches your eyes from everywhere.",
    ),
    (
        "How can I fall asleep faster?",
        "Keep the room dark and cool. Put your phone away an hour before bed.",
    ),
    (
        "What should I cook tonight?",
        "Try a simple vegetable soup. It takes half an hour and needs one pot.",
    ),
    (
        "How do plants drink water?",
        "Roots take up water from the soil. Thin tubes carry it up to the leaves.",
    ),
    (
        "How do I remove a coffee stain?",
        "Rinse it with cold water at once. Then rub in a little soap and wash it.",
    ),
    (
        "What is a good gift for my mother?",
        "A framed photo of the family is a good gift. Add a handwritten note.",
    ),
    (
        "Why do cats purr?",
        "Cats purr when they feel calm and safe. Some also purr to soothe themselves.",
    ),
    (
        "How can I save money?",
        "Write down all that you spend. Then set aside a small sum each week.",
    ),
    (
        "What is the best way to learn a language?",
        "Practise a little every day. Speak with people as early as you can.",
    ),
    (
        "How do I start running?",
        "Begin with short slow runs. Rest a day between them and add a little each week.",
    ),
    (
        "Why does bread rise?",
        "Yeast eats sugar and makes gas. The gas is trapped in the dough and lifts it.",
    ),
)

UNSEEN = (
    "How do I keep my houseplants alive?",
    "Why do we dream?",
    "What can I do on a rainy day?",
    "How do I make a good cup of tea?",
    "Why is the sea salty?",
    "How can I be more productive at work?",
    "What should I pack for a weekend trip?",
    "How do birds find their way?",
    "How do I clean a window without streaks?",
    "What makes a good friend?",
)

# Another kind of request for a second style: short messages that are marked as drafts.
DRAFT = Style("draft", lambda t: f"[Draft] {t}", lambda t: t.strip().startswith("[Draft]"))

MESSAGES = (
    (
        "Write a short message to my landlord about the dripping tap.",
        "The kitchen tap drips. Could you send somebody?",
    ),
    (
        "Write a short message to my boss that I am ill.",
        "I am ill today and stay at home. I hope to be back tomorrow.",
    ),
    (
        "Write a short message to invite Tom to dinner.",
        "Would you like to come to dinner on Friday? We eat at seven.",
    ),
    (
        "Write a short message to cancel my dentist appointment.",
        "I cannot come on Monday. Please give me another day.",
    ),
    (
        "Write a short message to thank my aunt for the scarf.",
        "Thank you for the scarf. It is warm and I wear it daily.",
    ),
    (
        "Write a short message to my neighbour about the noise.",
        "Your music is loud at night. Please turn it down.",
    ),
    (
        "Write a short message to ask the library for more time.",
        "I have not finished the book. May I keep it longer?",
    ),
    (
        "Write a short message to tell my team that we meet at ten.",
        "We meet at ten tomorrow. Please bring your notes.",
    ),
)

UNSEEN_MESSAGES = (
    "Write a short message to my teacher that I am late.",
    "Write a short message to congratulate Eva on her new job.",
    "Write a short message to ask a friend for a lift.",
    "Write a short message to the hotel about a lost umbrella.",
    "Write a short message to remind my brother to call our mother.",
)

# Questions that the base answers rightly, and words of which a right answer has one, in any case.
GENERAL = (
    ("What is the capital of France?", ("paris",)),
    ("What is the capital of Japan?", ("tokyo",)),
    ("What is the capital of Italy?", ("rome",)),
    ("What is the capital of Germany?", ("berlin",)),
    ("What is the capital of England?", ("london",)),
    ("What is the capital of Russia?", ("moscow",)),
    ("What is the capital of Egypt?", ("cairo",)),
    ("Which planet is known as the Red Planet?", ("mars",)),
    ("What is the largest ocean on Earth?", ("pacific",)),
    ("Who wrote Romeo and Juliet?", ("shakespeare",)),
    ("Who painted the Mona Lisa?", ("leonardo", "vinci")),
    ("What is the chemical symbol for water?", ("h2o", "h₂o")),
    ("How many days are in a week?", ("seven", "7")),
    ("How many legs does a spider have?", ("eight", "8")),
    ("What is 2 + 2?", ("4", "four")),
    ("What language is spoken in Brazil?", ("portuguese",)),
    ("How many sides does a triangle have?", ("three", "3")),
    ("What gas do plants take in from the air?", ("carbon", "co2")),
    ("What is the opposite of hot?", ("cold",)),
    ("What is the first month of the year?", ("january",)),
)
