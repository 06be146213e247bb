"""Commands that record feedback, choices and facts, and retract them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from personalpeft.errors import InvalidInput
from personalpeft.formatting import to_json
from personalpeft.learning.report import excerpt, signal_text
from personalpeft_app import session
from personalpeft_app.interrupts import interruptible
from personalpeft_app.options import GlobalOptions, command, flag, option, train_of
from personalpeft_app.output import emit, info, printable
from personalpeft_app.text_input import open_editor, read_argument

if TYPE_CHECKING:
    from personalpeft.chat.compare import Comparison, LabeledComparison
    from personalpeft.learning.status import SignalStatus

_NEITHER = "neither"
_TEXTS = {"edit": "edit", "prefer": "preferred text", "comment": "comment"}


@command(
    "feedback",
    examples=(
        "feedback --up",
        'feedback last --edit "Eight minutes in boiling water, then cold water."',
        "feedback t_01m7yhn42w --editor",
        'feedback --comment "Answer in one sentence."',
    ),
)
@click.argument("turn", default="last", metavar="[TURN|last]")
@flag("--up", help="The reply was good.")
@flag("--down", help="The reply was not good.")
@click.option(
    "--edit", metavar="TEXT", help="The reply as it should have been; '-' reads it from stdin."
)
@flag("--editor", help="Edit the reply in $EDITOR.")
@click.option("--prefer", metavar="TEXT", help="A better text; '-' reads it from stdin.")
@click.option("--comment", metavar="TEXT", help="A rule to follow from now on.")
@click.option(
    "--reward",
    type=click.FloatRange(-1, 1),
    help="How good the reply was, from -1 to 1.",
)
@flag("--no-train", help="No layer is trained on it.")
def feedback(
    common: GlobalOptions,
    turn: str,
    up: bool,
    down: bool,
    editor: bool,
    reward: float | None,
    no_train: bool,
    **given: str | None,
) -> None:
    """Record feedback on a reply and print its id.

    TURN is an id that ask or turns printed, or its beginning.  [default: last]

    Give one option. The newest feedback of a kind on a turn counts; comments add up.
    """
    texts = {name: text for name, text in given.items() if text is not None}
    count = sum((up, down, editor, reward is not None, len(texts)))
    if count != 1:
        begin = "Give only" if count else "Say what you think of the reply: give"
        raise click.UsageError(
            f"{begin} one of --up, --down, --edit, --editor, --prefer, --comment and --reward."
        )
    texts = {name: read_argument(text, what=_TEXTS[name]) for name, text in texts.items()}
    with session.open_user(common, "change") as user:
        about = user.turn(turn)
        if editor:
            texts = {"edit": open_editor(about.reply)}
        rating = 1 if up else -1 if down else None
        signal = user.feedback(
            about, rating=rating, reward=reward, train=train_of(no_train), **texts
        )
        # None where another program has superseded it meanwhile.
        status = next((each for each in user.signal_statuses() if each.signal.id == signal), None)
        too_few = user.pending().too_few
    data = {"signal": signal, "turn": about.id, "user": user.id, "status": status}
    emit(common, data, signal)
    # Background requests of a front end, such as for a title, may be newer than the reply meant.
    info(common, f"Reply: {excerpt(about.messages[-1].content)} -> {excerpt(about.reply)}")
    use = _describe_use(status, too_few) if status else ""
    info(common, f"Recorded on {about.id}. {use}".rstrip())


def _describe_use(status: SignalStatus, too_few: Mapping[str, int]) -> str:
    if status.place == "rule":
        return "It applies from the next question on."
    if status.is_held_out:
        return f"It replaces an answer that judges {status.layer}, and is not trained on either."
    if status.place == "layer":
        shortage = _describe_shortage(status.layer or "", too_few)
        return shortage or f"The next learn of {status.layer} trains on it."
    return f"Nothing is learned from it: {status.why}."


def _describe_shortage(layer: str, too_few: Mapping[str, int]) -> str:
    """Return how many lessons a layer still needs for its first learn, or an empty text."""
    from personalpeft.learning.plan import MIN_LESSONS

    if layer not in too_few:
        return ""
    return f"The first learn of {layer} needs {MIN_LESSONS} lessons; {too_few[layer]} so far."


@command(
    "compare",
    examples=(
        'compare "How do I boil an egg?"',
        'compare "How do I boil an egg?" live base',
        'compare "How do I boil an egg?" --json',
        'compare "How do I boil an egg?" --json --choose 1f4a09c2',
    ),
)
@click.argument("prompt")
@click.argument("a", default="live", metavar="[A]")
@click.argument("b", default="previous", metavar="[B]")
@option("--layer", default="style", help="The layer.")
@click.option(
    "--max-tokens", type=click.IntRange(1), help="The longest answer.  [default: the base's]"
)
@flag("--no-memory", help="Leave your rules and facts out.")
@click.option(
    "--choose",
    metavar="1|2|NAME|neither",
    help="The choice, instead of a question; NAME is from --json.",
)
def compare(
    common: GlobalOptions,
    prompt: str,
    no_memory: bool,
    choose: str | None,
    **options: Any,
) -> None:
    """Compare two answers to a PROMPT blind, and choose one.

    Two revisions of a layer answer, in random order. Your choice is recorded as a preference. Then
    the revisions are named.

    A and B are revisions: the beginnings of their ids, 'live', 'previous' or 'base'. 'previous' was
    live before the last change.
    [default: live previous]

    A program runs it twice: with --json alone, then with --choose and a name. The same revisions
    give the same answers.
    """
    prompt = read_argument(prompt, what="prompt")
    with session.open_user(common, "change") as user:
        with interruptible() as cancelled, common.display:
            comparison = user.compare(prompt, memory=not no_memory, cancelled=cancelled, **options)
        if choose is None and not common.json and not comparison.same and sys.stdin.isatty():
            click.echo(printable(str(comparison)))
            choose = click.prompt(
                "\nWhich is better?", type=click.Choice(["1", "2", _NEITHER]), err=True
            )
        choice = None if choose in (None, _NEITHER) else comparison.choose(choose)
    data = {**comparison.as_json(), "choice": to_json(choice)}
    emit(
        common, data, str(comparison) if choose is None else _format_comparison(comparison, choice)
    )
    if comparison.same:
        info(common, "Both answers are equal, so there is no choice.")


def _format_comparison(comparison: Comparison, choice: LabeledComparison | None) -> str:
    revisions = " and ".join(
        f"{number} is {each.revision}" for number, each in enumerate(comparison.answers, 1)
    )
    recorded = (
        f"{choice.signal}: {choice.chosen} rather than {choice.other}"
        if choice
        else "nothing was recorded"
    )
    return f"{revisions}; {recorded}"


@command(
    "teach",
    examples=(
        'teach "How do I boil an egg?" "Eight minutes in boiling water."',
        'teach "Decline the invitation." - --skill email < answer.txt',
    ),
    surplus="Put the prompt and the answer in quotation marks each.",
)
@click.argument("prompt")
@click.argument("answer")
@click.option("--skill", metavar="NAME", help="Learn it as a separate skill.  [default: the style]")
@flag("--no-train", help="Only keep and list it: no layer is trained on it.")
def teach(
    common: GlobalOptions, prompt: str, answer: str, skill: str | None, no_train: bool
) -> None:
    """Show the ANSWER that you want to a PROMPT.

    Prints the id of the signal. Either of the two may be '-', which reads it from stdin.
    """
    from personalpeft.chat.validation import check_text
    from personalpeft.ids import check_layer_name

    if prompt == answer == "-":
        raise click.UsageError("Only one of PROMPT and ANSWER can come from stdin.")
    prompt = check_text(read_argument(prompt, what="prompt"), what="prompt")
    answer = check_text(read_argument(answer, what="answer"), what="answer")
    layer = "style" if skill is None else check_layer_name(f"skill.{skill}")
    with session.open_user(common, "make") as user:
        trains = not no_train and user.summary().training
        signal = user.teach(prompt, answer, skill=skill, train=train_of(no_train))
        too_few = user.pending().too_few
    emit(common, {"signal": signal, "user": user.id, "layer": layer}, signal)
    option = "" if skill is None else f" --layer {layer}"
    if trains:
        shortage = _describe_shortage(layer, too_few)
        use = shortage or f"To train on it: personalpeft learn{option} --user {user.id}"
        info(common, f"Recorded for {layer}. {use}")
    else:
        info(common, "Recorded. Nothing is trained on it.")


@command(
    "remember",
    examples=(
        'remember "My dog is called Biscuit."',
        'remember "My dog is called Biscuit." --question "What is my dog called?" --answer Biscuit',
    ),
    surplus="Put the fact in quotation marks.",
)
@click.argument("text")
@click.option(
    "--question", "questions", multiple=True, help="A question that it answers; can be repeated."
)
@click.option("--answer", help="The short answer to those questions.")
@flag("--no-train", help="Only retrieve it: no layer is trained on it.")
def remember(
    common: GlobalOptions,
    text: str,
    questions: tuple[str, ...],
    answer: str | None,
    no_train: bool,
) -> None:
    """Store a fact and print its id.

    It is retrieved from the next question on. To change or retract it: personalpeft memory

    TEXT may be '-', which reads it from stdin.
    """
    from personalpeft.memory.items import check_item_text

    if answer is not None and not questions:
        raise InvalidInput("--answer needs a question.", hint="Give --question too.")
    text = check_item_text(read_argument(text, what="fact"), what="fact")
    questions = tuple(check_item_text(question, what="question") for question in questions)
    answer = answer if answer is None else check_item_text(answer, what="answer")
    with session.open_user(common, "make") as user:
        trains = not no_train and user.summary().training
        known = next((item.id for item in user.items() if item.text == text), None)
        signal = user.remember(text, questions=questions, answer=answer, train=train_of(no_train))
        # That of another source stays beside it.
        is_twice = signal != known and any(item.id == known for item in user.items())
    emit(common, {"signal": signal, "user": user.id}, signal)
    if signal == known:
        info(common, "It was known already, and nothing was added.")
        return
    learned = ", and the next learn trains on it" if answer and trains else ""
    info(common, f"Stored. It applies from the next question on{learned}.")
    if is_twice:
        info(common, f"It was known already, as {known}. To have it once: memory retract {known}")


@command("set-training", examples=("set-training off", "set-training on"))
@click.argument("state", type=click.Choice(("on", "off")))
def set_training(common: GlobalOptions, state: str) -> None:
    """Set whether layers may be trained on new feedback.

    With 'off' a rule or fact applies in the prompt only, and other feedback is only recorded. Earlier
    feedback is unchanged; to withdraw it: personalpeft retract ID --training-only
    """
    with session.open_user(common, "make") as user:
        user.set_training(state == "on")
        summary = user.summary()
    emit(common, summary, f"training {state}")


@command(
    "retract",
    examples=(
        "retract s_01m7yhn42w",
        "retract s_01m7yhn42w s_01m7yhp8xd --json",
        "retract s_01m7yhn42w --training-only",
    ),
)
@click.argument("signals", nargs=-1, required=True, metavar="ID...")
@flag("--training-only", help="Only withdraw it from training: rules and facts apply on.")
def retract(common: GlobalOptions, signals: tuple[str, ...], training_only: bool) -> None:
    """Retract feedback: a thumb, an edit, a rule, a fact.

    ID is what feedback printed and signals lists, its beginning, or "last". Either all of several are
    retracted or none. Prints the full ids.

    The next learn builds layers without it; personalpeft stack lists these. Feedback that it
    superseded stays off. The ledger keeps the record; to erase it: personalpeft forget
    """
    with session.open_user(common, "change") as user:
        retracted = user.retract(*signals, training_only=training_only)
    data = {"retracted": retracted, "user": user.id}
    emit(common, data, "\n".join(signal.id for signal in retracted))
    for signal in retracted:
        text = excerpt(signal_text(signal))
        what = "training on the" if training_only else "the"
        info(common, f'Retracted {what} {signal.kind} {signal.id}, "{text}".')
