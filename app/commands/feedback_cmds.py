"""Commands that record feedback and facts, and retract or erase them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from personalpeft.errors import InvalidInput
from personalpeft.learning.report import excerpt, signal_text
from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit, info
from personalpeft_app.progress import Display
from personalpeft_app.signals import interruptible
from personalpeft_app.text_input import open_editor, read_argument

if TYPE_CHECKING:
    from collections.abc import Collection

    from personalpeft import User
    from personalpeft.learning.status import SignalStatus
    from personalpeft.learning.triggers import TrainingTrigger


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
@click.option("--prefer", metavar="TEXT", help="A better text; '-' reads it from stdin.")
@click.option("--comment", metavar="TEXT", help="A rule to follow from now on.")
@click.option(
    "--reward",
    type=click.FloatRange(-1, 1),
    help="How good the reply was, from -1 to 1.",
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
    """Record feedback on a reply and print its id.

    TURN is an id that ask or turns printed, or its beginning.  [default: last]

    Give one option. The newest feedback of a kind on a turn counts; comments add up.
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
        # None where another program has superseded it meanwhile.
        status = next((each for each in user.lessons() if each.signal.id == signal), None)
    data = {"signal": signal, "turn": about.id, "user": user.id, "status": status}
    emit(common, data, signal)
    info(common, f"Recorded on {about.id}. {_describe_use(status) if status else ''}".rstrip())


def _describe_use(status: SignalStatus) -> str:
    if status.place == "profile":
        return "It applies from the next question on."
    if status.pinned:
        return f"It replaces an answer that judges {status.layer}, and is not trained on either."
    if status.place == "layer":
        return f"The next learn of {status.layer} trains on it."
    return f"Nothing is learned from it: {status.why}."


@command(
    "teach",
    examples=(
        'personalpeft teach "How do I boil an egg?" "Eight minutes in boiling water."',
        'personalpeft teach "Decline the invitation." - --skill email < answer.txt',
    ),
)
@click.argument("prompt")
@click.argument("answer")
@click.option("--skill", metavar="NAME", help="Learn it as a separate skill.  [default: the style]")
def teach(common: GlobalOptions, prompt: str, answer: str, skill: str | None) -> None:
    """Show the ANSWER that you want to a PROMPT, and print the id of the lesson.

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
    option = "" if skill is None else f" --layer {layer}"
    info(common, f"Recorded for {layer}. To train on it: personalpeft learn{option}")


@command(
    "remember",
    examples=(
        'personalpeft remember "My dog is called Biscuit."',
        'personalpeft remember "My dog is called Biscuit." --question "What is my dog called?" --answer Biscuit',
    ),
)
@click.argument("text")
@click.option(
    "--question", "questions", multiple=True, help="A question that it answers; can be repeated."
)
@click.option("--answer", help="The short answer to those questions.")
def remember(
    common: GlobalOptions, text: str, questions: tuple[str, ...], answer: str | None
) -> None:
    """Store a fact and print its id.

    It is looked up from the next question on. To change or remove it: personalpeft memory

    TEXT may be '-', which reads it from stdin.
    """
    from personalpeft.memory.items import check_item_text

    if answer is not None and not questions:
        raise InvalidInput("--answer needs a question.", hint="Give --question too.")
    text = check_item_text(read_argument(text, what="fact"), what="fact")
    questions = tuple(check_item_text(question, what="question") for question in questions)
    answer = answer if answer is None else check_item_text(answer, what="answer")
    with session.open_user(common, "make") as user:
        signal = user.remember(text, questions=questions, answer=answer)
    emit(common, {"signal": signal, "user": user.id}, signal)
    learned = ", and the next learn trains on it" if answer else ""
    info(common, f"Stored. It applies from the next question on{learned}.")


@command(
    "retract",
    examples=(
        "personalpeft retract s_01m7yhn42w",
        "personalpeft retract s_01m7yhn42w s_01m7yhp8xd --json",
    ),
)
@click.argument("signals", nargs=-1, required=True, metavar="ID...")
def retract(common: GlobalOptions, signals: tuple[str, ...]) -> None:
    """Retract feedback of any kind: a thumb, an edit, a rule, a fact.

    ID is what feedback printed and lessons lists, or its beginning. Either all of several are
    retracted or none. Prints the full ids.

    Layers that were trained on it are built without it by the next learn. What it superseded stays
    off. The ledger keeps the record; to destroy it: personalpeft forget
    """
    with session.open_user(common, "change") as user:
        before = user.pending().news
        retracted = user.retract(*signals)
        layers = layers_to_rebuild(user, before)
    data = {"retracted": retracted, "user": user.id, "layers_to_rebuild": layers}
    emit(common, data, "\n".join(signal.id for signal in retracted))
    for signal in retracted:
        text = excerpt(signal_text(signal))
        info(common, f'Retracted the {signal.kind} {signal.id}, "{text}".')
    note_rebuild(common, layers)


def layers_to_rebuild(user: User, before: Collection[TrainingTrigger]) -> list[str]:
    """Return the layers that have retracted signals to unlearn which they had not ``before``."""
    from personalpeft.learning.triggers import TriggerKind

    news = [each for each in user.pending().news if each not in before]
    return sorted({each.layer for each in news if each.kind == TriggerKind.RETRACTED})


def note_rebuild(common: GlobalOptions, layers: list[str]) -> None:
    """Print which layers the next learn builds without the retracted signals."""
    if layers:
        info(common, f"The next learn removes it from {' and '.join(layers)}.")


@command(
    "forget",
    examples=(
        "personalpeft forget s_01k2 --dry-run",
        "personalpeft forget last",
        "personalpeft forget s_01k2 --yes --json",
    ),
)
@click.argument("item")
@click.option("--dry-run", is_flag=True, help="Only list what would be destroyed.")
@click.option("--later", is_flag=True, help="Destroy now, and rebuild with the next learn.")
@click.option("--yes", is_flag=True, help="Do not ask first.")
def forget(common: GlobalOptions, item: str, dry_run: bool, later: bool, yes: bool) -> None:
    """Destroy a turn, a fact, a rule or other feedback, for good.

    ITEM is an id that turns, lessons or memory lists, its beginning, or "last" for the newest turn.
    Its text is deleted from every file of the home, with each revision trained on it. Live layers
    are rebuilt without it. This cannot be undone. Backups and exported files are not changed.

    On a terminal it lists what would be destroyed and asks. Ctrl-C stops only the rebuilding.
    """
    display = Display(common)
    with session.open_user(common, "read" if dry_run else "change", display) as user:
        if not (dry_run or yes):
            if common.json or not sys.stdin.isatty():
                raise click.UsageError("This cannot be undone. Give --yes, or --dry-run to look.")
            click.echo(str(user.forget(item, dry_run=True)), err=True)
            click.confirm("Forget this for good?", abort=True, err=True)

        def notify() -> None:
            display.print("It is destroyed; rebuilding stops after this step.")

        with interruptible(notify) as cancelled, display:
            report = user.forget(
                item, rebuild=not later, dry_run=dry_run, progress=display, cancelled=cancelled
            )
    emit(common, report, str(report))
