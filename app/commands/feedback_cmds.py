"""Commands that record feedback, choices and facts, and retract them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

import personalpeft
from personalpeft.errors import InvalidInput
from personalpeft.formatting import to_json
from personalpeft.learning.report import excerpt, signal_text
from personalpeft_app import session
from personalpeft_app.interrupts import interruptible
from personalpeft_app.options import GlobalOptions, command, flag, no_train_flag, option, switch_off
from personalpeft_app.output import emit, info, printable
from personalpeft_app.text_input import open_editor, read_argument

if TYPE_CHECKING:
    from personalpeft.chat.compare import LabeledComparison
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
@no_train_flag("No layer is trained on it.")
def feedback(
    common: GlobalOptions,
    turn: str,
    up: bool,
    down: bool,
    editor: bool,
    reward: float | None,
    train: bool | None,
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
        signal = user.feedback(about, rating=rating, reward=reward, train=train, **texts)
        status, use = _use_of(user, signal)
    data = {"signal": signal, "turn": about.id, "user": user.id, "status": status}
    emit(common, data, signal)
    # Background requests of a front end, such as for a title, may be newer than the reply meant.
    info(common, f"Reply: {excerpt(about.messages[-1].content)} -> {excerpt(about.reply)}")
    info(common, f"Recorded on {about.id}. {use}".rstrip())


def _use_of(user: personalpeft.User, signal: str) -> tuple[SignalStatus | None, str]:
    """Return the status of a new signal, and a sentence on its use.

    None and an empty text if another program has superseded it meanwhile.
    """
    from personalpeft.learning.plan import MIN_LESSONS

    status = next((each for each in user.signal_statuses() if each.signal.id == signal), None)
    if status is None:
        return None, ""
    layer = status.layer
    if status.place == "rule":
        use = "It applies from the next question on."
    elif status.is_held_out:
        use = f"It replaces an answer that judges {layer}, and is not trained on either."
    elif status.place != "layer":
        use = f"It trains no layer: {status.why}."
    elif few := user.pending().too_few.get(layer or ""):
        use = f"The first learn of {layer} needs {MIN_LESSONS} lessons; {few} so far."
    else:
        use = f"The next learn of {layer} trains on it."
    return status, use


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
@switch_off("--no-memory", "memory", help="Leave your rules and facts out.")
@click.option(
    "--choose",
    metavar="1|2|NAME|neither",
    help="The choice, instead of a question; NAME is from --json.",
)
def compare(common: GlobalOptions, prompt: str, choose: str | None, **options: Any) -> None:
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
            comparison = user.compare(prompt, cancelled=cancelled, **options)
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


def _format_comparison(
    comparison: personalpeft.Comparison, choice: LabeledComparison | None
) -> str:
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
@no_train_flag("Only keep and list it: no layer is trained on it.")
def teach(
    common: GlobalOptions, prompt: str, answer: str, skill: str | None, train: bool | None
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
        signal = user.teach(prompt, answer, skill=skill, train=train)
        _, use = _use_of(user, signal)
    emit(common, {"signal": signal, "user": user.id, "layer": layer}, signal)
    info(common, f"Recorded for {layer}. {use}".rstrip())


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
@no_train_flag("Only retrieve it: no layer is trained on it.")
def remember(
    common: GlobalOptions,
    text: str,
    questions: tuple[str, ...],
    answer: str | None,
    train: bool | None,
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
        known = any(item.text == text for item in user.items())
        signal = user.remember(text, questions=questions, answer=answer, train=train)
    emit(common, {"signal": signal, "user": user.id}, signal)
    note = "It was known already." if known else "It applies from the next question on."
    info(common, f"Stored. {note}")


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


FEEDBACK = (feedback, compare, teach, remember, retract, set_training)
"""The commands in the order of the help."""
