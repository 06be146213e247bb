"""Commands that record feedback and facts, and retract or erase them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from personalpeft.errors import InvalidInput
from personalpeft.learning.report import excerpt, signal_text
from personalpeft_app import session
from personalpeft_app.interrupts import interruptible
from personalpeft_app.options import GlobalOptions, command, no_train_option, train_of
from personalpeft_app.output import emit, info
from personalpeft_app.progress import Display
from personalpeft_app.text_input import open_editor, read_argument

if TYPE_CHECKING:
    from collections.abc import Collection

    from personalpeft import Certificate, User
    from personalpeft.learning.status import SignalStatus, TrainingTrigger


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
@click.option("--up", is_flag=True, help="The reply was good.")
@click.option("--down", is_flag=True, help="The reply was not good.")
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
@no_train_option("No layer is trained on it.")
def feedback(
    common: GlobalOptions,
    turn: str,
    up: bool,
    down: bool,
    edit: str | None,
    editor: bool,
    prefer: str | None,
    comment: str | None,
    reward: float | None,
    no_train: bool,
) -> None:
    """Record feedback on a reply and print its id.

    TURN is an id that ask or turns printed, or its beginning.  [default: last]

    Give one option. The newest feedback of a kind on a turn counts; comments add up.
    """
    if up and down:
        raise click.UsageError("Give either --up or --down.")
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
            about,
            rating=1 if up else -1 if down else None,
            edit=edit,
            prefer=prefer,
            comment=comment,
            reward=reward,
            train=train_of(no_train),
        )
        # None where another program has superseded it meanwhile.
        status = next((each for each in user.signal_statuses() if each.signal.id == signal), None)
    data = {"signal": signal, "turn": about.id, "user": user.id, "status": status}
    emit(common, data, signal)
    info(common, f"Recorded on {about.id}. {_describe_use(status) if status else ''}".rstrip())


def _describe_use(status: SignalStatus) -> str:
    if status.place == "profile":
        return "It applies from the next question on."
    if status.is_held_out:
        return f"It replaces an answer that judges {status.layer}, and is not trained on either."
    if status.place == "layer":
        return f"The next learn of {status.layer} trains on it."
    return f"Nothing is learned from it: {status.why}."


@command(
    "teach",
    examples=(
        'teach "How do I boil an egg?" "Eight minutes in boiling water."',
        'teach "Decline the invitation." - --skill email < answer.txt',
    ),
)
@click.argument("prompt")
@click.argument("answer")
@click.option("--skill", metavar="NAME", help="Learn it as a separate skill.  [default: the style]")
@no_train_option("Only keep and list it: no layer is trained on it.")
def teach(
    common: GlobalOptions, prompt: str, answer: str, skill: str | None, no_train: bool
) -> None:
    """Show the ANSWER that you want to a PROMPT.

    Prints the id of the lesson. Either of the two may be '-', which reads it from stdin.
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
    emit(common, {"signal": signal, "user": user.id, "layer": layer}, signal)
    option = "" if skill is None else f" --layer {layer}"
    if trains:
        info(common, f"Recorded for {layer}. To train on it: personalpeft learn{option}")
    else:
        info(common, "Recorded. Nothing is trained on it.")


@command(
    "remember",
    examples=(
        'remember "My dog is called Biscuit."',
        'remember "My dog is called Biscuit." --question "What is my dog called?" --answer Biscuit',
    ),
)
@click.argument("text")
@click.option(
    "--question", "questions", multiple=True, help="A question that it answers; can be repeated."
)
@click.option("--answer", help="The short answer to those questions.")
@no_train_option("Only look it up: no layer is trained on it.")
def remember(
    common: GlobalOptions,
    text: str,
    questions: tuple[str, ...],
    answer: str | None,
    no_train: bool,
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
        trains = not no_train and user.summary().training
        signal = user.remember(text, questions=questions, answer=answer, train=train_of(no_train))
    emit(common, {"signal": signal, "user": user.id}, signal)
    learned = ", and the next learn trains on it" if answer and trains else ""
    info(common, f"Stored. It applies from the next question on{learned}.")


@command("set-training", examples=("set-training off", "set-training on"))
@click.argument("state", type=click.Choice(("on", "off")))
def set_training(common: GlobalOptions, state: str) -> None:
    """Set whether layers may be trained on new feedback.

    With 'off' a rule or fact acts in the prompt alone, and other feedback is only kept. Earlier
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
@click.option(
    "--training-only",
    is_flag=True,
    help="Only withdraw it from training: rules and facts apply on.",
)
def retract(common: GlobalOptions, signals: tuple[str, ...], training_only: bool) -> None:
    """Retract feedback: a thumb, an edit, a rule, a fact.

    ID is what feedback printed and lessons lists, or its beginning. Either all of several are
    retracted or none. Prints the full ids.

    The next learn builds layers without it. Feedback that it superseded stays off. The ledger keeps
    the record; to erase it: personalpeft forget
    """
    with session.open_user(common, "change") as user:
        before = user.pending().news
        retracted = user.retract(*signals, training_only=training_only)
        layers = layers_to_rebuild(user, before)
    data = {"retracted": retracted, "user": user.id, "layers_to_rebuild": layers}
    emit(common, data, "\n".join(signal.id for signal in retracted))
    for signal in retracted:
        text = excerpt(signal_text(signal))
        what = "training on the" if training_only else "the"
        info(common, f'Retracted {what} {signal.kind} {signal.id}, "{text}".')
    note_rebuild(common, layers)


def layers_to_rebuild(user: User, before: Collection[TrainingTrigger]) -> list[str]:
    """Return the layers that have retracted signals to unlearn which they had not ``before``."""
    from personalpeft.learning.status import TriggerKind

    news = [each for each in user.pending().news if each not in before]
    return sorted({each.layer for each in news if each.kind == TriggerKind.RETRACTED})


def note_rebuild(common: GlobalOptions, layers: list[str]) -> None:
    """Print which layers the next learn builds without the retracted signals."""
    if layers:
        info(common, f"The next learn removes it from {' and '.join(layers)}.")


certificate_option = click.option(
    "--certificate",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write a signed certificate as JSON, and beside it a page to read.",
)


@command(
    "forget",
    examples=(
        "forget s_01k2 --dry-run",
        "forget last",
        "forget last --conversation --certificate erased.json",
        "forget skill.email --yes --json",
    ),
)
@click.argument("item")
@click.option("--conversation", is_flag=True, help="The whole conversation that the turn is in.")
@click.option("--dry-run", is_flag=True, help="Only list what would be erased.")
@click.option("--later", is_flag=True, help="Erase now, and rebuild with the next learn.")
@click.option("--yes", is_flag=True, help="Do not ask first.")
@certificate_option
def forget(
    common: GlobalOptions,
    item: str,
    conversation: bool,
    dry_run: bool,
    later: bool,
    yes: bool,
    certificate: Path | None,
) -> None:
    """Erase a turn, a fact, a rule or other feedback, a conversation or a layer, for good.

    ITEM is an id that turns, lessons or memory lists, its beginning, or "last" for the newest turn.
    Or it is a layer: style, memory or skill.NAME. It is erased with all that it was taught. For a
    whole user: personalpeft forget-user

    Its text is deleted from every file of the home, with each revision trained on it. Live layers
    are rebuilt without it. This cannot be undone. Backups and exported files are not changed.

    On a terminal it lists what would be erased and asks. Ctrl-C stops only the rebuilding.

    A certificate states what was erased, signed and without its words. It measures how far the
    model knew it, before and after. To check one: personalpeft verify-certificate
    """
    _check_certificate(certificate, dry_run)
    display = Display(common)
    with session.open_user(common, "read" if dry_run else "change", display) as user:
        if not (dry_run or yes):
            _check_can_ask(common)
            preview = user.forget(item, conversation=conversation, dry_run=True)
            click.echo(str(preview), err=True)
            click.confirm("Forget this for good?", abort=True, err=True)

        def notify() -> None:
            display.print("It is erased; rebuilding stops after this step.")

        with interruptible(notify) as cancelled, display:
            report = user.forget(
                item,
                conversation=conversation,
                rebuild=not later,
                dry_run=dry_run,
                certificate=certificate is not None,
                progress=display,
                cancelled=cancelled,
            )
    emit(common, report, str(report))
    _write_certificate(common, certificate, report.certificate)


@command("forget-user", examples=("forget-user ada --dry-run", "forget-user ada --yes --json"))
@click.argument("name", metavar="USER")
@click.option("--dry-run", is_flag=True, help="Only list what would be erased.")
@click.option("--yes", is_flag=True, help="Do not ask first.")
@certificate_option
def forget_user(
    common: GlobalOptions, name: str, dry_run: bool, yes: bool, certificate: Path | None
) -> None:
    """Erase a user for good, with all data.

    That is all turns, feedback, layers, published copies and tokens. This cannot be undone. Backups
    and exported files are not changed; to keep a copy, export the user first. On a terminal it
    lists what would be erased and asks.
    """
    _check_certificate(certificate, dry_run)
    with session.open_runtime(common, "read" if dry_run else "change") as runtime:
        if not (dry_run or yes):
            _check_can_ask(common)
            click.echo(str(runtime.forget_user(name, dry_run=True)), err=True)
            click.confirm(f"Forget {name} for good?", abort=True, err=True)
        report = runtime.forget_user(name, dry_run=dry_run, certificate=certificate is not None)
    emit(common, report, str(report))
    _write_certificate(common, certificate, report.certificate)


@command(
    "verify-certificate",
    examples=(
        "verify-certificate erased.json",
        "verify-certificate erased.json --json",
        'verify-certificate erased.json --text "My dog is called Biscuit."',
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--key", metavar="PUBLIC", help="The key that must have signed it: 64 hex digits.")
@click.option(
    "--text", metavar="TEXT", help="Also print which items had exactly this text; '-' reads stdin."
)
def verify_certificate(
    common: GlobalOptions, file: Path, key: str | None, text: str | None
) -> None:
    """Check a certificate of erasure, and print its page.

    FILE is the JSON that forget wrote. No home is needed, except with --text: only the home that
    made a certificate can tell which items it is about.

    Without --key any key may have signed it; compare the printed one with that of the home.

    The exit code is 0 if the signature is right, else 8.
    """
    import personalpeft

    certificate = personalpeft.verify_certificate(file, key=key)
    items: tuple[str, ...] | None = None
    if text is not None:
        text = read_argument(text, what="text")
        with session.open_runtime(common, "read") as runtime:
            items = runtime.items_with_text(certificate, text)
    found = {} if items is None else {"items": items}
    data = {"valid": True, "public_key": certificate.public_key, **found}
    emit(common, {**data, "statement": certificate.statement}, certificate.to_markdown().rstrip())
    info(common, f"The signature is right. Signed by {certificate.public_key}.")
    if items is not None:
        info(common, f"Items with this text: {', '.join(items) or 'none'}.")


def _check_certificate(file: Path | None, dry_run: bool) -> None:
    """Check that a certificate can be written, before anything is erased."""
    if file is None:
        return
    if dry_run:
        raise click.UsageError("A dry run has no certificate.")
    from personalpeft.certificate import check_certificate_path

    check_certificate_path(file)


def _write_certificate(
    common: GlobalOptions, file: Path | None, certificate: Certificate | None
) -> None:
    if file is not None and certificate is not None:
        try:
            path, page = certificate.write(file)
        except InvalidInput:
            # It cannot be made again.
            click.echo(certificate.to_json(), nl=False)
            raise
        info(common, f"The certificate is {path}, to read: {page}.")


def _check_can_ask(common: GlobalOptions) -> None:
    """Raise a usage error unless the person at a terminal can be asked."""
    if common.json or not sys.stdin.isatty():
        raise click.UsageError("This cannot be undone. Give --yes, or --dry-run to look.")
