"""Saying what was good, what was not, and what is so; and taking that back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from personalpeft.errors import InvalidInput
from personalpeft.learning.report import excerpt, signal_text
from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit, info
from personalpeft_app.pending_removals import describe_removals, pending_removals
from personalpeft_app.text_input import open_editor, read_argument

if TYPE_CHECKING:
    from personalpeft.learning.status import SignalStatus


@command(
    "feedback",
    examples=(
        "personalpeft feedback --up",
        'personalpeft feedback last --edit "Eight minutes in boiling water, then cold water."',
        "personalpeft feedback t_01m7yhn42w --editor",
        'personalpeft feedback --comment "Answer in one sentence."',
    ),
)
@click.argument("turn", default="last", metavar="[TURN|last]")
@click.option("--up", "rating", flag_value=1, type=int, help="The reply was good.")
@click.option("--down", "rating", flag_value=-1, type=int, help="The reply was not good.")
@click.option(
    "--edit", metavar="TEXT", help="The reply as it should have been; '-' reads it from stdin."
)
@click.option("--editor", is_flag=True, help="Edit the reply in $EDITOR.")
@click.option(
    "--prefer", metavar="TEXT", help="Another text that is better; '-' reads it from stdin."
)
@click.option("--comment", metavar="TEXT", help="A rule to follow from now on.")
@click.option(
    "--reward",
    type=click.FloatRange(-1, 1),
    help="How good it was, from -1 to 1: a thumb of that size.",
)
def feedback(
    common: GlobalOptions,
    turn: str,
    rating: int | None,
    edit: str | None,
    editor: bool,
    prefer: str | None,
    comment: str | None,
    reward: float | None,
) -> None:
    """Say what was good or not about a reply.

    TURN is an id that ask or turns showed, or the beginning of one.  [default: last]

    Give one of the options; it prints the id under which that is kept. Said again of the same turn, the later counts,
    and both are kept; comments add up.
    """
    if editor and edit is not None:
        raise click.UsageError("Give either --edit or --editor.")
    edit = edit if edit is None else read_argument(edit, what="edit")
    prefer = prefer if prefer is None else read_argument(prefer, what="preferred text")
    comment = comment if comment is None else read_argument(comment, what="comment")
    with session.open_user(common, "change") as user:
        about = user.turn(turn)
        if editor:
            edit = open_editor(about.reply)
        signal = user.feedback(
            about, rating=rating, edit=edit, prefer=prefer, comment=comment, reward=reward
        )
        # None where another program has said otherwise of the same turn meanwhile.
        account = next((each for each in user.lessons() if each.signal.id == signal), None)
    emit(common, {"signal": signal, "turn": about.id, "user": user.id}, signal)
    info(common, f"Kept, about {about.id}. {_describe_use(account) if account else ''}".rstrip())


def _describe_use(account: SignalStatus) -> str:
    if account.place == "profile":
        return "It acts from the next question on."
    if account.pinned:
        return f"It takes the place of an answer that was held back to judge {account.layer} by, and is held back as well."
    if account.place == "layer":
        return f"The next learn of {account.layer} takes it in."
    return f"Nothing is learned from it: {account.why}."


@command(
    "teach",
    examples=(
        'personalpeft teach "How do I boil an egg?" "Eight minutes in boiling water."',
        'personalpeft teach "Decline the invitation." - --skill email < answer.txt',
    ),
)
@click.argument("prompt")
@click.argument("answer")
@click.option(
    "--skill", metavar="NAME", help="Learn it as a skill of its own.  [default: the style]"
)
def teach(common: GlobalOptions, prompt: str, answer: str, skill: str | None) -> None:
    """Show the ANSWER that you want to a PROMPT.

    Prints the id under which it is kept.

    Either of the two may be '-', which reads it from stdin.
    """
    from personalpeft.chat.validation import check_text
    from personalpeft.ids import check_layer_name

    if prompt == answer == "-":
        raise click.UsageError("Only one of PROMPT and ANSWER can come from stdin.")
    prompt = check_text(read_argument(prompt, what="prompt"), what="prompt")
    answer = check_text(read_argument(answer, what="answer"), what="answer")
    layer = "style" if skill is None else check_layer_name(f"skill.{skill}")
    with session.open_user(common, "make") as user:
        signal = user.teach(prompt, answer, skill=skill)
    emit(common, {"signal": signal, "user": user.id, "layer": layer}, signal)
    info(
        common,
        f"Kept for {layer}; personalpeft learn{'' if skill is None else f' --layer {layer}'} takes it in.",
    )


@command(
    "remember",
    examples=(
        'personalpeft remember "My dog is called Biscuit."',
        'personalpeft remember "My dog is called Biscuit." --question "What is my dog called?" --answer Biscuit',
    ),
)
@click.argument("text")
@click.option(
    "--question", "questions", multiple=True, help="A question that it answers; may be given again."
)
@click.option("--answer", help="The short answer to those questions.")
def remember(
    common: GlobalOptions, text: str, questions: tuple[str, ...], answer: str | None
) -> None:
    """Keep a fact for the next questions.

    It is looked up from the next question on. Prints its id.

    TEXT may be '-', which reads it from stdin. To change or remove a fact: personalpeft memory
    """
    from personalpeft.memory.items import check_item_text

    if answer is not None and not questions:
        raise InvalidInput("There is an answer and no question.", hint="Give --question too.")
    text = check_item_text(read_argument(text, what="fact"), what="fact")
    questions = tuple(check_item_text(question, what="question") for question in questions)
    answer = answer if answer is None else check_item_text(answer, what="answer")
    with session.open_user(common, "make") as user:
        signal = user.remember(text, questions=questions, answer=answer)
    emit(common, {"signal": signal, "user": user.id}, signal)
    learned = ", and the next learn takes it in" if answer else ""
    info(common, f"Kept. It acts from the next question on{learned}.")


@command(
    "retract",
    examples=(
        "personalpeft retract s_01m7yhn42w",
        "personalpeft retract s_01m7yhn42w s_01m7yhp8xd --json",
    ),
)
@click.argument("signals", nargs=-1, required=True, metavar="ID...")
def retract(common: GlobalOptions, signals: tuple[str, ...]) -> None:
    """Take back feedback of any kind: a thumb, an edit, a rule, a fact.

    ID is what feedback printed and lessons lists, or the beginning of it. Of several, all are taken back or none. Prints the
    ids in full.

    It counts no more, and the next learn builds without it what has learned of it. What it superseded stays off. The ledger
    keeps that it was said. To destroy it: personalpeft forget
    """
    with session.open_user(common, "change") as user:
        before = pending_removals(user)
        taken = user.retract(*signals)
        later = describe_removals(user, before)
    emit(common, {"retracted": taken, "user": user.id}, "\n".join(signal.id for signal in taken))
    for signal in taken:
        info(
            common, f'Taken back: the {signal.kind} {signal.id}, "{excerpt(signal_text(signal))}".'
        )
    if later:
        info(common, later)
